"""CSPS, section 5: requests of NeedleBench and BookCorpus by CSPS and by Sarathi-Serve, on simulated devices.

    python benchmarks/papers/csps.py --serving [--models internlm2.5-7b] [--json FILE]      # some ten minutes

`--json benchmarks/papers/csps_serving.json` stores the cases that claims and figures use, after each case. Cases in the
file are not simulated again, unless other code has simulated them.

- Lengths are log-normal, through median and P99 of Table 2. The paper does not give the distribution. There are 40
  requests of each data set, one for each fortieth of the distribution. Input and output are paired at random.
- Sarathi-Serve is policy `chunked` with TP4 PP2 on 8 GPUs. Its chunks have 256 tokens as in the paper, or the best of
  several sizes for mean response time (tuned). A stage computes a chunk while the other computes the next.
- `ntp` is policy `csps` with exchange `alltoall`, on instances of one GPU. `ntp, csa` also drops keys and values of 4 %
  of the tokens. Those settings keep the accuracy here (docs/policies/csps.md). The paper drops 22 %. `tp` is `csps`
  with exchange `gather_hidden` on 8 GPUs. It serves prompts of up to 100K tokens, and `ntp` serves longer ones.
- `alone`: requests never overlap. `ntp` has 64 GPUs there. A prompt uses one GPU for each partition of 64K tokens, in
  one step. The last partition may be shorter.
- `served`: both systems use 8 GPUs of one host, with an eighth of the requests of 64 GPUs, Poisson. All GPUs share
  every prompt, so both systems have the same number. `ntp` has steps of 8,192 tokens per GPU. `ntp, csa` has steps of
  32,768, which is a whole prompt of up to 256K. Decodes wait for these steps, since no GPU only decodes here, unlike in
  the paper (4.2).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import NormalDist

import msgspec
import numpy as np
from stored_runs import code_version
from tqdm import tqdm

from longspan.core.options import SchedulingArgs
from longspan.sim.experiment import Experiment
from longspan.sim.run import Served
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment
from longspan.workload.arrivals import Arrival, Workload, arrival_times, text

STORED = Path(__file__).with_name("csps_serving.json")
MODELS = {"glm-4-9b-1m": "GLM-4", "internlm2.5-7b": "InternLM2.5"}
HARDWARE, GPUS_PER_HOST, NUM_GPUS = "a100-sxm-40g", 8, 64
PARTITION = 2**16
"""Tokens of a partition of `ntp`."""
LONG = 100_000
"""Longer prompts are for `ntp` (section 3.2.2)."""
DROPPED = 0.04
"""Drop ratio by which held-out texts lose at most 1 % of accuracy on groups of 2 to 4 (benchmarks/csa_bound.py)."""
RATES = (0.03, 0.06, 0.125, 0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8)
"""Requests per second of 64 GPUs. The paper has 1."""
SARATHI, TUNED, NTP, CSA, TP = "sarathi 256", "sarathi tuned", "ntp", "ntp, csa", "tp"
_CHUNKS = (512, 1024, 2048, 4096, 8192)
_SERVED_CHUNKS = (1024, 4096)
_NUM_REQUESTS = 40
_P99 = NormalDist().inv_cdf(0.99)


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A row of Table 2: median and P99 of inputs and outputs, and the deviation of inputs, in tokens."""

    name: str
    input_len: tuple[int, int]
    output_len: tuple[int, int]
    input_std: int


DATA_SETS = (
    DataSet(name="NeedleBench", input_len=(113_000, 995_000), output_len=(348, 572), input_std=506_000),
    DataSet(name="BookCorpus", input_len=(97_000, 406_000), output_len=(375, 631), input_std=183_000),
)


@dataclass(frozen=True, kw_only=True)
class Times:
    """Times of each request by one system.

    Attributes:
        gpus: number used by the request.
        tbt_s: mean time between its tokens.
    """

    gpus: list[int]
    ttft_s: list[float]
    tbt_s: list[float]
    response_s: list[float]

    @property
    def mean_gpus(self) -> float:
        return statistics.fmean(self.gpus)


