"""The verb `plan`: reads the question, shows the search, and prints the answer."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tqdm import tqdm

from longspan.cli.options import NameArgument, verb
from longspan.cli.outputs import check_writable, note, write_result
from longspan.core.options import Option
from longspan.core.quantities import number, seconds
from longspan.errors import ParameterError
from longspan.file_errors import unread
from longspan.sim.spec import HardwareSpec, ServiceLevel
from longspan.workload.spec import WorkloadSpec

if TYPE_CHECKING:
    from rich.table import Table

    from longspan.planner.values import Current, Interval, Plan, Question, Ranked

_search = partial(Option, group="Search")
_MAX_LOST = 5
"""Runners-up that are explained. `--json` has all."""


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _paths(texts: Sequence[str]) -> tuple[Path, ...]:
    return tuple(map(Path, texts))


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The devices of a plan, and its result."""

    hardware: Annotated[
        tuple[str, ...], _search("Devices to compare, such as a100-sxm-80g,h100-sxm-80g.", metavar="X[,Y]", read=_names)
    ] = ()
    gpus: Annotated[int, _search("Maximum number of devices. Fewer are searched, too.", minimum=1)] = 8
    gpus_per_host: Annotated[int, _search("Devices of each host.", minimum=1)] = 8
    profile: Annotated[
        tuple[Path, ...],
        _search(
            "Instead of hardware: a profile that longspan profile measured. Repeatable, one for each tp.",
            metavar="FILE",
            repeatable=True,
            read=_paths,
        ),
    ] = ()
    attainment: Annotated[float, _search("Fraction of requests that must meet the service level.")] = 0.99
    prices: Annotated[
        Path | None,
        _search("TOML or JSON file with the price of one device and hour by name: h100-sxm-80g = 2.5.", metavar="FILE"),
    ] = None
    current: Annotated[
        str | None,
        _search("The layout that serves the workload now: its error in the simulation, then its rank.", metavar="SPEC"),
    ] = None
    report: Annotated[
        Path | None, _search("A page with the front and all candidates. Needs longspan[report].", metavar="FILE.html")
    ] = None
    as_json: Annotated[bool, _search("Print one JSON object and no table.", name="json")] = False


@verb
def plan(
    model: NameArgument,
    *,
    search: SearchOptions = SearchOptions(),
    workload: WorkloadSpec = WorkloadSpec(),
    level: ServiceLevel = ServiceLevel(),
    hardware: HardwareSpec = HardwareSpec(),
) -> int:
    """Find the hardware, layout and policy that serve a workload within a service level, and the command for it.

    Estimates prune the candidates, and simulations over several seeds on all cores rank the remaining ones. Results are
    stored, so that an interrupted plan continues. The exit code is 1 if no candidate meets the level.
    """
    from longspan import planning  # noqa: PLC0415 - other verbs need no simulator

    if search.report is not None:
        check_writable("--report", search.report)
        import longspan.extras.plan_page  # noqa: F401, PLC0415 - raises ParameterError without plotly
    prices = {} if search.prices is None else read_prices(search.prices)
    with _progress() as progress:
        answer = planning.plan(
            model,
            hardware=search.hardware,
            gpus=search.gpus,
            workload=workload,
            level=level,
            attainment=search.attainment,
            prices=prices,
            devices=hardware,
            gpus_per_host=search.gpus_per_host,
            profiles=search.profile,
            current=search.current,
            progress=progress,
        )
    if search.report is not None:
        from longspan.extras.plan_page import plan_html  # noqa: PLC0415

        write_result("--report", search.report, plan_html(answer))
    if search.as_json:
        print(json.dumps(answer.as_json(), allow_nan=False))
    else:
        _print(answer)
    return 0 if answer.winner is not None and answer.winner.meets else 1


