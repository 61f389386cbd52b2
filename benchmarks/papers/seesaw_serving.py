"""Seesaw, Figures 10 to 14: offline throughput of the best static parallelism, and of pairs, on simulated devices.

    python benchmarks/papers/seesaw.py --serving [--figures 10 13] [--arxiv FILE] [--json FILE]

`--json benchmarks/papers/seesaw_serving.json` stores the points that claims and figures use, after each point. Stored
points are not simulated again, unless other code has simulated them.

- 15B runs on four devices, 34B and 70B on eight (section 6.2). Fig. 12 has 34B on four A10. Fig. 11 has Llama 3 70B on
  eight A100 of 40 GB. PCIe is 4.0 x8, with 80 GiB of host memory for each device. All requests arrive together.
- `arxiv`: the first 500 lengths of FILE. Its default is `shared/data/traces/arxiv_summarization_lengths.csv.gz` in the
  folder that contains this repository. Without it, lengths are drawn from quantiles of all its lengths, input and
  output independently.
- `sharegpt`: 2,000 requests. The paper shows a distribution without numbers. Ours are log-normal, cut off at 4 and
  1,024 tokens. The deviation of the logarithm is a sixth of the range. The means of 220 and 200 tokens are close to
  the lengths of ShareGPT in vLLM's benchmark.
- Static specs, of any number of instances, use `chunked`. Passes have the best size of 256 to 8,192 tokens, as the
  paper tunes its chunk size. Specs that are a quarter slower than the best with 1,024 tokens are not tuned. Specs with
  less than 60 % of the best throughput by Eq. 1, for requests of mean lengths, are not simulated.
- Both specs of a pair have the same number of instances, as in the paper. The two pairs with the highest throughput by
  Eq. 1 are simulated, and the better one is tuned. Memory alone bounds the number of concurrent requests.
- Fig. 14 scales the time of sums over ranks, including latency, as in the paper.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import closed_form
import msgspec
import numpy as np
from closed_form import OfflineWork
from stored_runs import code_version
from tqdm import tqdm

from longspan.core.cluster import Cluster
from longspan.core.options import SchedulingArgs
from longspan.core.splits import ParallelSpec
from longspan.core.steps import Forward
from longspan.cost.forward import Roofline, rooflines
from longspan.cost.step_cost import RooflineCost
from longspan.cost.topology import Devices
from longspan.policy.registry import policy_names
from longspan.sim.experiment import Experiment
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment, read_architecture
from longspan.workload.arrivals import Arrival, Workload, text
from longspan.workload.requests import make_workload
from longspan.workload.spec import WorkloadSpec

FIGURES = (10, 11, 12, 13, 14)
OUTPUT_LENS = (1, 10, 30, 100, 300, 1000)
SPEEDS = (0.1, 0.3, 1.0, 3.0, 10.0, 50.0)
"""Link speeds in Fig. 14, as multiples of PCIe's."""
STORED = Path(__file__).with_name("seesaw_serving.json")
_ARXIV_QUANTILES = Path(__file__).with_name("arxiv_summarization_quantiles.json")
_SHAREGPT_QUANTILES = Path(__file__).with_name("sharegpt_quantiles.json")
ARXIV = Path(__file__).parents[3] / "shared" / "data" / "traces" / "arxiv_summarization_lengths.csv.gz"
_NUM_ARXIV, _NUM_SHAREGPT, _NUM_CONSTANT = 500, 2000, 200
INPUT_LEN = 3000
_HOST_GIB_PER_DEVICE = 80
_MAX_NUM_SEQS = 4096
PASS_TOKENS = (256, 512, 1024, 2048, 4096, 8192)
_FIRST_TOKENS = 1024
_WORTH_TRYING, _WORTH_TUNING = 0.6, 0.75
_NUM_PAIRS = 2


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A model on the devices of one host.

    Attributes:
        faster: speed of sums over ranks, as a multiple of that over the devices' link.
        stage_seqs: maximum requests per pipeline stage. None: memory alone bounds them.
        host_s, seq_s: seconds of the host before each pass of a stage, and for each of its requests. Devices wait.
        host_gib: GiB of host memory for KV, for each device.
    """

    model: str
    hardware: str
    gpus: int
    link: str | None = None
    faster: float = 1.0
    stage_seqs: int | None = None
    host_s: float = 0.0
    seq_s: float = 0.0
    host_gib: float = _HOST_GIB_PER_DEVICE

    def specs(self) -> list[str]:
        """Return the parallel specs that use all devices, with degrees that are powers of 2."""
        powers = [2**power for power in range(self.gpus.bit_length())]
        every = [
            ParallelSpec(instances=self.gpus // (tp * pp), tp=tp, pp=pp)
            for tp, pp in product(powers, powers)
            if tp * pp <= self.gpus
        ]
        return [str(spec) for spec in every]

    def line(self, spec: str) -> Roofline:
        """Return the cost model of an instance."""
        devices = Devices(hardware=self.hardware, gpus_per_host=self.gpus, link=self.link)
        line = rooflines(read_architecture(self.model), devices, Cluster.of(spec))[0]
        return line if self.faster == 1 else _with_faster_sums(line, self.faster)

    def experiment(self, pass_tokens: int, spec: str, decode_spec: str | None = None) -> Experiment:
        """Return an experiment on these devices: with `chunked`, or with `seesaw` if `decode_spec` is given.

        Raises:
            ValueError: if the model does not fit.
        """
        pp = ParallelSpec.parse(spec).pp
        scheduling = SchedulingArgs(
            policy="chunked" if decode_spec is None else "seesaw",
            max_num_batched_tokens=pass_tokens * pp,
            max_num_seqs=_MAX_NUM_SEQS if self.stage_seqs is None else self.stage_seqs * pp,
            block_size=16,
            host_kv_gib=0.0 if decode_spec is None else self.host_gib * self.gpus,
        )
        cluster = ClusterSpec(
            hardware=self.hardware,
            gpus_per_host=self.gpus,
            link=self.link,
            parallel=spec if decode_spec is None else None,
            prefill_parallel=None if decode_spec is None else spec,
            decode_parallel=decode_spec,
        )
        experiment = make_experiment(self.model, cluster, scheduling)
        for phase in experiment.facts.phases or (experiment.cluster,):
            cost = experiment.cost.resharded(phase)
            assert isinstance(cost, RooflineCost)
            if self.faster != 1:
                cost.lines = tuple(_with_faster_sums(line, self.faster) for line in cost.lines)
            if self.host_s or self.seq_s:
                vars(cost)["stage_seconds"] = partial(_after_host, cost.stage_seconds, self)
        return experiment


def _after_host(
    seconds: Callable[[Forward], dict[int, tuple[float, ...]]], machine: Machine, forward: Forward
) -> dict[int, tuple[float, ...]]:
    """Return the seconds of the stages of a step, each after the time of the host."""
    host_s = machine.host_s + machine.seq_s * len(forward.parts)
    return {i: tuple([host_s + stage_s for stage_s in stages]) for i, stages in seconds(forward).items()}


def _with_faster_sums(line: Roofline, times: float) -> Roofline:
    """Return the cost model with sums over ranks that are `times` as fast."""
    link = line.topology.inside
    link = replace(link, ring_bytes_per_s=times * link.ring_bytes_per_s, collective_s=link.collective_s / times)
    return replace(line, topology=replace(line.topology, inside=link), _known={})


def throughput(
    machine: Machine, requests: Workload, pass_tokens: int, spec: str, decode_spec: str | None = None
) -> float:
    """Return requests per second of a parallel spec, or of Seesaw if `decode_spec` is given.

    If the model or a request does not fit, the result is 0.
    """
    try:
        result = machine.experiment(pass_tokens, spec, decode_spec).run(requests)
    except ValueError:
        return 0.0
    return 0.0 if result.refused else len(requests.arrivals) / result.makespan_s


# ---------------------------------------------------------------- points of figures


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The highest throughput of a spec or a pair, and the tokens of its passes."""

    pass_tokens: int
    requests_per_s: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """One bar of a figure, or one place on its axis.

    Attributes:
        static: by parallel spec.
        pairs: by the two specs of Seesaw, with an arrow between. Empty if no policy reshards.
        code: `code_version` of the simulation.
    """

    figure: int
    name: str
    static: dict[str, Rate]
    pairs: dict[str, Rate]
    code: str = ""

    @property
    def best_static(self) -> str:
        return max(self.static, key=lambda spec: self.static[spec].requests_per_s)

    @property
    def best_pair(self) -> str | None:
        return max(self.pairs, key=lambda pair: self.pairs[pair].requests_per_s, default=None)

    @property
    def ratio(self) -> float | None:
        """Throughput of the best pair over that of the best static spec."""
        pair = self.best_pair
        if pair is None:
            return None
        return self.pairs[pair].requests_per_s / self.static[self.best_static].requests_per_s


