"""The verb `profile`: measures this machine with a model and prints the results."""

from __future__ import annotations

import json
import os
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table

from longspan.args import EngineArgs
from longspan.cli.options import ModelArgument, start, verb
from longspan.cli.outputs import note, note_progress, number_table
from longspan.core.group_links import links_by_size
from longspan.core.imitated_hosts import text_of
from longspan.core.link_classes import SAME_HOST
from longspan.core.options import Option, length_list
from longspan.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from longspan.core.exchange import Exchange
    from longspan.core.link_classes import LinkClass
    from longspan.core.locations import Location
    from longspan.core.splits import ParallelSpec
    from longspan.cost.partition_table import PartitionTable
    from longspan.cost.profile import Fit, Profile
    from longspan.llm import LLM

_REPEATS = 3
_HOSTS = "LONGSPAN_HOSTS"


@verb
def profile(
    model: ModelArgument = "smollm2-135m",
    *,
    lengths: Annotated[
        tuple[int, ...] | None,
        Option(
            "Prompt lengths. By default 512, 1024 and so on up to the longest.", metavar="N,N,...", read=length_list
        ),
    ] = None,
    repeats: Annotated[
        int,
        Option("Number of measurements of each point. Twice for the fastest exchange of a prompt.", minimum=1),
    ] = _REPEATS,
    quick: Annotated[
        bool,
        Option("Measure each point once, and no prompts of the longest length. It takes about a fifth of the time."),
    ] = False,
    partitions: Annotated[
        bool, Option("Also search the partitions of prompts in chains, for the policy runahead.")
    ] = False,
    as_json: Annotated[bool, Option("Print one JSON object and no tables.", name="json")] = False,
    engine: EngineArgs = EngineArgs(),
) -> int:
    """Measure the speed of a model on this machine, on one instance and on groups, as a basis of policies.

    Prompts are timed on one instance and on groups of two or more, with every exchange. The speeds of links between
    ranks are measured, too. Each result is saved in the cache folder at once. A repeated run after a stop continues
    and does not measure saved points again.
    """
    from longspan.profiling import run, store  # noqa: PLC0415 - loads torch

    _check(engine)
    if quick and (lengths is not None or repeats != _REPEATS or partitions):
        raise ParameterError("quick", "excludes --lengths, --repeats and --partitions: leave it out", quick)
    resolved = engine.resolve()
    given, locations = resolved.cluster.spec, resolved.cluster.locations
    # These instances compute concurrently, as stages do.
    spec = replace(given, instances=given.instances * given.pp, pp=1)
    if partitions:
        _check_partitions(engine, spec.instances)
    chosen, repeats = None if lengths is None else list(lengths), 1 if quick else repeats
    alike = replace(engine, instances=None, tp=None, pp=None, threads_per_rank=resolved.threads)
    start_instances = partial(_start, model, alike, spec, locations)
    says = {"say": note, "say_progress": note_progress}
    measured = run.measure(start_instances, spec.instances, chosen, repeats, quick=quick, **says)
    if engine.executor == "local":
        measured = run.measure_links(measured, locations[:: given.tp])
    else:
        measured = _measure_ray_links(measured, replace(alike, parallel=str(spec)))
    if partitions:
        # Steps must hold whole prompts, because `set_policy`, which sets the tried partitions, keeps their size.
        chains = replace(alike, policy="runahead", policy_options={"partition": "even"})
        start_chains = partial(_start, model, chains, spec, locations)
        classes = links_by_size(replace(resolved.cluster, spec=spec))
        table = run.search_partitions(start_chains, measured, classes, chosen, repeats)
    else:
        table = store.load_partitions(measured.profile_key, engine.block_size)
    _print(measured, table, as_json=as_json)
    note(f"longspan simulate takes this file: --profile {store.profile_file(measured.profile_key)}")
    return 0