def read_prices(path: Path) -> dict[str, float]:
    """Read the prices of devices by name. Raise ParameterError for an invalid file."""
    try:
        text = path.read_text(encoding="utf-8")
        prices = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ParameterError("prices", unread(path, error), path) from None
    if not isinstance(prices, dict) or not prices:
        raise ParameterError("prices", f"{path} must map names of devices to prices, such as h100-sxm-80g = 2.5", path)
    for name, price in prices.items():
        is_number = isinstance(price, int | float) and not isinstance(price, bool)
        if not is_number or not abs(price) <= sys.float_info.max:
            shown = "too large" if is_number else f"{price!r:.40}"
            raise ParameterError("prices", f"{path}: {name} must be a number, but is {shown}", path)
    return {name: float(price) for name, price in prices.items()}


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Show a bar of simulations on a terminal."""
    with tqdm(desc="simulations", unit="", dynamic_ncols=True, disable=None, leave=False) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update


# ---------------------------------------------------------------- the answer


def _print(answer: Plan) -> None:
    from rich.console import Console  # noqa: PLC0415

    winner = answer.winner
    if winner is None:
        for text in answer.notes:
            note(text)
        return
    question = answer.question
    if answer.current is not None:
        _print_current(answer.current)
    front = [one for one in answer.ranked if one.on_front]
    Console().print(_front(front, question))
    for place, one in enumerate(front, start=1):
        print(f"{place}: {_name(one, question)}")
    if winner.meets:
        print(f"start it: {winner.command}")
    else:
        print(f"no candidate meets the level for {question.attainment:.3g} of requests. The nearest: {winner.command}")
        if answer.max_rate is not None:
            print(f"the highest rate within the level: {answer.max_rate:.3g} requests/s")
    for text in answer.notes:
        print(text)
    lost = [ranked for ranked in answer.ranked if ranked is not winner][:_MAX_LOST]
    for ranked in lost:
        print(f"lost: {_name(ranked, question)}: {ranked.lost_because}")
    for error in answer.error:
        print(f"error of the model, {error.what}: mean {error.mean:g} %, worst {error.worst}")
    if question.is_measured:
        print("error of the model: times are from the profile")
    elif not answer.error:
        print("error of the model: nothing was measured on this kind of device, see docs/cost.md")
    pruned, simulated = len(answer.pruned), len(answer.ranked)
    print(f"{simulated} candidates were simulated with {answer.num_simulated_requests:,} requests, {pruned:,} pruned")


def _print_current(current: Current) -> None:
    """Print the errors of the simulation on the recorded layout, and the layout's numbers."""
    ranked = current.ranked
    print(f"now: {ranked.candidate}")
    for time in current.times:
        recorded, simulated = seconds(time.recorded_s), seconds(time.simulated_s)
        print(f"  {time.what}: recorded {recorded}, simulated {simulated}, error {time.error:+.1f} %")
    if not current.times:
        print("  the trace has no recorded times, so the error of the simulation is unknown")
    goodput = number(ranked.goodput_per_s.mean)
    print(f"  {goodput} good requests/s, {ranked.attainment.mean:.1%} of requests meet the level")


def _front(ranked: Sequence[Ranked], question: Question) -> Table:
    """Return a table of the front, with the winner first, for terminals of 80 columns."""
    from rich.table import Table  # noqa: PLC0415

    prices = ("price/h",) if question.prices else ()
    names = ("", "GPUs", *prices, "goodput/s", "tokens/s/GPU", "P99 TTFT", "P99 TBT", "attained")
    table = Table(*names, title="best first, 95 % intervals over seeds", title_justify="left", padding=0)
    for column in table.columns:
        column.justify = "right"
    for place, one in enumerate(ranked, start=1):
        price = () if one.price_per_hour is None else (f"{one.price_per_hour:.2f}",)
        table.add_row(
            str(place),
            str(one.num_gpus),
            *price,
            _between(one.goodput_per_s, number),
            _between(one.tokens_per_s_per_gpu, number),
            _between(one.ttft_p99_s, seconds),
            _between(one.tbt_p99_s, seconds),
            f"{one.attainment.mean:.1%}",
        )
    return table


def _name(ranked: Ranked, question: Question) -> str:
    """Return the candidate, with its hardware if there are several."""
    name = str(ranked.candidate)
    return name if len(question.hardware) > 1 else name.removesuffix(f" on {ranked.candidate.hardware}")


def _between(interval: Interval | None, text: Callable[[float], str]) -> str:
    if interval is None:
        return ""
    percent = f" ±{50 * (interval.high - interval.low) / interval.mean:.0f}%" if interval.mean else ""
    return text(interval.mean) + percent
