"""Ask longspan and AISimulate the same questions, and compare their answers.

    make aisimulate
    python benchmarks/aisimulate.py [--venv .venv-aisimulate] [--quick] [--require]

AISimulate (once AIConfigurator) lives in an environment of its own. A question has a model, devices, a prompt and an
output length, a rate, and a service level. The first table compares predictions for each layout of tensor-parallel
instances: mean TTFT, mean TPOT and tokens per second and GPU. longspan simulates policy `chunked` there, with the same
numbers of requests and Poisson arrivals. AISimulate models vLLM, by the kernels that it has measured for the device.

The second table has the layouts that `longspan.plan` and `aisimulate recommend` choose for all devices. It also has the
predictions of both for these layouts, and the seconds of each search.

The third table has questions that one of both cannot answer. Each question is put to both command lines, and the
table has the error of a tool that refuses it. `--quick` has one question. The exit code is 1 with `--require` if both
choose different layouts, and either predicts more than 5 % less goodput for the other's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from longspan import WorkloadSpec, plan
from longspan.core.options import SchedulingArgs
from longspan.core.splits import ParallelSpec
from longspan.sim.spec import ClusterSpec, ServiceLevel
from longspan.simulation import simulate

_NUM_REQUESTS, _NUM_GPUS, _SEED = 200, 8, 42
_MAX_TRIALS = 8
"""Layouts that AISimulate may simulate: on 8 devices it has four, and each may be drawn twice."""
_WORSE = 0.95
_TIMEOUT_S = 600


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question for both, in the names of both."""

    model: str
    hub_id: str
    hardware: str
    system: str
    input_len: int
    output_len: int
    rate: float
    level: ServiceLevel

    def __str__(self) -> str:
        return f"{self.model}, {_NUM_GPUS} {self.hardware}, {self.input_len}/{self.output_len}, {self.rate:g}/s"


_8B = ("llama-3-8b", "meta-llama/Meta-Llama-3.1-8B")
_70B = ("llama-3-70b", "meta-llama/Meta-Llama-3.1-70B")
_A100, _H100 = ("a100-sxm-80g", "a100_sxm"), ("h100-sxm-80g", "h100_sxm")


def _question(names: tuple[str, str], devices: tuple[str, str], lengths: tuple[int, int], rate: float) -> Question:
    (model, hub_id), (hardware, system), (input_len, output_len) = names, devices, lengths
    return Question(
        model=model,
        hub_id=hub_id,
        hardware=hardware,
        system=system,
        input_len=input_len,
        output_len=output_len,
        rate=rate,
        level=ServiceLevel(slo_ttft=2.0, slo_tbt=0.05),
    )