def _measure_ray_links(measured: Profile, engine: EngineArgs) -> Profile:
    """Measure links between the hosts of a Ray cluster, at the places of the ranks."""
    from longspan.profiling.ray_links import time_ray_links  # noqa: PLC0415 - needs Ray
    from longspan.profiling.run import measure_links  # noqa: PLC0415 - loads torch
    from longspan.remote_ranks import reserve_hosts  # noqa: PLC0415 - for several hosts

    with closing(reserve_hosts(engine)) as hosts:
        locations = hosts.placement.locations[:: engine.resolve().cluster.spec.tp]
        return measure_links(measured, locations, partial(time_ray_links, hosts))


def _print(measured: Profile, table: PartitionTable, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_fields(measured, table)))
        return
    for printed in _tables(measured, table):
        Console().print(printed)


def _check_partitions(engine: EngineArgs, num_instances: int) -> None:
    if engine.executor != "local":
        raise ParameterError("partitions", "is for ranks on this host: leave it out with --executor ray", True)
    if num_instances == 1:
        raise ValueError("--partitions needs several instances, but there is 1: give --parallel")
    if engine.max_num_batched_tokens is not None:
        problem = f"{engine.max_num_batched_tokens} given, but --partitions needs prompts in one step: leave it out"
        raise ParameterError("max_num_batched_tokens", problem, engine.max_num_batched_tokens)


def _check(engine: EngineArgs) -> None:
    if (engine.policy, engine.exchange, engine.layout, engine.fractions) != ("auto", "auto", "auto", None):
        raise ValueError("profile tries the exchanges itself: leave out --policy, --exchange, --layout and --fractions")
    if (engine.prefill_parallel, engine.decode_parallel, engine.transfer_backends) != (None, None, None):
        raise ValueError("profile measures instances of one split: give --parallel, and no roles to instances")
    if engine.policy_options:
        [key, value], *_ = engine.policy_options.items()
        raise ValueError(f"profile sets options of policies itself: leave out -o {key}={value}")
    if engine.executor != "local" and engine.threads_per_rank is None:
        problem = "must be given with --executor ray: groups of every size are measured with the same number"
        raise ParameterError("threads_per_rank", problem)
    if not engine.enable_prefix_caching:
        raise ValueError("profile measures prompts with cached prefixes: leave out --no-enable-prefix-caching")


@contextmanager
def _start(
    model: str, engine: EngineArgs, spec: ParallelSpec, locations: Sequence[Location], instances: int
) -> Iterator[LLM]:
    """Start a number of instances without a tokenizer, with the threads per rank of a run with all instances.

    They are at the first locations of that run.
    """
    alike = replace(engine, parallel=str(replace(spec, instances=instances)), skip_tokenizer_init=True)
    with _imitated(locations[: instances * spec.tp]), start(model, alike, seed=0) as llm:
        yield llm


@contextmanager
def _imitated(locations: Sequence[Location]) -> Iterator[None]:
    """Set LONGSPAN_HOSTS to these locations while a block runs. Without the variable, change nothing."""
    if not (before := os.environ.get(_HOSTS)):
        yield
        return
    os.environ[_HOSTS] = text_of(locations)
    try:
        yield
    finally:
        os.environ[_HOSTS] = before


def _as_fields(profile: Profile, table: PartitionTable) -> dict[str, object]:
    import msgspec  # noqa: PLC0415 - not needed by other verbs

    links = [
        {"kind": kind, "members": members, "link_class": link_class, **asdict(fit)}
        for kind, members, link_class in profile.links
        if (fit := profile.link(kind, members, link_class)) is not None
    ]
    fits, decode_fits = list[dict[str, object]](), list[dict[str, object]]()
    for link_class in profile.link_classes:
        times = profile.over(link_class) if link_class == SAME_HOST else profile.of_groups(link_class)
        waits_s = times.waits_s()
        fits += [_fit_fields(*key, link_class, fit) for key, fit in times.fits().items()]
        decode_fits += [
            _fit_fields(*key, link_class, fit) | {"wait_s": waits_s.get(key)}
            for key, fit in times.decode_fits().items()
        ]
    return {
        **msgspec.to_builtins(profile),
        "fits": fits,
        "decode_fits": decode_fits,
        "links": links,
        **msgspec.to_builtins(table),
    }


