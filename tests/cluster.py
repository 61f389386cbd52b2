"""An engine over a simulated cluster, whose executor checks every step against a model of the KV slots."""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from longspan.core.engine import Engine, EngineConfig
from longspan.core.protocols import Limits
from longspan.core.request import Request
from longspan.core.rotation import Rotation
from longspan.core.sampling import SamplingParams
from longspan.core.steps import UNKNOWN, BlockRef, Completion, Forward, Free, Part, Step
from longspan.policy import make_policy
from longspan.policy.choosing import Facts
from longspan.runtime.requests import RankRequests
from longspan.sim.clock import VirtualClock
from longspan.sim.executor import LinearCost, SimExecutor

VOCAB = 64


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A cluster; what is left out is plenty."""

    num_instances: int = 1
    num_blocks: int = 256
    block_size: int = 16
    policy: str = "auto"
    options: Mapping[str, str] = field(default_factory=dict)
    max_model_len: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 128
    eos_token_ids: tuple[int, ...] = ()
    rope_switch_length: int | None = None
    prefix_caching: bool = True
    max_steps_in_flight: int = 2
    uneven: int = 0
    facts: Facts = field(default_factory=Facts)

    def lag_s(self, instance: int, step: int) -> float:
        """Instances end their steps at different times unless `uneven` is 0."""
        return zlib.crc32(f"{self.uneven} {instance} {step}".encode()) % 64 / 100 if self.uneven else 0.0


@dataclass(frozen=True)
class UnevenCost:
    """A linear cost, after which each instance lags by its own time."""

    setup: Setup

    def seconds(self, forward: Forward) -> dict[int, float]:
        """See `StepCost`."""
        even = LinearCost().seconds(forward)
        return {instance: time + self.setup.lag_s(instance, forward.number) for instance, time in even.items()}


@dataclass(kw_only=True)
class Slots:
    """Where the tokens of a request lie, told by counting them one by one.

    Attributes:
        of: block and offset of each token up to the end of its latest part.
        held: tokens of each instance.
    """

    size: int
    of: list[tuple[BlockRef, int]] = field(default_factory=list)
    held: Counter[int] = field(default_factory=Counter)

    def follow(self, part: Part, table: Sequence[BlockRef]) -> None:
        """Counts the tokens that are new since the part before."""
        rotates_from = part.stop if part.rotation is None else part.rotation.start
        for position in range(len(self.of), part.stop):
            if position < rotates_from:
                ref, offset = table[position // self.size], position % self.size
            else:
                home = min(part.group, key=lambda instance: self.held[instance])  # of equals the first
                own = [ref for ref in table if ref.instance == home]
                ref, offset = own[self.held[home] // self.size], self.held[home] % self.size
            self.of.append((ref, offset))
            self.held[ref.instance] += 1


def rank_requests() -> RankRequests:
    """What a rank without a device remembers."""
    return RankRequests(vocab_size=VOCAB, device=torch.device("cpu"))


def invented_token(request: Request, position: int, eos: tuple[int, ...]) -> int:
    """What `SimExecutor` samples."""
    token = zlib.crc32(f"{request.id} {position}".encode()) % VOCAB
    banned = (*eos, *request.params.stop_ids)
    while position - len(request.prompt) < request.params.min_tokens and token in banned:
        token = (token + 1) % VOCAB
    return token


class Cluster:
    """An engine whose every step is checked. Tokens are invented by the `SimExecutor`."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.clock = VirtualClock()
        policy = make_policy(setup.policy, num_instances=setup.num_instances, options=setup.options, facts=setup.facts)
        capacity = policy.capacity_tokens(num_blocks=setup.num_blocks, block_size=setup.block_size)
        self.executor = CheckedExecutor(SimExecutor(clock=self.clock, vocab_size=VOCAB, cost=UnevenCost(setup)), setup)
        self.engine = Engine(
            policy=policy,
            executor=self.executor,
            clock=self.clock,
            config=EngineConfig(
                num_instances=setup.num_instances,
                num_blocks=setup.num_blocks,
                block_size=setup.block_size,
                max_model_len=setup.max_model_len or capacity,
                eos_token_ids=setup.eos_token_ids,
                rope_switch_length=setup.rope_switch_length,
                limits=Limits(max_num_batched_tokens=setup.max_num_batched_tokens, max_num_seqs=setup.max_num_seqs),
                prefix_caching=setup.prefix_caching,
                max_steps_in_flight=setup.max_steps_in_flight,
            ),
        )

    @property
    def forwards(self) -> list[Forward]:
        """Emitted so far."""
        return [step for step in self.executor.steps if isinstance(step, Forward)]

    @property
    def requests(self) -> list[Request]:
        """All that were ever added."""
        return list(self.executor.requests.values())

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None, **wishes: int | bool) -> Request:
        """Queues a request; `wishes` are sampling parameters."""
        request = self.engine.add(tuple(prompt), params or SamplingParams(**wishes))  # type: ignore[arg-type]
        self.executor.requests[request.id] = request
        return request

    def follow(self, leader: Request, choice: int) -> Request:
        """Queues another choice of a request."""
        request = self.engine.add(leader.prompt, leader.params, choice=choice, leader=leader)
        self.executor.requests[request.id] = request
        return request

    def step(self, timeout_s: float | None = None) -> list[Request]:
        """One turn of the engine's loop."""
        return self.engine.step(timeout_s)

    def run(self, max_steps: int = 20_000) -> None:
        """Until all requests are finished."""
        for _ in range(max_steps):
            if not self.engine.has_unfinished:
                self.assert_at_rest()
                return
            self.step()
        raise AssertionError(f"not finished after {max_steps} steps")

    def parts_of(self, request: Request) -> list[Part]:
        """A request's share of every step, in order."""
        return [part for forward in self.forwards for part in forward.parts if part.request_id == request.id]

    def assert_at_rest(self) -> None:
        """Nothing runs and every block is free."""
        assert not self.engine.has_unfinished
        assert not self.executor.in_flight
        assert not self.executor.live
        for instance in range(self.setup.num_instances):
            pool = self.engine.account.pool(instance)
            assert pool.num_free == pool.num_blocks == self.setup.num_blocks
            assert not any(pool.references(block) for block in range(pool.num_blocks))

    def expected_output(self, request: Request) -> list[int]:
        """What the request must put out if nobody aborts it, whatever the other requests do."""
        params, eos = request.params, self.setup.eos_token_ids
        room = self.engine.config.max_model_len - len(request.prompt)
        output: list[int] = []
        while len(output) < min(params.max_tokens or room, room):
            token = invented_token(request, len(request.prompt) + len(output), eos)
            output.append(token)
            if (token in eos and not params.ignore_eos) or token in params.stop_ids:
                break
        return output


