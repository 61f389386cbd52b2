"""Plans: the hardware, the layout and the policy that serve a workload within a service level.

    from longspan import ServiceLevel, WorkloadSpec, plan

    level = ServiceLevel(slo_ttft=2.0, slo_tbt=0.05)
    answer = plan("llama-3-8b", hardware="h100-sxm-80g", gpus=8, workload=WorkloadSpec(rate=2.0), level=level)
    print(answer.winner.command)

The search is `longspan.planner`, which is pure. This module gives it the model, the simulations and the prices.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan import limits
from longspan.args import EngineArgs
from longspan.core.fleets import parse_fleet
from longspan.core.options import at_least_one
from longspan.core.splits import ParallelSpec
from longspan.cost import catalog
from longspan.cost.step_cost import RooflineCost
from longspan.errors import ParameterError
from longspan.plan_runs import Runner, Setup, base_rate, experiment_of, sample_of, store_of, whole
from longspan.planner.answer import errors_of, ranked_of
from longspan.planner.candidates import OFFLINE_POLICIES, POLICIES, STEP_BUDGETS, Candidate, Space, candidates
from longspan.planner.demand import Demand, demand_of
from longspan.planner.pruning import Estimator, Forecast, prune
from longspan.planner.ranking import Search, max_rate
from longspan.planner.samples import recorded_times
from longspan.planner.values import Current, Plan, Pruned, Question, RecordedTime
from longspan.sim.spec import HardwareSpec, ServiceLevel
from longspan.simulation import read_architecture, read_device, read_profile
from longspan.workload.recorded import recorded_layouts
from longspan.workload.requests import is_drawn, make_workload
from longspan.workload.spec import WorkloadSpec
from longspan.workload.traces import read_trace

if TYPE_CHECKING:
    from longspan.cost.forward import Roofline

_SEEDS = 4
_NUM_REQUESTS, _MAX_REQUESTS = 240, 960
"""Requests of a seed in the last round: at least, and at most."""
_FILLS = 3
"""Requests of a seed, as a multiple of the requests that are in flight at a time."""
_HOST_KV_GIB = 64.0
"""Memory of each host that a plan may use for KV, if prompts share prefixes or phases alternate."""
_DEMAND_REQUESTS = 1000
_ENGINE_STEP = 2048
"""Step budget of a recorded engine whose options do not give it."""
_RECORDED = (
    *("max_model_len", "block_size", "max_num_seqs", "num_gpu_blocks_override", "disk_kv_gib"),
    *("enable_prefix_caching", "async_scheduling"),
)
"""Further scheduling options of a recorded engine that its simulation has."""
_NOT_SIMULATED = ("dtype", "quantization", "enforce_eager", "attention_backend", "kv_cache_memory_bytes", "csa")
_ENGINE_DTYPES: Mapping[str, tuple[str, ...]] = {
    **{dtype: ("--dtype", dtype) for dtype in ("float32", "bfloat16")},
    **{dtype: ("--quantization", dtype) for dtype in ("int8", "int4")},
}

Progress = Callable[[int, int], object]
"""Gets the numbers of finished simulations, and of all simulations that are known so far."""


def plan(
    model: str,
    *,
    hardware: str | Sequence[str] = (),
    gpus: int,
    workload: WorkloadSpec,
    level: ServiceLevel,
    attainment: float = 0.99,
    prices: Mapping[str, float] | None = None,
    devices: HardwareSpec = HardwareSpec(),
    gpus_per_host: int = 8,
    profiles: Sequence[Path | str] = (),
    current: str | None = None,
    fewer: bool = True,
    layouts: Sequence[str] = (),
    policies: Sequence[str] = (),
    step_budgets: Sequence[int | None] = (),
    host_kv_gib: Sequence[float] = (),
    seeds: int = _SEEDS,
    num_processes: int | None = None,
    progress: Progress = lambda _done, _total: None,
    stores: bool = True,
) -> Plan:
    """Search the hardware, layout and policy that serve a workload within a service level.

    Args:
        model: a name such as llama-3-8b, a folder with a config.json, or a hub id.
        hardware: names of devices. Empty with profiles.
        gpus: the maximum number of devices.
        workload: the requests. `num_requests` are simulated with each seed of the last candidates.
        attainment: the fraction of requests that must meet the level.
        prices: of one device and hour, by name. Without prices, fewer devices are better.
        profiles: profiles of a machine in place of hardware, one for each tp.
        current: the layout that serves the workload now, such as `4xtp2`. The policy is that of a recorded trace, or
            `auto`. If the trace has times, the answer has the errors of their simulation.
        fewer: also search layouts on fewer devices.
        layouts: only these, such as `4xtp2` or `2xtp4 prefill + tp8 decode`.
        policies, step_budgets, host_kv_gib: only these, in place of a selection for the workload.
        seeds: simulations of each candidate, with other requests or other parts of the trace.
        num_processes: all cores if None. With 1, simulations run in this process.
        stores: store simulations in the cache folder, and read those of an earlier run.

    Raises:
        ValueError: for invalid values, files that cannot be read, or if no candidate can run.
    """
    names = (hardware,) if isinstance(hardware, str) else tuple(hardware)
    at_least_one(gpus=gpus, gpus_per_host=gpus_per_host, seeds=seeds, num_processes=num_processes)
    measured = _measured(names, profiles)
    for name in names:
        read_device(name)
    names = names or tuple(dict.fromkeys(machine for machine, _ in measured.values()))
    setup = Setup(
        model=model,
        devices=devices,
        gpus_per_host=gpus_per_host,
        profiles=tuple((tp, path) for tp, (_, path) in measured.items()),
        workload=_finite(workload),
        level=level,
    )
    question = Question(
        model=model,
        hardware=names,
        num_gpus=gpus,
        workload=workload.workload,
        rate=base_rate(setup.workload),
        level=level,
        attainment=attainment,
        prices=dict(prices or {}),
        is_measured=bool(measured),
    )
    _check(question, setup.workload)
    demand = _demand(setup.workload, base_rate(setup.workload))
    tiers = (0.0, _HOST_KV_GIB) if demand.shares or setup.workload.offline else (0.0,)
    space = Space(
        hardware=names,
        max_gpus=gpus,
        fewer=fewer,
        max_tp=min(gpus_per_host, gpus),
        tensor_parallel=tuple(measured) or None,
        num_layers=_num_layers(setup, names[0]),
        layouts=tuple(layouts),
        policies=tuple(policies) or (OFFLINE_POLICIES if setup.workload.offline else POLICIES),
        step_budgets=tuple(step_budgets) or ((None,) if measured else STEP_BUDGETS),
        host_kv_gib=tuple(host_kv_gib) or tiers,
    )
    now = None if current is None else _current(setup, names[0], current)
    store = store_of(setup, names) if stores else None
    with Runner(setup, num_processes or limits.cores(), progress, store) as simulate:
        return _answer(question, setup, space, demand, now=now, simulate=simulate, seeds=seeds)


def _answer(
    question: Question,
    setup: Setup,
    space: Space,
    demand: Demand,
    *,
    now: Candidate | None,
    simulate: Runner,
    seeds: int,
) -> Plan:
    """Simulate and rank the candidates that estimates do not prune, and the layout `now`."""
    rate = base_rate(setup.workload)
    forecasts, pruned = _forecasts(setup, space, demand, question)
    num_requests = setup.workload.num_requests or _num_requests(setup.workload, demand, forecasts)
    search = Search(
        simulate=simulate,
        level=question.level,
        attainment=question.attainment,
        num_seeds=seeds,
        num_requests=num_requests,
        min_requests=_FILLS * _num_clients(setup.workload),
        costs={candidate: question.cost(candidate) for candidate in forecasts},
    )
    if now is not None:
        search.include(now, question.cost(now))
        if (problem := search.scored[now].problem) is not None:
            raise ParameterError("current", f"{now.layout} cannot run: {problem}", now.layout)
    search.run(forecasts)
    if now is not None:
        search.include(now, question.cost(now))  # a round may have replaced its long samples by short ones
    ranked, winner, baseline, notes = ranked_of(search.sorted(), question, partial(_command, setup))
    num_simulated, highest = simulate.num_requests, None
    if winner is not None and not winner.meets and math.isfinite(rate) and question.level.is_given:
        half = num_requests // 2
        highest = max_rate(
            simulate, winner.candidate, rate, num_requests=half, seeds=seeds, attainment=question.attainment
        )
    chosen = None if winner is None else winner.candidate
    row = next((one for one in ranked if one.candidate == now), None)
    return Plan(
        question=question,
        ranked=ranked,
        pruned=(*pruned, *search.unsimulated(forecasts)),
        winner=winner,
        baseline=baseline,
        error=errors_of(chosen, setup.devices.attention or "flash") if chosen and not question.is_measured else (),
        max_rate=highest,
        num_simulated_requests=num_simulated,
        notes=(
            *notes,
            *_warnings(setup, num_requests, chosen, now),
            *_engine_notes(setup),
            *([] if now is None else _recorded_notes(setup, now)),
        ),
        current=None if row is None or now is None else Current(ranked=row, times=_recorded_times(setup, now)),
    )


# ---------------------------------------------------------------- the question


def _measured(names: Sequence[str], profiles: Sequence[Path | str]) -> dict[int, tuple[str, str]]:
    """Return the machine and the file of each profile, by tp."""
    if bool(names) == bool(profiles):
        problem = "must be given, unless `profile` is" if not names else "and `profile` exclude each other"
        raise ParameterError("hardware", f"{problem}: give one of them", ", ".join(names) or None)
    found: dict[int, tuple[str, str]] = {}
    machines: dict[str, str] = {}
    for path in profiles:
        key = read_profile(Path(path)).profile_key
        same = (key.machine, key.device, key.dtype, f"{key.threads} threads", key.kernel, Path(key.model).name)
        machines[", ".join(same)] = str(path)
        if len(machines) > 1:
            problem = " but ".join(f"{path} is of {machine}" for machine, path in machines.items())
            raise ParameterError("profile", f"{problem}: give profiles that differ in tp only", path)
        if key.tp in found:
            raise ParameterError(
                "profile", f"{path} has tp {key.tp}, as {found[key.tp][1]} has: give one of them", path
            )
        found[key.tp] = key.machine, str(path)
    return found


def _finite(workload: WorkloadSpec) -> WorkloadSpec:
    """Return the workload with `offline` in place of an infinite rate."""
    if workload.rate is not None and math.isinf(workload.rate):
        return replace(workload, rate=None, offline=True)
    return workload


def _check(question: Question, workload: WorkloadSpec) -> None:
    """Raise ParameterError for a question that has no answer."""
    if not 0 < question.attainment <= 1:
        problem = f"must be above 0 and at most 1, but {question.attainment:g} given"
        raise ParameterError("attainment", problem, question.attainment)
    if not question.level.is_given and not workload.offline:
        problem = "or `slo_tbt` must be given: without a bound, the smallest cluster is enough for any rate"
        raise ParameterError("slo_ttft", problem)
    for name, price in question.prices.items():
        if not (price > 0 and math.isfinite(price)):
            raise ParameterError("prices", f"of {name} must be above 0 and finite, but {price} given", price)
    for name in question.hardware if question.prices else ():
        if name not in question.prices:
            known = ", ".join(question.prices)
            raise ParameterError("prices", f"has no {name}, only {known}: add it", name)


def _demand(spec: WorkloadSpec, rate: float) -> Demand:
    drawn = is_drawn(spec)
    requests = sample_of(spec, 0, _DEMAND_REQUESTS, rate) if drawn else whole(spec)
    return demand_of(requests, rate)


def _num_requests(spec: WorkloadSpec, demand: Demand, forecasts: Mapping[Candidate, Forecast]) -> int:
    """Return the requests of a seed: enough to fill the instances several times, and at most the trace.

    Closed loops have several requests of each client, and repeat a shorter trace.
    """
    in_flight = float(least := _num_clients(spec))
    if math.isfinite(demand.rate):
        best = min(forecasts.values(), key=lambda forecast: forecast.tightness)
        seconds = min(best.ttft_s, max(best.least_ttfts_s, default=0.0)) + demand.mean_output * best.tbt_s
        in_flight = demand.rate * seconds
    num = min(_MAX_REQUESTS, max(_NUM_REQUESTS, math.ceil(_FILLS * in_flight)))
    num = num if is_drawn(spec) else min(num, len(whole(spec).arrivals))
    return max(num, _FILLS * least)


def _num_clients(spec: WorkloadSpec) -> int:
    """Return the requests that the clients of a closed loop make until all have ended one conversation. Else 0."""
    return (spec.concurrency or spec.batch_size or 0) * spec.turns


def _warnings(setup: Setup, num_requests: int, *chosen: Candidate | None) -> Iterator[str]:
    """Yield limits of a plan: samples that are not independent, and shards of an instance on several hosts."""
    if not is_drawn(setup.workload) and (num := len(whole(setup.workload).arrivals)) <= num_requests:
        yield (
            f"The trace has {num:,} requests, so every sample of {num_requests:,} has all of them. Seeds differ in the "
            "first request only, and intervals are narrower than for other traffic"
        )
    for candidate in dict.fromkeys(filter(None, chosen)):
        tp = max(spec.tp for spec in (candidate.spec, candidate.decode or candidate.spec))
        if tp > setup.gpus_per_host and not setup.profiles:
            yield f"{candidate} has its tp({tp}) on several hosts of {setup.gpus_per_host}, so it is slow"


# ---------------------------------------------------------------- the recorded layout


def _current(setup: Setup, hardware: str, layout: str) -> Candidate:
    """Return the candidate of a layout, with the settings that a recording has."""
    try:
        cluster = parse_fleet(layout)
    except ParameterError as error:
        raise ParameterError("current", error.problem, layout) from None
    header = next(iter(_headers(setup)), None)
    options = {} if header is None else {"max_num_batched_tokens": _ENGINE_STEP, **header["options"]}
    applied = {name: options[name] for name in ("max_num_batched_tokens", "host_kv_gib", *_RECORDED) if name in options}
    try:
        EngineArgs(**applied)
    except (TypeError, ValueError) as error:
        raise ParameterError(
            "workload", f"{setup.workload.workload} has a header with an invalid option ({error}): remove it"
        ) from None
    policy = "auto" if cluster.decode_spec is None else "tetris"
    policy_options = {} if header is None else header["policy_options"]
    return Candidate(
        hardware=hardware,
        spec=cluster.spec,
        decode=cluster.decode_spec,
        policy=policy if header is None else header["policy"],
        policy_options=tuple(sorted((name, str(value)) for name, value in policy_options.items())),
        max_num_batched_tokens=applied.pop("max_num_batched_tokens", None),
        host_kv_gib=float(applied.pop("host_kv_gib", 0.0)),
        scheduling=tuple(sorted((name, value) for name, value in applied.items() if value is not None)),
    )


def _headers(setup: Setup) -> list[Mapping[str, Any]]:
    """Return the headers of a recording, or nothing."""
    trace = Path(setup.workload.workload)
    return list(recorded_layouts(trace)) if trace.is_file() and not is_drawn(setup.workload) else []


def _recorded_notes(setup: Setup, now: Candidate) -> list[str]:
    """Return differences between the engine of a recording and the simulation of the current layout."""
    headers = _headers(setup)
    if not headers:
        return []
    first, devices = headers[0], setup.devices
    dtype = read_profile(Path(setup.profiles[0][1])).profile_key.dtype if setup.profiles else devices.dtype
    simulated = {"dtype": dtype, "quantization": dtype, "enforce_eager": devices.launch == "eager"}
    pairs = [
        ("model", _folder(str(first.get("model"))), _folder(setup.model)),
        ("layout", first["parallel"], now.layout),
        *(
            (name, first["options"].get(name), simulated.get(name))
            for name in _NOT_SIMULATED
            if name in first["options"]
        ),
    ]
    notes = [
        f"The recorded engine had {name} {recorded}, but the simulation has {'another' if other is None else other}"
        for name, recorded, other in pairs
        if recorded != other
    ]
    changes = sum({**one, "start_s": 0} != {**other, "start_s": 0} for one, other in pairwise(headers))
    return notes + [f"The recorded engine changed {changes} times, but the simulation has its first layout"] * (
        changes > 0
    )


def _recorded_times(setup: Setup, candidate: Candidate) -> tuple[RecordedTime, ...]:
    """Simulate a trace at its own times, and compare with its recorded times. Empty if there are none."""
    if is_drawn(setup.workload):
        return ()
    requests = read_trace(Path(setup.workload.workload), num=setup.workload.num_requests)
    if not any(request.ttft_s or request.tpot_s for request in requests):
        return ()
    own = make_workload(WorkloadSpec(workload=setup.workload.workload, num_requests=setup.workload.num_requests))
    ttfts_s, tpots_s = [one.ttft_s for one in requests], [one.tpot_s for one in requests]
    return recorded_times(experiment_of(setup, candidate).run(own), ttfts_s, tpots_s)


# ---------------------------------------------------------------- estimates


def _forecasts(
    setup: Setup, space: Space, demand: Demand, question: Question
) -> tuple[Mapping[Candidate, Forecast], tuple[Pruned, ...]]:
    """Return the forecasts of candidates, and the pruned ones. Profiles give no forecasts, so nothing is pruned.

    Raises:
        ParameterError: if no candidate can run.
    """
    every = list(candidates(space))
    if setup.profiles and every:
        return dict.fromkeys(every, Forecast.unknown()), ()

    @cache
    def line(hardware: str, tp: int, pp: int) -> Roofline | str:
        candidate = Candidate(hardware=hardware, spec=ParallelSpec(tp=tp, pp=pp))
        try:
            cost = experiment_of(setup, candidate, num_gpu_blocks_override=1).cost
        except ValueError as error:
            return str(error)
        assert isinstance(cost, RooflineCost), "there is no noise"
        return cost.lines[0]

    estimator = Estimator(line, demand, setup.level)
    kept = prune(every, estimator, question.attainment)
    if not kept.forecasts:
        reason = kept.pruned[-1].reason if kept.pruned else "no layout takes so few"
        problem = f"({question.num_gpus}) are too few of {', '.join(question.hardware)} for this model: {reason}"
        raise ParameterError("gpus", problem, question.num_gpus)
    return kept.forecasts, kept.pruned


def _num_layers(setup: Setup, hardware: str) -> int:
    tp = setup.profiles[0][0] if setup.profiles else 1
    candidate = Candidate(hardware=hardware, spec=ParallelSpec(tp=tp))
    shape = experiment_of(setup, candidate, num_gpu_blocks_override=1).facts.shape
    assert shape is not None, "a simulation has the model's shape"
    return shape.num_layers


# ---------------------------------------------------------------- the command


def _command(setup: Setup, candidate: Candidate) -> str:
    """Return the command line that serves a model as the candidate does, with the options that the engine has."""
    path, devices = Path(setup.model).expanduser(), setup.devices
    words = ["longspan", "serve", str(path.parent) if path.is_file() else setup.model, *candidate.flags]
    if setup.profiles:
        key = read_profile(Path(dict(setup.profiles)[candidate.spec.tp])).profile_key
        words += ["--device", key.device, "--threads-per-rank", str(key.threads), "--dtype", key.dtype]
    else:
        words += [] if candidate.hardware.startswith("cpu") else ["--device", "cuda"]
        words += ["--executor", "ray"] if candidate.num_gpus > setup.gpus_per_host else []
        words += _ENGINE_DTYPES.get(devices.dtype, ())
        words += ["--enforce-eager"] if (devices.launch or devices.attention) == "eager" else []
    return shlex.join(words)


def _engine_notes(setup: Setup) -> list[str]:
    """Return why longspan's own engine does not serve the model as it is simulated."""
    notes = []
    if setup.model in catalog.names("models") and setup.model != EngineArgs.model:
        notes.append(f"{setup.model} has sizes only: put a folder or a hub id in its place in the command")
    if setup.profiles:
        return notes
    devices, sizes = setup.devices, read_architecture(setup.model, setup.devices)
    given = _ENGINE_DTYPES.get(devices.dtype) is not None
    plain = {sizes.precision.weights, sizes.precision.ffn} <= {"float32", "bfloat16"}
    problems = {
        f"weights in {sizes.precision} (quantised checkpoints are expanded to 16 bits at load)": not plain
        and not given,
        f"--ffn-dtype {devices.ffn_dtype}": devices.ffn_dtype not in (None, devices.dtype),
        f"--kv-cache-dtype {devices.kv_cache_dtype}": devices.kv_cache_dtype == "fp8",
        "--expert-parallel": devices.expert_parallel,
        "--attention eager": devices.attention == "eager",
        "multi-head latent attention": sizes.attention.latent is not None,
    }
    reasons = ", ".join(problem for problem, is_so in problems.items() if is_so)
    return notes + [f"The command does not run as simulated: longspan's engine does not have {reasons}"] * bool(reasons)


def _folder(model: str) -> str:
    """Return the last name of a model's folder or hub id."""
    path = Path(model).expanduser()
    return (path.parent if path.is_file() else path).name.lower()