@dataclass(frozen=True, kw_only=True)
class Case:
    """A point to simulate, with its machine and requests."""

    figure: int
    name: str
    machine: Machine
    requests: Callable[[], Workload]


def cases(figures: Sequence[int], arxiv: Path) -> list[Case]:
    """Return the points of these figures, in ascending order of simulation time."""
    points: list[Case] = []
    workloads: dict[str, Callable[[], Workload]] = {"arxiv": partial(articles, arxiv), "sharegpt": chats}
    models = (("llama-3-15b", 4), ("codellama-34b", 8), ("llama-2-70b", 8))
    for length in OUTPUT_LENS:
        machine = Machine(model="llama-2-70b", hardware="a10", gpus=8)
        points.append(Case(figure=13, name=f"{length}", machine=machine, requests=partial(constant, length)))
    machine = Machine(model="codellama-34b", hardware="a10", gpus=4)
    points.append(Case(figure=12, name="34B, 4 a10", machine=machine, requests=workloads["arxiv"]))
    for speed in SPEEDS:
        machine = Machine(model="codellama-34b", hardware="a10", gpus=8, faster=speed)
        points.append(Case(figure=14, name=f"{speed:g}", machine=machine, requests=workloads["arxiv"]))
    for name, hardware, (model, gpus) in product(workloads, ("a10", "l4"), models):
        machine = Machine(model=model, hardware=hardware, gpus=gpus)
        title = f"{hardware}, {model}, {name}"
        points.append(Case(figure=10, name=title, machine=machine, requests=workloads[name]))
    sxm, pcie = (
        Machine(model="llama-3-70b", hardware=hardware, gpus=8, link=link)
        for hardware, link in (("a100-sxm-40g", None), ("a100-pcie-40g", "pcie4-x8"))
    )
    for machine, name in product((sxm, pcie), workloads):
        title = f"{machine.hardware}, {name}"
        points.append(Case(figure=11, name=title, machine=machine, requests=workloads[name]))
    return [case for case in points if case.figure in figures]