class CheckedExecutor:
    """Passes steps on to a `SimExecutor` after checking every law that ranks rely on.

    It keeps what each KV slot holds - a name of all tokens up to there, and of the rotary length - as ranks would.
    """

    def __init__(self, inner: SimExecutor, setup: Setup) -> None:
        self._inner, self._setup = inner, setup
        self.steps: list[Step] = []
        self.requests: dict[int, Request] = {}
        self.in_flight: dict[int, Forward] = {}
        self.live: dict[int, _Live] = {}
        self._ranks = [rank_requests() for _ in range(setup.num_instances)]
        self._slots: dict[BlockRef, list[int]] = defaultdict(lambda: [0] * setup.block_size)
        self._owners: dict[BlockRef, set[int]] = defaultdict(set)

    def submit(self, step: Step) -> None:
        """Checks a step and passes it on."""
        assert not self.steps or step.number > self.steps[-1].number, "steps are numbered in order"
        self.steps.append(step)
        if isinstance(step, Free):
            self._free(step)
        else:
            self._forward(step)
        self._inner.submit(step)

    def poll(self, timeout_s: float | None) -> list[Completion]:
        """The simulation's completions."""
        completions = self._inner.poll(timeout_s)
        for completion in completions:
            del self.in_flight[completion.number]
        return completions

    def _free(self, step: Free) -> None:
        for request_id in step.request_ids:
            named = {part.request_id for forward in self.in_flight.values() for part in forward.parts}
            assert request_id not in named, "freed while a step in flight names it"
            for ref in self.live.pop(request_id).table:
                self._owners[ref].remove(request_id)
        for rank in self._ranks:
            rank.forget(step.request_ids)

    def _forward(self, forward: Forward) -> None:
        busy = Counter(instance for other in self.in_flight.values() for instance in other.instances)
        most = self._setup.max_steps_in_flight - 1
        assert all(busy[i] <= most for i in forward.instances), "few steps are in flight on an instance"
        assert forward.parts
        assert len({part.request_id for part in forward.parts}) == len(forward.parts)
        for part in forward.parts:
            self._begin(part)
        for part in forward.parts:
            self._check_span(part)
            self._check_blocks(part)
        for part in forward.parts:
            self._write(part)
        self._check_limits(forward)
        self.in_flight[forward.number] = forward

    def _begin(self, part: Part) -> None:
        """Tables first: a block may be named by two requests only if neither writes it."""
        tables = [self._ranks[instance].apply(part).table for instance in part.group]
        assert all(table == tables[0] for table in tables)
        fresh = _Live(group=part.group, next_start=part.start, slots=Slots(size=self._setup.block_size))
        live = self.live.setdefault(part.request_id, fresh)
        if not set(part.group) <= set(live.group):
            assert live.rotation is None, "a group does not grow while homes rotate in it"
            assert part.first_block == 0 and part.sampling is not None, "new members are told everything"
            request = self.requests[part.request_id]
            assert not request.keeps_history or part.new_output == tuple(request.output)
        live.group = part.group
        for ref in live.table[part.first_block :]:
            self._owners[ref].remove(part.request_id)
        live.table = list(tables[0])
        for ref in part.blocks:
            self._owners[ref].add(part.request_id)
        assert len(set(live.table)) == len(live.table)
        assert live.rotation in (None, part.rotation), "once homes rotate by token they go on"
        live.rotation = part.rotation
        live.slots.follow(part, live.table)

    def _check_span(self, part: Part) -> None:
        request, live = self.requests[part.request_id], self.live[part.request_id]
        assert part.start == live.next_start, "spans follow each other without a gap"
        assert part.start < part.stop <= request.num_tokens
        live.next_start = part.stop
        assert part.tokens == request.tokens(part.start, part.stop)
        assert part.rope_length == request.rope_length
        positions = [position for runs in part.runs for run in runs for position in run.positions]
        assert sorted(positions) == list(range(part.start, part.stop)), "every token is computed exactly once"
        for runs in part.runs:
            assert all(len(run) and run.step == 1 for run in runs)
            assert all(a.stop < b.start for a, b in pairwise(runs)), "runs ascend and are joined"
        assert len(part.group) == len(part.runs) == len(set(part.group))
        assert all(0 <= ref.block < self._setup.num_blocks for ref in part.blocks)
        assert (part.exchange == "local") == (len(part.group) == 1)
        by_default = self._setup.options.get("exchange", "auto") == "auto" and self._setup.facts.profile is None
        assert not by_default or part.exchange != "ring_q" or part.stop == part.start + 1
        assert (part.sample is not None) == (part.stop >= request.num_known)
        assert UNKNOWN not in part.tokens[:-1], "at most the last token is yet to be sampled"
        assert (part.unknown_on is not None) == (part.tokens[-1] == UNKNOWN)
        if part.unknown_on is not None:
            assert part.unknown_on == live.sampled_on, "who sampled a token passes it on"
        live.sampled_on = None if part.sample is None else part.sample.instance
        if part.sample is not None:
            assert part.sample.position == part.stop
            runs = part.runs[part.group.index(part.sample.instance)]
            assert runs and runs[-1].stop == part.stop, "who computes the last token samples"

    def _check_blocks(self, part: Part) -> None:
        live, names = self.live[part.request_id], self._names(part.request_id)
        slots = live.slots.of
        assert {ref for ref, _ in slots} == set(live.table), "blocks for all tokens and no more"
        assert {ref.instance for ref in live.table} <= set(part.group)
        for member, runs in enumerate(part.runs):
            holders = {slots[position][0].instance for run in runs for position in run.positions}
            assert holders <= set(part.group[member:] if part.exchange == "chain" else [part.group[member]])
        for ref, _ in slots[part.start :]:
            assert self._owners[ref] == {part.request_id}, "a block that is written belongs to one request"
        stored = [self._slots[ref][offset] for ref, offset in slots[: part.start]]
        assert stored == names[: part.start], f"the blocks of request {part.request_id} hold other tokens"

    def _write(self, part: Part) -> None:
        names, slots = self._names(part.request_id), self.live[part.request_id].slots.of
        for position in range(part.start, part.stop):
            ref, offset = slots[position]
            self._slots[ref][offset] = names[position]

    def _names(self, request_id: int) -> list[int]:
        """Names every position of a request by all tokens up to it."""
        request, live = self.requests[request_id], self.live[request_id]
        if live.rope_length != request.rope_length:
            live.names, live.rope_length = [], request.rope_length
        for position in range(len(live.names), request.num_tokens):
            before = live.names[-1] if live.names else request.rope_length
            [token] = request.tokens(position, position + 1)
            if token == UNKNOWN:
                token = invented_token(request, position, self._setup.eos_token_ids)
            live.names.append(hash((before, position, token)))
        return live.names

    def _check_limits(self, forward: Forward) -> None:
        tokens: Counter[int] = Counter()
        for part in forward.parts:
            tokens.update({i: sum(map(len, runs)) for i, runs in zip(part.group, part.runs, strict=True)})
        assert max(tokens.values()) <= self._setup.max_num_batched_tokens
        running = [live for number, live in self.live.items() if self.requests[number].finish_reason is None]
        seats = Counter(instance for live in running for instance in live.group)
        assert max(seats.values()) <= self._setup.max_num_seqs


@dataclass(kw_only=True)
class _Live:
    group: tuple[int, ...]
    next_start: int
    slots: Slots
    rotation: Rotation | None = None
    sampled_on: int | None = None
    table: list[BlockRef] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    rope_length: int = -1
