"""`--parallel auto` of the verb `batch`: samples requests of the file, simulates candidates and prints the results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from longspan.args import EngineArgs
from longspan.cli.outputs import note

if TYPE_CHECKING:
    from longspan.cli.batch import BatchLine
    from longspan.machine import Machine, Outcome
    from longspan.workload.arrivals import Arrival

_MAX_SIMULATED = 64
"""Requests of the file that are simulated."""


def with_best_parallel(model: str, engine: EngineArgs, lines: Iterable[BatchLine], num_lines: int) -> EngineArgs:
    """Return the options of the engine that is the fastest in the simulator with a sample of the requests.

    Raises:
        ValueError: the options exclude a search, no profile was measured, or no candidate can run.
    """
    from longspan.machine import Machine, best, options_of, sample_indices  # noqa: PLC0415 - loads torch

    machine = Machine.of(replace(engine, model=model))
    sampled = set(sample_indices(num_lines, _MAX_SIMULATED))
    chosen = [line for index, line in enumerate(lines) if index in sampled and line.error is None]
    arrivals = _arrivals(machine, chosen)
    if not arrivals:
        raise ValueError("--parallel auto simulates requests, but no sampled request can be served: give a spec")
    bar = tqdm(machine.candidates, desc="simulations", unit="candidate", dynamic_ncols=True, disable=None, leave=False)
    outcomes = [machine.outcome(candidate, arrivals) for candidate in bar]
    winner = best(outcomes)
    _print(machine, outcomes, winner, num_requests=len(arrivals))
    return replace(options_of(winner.candidate, machine.given), model=engine.model)


def _arrivals(machine: Machine, lines: Iterable[BatchLine]) -> list[Arrival]:
    """Tokenize requests as the run will. Omit requests that cannot be served."""
    from longspan.machine import arrivals_of  # noqa: PLC0415
    from longspan.serve.convert import ServedModel  # noqa: PLC0415 - loads transformers
    from longspan.serve.errors import WireError  # noqa: PLC0415
    from longspan.serve.responses import engine_requests_of  # noqa: PLC0415
    from longspan.serve.settings import ServerSettings  # noqa: PLC0415
    from longspan.text.input_processor import InputProcessor  # noqa: PLC0415
    from longspan.text.tokenizer import load_tokenizer  # noqa: PLC0415

    given, info = machine.given, machine.model.info
    max_model_len = given.max_model_len or info.context_length
    tokenizer = None if given.skip_tokenizer_init else load_tokenizer(machine.model.files)
    processor = InputProcessor(tokenizer=tokenizer, vocab_size=info.vocab_size, max_model_len=max_model_len)
    served = ServedModel(input_processor=processor, settings=ServerSettings())
    arrivals = []
    for line in lines:
        try:
            arrivals += arrivals_of(engine_requests_of(line.url, line.body, served), max_model_len)
        except WireError:
            continue  # its answer will have the error
    return arrivals


def _print(machine: Machine, outcomes: list[Outcome], winner: Outcome, *, num_requests: int) -> None:
    """Print the table of all candidates, fastest first, the omitted candidates, and the choice."""
    from longspan.machine import explanation, name_of  # noqa: PLC0415

    table = Table("parallel", "requests/s", "ratio", "why", title_justify="left")
    for column in table.columns[1:3]:
        column.justify = "right"
    for outcome in sorted(outcomes, key=lambda outcome: -outcome.requests_per_s):
        ran = outcome.problem is None
        rate = f"{outcome.requests_per_s:.3g}" if ran else ""
        ratio = f"{outcome.requests_per_s / winner.requests_per_s:.2f}" if ran and winner.requests_per_s else ""
        table.add_row(name_of(outcome.candidate), rate, ratio, explanation(outcome))
    Console(stderr=True).print(table)
    for tp, command in machine.unmeasured.items():
        note(f"instances with tp {tp} have no profile, so they were not simulated: {command}")
    if not machine.given.host_kv_gib and machine.given.policy != "chunked":
        note("pairs for Seesaw need --host-kv-gib, so none was simulated")
    rest = [outcome for outcome in outcomes if outcome.problem is None and outcome is not winner]
    second = max(filter(lambda o: o.requests_per_s, rest), key=lambda o: o.requests_per_s, default=None)
    ratio = f", {winner.requests_per_s / second.requests_per_s:.2f} times {name_of(second.candidate)}" if second else ""
    rate = f"{winner.requests_per_s:.3g} requests/s of {num_requests} simulated"
    note(f"uses {name_of(winner.candidate)}: {rate}{ratio}; {explanation(winner)}")