@dataclass(frozen=True, kw_only=True)
class Means:
    """Means over all requests that 8 GPUs served at one rate.

    Attributes:
        gpus: of each request.
        prefill_tokens_per_s, decode_tokens_per_s: until the last token of all.
    """

    gpus: int
    ttft_s: float
    tbt_s: float
    response_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a data set.

    Attributes:
        tuned: the chunk of `sarathi tuned`, when requests are alone.
        alone: by system.
        served: by requests per second of 64 GPUs, then system.
        code: `code_version` of the simulation.
    """

    model: str
    data_set: str
    input_lens: list[int]
    output_lens: list[int]
    tuned: int
    alone: dict[str, Times]
    served: dict[float, dict[str, Means]]
    code: str = ""

    @property
    def name(self) -> str:
        return f"{MODELS[self.model]}, {self.data_set}"

    def chosen(self) -> Times:
        """Return the times of CSPS by the rule of section 3.2.2: `tp` for short prompts, sparse `ntp` for long ones."""
        short, long = self.alone[TP], self.alone[CSA]
        pick = [long if length > LONG else short for length in self.input_lens]
        return Times(
            gpus=[times.gpus[i] for i, times in enumerate(pick) if times.gpus],
            ttft_s=[times.ttft_s[i] for i, times in enumerate(pick)],
            tbt_s=[times.tbt_s[i] for i, times in enumerate(pick)],
            response_s=[times.response_s[i] for i, times in enumerate(pick)],
        )


# ---------------------------------------------------------------- requests


def lengths(data_set: DataSet, num: int = _NUM_REQUESTS) -> tuple[list[int], list[int]]:
    """Return the lengths of inputs in ascending order, and the lengths of outputs in random order."""
    inputs, outputs = (_quantiles(*ends, num) for ends in (data_set.input_len, data_set.output_len))
    np.random.default_rng(0).shuffle(outputs)
    return inputs, outputs


def _quantiles(median: int, p99: int, num: int) -> list[int]:
    log = NormalDist(math.log(median), math.log(p99 / median) / _P99)
    return [round(math.exp(log.inv_cdf((index + 0.5) / num))) for index in range(num)]


def requests(data_set: DataSet, rate: float = 1.0) -> Workload:
    """Return requests that arrive at `rate` per second, in random order."""
    inputs, outputs = lengths(data_set)
    rng = np.random.default_rng(1)
    due_s = arrival_times(len(inputs), rate=rate, burstiness=1.0, rng=rng)
    order = rng.permutation(len(inputs)).tolist()
    arrivals = [
        Arrival(due_s=at_s, prompt=text(3 * index + 2, inputs[index]), output_len=outputs[index])
        for at_s, index in zip(due_s, order, strict=True)
    ]
    return Workload(arrivals=arrivals, shares=False)


# ---------------------------------------------------------------- systems


@cache
def sarathi(model: str, chunk: int) -> Experiment:
    """Return Sarathi-Serve, whose two stages compute a chunk each."""
    return _experiment(model, "tp4pp2", GPUS_PER_HOST, "chunked", 2 * chunk)


@cache
def ntp(model: str, gpus: int, tokens: int = PARTITION, csa: str = "off") -> Experiment:
    """Return SP-NTP on `gpus` instances of one GPU, with steps of `tokens` tokens on each."""
    options = {"exchange": "alltoall", "csa": csa, "long_share": "1"}
    return _experiment(model, str(gpus), gpus, "csps", tokens, options)


@cache
def ntp_by_length(model: str, csa: str = "off") -> Experiment:
    """Return SP-NTP on 64 instances of one GPU. Each prompt uses one instance per partition."""
    options = {"exchange": "alltoall", "csa": csa, "long_share": "1", "partition": str(PARTITION)}
    return _experiment(model, str(NUM_GPUS), NUM_GPUS, "csps", PARTITION, options)


@cache
def tp(model: str) -> Experiment:
    """Return SP-TP on 8 GPUs."""
    return _experiment(model, "8", GPUS_PER_HOST, "csps", 8192, {"exchange": "gather_hidden"})


def csa() -> str:
    """Return settings that keep the accuracy.

    There are two levels. By the rule of section 3.2.4, level 3 drops half of all tokens even if level 2 drops none.
    """
    return json.dumps({"levels": 2, "drop": DROPPED, "drop_mode": "kv"})


def _experiment(
    model: str, spec: str, gpus: int, policy: str, tokens: int, options: dict[str, str] | None = None
) -> Experiment:
    cluster = ClusterSpec(hardware=HARDWARE, hosts=-(-gpus // GPUS_PER_HOST), parallel=spec)
    scheduling = SchedulingArgs(policy=policy, max_num_batched_tokens=tokens, policy_options=options)
    return make_experiment(model, cluster, scheduling)


# ---------------------------------------------------------------- one case


def study(model: str, data_set: DataSet) -> Case:
    """Simulate a model and a data set."""
    inputs, outputs = lengths(data_set)
    by_chunk = {chunk: _alone(sarathi(model, chunk), GPUS_PER_HOST, inputs, outputs) for chunk in (256, *_CHUNKS)}
    tuned = min(_CHUNKS, key=lambda chunk: statistics.fmean(by_chunk[chunk].response_s))
    alone = {
        SARATHI: by_chunk[256],
        TUNED: by_chunk[tuned],
        NTP: _by_partitions(model, "off", inputs, outputs),
        CSA: _by_partitions(model, csa(), inputs, outputs),
        TP: _alone(tp(model), GPUS_PER_HOST, inputs, outputs),
    }
    served = {rate: _served(model, data_set, rate) for rate in RATES}
    return Case(
        model=model,
        data_set=data_set.name,
        input_lens=inputs,
        output_lens=outputs,
        tuned=tuned,
        alone=alone,
        served=served,
        code=code_version(__file__),
    )


def _by_partitions(model: str, settings: str, inputs: Sequence[int], outputs: Sequence[int]) -> Times:
    """Run requests one at a time, each prompt on one GPU per partition."""
    times = _alone(ntp_by_length(model, settings), NUM_GPUS, inputs, outputs)
    return replace(times, gpus=[-(-length // PARTITION) for length in inputs])


def _alone(experiment: Experiment, gpus: int, inputs: Sequence[int], outputs: Sequence[int]) -> Times:
    """Run requests one at a time."""
    arrivals = [
        Arrival(due_s=0.0, prompt=text(3 * index + 2, length), output_len=output)
        for index, (length, output) in enumerate(zip(inputs, outputs, strict=True))
    ]
    served = _all_served(experiment, Workload(arrivals=arrivals, shares=False).one_by_one(1e5))
    return Times(
        gpus=[gpus] * len(served),
        ttft_s=[_rounded(request.ttft_s) for request in served],
        tbt_s=[_rounded(request.mean_tbt_s) for request in served],
        response_s=[_rounded(request.e2e_s) for request in served],
    )


def _served(model: str, data_set: DataSet, rate: float) -> dict[str, Means]:
    """Serve an eighth of the requests on 8 GPUs."""
    workload = requests(data_set, rate * GPUS_PER_HOST / NUM_GPUS)
    tuned = [_means(sarathi(model, chunk), workload) for chunk in _SERVED_CHUNKS]
    return {
        SARATHI: _means(sarathi(model, 256), workload),
        TUNED: min(tuned, key=lambda means: means.response_s),
        NTP: _means(ntp(model, GPUS_PER_HOST, 8192), workload),
        CSA: _means(ntp(model, GPUS_PER_HOST, PARTITION // 2, csa()), workload),
    }


def _means(experiment: Experiment, workload: Workload) -> Means:
    served = _all_served(experiment, workload)
    end_s = max(request.finished_s for request in served)
    return Means(
        gpus=experiment.cluster.num_ranks,
        ttft_s=_rounded(statistics.fmean(request.ttft_s for request in served)),
        tbt_s=_rounded(statistics.fmean(request.mean_tbt_s for request in served)),
        response_s=_rounded(statistics.fmean(request.e2e_s for request in served)),
        prefill_tokens_per_s=_rounded(sum(request.num_prompt_tokens for request in served) / end_s),
        decode_tokens_per_s=_rounded(sum(request.num_output_tokens for request in served) / end_s),
    )


def _all_served(experiment: Experiment, workload: Workload) -> tuple[Served, ...]:
    result = experiment.run(workload)
    if result.refused or result.truncated:
        cut = len(result.truncated)
        raise SystemExit(f"{experiment.scheduling.policy} refuses {result.refused} and cuts {cut}: no means")
    return result.served


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


# ---------------------------------------------------------------- all


def run(args: argparse.Namespace) -> list[Case]:
    """Simulate all cases, and store them with `--json`."""
    path: Path | None = args.json
    found = {(case.model, case.data_set): case for case in (stored(path) if path else [])}
    requested = list(product(args.models, DATA_SETS))
    for model, data_set in tqdm(requested, desc="cases", disable=None):
        before = found.get((model, data_set.name))
        if before is not None and before.code == code_version(__file__):
            continue
        found[model, data_set.name] = study(model, data_set)
        if path is not None:
            path.write_bytes(msgspec.json.encode(list(found.values())).replace(b'"tuned"', b'\n"tuned"') + b"\n")
    return [found[model, data_set.name] for model, data_set in requested]


def stored(path: Path | None = None) -> list[Case]:
    """Read the stored cases."""
    path = STORED if path is None else path
    return msgspec.json.decode(path.read_bytes(), type=list[Case]) if path.is_file() else []


def options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `--serving`."""
    parser.add_argument("--models", nargs="+", default=tuple(MODELS), choices=tuple(MODELS))
    parser.add_argument("--json", type=Path, help="write the figures that claims need to this file")
