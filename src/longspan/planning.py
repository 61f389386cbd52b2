"""The choice of a parallel spec, or of a pair for Seesaw, for offline work: each candidate serves it in the simulator.

Which candidates there are, and which is taken, follows from plain data. A candidate is simulated as an engine with
these options would be: its pools, its policy, and the profile of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import torch

from longspan import limits
from longspan.args import AUTO, EngineArgs
from longspan.core.cluster import ParallelSpec
from longspan.cost.profile import Profile
from longspan.errors import ParameterError
from longspan.profiling.store import load_profile
from longspan.resolve import EngineModel, ResolvedEngine
from longspan.sim.executor import StepTiming
from longspan.sim.run import Observers, Result, simulate
from longspan.text.input_processor import EngineRequest
from longspan.workload.arrivals import Arrival

DEFAULT_OUTPUT_TOKENS = 256
"""The output length of requests that name none."""
_POLICIES = ("auto", "chunked", "seesaw")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A parallel spec for a whole run; or that of its prefills, and by turns with it that of its decodes."""

    spec: ParallelSpec
    decode: ParallelSpec | None = None

    def options(self, given: EngineArgs) -> EngineArgs:
        """Return options of an engine that runs so."""
        if self.decode is None:
            return replace(given, policy="chunked", parallel=str(self.spec))
        prefill, decode = str(self.spec), str(self.decode)
        return replace(given, policy="seesaw", parallel=None, prefill_parallel=prefill, decode_parallel=decode)

    def __str__(self) -> str:
        return str(self.spec) if self.decode is None else f"seesaw {self.spec} to {self.decode}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The simulated run of a candidate.

    Attributes:
        requests_per_s: 0 when no request was served.
        num_refused: requests that have no room.
        prefill_share: the part of the time of all steps that those with tokens of prompts take.
        problem: why there was no run, if there was none.
    """

    candidate: Candidate
    requests_per_s: float = 0.0
    num_refused: int = 0
    num_transitions: int = 0
    prefill_share: float = 0.0
    problem: str | None = None


# ---------------------------------------------------------------- decisions


def specs_of(num_ranks: int, num_layers: int) -> list[ParallelSpec]:
    """Return all specs that take so many ranks, with at least one layer in each stage; most instances first."""
    degrees = [degree for degree in range(1, num_ranks + 1) if num_ranks % degree == 0]
    return [
        ParallelSpec(instances=num_ranks // (tp * pp), tp=tp, pp=pp)
        for size in degrees
        for tp in degrees
        for pp in degrees
        if tp * pp == size and pp <= num_layers
    ]


def candidates(specs: Sequence[ParallelSpec], *, policy: str, with_pairs: bool) -> list[Candidate]:
    """Return what a policy can run of some specs: `chunked` each, `seesaw` pairs with as many instances, auto both."""
    single = [Candidate(spec=spec) for spec in specs] if policy != "seesaw" else []
    pairs = [
        Candidate(spec=prefill, decode=decode)
        for prefill, decode in permutations(specs, 2)
        if prefill.instances == decode.instances
    ]
    return single + (pairs if with_pairs and policy != "chunked" else [])


def best(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the quickest of those that refuse the fewest requests; the first of equals.

    Raises:
        ParameterError: when none could run, with the reason of the first.
    """
    ran = [one for one in outcomes if one.problem is None]
    if not ran:
        reason = f": {outcomes[0].candidate} cannot run: {outcomes[0].problem}" if outcomes else ""
        raise ParameterError("parallel", f"{AUTO} finds nothing that can run{reason}", AUTO)
    return max(ran, key=lambda one: (-one.num_refused, one.requests_per_s))


def explanation(outcome: Outcome) -> str:
    """Say in a few words where the time of a run goes, or why there was none."""
    if outcome.problem is not None:
        return f"not simulated: {outcome.problem}"
    words = [f"{outcome.prefill_share:.0%} of step time is prefill"]
    if outcome.candidate.decode is not None:
        words.append(f"{outcome.num_transitions} transitions")
    if outcome.num_refused:
        words.append(f"{outcome.num_refused} requests have no room")
    return ", ".join(words)


def check_options(given: EngineArgs) -> None:
    """Raise ParameterError for options that leave nothing to choose, or that no candidate can have."""
    if given.policy not in _POLICIES:
        problem = f"{given.policy} is not simulated for parallel {AUTO}: choose {', '.join(_POLICIES)}, or give a spec"
        raise ParameterError("policy", problem, given.policy)
    if given.policy == "seesaw" and not given.host_kv_gib:
        problem = "is where KV lies while clusters change, which policy seesaw has them do: give some"
        raise ParameterError("host_kv_gib", problem, given.host_kv_gib)
    replace(given, parallel="1", policy="chunked").resolve()  # another spelling of the spec is refused there