def constant(output_len: int, num: int = _NUM_CONSTANT) -> Workload:
    """Return equal requests with prompts of 3,000 tokens and answers of `output_len` tokens."""
    arrivals = [Arrival(due_s=0.0, prompt=text(3 * i + 2, INPUT_LEN), output_len=output_len) for i in range(num)]
    return Workload(arrivals=arrivals, shares=False)


def articles(file: Path) -> Workload:
    """Return the first requests of arxiv-summarization, or drawn ones if the file does not exist."""
    path = file if file.is_file() else _ARXIV_QUANTILES
    return make_workload(WorkloadSpec(workload=str(path), num_requests=_NUM_ARXIV, rate=math.inf))


def chats() -> Workload:
    """Return requests of ShareGPT's lengths."""
    return make_workload(WorkloadSpec(workload=str(_SHAREGPT_QUANTILES), num_requests=_NUM_SHAREGPT, rate=math.inf))


# ---------------------------------------------------------------- the best of each point


def point(case: Case, static: Mapping[str, Rate] | None = None) -> Point:
    """Return the best throughput of likely pairs, and of static specs unless `static` is given."""
    requests, machine = case.requests(), case.machine
    static = best_static(machine, requests) if static is None else dict(static)
    pairs = {}
    if has_resharding():
        runs = {
            f"{prefill} → {decode}": partial(throughput, machine, requests, spec=prefill, decode_spec=decode)
            for prefill, decode in _likely_pairs(machine, requests)
        }
        rates = {pair: run_pair(_FIRST_TOKENS) for pair, run_pair in runs.items()}
        best = max(rates, key=rates.__getitem__)
        pairs = {pair: _climb(run_pair, rates[pair], tuned=pair == best) for pair, run_pair in runs.items()}
    return Point(figure=case.figure, name=case.name, static=static, pairs=pairs, code=code_version(__file__))


def best_static(machine: Machine, requests: Workload) -> dict[str, Rate]:
    work = _mean_work(requests)
    expected = {spec: _expected_throughput(machine, work, spec) for spec in machine.specs()}
    least = _WORTH_TRYING * max(expected.values())
    tried = [spec for spec, rate in expected.items() if rate >= least]
    rates = {spec: throughput(machine, requests, _FIRST_TOKENS, spec) for spec in tried}
    best, tuned = max(rates.values()), {}
    for spec, rate in rates.items():
        if rate:
            is_good = rate >= _WORTH_TUNING * best
            tuned[spec] = _climb(partial(throughput, machine, requests, spec=spec), rate, tuned=is_good)
    return tuned


def has_resharding() -> bool:
    """Return True if there is a policy that changes the parallel spec while it serves."""
    return "seesaw" in policy_names()


