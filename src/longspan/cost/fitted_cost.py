"""Seconds of a step from what was measured of prefills and decodes on one machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from longspan.core.exchange import LOCAL, Exchange, named
from longspan.core.owners import coupled_instances
from longspan.core.runs import SpanShards, shard_span
from longspan.core.steps import Forward, MoveKV, Part
from longspan.cost.architecture import ModelShape
from longspan.cost.forward import exposed_s
from longspan.cost.profile import Prefill, Profile
from longspan.cost.time_fit import Times


class FittedCost:
    """A cost for the simulator: every instance of a part takes as long as the profile says of such a group.

    Blocks are sharded whole, so some members have more tokens than others: a prompt counts as one of which each has as
    many as the busiest, and so do those that were measured, but not where a chain was cut unevenly on purpose. A step
    is computed as one row of tokens, so it starts once: the largest prefill's start counts, or that of decodes where
    there is no prefill. The first decode of each group costs its messages: what it takes to start beyond one
    instance's; and in a step of decodes where several members compute tokens, what they wait for each other. Beside a
    prefill, a decode costs a token of it and its own context. Members of a group end together. KV moves as quickly as
    two ranks sent to each other.

    Args:
        shape: of the model that was measured.
        block_size: tokens of a KV block, which transfers consist of.

    Raises:
        ValueError: for a profile that lacks one instance alone, with the remedy.
    """

    def __init__(self, profile: Profile, shape: ModelShape, *, block_size: int) -> None:
        self._link, self._tp = profile.link("point_to_point", 2), profile.profile_key.tp
        self._num_layers, self._block_bytes = shape.num_layers, block_size * shape.kv_bytes * shape.num_layers
        self._block_size = block_size
        self._times = profile.times(self._measured_as)
        self._decodes = profile.decode_fits()
        self._waits_s = profile.waits_s()
        self._known: dict[tuple[int, Exchange, int, int], float] = {}
        if (1, LOCAL) not in self._times or (1, LOCAL) not in self._decodes:
            raise ValueError(
                "the profile lacks prefills or decodes of one instance alone: run longspan profile with the same model "
                "and options again, which measures what is missing"
            )

    @property
    def num_layers(self) -> int:
        return self._num_layers

    def move_s(self, move: MoveKV) -> float:
        """The ranks of an instance send and receive equal parts."""
        return self._moved_s(move, ("out", "in"))

    def received_s(self, move: MoveKV) -> float:
        return self._moved_s(move, ("in",))

    def _moved_s(self, move: MoveKV, ways: Collection[str]) -> float:
        """Times a move by the busiest instance of those that send or receive."""
        if self._link is None:
            raise ValueError(
                "the profile lacks times of messages between two ranks, which KV moves by: run longspan profile "
                "--parallel 2 or more"
            )
        blocks = Counter((source.instance, target.instance) for source, target in move.copies)
        ends: Counter[tuple[str, int]] = Counter()
        for (source, target), number in blocks.items():
            ends["out", source] += number
            ends["in", target] += number
        most = max(number for (way, _), number in ends.items() if way in ways)
        return self._link.seconds(most * self._block_bytes / self._tp)

    def seconds(self, forward: Forward) -> dict[int, float]:
        """Passing a token on takes no time."""
        starts, rest = dict.fromkeys(forward.instances, 0.0), dict.fromkeys(forward.instances, 0.0)
        prefilling: set[int] = set()
        for part in forward.parts:
            if not self._decodes_in(part):
                fixed = self._of_prefill(part).fit.start_s
                whole = self._prefill_s(part)
                prefilling.update(part.group)
                for instance in part.group:
                    starts[instance] = max(starts[instance], fixed)
                    rest[instance] += max(0.0, whole - fixed)
        decoding: dict[tuple[tuple[int, ...], Exchange], None] = {}  # in order, so that sums have the same last bits
        for part in forward.parts:
            if self._decodes_in(part):
                is_first = (part.group, part.exchange) not in decoding
                decoding[part.group, part.exchange] = None
                self._add_decode(part, starts, rest, prefilling, is_first=is_first)
        computing = {i for part in forward.parts for i, runs in zip(part.group, part.runs, strict=True) if runs}
        for group, exchange in decoding:
            if len(computing.intersection(group)) > 1 and prefilling.isdisjoint(group):
                for instance in group:
                    rest[instance] += self._waits_s.get((len(group), exchange), 0.0)
        found = {instance: starts[instance] + seconds for instance, seconds in rest.items()}
        for coupled in coupled_instances({part.group for part in forward.parts if len(part.group) > 1}):
            found.update(dict.fromkeys(coupled, max(found[instance] for instance in coupled)))
        for move in forward.rebalances:
            group = next(part.group for part in forward.parts if part.request_id == move.request_id)
            layer_s = min(found[instance] for instance in group) / self._num_layers
            waiting_s = exposed_s(self.move_s(move), layer_s, self._num_layers)
            found.update({instance: found[instance] + waiting_s for instance in group})
        return found

    def _add_decode(
        self, part: Part, starts: dict[int, float], rest: dict[int, float], prefilling: set[int], *, is_first: bool
    ) -> None:
        fit = self._decodes[len(part.group), part.exchange]
        start_s = min(fit.start_s, self._decodes[1, LOCAL].start_s)
        messages_s = fit.start_s - start_s if is_first else 0.0
        context_s = messages_s + fit.context_s * part.start
        for instance in part.group:
            if instance in prefilling:
                rest[instance] += self._times[1, LOCAL].fit.token_s + context_s
            else:
                starts[instance] = max(starts[instance], start_s)
                rest[instance] += fit.request_s + context_s

    def _decodes_in(self, part: Part) -> bool:
        """Tells whether a part counts as a decode: a single token, by an exchange that decodes were measured with."""
        return part.stop - part.start == 1 and (len(part.group), part.exchange) in self._decodes

    def _prefill_s(self, part: Part) -> float:
        new_tokens = part.stop - part.start
        if not part.exchange.traits.in_order or part.runs == self._sharded(
            part.exchange, part.start, part.stop, len(part.group)
        ):
            new_tokens = _as_even(part.runs)
        key = len(part.group), part.exchange, new_tokens, part.start
        if key not in self._known:
            self._known[key] = self._of_prefill(part).seconds(new_tokens, part.start)
        return self._known[key]

    def _measured_as(self, prefill: Prefill) -> int:
        """Counts the new tokens that a part stands for."""
        start, stop = prefill.cached_tokens, prefill.cached_tokens + prefill.new_tokens
        return _as_even(self._sharded(named(prefill.exchange), start, stop, prefill.members))

    def _sharded(self, exchange: Exchange, start: int, stop: int, members: int) -> SpanShards:
        """Shards to members with room alike, as evenly as blocks allow."""
        return shard_span(exchange.traits.layouts[0], start, stop, members, align=self._block_size, head=0)

    def _of_prefill(self, part: Part) -> Times:
        kind = len(part.group), part.exchange
        if kind not in self._times:
            raise ValueError(_missing(*kind))
        return self._times[kind]


def _as_even(sharded: SpanShards) -> int:
    """Counts the tokens there would be if each member had as many as the busiest."""
    return len(sharded) * max(sum(map(len, runs)) for runs in sharded)


def _missing(members: int, exchange: Exchange) -> str:
    return (
        f"the profile lacks times of {members} instances with exchange {exchange}: run longspan profile --parallel "
        f"{members} or more, or choose other options of the policy"
    )
