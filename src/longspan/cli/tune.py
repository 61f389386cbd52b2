"""The verb `tune csa`: measures the loss and the time of sparse attention, for `--csa auto`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console
from tqdm import tqdm

from longspan.args import EngineArgs
from longspan.cli.inputs import read_text
from longspan.cli.options import start, verb
from longspan.cli.outputs import check_writable, note, note_progress, number_table, write_result
from longspan.core.options import Option
from longspan.errors import ParameterError
from longspan.progress import MinuteLines, duration

if TYPE_CHECKING:
    from rich.table import Table

    from longspan.evals import Text
    from longspan.llm import LLM
    from longspan.policy.csps.search import Group
    from longspan.policy.csps.tuned import HeldOut, Tuned
    from longspan.tuning import Header, Journal

_MIN_SHARED = "512"


@verb
def tune(
    what: Annotated[Literal["csa"], Option("csa: sparse attention of policy csps.")],
    model: Annotated[str, Option("An alias (smollm2-135m), a local folder, a .gguf file, or a Hugging Face hub id.")],
    *,
    out: Annotated[Path, Option("The tuned file. Points are saved in FILE.journal.", metavar="FILE")],
    max_minutes: Annotated[float, Option("Minutes of measuring. 0 uses the saved points only.", minimum=0)],
    data: Annotated[Path | None, Option("Text for the prompts.", metavar="FILE", default="Python's manual")] = None,
    engine: EngineArgs = EngineArgs(parallel="4"),
) -> None:
    """Measure the loss and the time of sparse attention with a model, so that --csa auto can choose.

    Pass keys are hidden in prompts, which are computed exactly and with random numbers of levels and drop ratios. Each
    point is saved in FILE.journal at once. A repeated run after a stop, or for more points, continues.
    """
    from longspan import tuning  # noqa: PLC0415 - other verbs need none of it
    from longspan.policy.csps.tuned import tuned  # noqa: PLC0415

    del what
    given = _checked(engine)
    check_writable("--out", out)
    if data is not None:
        read_text(data, "data")  # raises before the engine starts
    path = out.with_name(f"{out.name}.journal")
    with start(model, given, seed=0) as llm:
        text = tuning.text_of(llm, data)
        header = tuning.header_of(llm, model, text)
        journal = tuning.Journal(path, header)
        note("measuring the attention scores of layers and KV heads")
        scores = tuning.deviations(llm.service.files, text)
        group = replace(tuning.group_of(llm, header.hosts, given.block_size), deviations=scores)
        _measure(llm, text, header, journal, group, max_minutes)
        tuning.check_enough(journal.points, path)
    key = llm.profile_key
    result = tuned(
        journal.points,
        group,
        tuned_for=model,
        dtype=key.dtype,
        machine=f"{key.machine}, {key.threads} threads per rank",
        data="Python's manual" if data is None else data.name,
    )
    write_result("--out", out, result.to_json())
    Console().print(_table(result))
    print(_accuracy(result.held_out))
    print(f"written to {out}: longspan generate {model} --policy csps --csa {out} --parallel {given.parallel}")


def _checked(engine: EngineArgs) -> EngineArgs:
    """Return the options with the values that tuning sets. Raise ParameterError if one of them is given."""
    for name, value in engine.sharing.items():
        raise ParameterError(name, "is set by tuning itself: leave it out", value)
    if engine.policy not in {"auto", "csps"}:
        raise ParameterError("policy", f"{engine.policy} has no sparse attention to tune: leave it out", engine.policy)
    options = {"threshold": _MIN_SHARED, **(engine.policy_options or {})}
    return replace(engine, policy="csps", policy_options=options, enable_prefix_caching=False, record_times=True)


def _measure(llm: LLM, text: Text, header: Header, journal: Journal, group: Group, max_minutes: float) -> None:
    """Measure until the minutes are over. A progress bar shows them on a terminal."""
    from longspan import tuning  # noqa: PLC0415 - not needed by other verbs

    lengths = header.lengths
    if max_minutes:
        seconds = tuning.point_seconds(llm, text, lengths)
        lengths = tuning.affordable(seconds, 60 * max_minutes)
        fewest = f"{tuning.MIN_POINTS} points with prompts of up to {max(lengths):,} tokens"
        note(f"{fewest} take about {duration(tuning.least_s(seconds, lengths))} by the speed of a short prompt")
        if longer := [length for length in header.lengths if length not in lengths]:
            needed_s = tuning.least_s(seconds, header.lengths)
            note(
                f"prompts of {longer[0]:,} tokens and more are left out: with them it takes about {duration(needed_s)}"
            )
    begin = time.monotonic()

    def minutes() -> float:
        return (time.monotonic() - begin) / 60

    note(f"measuring for {duration(60 * max_minutes)}; {len(journal.points)} points were saved before")
    lines = MinuteLines("tune", note_progress)
    layout = "{desc}: {bar} {n:.1f} of {total:g} minutes"
    with tqdm(total=max_minutes, desc="measuring", bar_format=layout, dynamic_ncols=True, disable=None) as bar:
        known = header, journal.points, group, lengths
        for point in tuning.measure(llm, text, *known, continues=lambda: minutes() < max_minutes):
            journal.add(point)
            bar.set_description(f"{len(journal.points)} points")
            spent = min(minutes(), max_minutes)
            lines.update(spent / max_minutes, f"{len(journal.points)} points")
            bar.update(spent - bar.n)


def _accuracy(held_out: HeldOut) -> str:
    times = "not measured" if held_out.time_error is None else f"{held_out.time_error:.0%} off (median)"
    return (
        f"{held_out.num_points} points were held out: loss {held_out.accuracy:.1%} accurate (1 - mean absolute error, "
        f"of 100 points), {held_out.covered:.0%} of prompts within the predicted gain of perplexity, times {times}"
    )


def _table(found: Tuned) -> Table:
    """Shows the largest drop ratios without a predicted loss, by length, levels and mode."""
    columns = [(levels, mode) for levels in sorted(found.levels() - {1}) for mode in found.modes()]
    names = (f"{levels} levels, {mode}" for levels, mode in columns)
    table = number_table("Largest drop ratio of level 2 without loss", "tokens", *names)
    for length in sorted({one.num_tokens for one in found.points}):
        most = (found.max_drop_without_loss(length, levels, mode) for levels, mode in columns)
        table.add_row(f"{length:,}", *("" if one is None else f"{one:.0%}" for one in most))
    return table