def _fit_fields(members: int, exchange: Exchange, link_class: LinkClass, fit: Fit) -> dict[str, object]:
    return {"members": members, "exchange": str(exchange), "link_class": link_class, **asdict(fit)}


def _tables(profile: Profile, table: PartitionTable) -> Iterator[Table]:
    for link_class in profile.link_classes:
        times, where = profile.over(link_class), "" if link_class == SAME_HOST else f"{link_class}: "
        yield _seconds(times, where)
        yield _fits(times, where)
        yield _decodes(times, where)
    yield _links(profile)
    if table.partitions:
        yield _partitions(table)


def _seconds(profile: Profile, where: str) -> Table:
    key, kinds = profile.profile_key, sorted({(prefill.members, prefill.exchange) for prefill in profile.prefills})
    about = f"{key.model}, {key.dtype}, {key.threads} threads per rank, {key.machine}"
    table = number_table(
        f"{where}Median seconds to the first token: {about}",
        "new",
        "cached",
        *(_name(members, exchange) for members, exchange in kinds),
    )
    median_s = {prefill.key: prefill.median_s for prefill in profile.prefills}
    for new, cached in sorted({(p.new_tokens, p.cached_tokens) for p in profile.prefills}, key=lambda at: at[::-1]):
        medians_s = (median_s.get((*kind, new, cached)) for kind in kinds)
        table.add_row(f"{new:,}", f"{cached:,}", *("" if time_s is None else f"{time_s:.3f}" for time_s in medians_s))
    return table


def _fits(profile: Profile, where: str) -> Table:
    title = f"{where}Fits: a + b L + c P L + d L² for L new tokens after P cached tokens"
    table = number_table(title, "", "a, ms", "b, µs", "c, ns", "d, ns", "mean error", "largest")
    for (members, exchange), fit in profile.fits().items():
        terms = (fit.start_s * 1e3, fit.token_s * 1e6, fit.cached_s * 1e9, fit.square_s * 1e9)
        errors = (f"{fit.mean_error:.1%}", f"{fit.max_error:.1%}")
        table.add_row(_name(members, exchange), *(f"{term:.4g}" for term in terms), *errors)
    return table


def _decodes(profile: Profile, where: str) -> Table:
    formula = "a + b B + c B C for B requests after C tokens, + w for several computing members"
    title = f"{where}Seconds between tokens: {formula}"
    table = number_table(title, "", "a, ms", "b, ms", "c, µs", "mean error", "largest", "w, ms")
    waits_s = profile.waits_s()
    for (members, exchange), fit in profile.decode_fits().items():
        terms = (fit.start_s * 1e3, fit.request_s * 1e3, fit.context_s * 1e6)
        errors, wait_s = (f"{fit.mean_error:.1%}", f"{fit.max_error:.1%}"), waits_s.get((members, exchange))
        waits = "" if wait_s is None else f"{wait_s * 1e3:.4g}"
        table.add_row(_name(members, exchange), *(f"{term:.4g}" for term in terms), *errors, waits)
    return table


def _links(profile: Profile) -> Table:
    table = number_table("Links, per rank", "", "ranks", "µs per call", "GB/s", "largest error")
    for kind, members, link_class in profile.links:
        if (fit := profile.link(kind, members, link_class)) is not None:
            name = kind if link_class == SAME_HOST else f"{kind}, {link_class}"
            speeds = (f"{fit.start_s * 1e6:.1f}", f"{fit.bytes_per_s / 1e9:.2f}")
            table.add_row(name, str(members), *speeds, f"{fit.max_error:.0%}")
    return table


def _partitions(partitions: PartitionTable) -> Table:
    table = number_table("Partitions of prompts in chains", "instances", "tokens")
    table.add_column("parts")
    for entry in sorted(partitions.partitions, key=lambda entry: (entry.members, entry.length)):
        parts = ", ".join(f"{fraction:.3f}" for fraction in entry.fractions)
        table.add_row(str(entry.members), f"{entry.length:,}", parts)
    return table


def _name(members: int, exchange: Exchange | str) -> str:
    return "alone" if members == 1 else f"{members} {exchange}"
