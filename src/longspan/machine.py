"""The choice of a layout on this machine for offline work, with `longspan.planner`'s candidates.

The decisions are functions of plain data. A candidate is simulated like an engine with its options, with the same
pools, policy and profile of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import torch

from longspan import limits
from longspan.args import AUTO, EngineArgs
from longspan.core.splits import ParallelSpec
from longspan.cost.profile import Profile
from longspan.errors import ParameterError
from longspan.planner.candidates import Candidate, offline_candidates, specs_of
from longspan.profiling.store import load_profile
from longspan.resolve import EngineModel, ResolvedEngine
from longspan.sim.executor import StepTiming
from longspan.sim.run import Observers, simulate
from longspan.text.input_processor import EngineRequest
from longspan.workload.arrivals import Arrival

DEFAULT_OUTPUT_TOKENS = 256
"""Assumed output length of requests without `max_tokens`."""
_POLICIES = ("auto", "chunked", "seesaw")


def options_of(candidate: Candidate, given: EngineArgs) -> EngineArgs:
    """Return the options of an engine with the layout and policy of a candidate."""
    prefill, decode = str(candidate.spec), str(candidate.decode)
    if candidate.decode is None:
        return replace(given, policy=candidate.policy, parallel=prefill)
    return replace(given, policy=candidate.policy, parallel=None, prefill_parallel=prefill, decode_parallel=decode)


def name_of(candidate: Candidate) -> str:
    """Return the layout, as `2xtp2` or `seesaw pp2 to tp2`."""
    return str(candidate.spec) if candidate.decode is None else f"seesaw {candidate.spec} to {candidate.decode}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The simulated run of a candidate.

    Attributes:
        requests_per_s: 0 if no request was served.
        num_refused: number of requests that do not fit.
        prefill_share: time of steps with prompt tokens divided by the time of all steps.
        problem: the error if the candidate cannot run.
    """

    candidate: Candidate
    requests_per_s: float = 0.0
    num_refused: int = 0
    num_transitions: int = 0
    prefill_share: float = 0.0
    problem: str | None = None


# ---------------------------------------------------------------- decisions