# ---------------------------------------------------------------- this machine


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Candidates are made of this: a model, the ranks that there are, and the profiles of their instances.

    Attributes:
        given: the options, with the number of threads.
        profiles: by tp; at least one.
        unmeasured: for each tp without a profile, the command that measures it.
    """

    given: EngineArgs
    model: EngineModel
    num_ranks: int
    profiles: dict[int, Profile]
    unmeasured: dict[int, str]

    @classmethod
    def of(cls, given: EngineArgs) -> Machine:
        """Count ranks, finds the model and read profiles.

        Raises:
            ValueError: for wrong options, an unknown model, or when there is no profile of it.
        """
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
        found = {tp: load_profile(key) for tp, key in keys.items()}
        commands = {tp: _command(given, tp, num_ranks) for tp, profile in found.items() if profile is None}
        profiles = {tp: profile for tp, profile in found.items() if profile is not None}
        if not profiles:
            problem = (
                f"{AUTO} goes by a profile of this model with {threads} threads per rank, but there is none: run "
                f"{' and '.join(commands.values())}"
            )
            raise ParameterError("parallel", problem, AUTO)
        return cls(given=given, model=model, num_ranks=num_ranks, profiles=profiles, unmeasured=commands)

    @property
    def candidates(self) -> list[Candidate]:
        """The candidates that were measured."""
        given = self.given
        specs = [one for one in specs_of(self.num_ranks, self.model.info.num_layers) if one.tp in self.profiles]
        return candidates(specs, policy=given.policy, with_pairs=bool(given.host_kv_gib))

    def outcome(self, candidate: Candidate, requests: Sequence[Arrival]) -> Outcome:
        """Simulate a candidate with requests that are all there at once."""
        try:
            setup = ResolvedEngine.of(candidate.options(self.given), self.model)
            watch = _Watch()
            result = self._simulated(setup, requests, watch)
        except ValueError as error:
            return Outcome(candidate=candidate, problem=str(error))
        return Outcome(
            candidate=candidate,
            requests_per_s=len(result.served) / result.makespan_s if result.makespan_s else 0.0,
            num_refused=len(result.refused),
            num_transitions=len(result.transitions),
            prefill_share=watch.prefill_s / watch.all_s if watch.all_s else 0.0,
        )

    @staticmethod
    def _simulated(setup: ResolvedEngine, requests: Sequence[Arrival], watch: _Watch) -> Result:
        cost = setup.step_cost()
        assert cost is not None, "candidates have profiles"
        observers = Observers(ran=watch.ran)
        return simulate(requests, setup.config, setup.policy, cost, watch=observers)


class _Watch:
    """Sums over a simulated run."""

    def __init__(self) -> None:
        self.prefill_s = self.all_s = 0.0

    def ran(self, step: StepTiming) -> None:
        seconds = sum(end_s - begin_s for begin_s, end_s in step.stages.values())
        self.all_s += seconds
        if any(part.stop - part.start > 1 for part in step.forward.parts):
            self.prefill_s += seconds


def arrivals_of(requests: Sequence[EngineRequest], max_model_len: int) -> list[Arrival]:
    """Return the requests for the simulator, one for each of their choices."""
    found = []
    for one in requests:
        wanted = one.params.max_tokens or DEFAULT_OUTPUT_TOKENS
        output_len = max(1, min(wanted, max_model_len - len(one.token_ids)))
        arrival = Arrival(due_s=0.0, prompt=one.token_ids, output_len=output_len, cache_salt=one.cache_salt)
        found += [arrival] * one.params.n
    return found


def drawn(number: int, most: int) -> range | list[int]:
    """Return the indices of at most `most` of a number of things, evenly apart."""
    return range(number) if number <= most else [index * number // most for index in range(most)]


def _command(given: EngineArgs, tp: int, num_ranks: int) -> str:
    """Return the command that measures instances of a tp, as many as there are ranks for."""
    spec = ParallelSpec(instances=num_ranks // tp, tp=tp)
    words = ["longspan profile", given.model, f"--parallel {spec}", f"--threads-per-rank {given.threads_per_rank}"]
    default = EngineArgs()
    flags = ("dtype", "device", "attention_backend", "quantization", "load_format")
    chosen = {flag: getattr(given, flag) for flag in flags}
    words += [f"--{flag.replace('_', '-')} {one}" for flag, one in chosen.items() if one != getattr(default, flag)]
    return " ".join(words)