QUESTIONS = (
    _question(_8B, _A100, (4000, 500), 12.0),
    _question(_8B, _H100, (16000, 200), 6.0),
    _question(_70B, _H100, (4000, 500), 3.0),
)
LAYOUTS = tuple(ParallelSpec(instances=_NUM_GPUS // tp, tp=tp) for tp in (1, 2, 4, 8))


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted means of a layout. Goodput is the requests per second within the service level."""

    ttft_s: float
    tpot_s: float
    tokens_per_s_per_gpu: float
    goodput_per_s: float


class RefusedError(Exception):
    """A tool refuses a question. The text is the error of the tool."""


# ---------------------------------------------------------------- longspan


def lengths_file(question: Question, folder: Path) -> Path:
    """Write the workload file of requests of one length."""
    file = folder / f"{question.input_len}-{question.output_len}.json"
    lengths = {"input_len": question.input_len, "output_len": question.output_len}
    file.write_text(json.dumps({name: {"0": value, "1": value} for name, value in lengths.items()}))
    return file


def _workload(question: Question, folder: Path) -> WorkloadSpec:
    file = str(lengths_file(question, folder))
    return WorkloadSpec(workload=file, rate=question.rate, num_requests=_NUM_REQUESTS, seed=_SEED)


def ours(question: Question, layout: ParallelSpec, folder: Path) -> Prediction:
    """Simulate a layout with policy `chunked`.

    Raises:
        RefusedError: the model does not fit.
    """
    cluster = ClusterSpec(hardware=question.hardware, gpus_per_host=_NUM_GPUS, parallel=str(layout))
    try:
        workload, chunked = _workload(question, folder), SchedulingArgs(policy="chunked")
        result = simulate(question.model, cluster, workload, scheduling=chunked)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    served = result.served
    return Prediction(
        ttft_s=sum(one.ttft_s for one in served) / len(served),
        tpot_s=sum(one.mean_tbt_s for one in served) / len(served),
        tokens_per_s_per_gpu=result.num_tokens / result.makespan_s / _NUM_GPUS,
        goodput_per_s=result.num_good(question.level) / result.makespan_s,
    )


def our_choice(question: Question, folder: Path) -> ParallelSpec:
    """Return the layout of the best candidate with policy `chunked` on all devices.

    Raises:
        RefusedError: no candidate can run.
    """
    answer = plan(
        question.model,
        hardware=question.hardware,
        gpus=_NUM_GPUS,
        workload=_workload(question, folder),
        level=question.level,
        policies=("chunked",),
        layouts=tuple(map(str, LAYOUTS)),
        fewer=False,
        stores=False,
    )
    if answer.winner is None:
        raise RefusedError("; ".join(answer.notes))
    return answer.winner.candidate.spec


# ---------------------------------------------------------------- AISimulate


def their_config(question: Question, layout: ParallelSpec | None) -> dict[str, Any]:
    """Return a configuration that predicts a layout, or without one, that recommends a layout."""
    parallelism = {"preset": "default"} if layout is None else {"replicas": layout.instances, "tensor": layout.tp}
    level = question.level
    assert level.slo_ttft is not None and level.slo_tbt is not None, "all questions have both"
    config: dict[str, Any] = {
        "traffic": {
            "source": {
                "type": "synthetic",
                "input_tokens": question.input_len,
                "output_tokens": question.output_len,
            },
            "load": {"type": "poisson", "requests_per_second": question.rate, "seed": _SEED},
            "stop": {"requests": _NUM_REQUESTS},
        },
        "engine": {
            "mode": "aggregated",
            "model": question.hub_id,
            "hardware": question.system,
            "backend": "vllm",
            "workers": {"aggregated": {"parallelism": parallelism}},
        },
        "evaluation": {"sla": {"ttft_ms": 1000 * level.slo_ttft, "itl_ms": 1000 * level.slo_tbt}},
    }
    if layout is None:
        gpus = {"min_candidate_gpus": _NUM_GPUS, "max_candidate_gpus": _NUM_GPUS}
        config["optimization"] = {"target": "goodput", "constraints": gpus}
        config["optimizer"] = {
            "algorithm": "random",
            "max_trials": _MAX_TRIALS,
            "parallelism": os.cpu_count() or 1,
            "seed": _SEED,
        }
    return config


def ask(venv: Path, verb: str, config: Mapping[str, Any], folder: Path, more: Sequence[str] = ()) -> Any:  # noqa: ANN401 - JSON
    """Return the JSON that AISimulate prints.

    Args:
        more: further arguments of the command line.

    Raises:
        RefusedError: it ended with an error.
    """
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))  # JSON is YAML
    command = [str(venv / "bin" / "aisimulate"), verb, "-c", str(file), "--format", "json"]
    return json.loads(_output([*command, "--output-dir", str(folder / "out"), "--overwrite", *more]).splitlines()[-1])


def theirs(venv: Path, question: Question, layout: ParallelSpec, folder: Path) -> Prediction:
    """Ask AISimulate to predict a layout."""
    summary = ask(venv, "predict", their_config(question, layout), folder)
    return Prediction(
        ttft_s=summary["mean_ttft_ms"] / 1000,
        tpot_s=summary["mean_tpot_ms"] / 1000,
        tokens_per_s_per_gpu=summary["total_throughput_tok_s"] / _NUM_GPUS,
        goodput_per_s=summary["goodput_request_throughput_rps"],
    )


def their_choice(venv: Path, question: Question, folder: Path) -> ParallelSpec:
    """Return the layout of AISimulate's best candidate."""
    ask(venv, "recommend", their_config(question, None), folder)
    candidates = json.loads((folder / "out" / "recommendation.json").read_text())["candidates"]
    best = max((one for one in candidates if one["score"] is not None), key=lambda one: one["score"])
    parallelism = best["prediction_config"]["engine"]["workers"]["aggregated"]["parallelism"]
    return ParallelSpec(instances=parallelism["replicas"], tp=parallelism["tensor"], pp=parallelism["pipeline"])


def _output(command: Sequence[str]) -> str:
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    if ended.returncode:
        raise RefusedError(error_line(ended.stderr))
    return ended.stdout


def error_line(text: str) -> str:
    """Return the line of a tool's errors that has the reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reasons = [line for word in _REASONS for line in lines if word in line]
    return (reasons or lines[-1:] or ["no message"])[0][:_MAX_ERROR]


_REASONS = ("not permitted", "Input should", "failed:", "rror:")
"""Parts of the lines with the reason of an error, most specific first."""
_MAX_ERROR = 120


# ---------------------------------------------------------------- questions for one


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A question that one of both may not answer.

    Attributes:
        theirs: arguments of `aisimulate predict`, after the configuration of the first question.
        ours: arguments of `longspan simulate`.
    """

    what: str
    theirs: tuple[str, ...]
    ours: tuple[str, ...]


_OURS = ("llama-3-8b", "--rate", "4", "--num-requests", "20")
_ON_A100 = (*_OURS, "--hardware", "a100-sxm-80g", "--gpus-per-host", "8")


def probes(folder: Path) -> Sequence[Probe]:
    """Return the questions, and write their file."""
    drawn = folder / "drawn.json"
    drawn.write_text(json.dumps({"input_len": {"0": 128, "1": 65536}, "output_len": {"0": 16, "1": 400}}))
    roles = ("--prefill-parallel", "4xpp2", "--decode-parallel", "4xtp2", "--host-kv-gib", "64")
    return (
        Probe(
            what="lengths drawn from quantiles",
            theirs=("--set", f"traffic.source.input_tokens={json.dumps({'0': 128, '1': 65536})}"),
            ours=(*_ON_A100, "--workload", str(drawn)),
        ),
        Probe(
            what="a group of instances for each long prompt",
            theirs=("--set", "engine.workers.aggregated.scheduler.policy=auto"),
            ours=(*_ON_A100, "--policy", "auto"),
        ),
        Probe(
            what="other layouts of the weights for prefill and decode phases",
            theirs=("--set", "engine.mode=resharded"),
            ours=(*_ON_A100, "--policy", "seesaw", *roles),
        ),
        Probe(
            what="a device without measured kernels: A10",
            theirs=("--set", "engine.hardware=a10"),
            ours=(*_OURS, "--hardware", "a10", "--parallel", "4xtp2"),
        ),
        Probe(
            what="a lost worker and the restart",
            theirs=("--set", "engine.faults={lost_at_s: [1]}"),
            ours=(*_ON_A100, "--lose-worker-at", "1"),
        ),
        Probe(
            what="another engine: SGLang",
            theirs=("--set", "engine.backend=sglang"),
            ours=(*_ON_A100, "--backend", "sglang"),
        ),
        Probe(
            what="speculative decoding",
            theirs=("--set", "engine.nextn=1", "--set", "engine.nextn_accepted=0.7"),
            ours=(*_ON_A100, "--num-speculative-tokens", "1"),
        ),
        Probe(
            what="time and memory by operation",
            theirs=("--detail", "memory,time"),
            ours=(*_ON_A100, "--detail", "memory,time"),
        ),
    )


def answers_of(venv: Path, probe: Probe, folder: Path) -> tuple[str, str]:
    """Put a question to AISimulate and to longspan. Return `answers`, or the error, of each."""
    config = their_config(QUESTIONS[0], LAYOUTS[1])
    simulate_it = [sys.executable, "-m", "longspan", "simulate", *probe.ours]
    theirs_text = _answered(lambda: ask(venv, "predict", config, folder, probe.theirs))
    return theirs_text, _answered(lambda: _output(simulate_it))


def _answered(run: Callable[[], object]) -> str:
    try:
        run()
    except RefusedError as error:
        return str(error)
    return "answers"


# ---------------------------------------------------------------- report


def main() -> int:
    """Ask all questions and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".venv-aisimulate"), help="the environment of AISimulate")
    parser.add_argument("--quick", action="store_true", help="the first question only, and no search")
    parser.add_argument("--require", action="store_true", help="exit code 1 if a choice is worse for both")
    args = parser.parse_args()
    if not (args.venv / "bin" / "aisimulate").is_file():
        sys.exit(f"{args.venv} has no aisimulate: run make aisimulate, or name its environment with --venv")
    questions = QUESTIONS[:1] if args.quick else QUESTIONS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tables = {question: predictions(args.venv, question, folder) for question in questions}
        print("\n".join(_predicted_lines(tables)), flush=True)
        choices = {} if args.quick else {one: choose(args.venv, one, folder) for one in questions}
        if choices:
            print("\n" + "\n".join(_choice_lines(choices, tables)), flush=True)
        print("\n| question | AISimulate | longspan |\n|---|---|---|")
        for probe in probes(folder):
            print(f"| {probe.what} | {' | '.join(answers_of(args.venv, probe, folder))} |", flush=True)
    worse = [str(one) for one, choice in choices.items() if is_worse(choice, tables[one])]
    for text in worse:
        print(f"the choices differ, and a tool predicts clearly less goodput for the other's: {text}")
    return 1 if args.require and worse else 0


Predictions = Mapping[ParallelSpec, tuple[Prediction | None, Prediction | None]]
"""Predictions of longspan and of AISimulate, for each layout. None if the tool refuses the layout."""


def predictions(venv: Path, question: Question, folder: Path) -> Predictions:
    """Return the predictions of both for each layout."""
    return {
        layout: (
            _unless_refused(partial(ours, question, layout, folder)),
            _unless_refused(partial(theirs, venv, question, layout, folder)),
        )
        for layout in LAYOUTS
    }


def _unless_refused(predict: Callable[[], Prediction]) -> Prediction | None:
    try:
        return predict()
    except RefusedError as error:
        print(error, file=sys.stderr)
        return None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The layouts that both choose, and the seconds of each search."""

    ours: ParallelSpec
    theirs: ParallelSpec
    our_s: float
    their_s: float


def choose(venv: Path, question: Question, folder: Path) -> Choice:
    """Let both choose a layout."""
    begin_s = time.perf_counter()
    mine = our_choice(question, folder)
    middle_s = time.perf_counter()
    other = their_choice(venv, question, folder)
    return Choice(ours=mine, theirs=other, our_s=middle_s - begin_s, their_s=time.perf_counter() - middle_s)


def is_worse(choice: Choice, table: Predictions) -> bool:
    """Return True if the layouts differ, and a tool predicts clearly less goodput for the layout of the other."""
    if choice.ours == choice.theirs:
        return False
    for place, (own, other) in enumerate(((choice.ours, choice.theirs), (choice.theirs, choice.ours))):
        best, worst = table[own][place], table[other][place]
        if best is not None and (worst is None or worst.goodput_per_s < _WORSE * best.goodput_per_s):
            return True
    return False


def _predicted_lines(tables: Mapping[Question, Predictions]) -> Iterator[str]:
    yield "longspan / AISimulate, and the ratio\n"
    yield "| question | layout | TTFT ms | TPOT ms | tokens/s/GPU | goodput/s |"
    yield "|---|---|---|---|---|---|"
    for question, table in tables.items():
        for layout, pair in table.items():
            cells = (
                _pair([None if one is None else 1000 * one.ttft_s for one in pair]),
                _pair([None if one is None else 1000 * one.tpot_s for one in pair]),
                _pair([None if one is None else one.tokens_per_s_per_gpu for one in pair]),
                _pair([None if one is None else one.goodput_per_s for one in pair]),
            )
            yield f"| {question} | {layout} | {' | '.join(cells)} |"


def _pair(values: Sequence[float | None]) -> str:
    texts = ["refused" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}" for value in values]
    mine, other = values
    ratio = f" ({mine / other:.2f})" if mine is not None and other else ""
    return f"{texts[0]} / {texts[1]}{ratio}"


def _choice_lines(choices: Mapping[Question, Choice], tables: Mapping[Question, Predictions]) -> Iterator[str]:
    yield "| question | longspan | AISimulate | goodput/s of longspan's | of AISimulate's | seconds |"
    yield "|---|---|---|---|---|---|"
    for question, choice in choices.items():
        goodputs = (
            _pair([None if one is None else one.goodput_per_s for one in tables[question].get(layout, (None, None))])
            for layout in (choice.ours, choice.theirs)
        )
        seconds = f"{choice.our_s:.0f} / {choice.their_s:.0f}"
        yield f"| {question} | {choice.ours} | {choice.theirs} | {' | '.join(goodputs)} | {seconds} |"


if __name__ == "__main__":
    sys.exit(main())