def best(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the first outcome with the fewest refused requests and then the highest rate.

    Raises:
        ParameterError: no candidate can run. The message has the problem of the first.
    """
    ran = [outcome for outcome in outcomes if outcome.problem is None]
    if not ran:
        reason = f": {name_of(outcomes[0].candidate)} cannot run: {outcomes[0].problem}" if outcomes else ""
        raise ParameterError("parallel", f"{AUTO} finds no candidate that can run{reason}", AUTO)
    return max(ran, key=lambda outcome: (-outcome.num_refused, outcome.requests_per_s))


def explanation(outcome: Outcome) -> str:
    """Describe the time of a run in a few words, or its problem."""
    if outcome.problem is not None:
        return f"not simulated: {outcome.problem}"
    words = [f"{outcome.prefill_share:.0%} of step time is prefill"]
    if outcome.candidate.decode is not None:
        words.append(f"{outcome.num_transitions} transitions")
    if outcome.num_refused:
        words.append(f"{outcome.num_refused} requests do not fit")
    return ", ".join(words)


def check_options(given: EngineArgs) -> None:
    """Raise ParameterError for options that exclude a search or every candidate."""
    if given.executor != "local":
        problem = f"is {given.executor}, but parallel {AUTO} searches for one machine: give a spec"
        raise ParameterError("executor", problem, given.executor)
    if given.policy not in _POLICIES:
        problem = f"{given.policy} is not simulated for parallel {AUTO}: choose {', '.join(_POLICIES)}, or give a spec"
        raise ParameterError("policy", problem, given.policy)
    if given.policy == "seesaw" and not given.host_kv_gib:
        problem = "must be above 0 for policy seesaw, which keeps KV on hosts while clusters change: give some"
        raise ParameterError("host_kv_gib", problem, given.host_kv_gib)
    replace(given, parallel="1", policy="chunked").resolve()  # raises for other options of the spec


# ---------------------------------------------------------------- this machine


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The basis of candidates: a model, the number of ranks, and the profiles of their instances.

    Attributes:
        given: the options, with the number of threads.
        profiles: at least one profile, by tp.
        unmeasured: the command that measures a profile, for each tp without one.
    """

    given: EngineArgs
    model: EngineModel
    num_ranks: int
    profiles: dict[int, Profile]
    unmeasured: dict[int, str]

    @classmethod
    def of(cls, given: EngineArgs) -> Machine:
        """Count ranks, load the model and read its profiles. Raise ValueError if that fails, or none exists."""
        check_options(given)
        num_cores = limits.cores()
        if given.device == "cuda":
            num_ranks = max(1, torch.cuda.device_count())
            threads = given.threads_per_rank or max(1, num_cores // num_ranks)
        else:
            threads = given.threads_per_rank or 1
            num_ranks = max(1, num_cores // threads)
        given = replace(given, threads_per_rank=threads)
        model = EngineModel.of(given)
        degrees = {spec.tp for spec in specs_of(num_ranks, model.info.num_layers)}
        keys = {tp: model.profile_key(given.device, tp=tp, threads=threads) for tp in sorted(degrees)}
        loaded = {tp: load_profile(key) for tp, key in keys.items()}
        commands = {tp: _command(given, tp, num_ranks) for tp, profile in loaded.items() if profile is None}
        profiles = {tp: profile for tp, profile in loaded.items() if profile is not None}
        if not profiles:
            problem = f"{AUTO} needs a profile of this model with {threads} threads per rank, but there is none"
            raise ParameterError("parallel", f"{problem}: run {' and '.join(commands.values())}", AUTO)
        return cls(given=given, model=model, num_ranks=num_ranks, profiles=profiles, unmeasured=commands)

    @property
    def candidates(self) -> list[Candidate]:
        """The candidates with a profile."""
        given = self.given
        specs = [spec for spec in specs_of(self.num_ranks, self.model.info.num_layers) if spec.tp in self.profiles]
        return offline_candidates(specs, hardware=given.device, policy=given.policy, with_pairs=bool(given.host_kv_gib))

    def outcome(self, candidate: Candidate, requests: Sequence[Arrival]) -> Outcome:
        """Simulate a candidate with requests that all arrive at once."""
        try:
            setup, steps = ResolvedEngine.of(options_of(candidate, self.given), self.model), list[StepTiming]()
            cost = setup.step_cost()
            assert cost is not None, "candidates have profiles"
            result = simulate(requests, setup.config, setup.policy, cost, watch=Observers(ran=steps.append))
        except ValueError as error:
            return Outcome(candidate=candidate, problem=str(error))
        return Outcome(
            candidate=candidate,
            requests_per_s=len(result.served) / result.makespan_s if result.makespan_s else 0.0,
            num_refused=len(result.refused),
            num_transitions=len(result.transitions),
            prefill_share=prefill_share(steps),
        )


def prefill_share(steps: Sequence[StepTiming]) -> float:
    """Return the time of steps with prompt tokens divided by the time of all steps, 0 without steps."""
    times_s = [sum(end_s - begin_s for begin_s, end_s in step.stages.values()) for step in steps]
    is_prefill = [any(part.stop - part.start > 1 for part in step.forward.parts) for step in steps]
    return sum(compress(times_s, is_prefill)) / (sum(times_s) or 1.0)


def arrivals_of(requests: Sequence[EngineRequest], max_model_len: int) -> list[Arrival]:
    """Return the arrivals of requests in the simulator, one for each choice."""
    arrivals = []
    for request in requests:
        max_tokens = request.params.max_tokens or DEFAULT_OUTPUT_TOKENS
        output_len = max(1, min(max_tokens, max_model_len - len(request.token_ids)))
        arrival = Arrival(due_s=0.0, prompt=request.token_ids, output_len=output_len, cache_salt=request.cache_salt)
        arrivals += [arrival] * request.params.n
    return arrivals


def sample_indices(number: int, max_samples: int) -> range | list[int]:
    """Return at most `max_samples` indices below `number`, evenly spaced."""
    return range(number) if number <= max_samples else [i * number // max_samples for i in range(max_samples)]


def _command(given: EngineArgs, tp: int, num_ranks: int) -> str:
    """Return the command that measures instances with `tp` on all ranks."""
    spec = ParallelSpec(instances=num_ranks // tp, tp=tp)
    words = ["longspan profile", given.model, f"--parallel {spec}", f"--threads-per-rank {given.threads_per_rank}"]
    fields = ("dtype", "device", "attention_backend", "quantization", "load_format")
    chosen = (field for field in fields if getattr(given, field) != getattr(EngineArgs, field))
    return " ".join([*words, *(f"--{field.replace('_', '-')} {getattr(given, field)}" for field in chosen)])
