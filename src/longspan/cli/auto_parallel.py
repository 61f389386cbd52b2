"""`--parallel auto` of the verb `batch`: draws requests of the file, asks the simulator, and prints what it said."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from longspan.args import EngineArgs

if TYPE_CHECKING:
    from longspan.cli.batch import BatchLine
    from longspan.planning import Machine, Outcome
    from longspan.workload.arrivals import Arrival

_MOST_DRAWN = 64


def with_best_parallel(model: str, engine: EngineArgs, lines: Iterable[BatchLine], num_lines: int) -> EngineArgs:
    """Returns options of an engine that is the quickest in the simulator with some of the requests.

    Raises:
        ValueError: when options exclude that, nothing was measured, or nothing can run.
    """
    from longspan.planning import Machine, best, drawn  # noqa: PLC0415 - loads torch

    machine = Machine.of(replace(engine, model=model))
    wanted = set(drawn(num_lines, _MOST_DRAWN))
    chosen = [line for index, line in enumerate(lines) if index in wanted and line.error is None]
    arrivals = _arrivals(machine, chosen)
    if not arrivals:
        raise ValueError("--parallel auto goes by the requests, but none of those drawn can be served: give a spec")
    bar = tqdm(machine.candidates, desc="simulations", unit="candidate", dynamic_ncols=True, disable=None, leave=False)
    outcomes = [machine.outcome(candidate, arrivals) for candidate in bar]
    winner = best(outcomes)
    _print(machine, outcomes, winner, num_drawn=len(arrivals))
    return replace(winner.candidate.options(machine.given), model=engine.model)


def _arrivals(machine: Machine, lines: Iterable[BatchLine]) -> list[Arrival]:
    """Tokenizes requests as they will be; leaves out those that cannot be served."""
    from longspan.planning import arrivals_of  # noqa: PLC0415
    from longspan.serve.convert import ServedModel  # noqa: PLC0415 - loads transformers
    from longspan.serve.errors import WireError  # noqa: PLC0415
    from longspan.serve.responses import engine_requests_of  # noqa: PLC0415
    from longspan.text.input_processor import InputProcessor  # noqa: PLC0415
    from longspan.text.tokenizer import load_tokenizer  # noqa: PLC0415

    given, info = machine.given, machine.model.info
    max_model_len = given.max_model_len or info.context_length
    tokenizer = None if given.skip_tokenizer_init else load_tokenizer(machine.model.files)
    processor = InputProcessor(tokenizer=tokenizer, vocab_size=info.vocab_size, max_model_len=max_model_len)
    served = ServedModel(input_processor=processor, names=())
    found = []
    for line in lines:
        try:
            found += arrivals_of(engine_requests_of(line.url, line.body, served), max_model_len)
        except WireError:
            continue  # its answer will say why
    return found


def _print(machine: Machine, outcomes: list[Outcome], winner: Outcome, *, num_drawn: int) -> None:
    """Prints the table of all candidates, quickest first, what was left out, and what is taken."""
    from longspan.planning import explanation  # noqa: PLC0415

    table = Table("parallel", "requests/s", "ratio", "why", title_justify="left")
    for column in table.columns[1:3]:
        column.justify = "right"
    for one in sorted(outcomes, key=lambda one: -one.requests_per_s):
        ran = one.problem is None
        rate = f"{one.requests_per_s:.3g}" if ran else ""
        ratio = f"{one.requests_per_s / winner.requests_per_s:.2f}" if ran and winner.requests_per_s else ""
        table.add_row(str(one.candidate), rate, ratio, explanation(one))
    Console(stderr=True).print(table)
    for tp, command in machine.unmeasured.items():
        print(f"longspan: instances with tp {tp} were not measured, so not simulated: {command}", file=sys.stderr)
    if not machine.given.host_kv_gib and machine.given.policy != "chunked":
        print("longspan: pairs for Seesaw need --host-kv-gib, so none was simulated", file=sys.stderr)
    others = [one for one in outcomes if one.problem is None and one is not winner and one.requests_per_s]
    second = max(others, key=lambda one: one.requests_per_s, default=None)
    ratio = f", {winner.requests_per_s / second.requests_per_s:.2f} times {second.candidate}" if second else ""
    print(
        f"longspan: takes {winner.candidate}: {winner.requests_per_s:.3g} requests/s of {num_drawn} simulated"
        f"{ratio}; {explanation(winner)}",
        file=sys.stderr,
    )
