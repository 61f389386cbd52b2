"""An engine over a simulated cluster, whose executor checks every step against a model of the KV slots."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

from checked_executor import CheckedExecutor, Slots
from cluster_setup import VOCAB, Setup, UnevenCost, invented_token, rank_requests
from profiles_on_hosts import measured_on

from longspan.core.cluster import Cluster as Instances
from longspan.core.config import EngineConfig, capacity_tokens
from longspan.core.engine import Engine
from longspan.core.kv.check import violations
from longspan.core.kv.pool import BlockPool
from longspan.core.kv.swaps import Pools
from longspan.core.kv.transfer import Transfer
from longspan.core.policy import Policy
from longspan.core.regrouping import Change
from longspan.core.request import Request
from longspan.core.sampling import SamplingParams
from longspan.core.steps import Content, Forward, MoveKV, Part
from longspan.policy.registry import make_policy
from longspan.sim.executor import SimExecutor, VirtualClock

__all__ = ["VOCAB", "Cluster", "Setup", "Slots", "invented_token", "rank_requests"]


class Cluster:
    """An engine whose every step is checked. Tokens are invented by the `SimExecutor`.

    The disks come from a cluster `before`. The profile of the facts counts as measured on the nearest groups of this
    cluster.
    """

    def __init__(self, setup: Setup, *, before: Cluster | None = None) -> None:
        self.setup = setup
        self.clock = VirtualClock()
        phases = setup.clusters
        profile = None if setup.facts.profile is None else measured_on(setup.facts.profile, setup.cluster)
        facts = replace(setup.facts, cluster=setup.cluster, phases=phases, profile=profile)
        self.policy = make_policy(setup.policy, num_instances=setup.num_instances, options=setup.options, facts=facts)
        capacity = capacity_tokens(self.policy, phases or [setup.cluster], setup.block_size)
        self.executor = CheckedExecutor(SimExecutor(clock=self.clock, vocab_size=VOCAB, cost=UnevenCost(setup)), setup)
        self.engine = Engine(
            policy=self.policy,
            executor=self.executor,
            clock=self.clock,
            config=EngineConfig(
                cluster=setup.cluster,
                phases=phases,
                block_size=setup.block_size,
                max_model_len=setup.max_model_len or capacity,
                eos_token_ids=setup.eos_token_ids,
                rope_switch_length=setup.rope_switch_length,
                max_num_batched_tokens=setup.max_num_batched_tokens,
                max_num_seqs=setup.max_num_seqs,
                prefix_caching=setup.prefix_caching,
                max_steps_in_flight=setup.max_steps_in_flight,
                swap=lambda _: setup.swap,
            ),
            saved=[] if before is None else before.saved,
        )
        if before is not None:
            self.executor.keep(before.executor, ["disk"])
        self.executor.pool, self.executor.reservation = self._pool, self.transfer_of

    def _pool(self, instance: int) -> BlockPool:
        return self.engine.kv.pool(instance)

    def transfer_of(self, request_id: int, target: int | None = None) -> Transfer | None:
        """Of a request whose KV is on its way: to that target, or to the only one."""
        shares = self.transfers_of(request_id)
        return next((one for one in shares if target in (None, one.target)), None)

    def transfers_of(self, request_id: int) -> tuple[Transfer, ...]:
        """Of a request whose KV is on its way, to all of its targets."""
        transfers = self.engine.kv.transfers
        return tuple(one for one in (transfers.in_progress if transfers else ()) if one.request.id == request_id)

    def restart(
        self,
        policy: Policy | None = None,
        *,
        smaller: Instances | None = None,
        lost_pools: Pools | None = None,
    ) -> None:
        """Lose the workers and start new ones. With `policy`, use that policy from now on, on the first cluster of the
        setup or on a `smaller` one. The slots of lost pools are lost.
        """
        before, cluster = self.executor, self.engine.config.cluster if policy is None else self.setup.cluster
        cluster = cluster if smaller is None else smaller
        inner = SimExecutor(clock=self.clock, vocab_size=VOCAB, cost=UnevenCost(self.setup, cluster=cluster))
        self.executor = CheckedExecutor(inner, self.setup, cluster)
        self.executor.requests, self.executor.pool = before.requests, self._pool
        self.executor.reservation = self.transfer_of
        self.executor.steps = list(before.steps)
        self.executor.keep(before, ["host", "disk"])
        for ref in [ref for ref in self.executor.slots if ref.pool in (lost_pools or ())]:
            del self.executor.slots[ref]
        change = None if policy is None else Change(cluster=cluster, policy=policy)
        self.engine.restart(self.executor, change)
        if lost_pools:
            kv = self.engine.kv
            assert kv.swaps is not None
            kv.kept = kv.swaps.replace_pools(lost_pools, kv.kept, seal=())

    @property
    def saved(self) -> list[list[tuple[int, Content]]]:
        """The contents of each disk when nothing runs, the least recently used first."""
        pools = [self._pool(number) for number in self.engine.config.cluster.disk_pools]
        blocks = [deepcopy(pool).allocate(pool.num_free)[pool.num_free - pool.num_cached :] for pool in pools]
        return [[(block, pool.content(block)) for block in of] for pool, of in zip(pools, blocks, strict=True)]

    @property
    def forwards(self) -> list[Forward]:
        """Emitted so far."""
        return [step for step in self.executor.steps if isinstance(step, Forward)]

    @property
    def moves(self) -> list[MoveKV]:
        """Emitted so far, from prefill to decode instances, in order."""
        streams = [move for forward in self.forwards for move in forward.streams if move.way == "across"]
        alone = [step for step in self.executor.steps if isinstance(step, MoveKV) and step.way == "across"]
        return sorted([*streams, *alone], key=lambda move: move.number)

    @property
    def swaps(self) -> list[MoveKV]:
        """Emitted so far, between instances, hosts and disks, in order."""
        streams = [move for forward in self.forwards for move in forward.streams if move.way == "out"]
        alone = [step for step in self.executor.steps if isinstance(step, MoveKV) and step.way != "across"]
        return sorted([*streams, *alone], key=lambda move: move.number)

    @property
    def requests(self) -> list[Request]:
        """All that were ever added."""
        return list(self.executor.requests.values())

    def add(
        self, prompt: Sequence[int], params: SamplingParams | None = None, *, cache_salt: str = "", **wishes: int | bool
    ) -> Request:
        """Queue a request. `wishes` are sampling parameters."""
        chosen = params or SamplingParams(**wishes)  # type: ignore[arg-type]
        request = self.engine.add(tuple(prompt), chosen, cache_salt=cache_salt)
        self.executor.requests[request.id] = request
        return request

    def follow(self, leader: Request, choice: int) -> Request:
        """Queues another choice of a request."""
        request = self.engine.add(leader.prompt, leader.params, choice=choice, leader=leader)
        self.executor.requests[request.id] = request
        return request

    def step(self, timeout_s: float | None = None) -> list[Request]:
        """One turn of the engine's loop, after which every block is accounted for."""
        found = self.engine.step(timeout_s)
        assert not (wrong := violations(self.engine.kv, self.requests)), wrong
        return found

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
        """Nothing runs, every block is free, and no request has any."""
        assert not self.engine.has_unfinished
        assert not violations(self.engine.kv, ())
        assert not self.executor.in_flight
        assert not self.executor.live
        assert not self.executor.moving
        assert not self.executor.non_finite_blocks, "NaN in a free block"
        for number, num_blocks in enumerate(self.engine.config.cluster.pool_blocks):
            pool = self.engine.kv.pool(number)
            assert pool.num_free == pool.num_blocks == num_blocks
            assert not any(pool.references(block) for block in range(pool.num_blocks))

    def expected_output(self, request: Request) -> list[int]:
        """Return the expected output of a request without an abort. It does not depend on other requests."""
        params, eos = request.params, self.setup.eos_token_ids
        room = self.engine.config.max_model_len - len(request.prompt)
        output: list[int] = []
        while len(output) < min(params.max_tokens or room, room):
            token = invented_token(request, len(request.prompt) + len(output), eos)
            output.append(token)
            if (token in eos and not params.ignore_eos) or token in params.stop_ids:
                break
        return output