def _climb(run: Callable[[int], float], first: float | None, *, tuned: bool) -> Rate:
    """Search the best pass size from `_FIRST_TOKENS` on, whose rate is `first`, in both directions if `tuned`."""
    start = PASS_TOKENS.index(_FIRST_TOKENS)
    best = Rate(pass_tokens=_FIRST_TOKENS, requests_per_s=run(_FIRST_TOKENS) if first is None else first)
    for further in (PASS_TOKENS[start + 1 :], PASS_TOKENS[start - 1 :: -1]) if tuned else ():
        for tokens in further:
            rate = run(tokens)
            if rate <= best.requests_per_s:
                break
            best = Rate(pass_tokens=tokens, requests_per_s=rate)
    return best


def _likely_pairs(machine: Machine, requests: Workload) -> list[tuple[str, str]]:
    """Return the pairs with equal numbers of instances that are best for requests of mean lengths, by Eq. 1."""
    work, rates = _mean_work(requests), {}
    for pair in product(machine.specs(), machine.specs()):
        if pair[0] != pair[1] and len({ParallelSpec.parse(spec).instances for spec in pair}) == 1:
            rates[pair] = expected_pair_throughput(machine, work, _FIRST_TOKENS, *pair)
    return sorted(rates, key=lambda pair: -rates[pair])[:_NUM_PAIRS]


def _mean_work(requests: Workload) -> OfflineWork:
    """Return the same number of requests, all with the mean lengths."""
    return OfflineWork(
        num_requests=len(requests.arrivals),
        input_len=round(float(np.mean([len(arrival.prompt) for arrival in requests.arrivals]))),
        output_len=round(float(np.mean([arrival.output_len for arrival in requests.arrivals]))),
    )


def _expected_throughput(machine: Machine, work: OfflineWork, spec: str) -> float:
    """Return the throughput of a single spec by Eq. 1, or 0 if no request fits."""
    try:
        line = machine.line(spec)
        tokens = _FIRST_TOKENS * len(line.stages)
        return closed_form.static_throughput(line, ParallelSpec.parse(spec).instances, work, tokens)
    except ValueError:
        return 0.0


def expected_pair_throughput(
    machine: Machine, work: OfflineWork, pass_tokens: int, prefill_spec: str, decode_spec: str
) -> float:
    """Return the throughput of a pair by Eq. 1, or 0 if no request fits."""
    prefill, decode = (machine.line(spec) for spec in (prefill_spec, decode_spec))
    shape = prefill.layer.model.attention
    host_tokens = machine.host_gib * machine.gpus * 2**30 / (shape.kv_bytes * shape.num_layers)
    num_instances = ParallelSpec.parse(prefill_spec).instances
    tokens = pass_tokens * len(prefill.stages)
    try:
        return closed_form.pair_throughput(prefill, decode, num_instances, work, tokens, host_tokens)
    except ValueError:
        return 0.0


def run(args: argparse.Namespace) -> list[Point]:
    """Simulate all points that are not stored yet, and print every figure."""
    if not args.arxiv.is_file():
        print(f"{args.arxiv} does not exist: lengths of articles are drawn from {_ARXIV_QUANTILES.name}")
    points = {(point.figure, point.name): point for point in (stored(args.json) if args.json else [])}
    requested = cases(args.figures, args.arxiv)
    for case in tqdm(requested, desc="points", disable=None):
        key, before = (case.figure, case.name), points.get((case.figure, case.name))
        if before is not None and before.code == code_version(__file__):
            continue
        points[key] = point(case)
        show(points[key])
        if args.json:
            ordered = sorted(points.values(), key=lambda point: point.figure)
            args.json.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")
    return [points[case.figure, case.name] for case in requested]


def stored(path: Path | None = None) -> list[Point]:
    """Read the stored points."""
    path = STORED if path is None else path
    return msgspec.json.decode(path.read_bytes(), type=list[Point]) if path.is_file() else []


def show(point: Point) -> None:
    """Print the throughput of every spec of a point."""
    rates = sorted({**point.static, **point.pairs}.items(), key=lambda item: -item[1].requests_per_s)
    listed = ", ".join(f"{spec} {rate.requests_per_s:.3g} ({rate.pass_tokens})" for spec, rate in rates)
    print(f"Fig. {point.figure}, {point.name}: {listed}", flush=True)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `--serving`."""
    parser.add_argument("--figures", nargs="+", type=int, default=FIGURES, choices=FIGURES)
    parser.add_argument("--arxiv", type=Path, default=ARXIV, help="lengths of arxiv-summarization")
    parser.add_argument("--json", type=Path, help="store points in this file, and simulate only missing ones")
