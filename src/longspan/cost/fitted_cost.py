"""The time of a step from the measurements of `longspan profile`, for simulations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from longspan.core.blocks import coupled_instances
from longspan.core.cluster import Cluster
from longspan.core.exchange import LOCAL, Exchange
from longspan.core.group_links import link_of_group
from longspan.core.layouts import shard_span
from longspan.core.link_classes import LINK_CLASSES, SAME_HOST, LinkClass, slowest_link
from longspan.core.runs import SpanShards
from longspan.core.steps import Forward, MoveKV, Part
from longspan.cost.flows import Flow, block_pairs, host_flows
from longspan.cost.profile import DecodeFit, Kind, LinkFit, Prefill, Profile, Times, TransferKind
from longspan.cost.shape import ModelShape
from longspan.cost.step_cost import ReshardCost, computed_tokens, sparse_share, wait_for_balances
from longspan.errors import ParameterError


class _Fits(NamedTuple):
    """Fits of the times of single instances, and of groups over one class of link."""

    times: dict[Kind, Times]
    decodes: dict[Kind, DecodeFit]
    waits_s: dict[Kind, float]


class FittedCost:
    """A cost for simulations, in which instances take the time that a profile measured for a group of the same size.

    - Times of groups and links count for the class of link that they were measured over.
    - Blocks are not split, so the busiest member has the most tokens. Predicted and measured prompts count with the
      busiest member's tokens on every member, except for chains that are cut unevenly on purpose.
    - A step is one row of tokens and has one start time, of the largest prefill, or else of decodes.
    - The first decode of each group adds its messages: its start time beyond the start time of one instance. If several
      members compute tokens in a decode step, their waits for each other are added.
    - A decode in a step with a prefill costs a token of the prefill, and its own context.
    - Members of a group end together. KV moves at the measured speed between two ranks.
    - Keys on a host are copied to a device during the attention to cached tokens, and for decodes without overlap.
    - The sparse form of an exchange takes a fraction of the exact form's time, see `csa_price`. Measured sparse prompts
      correct it.
    - Pipeline stages split the measured time of an instance without stages, by their layers and the head's weights. It
      was measured with as many other busy instances as there are further stages.

    Args:
        shape: the shape of the measured model.
        block_size: tokens of a KV block.
        cluster: the instances, if they have stages or host pools.
        others: profiles of instances with another split, for clusters of phases. Their links fill gaps.

    Raises:
        ValueError: the profile lacks measurements of one instance alone.
    """

    def __init__(
        self,
        profile: Profile,
        shape: ModelShape,
        *,
        block_size: int,
        cluster: Cluster | None = None,
        others: Sequence[Profile] = (),
    ) -> None:
        self._profile, self._shape, self._others = profile, shape, others
        self._cluster, self._tp = cluster, profile.profile_key.tp
        self._links = {
            link_class: _link((profile, *others), "point_to_point", 2, link_class) for link_class in LINK_CLASSES
        }
        self._host_link = _link((profile, *others), "host_copy", 1, SAME_HOST) or self._links[SAME_HOST]
        self._hidden_bytes = shape.hidden_size * shape.bytes_per_element
        self.num_layers, self._block_bytes = shape.num_layers, shape.block_bytes(block_size)
        self._block_size = block_size
        self._fits = {link_class: self._fits_over(link_class) for link_class in profile.link_classes}
        self._classes: dict[tuple[int, ...], LinkClass] = {}
        self._known: dict[tuple[LinkClass, int, Exchange, int, int], float] = {}
        self._sparse: dict[tuple[tuple[int, ...], str], float] = {}
        self._alone = self._fits[SAME_HOST]
        if (1, LOCAL) not in self._alone.times or (1, LOCAL) not in self._alone.decodes:
            problem = (
                "lacks prefills or decodes of one instance alone: use longspan profile with the same model and options "
                "again, which adds them"
            )
            raise ParameterError("profile", problem)

    @property
    def device(self) -> str:
        return self._profile.profile_key.device

    def flows(self, move: MoveKV) -> tuple[Flow, ...]:
        if move.way != "across":
            assert self._cluster is not None, "host pools belong to a cluster"
            link = self._host_link or self._known_link(SAME_HOST)
            return host_flows(move, self._cluster, lambda _: self._block_bytes, link.start_s, link.bytes_per_s)
        flows = []
        for pair, number in block_pairs(move):
            link = self._known_link(self._class_of(pair))
            byte_s = 1 / (link.bytes_per_s * self._tp)
            used = (("out", pair[0]), byte_s), (("in", pair[1]), byte_s)
            flows.append(Flow(*pair, number * self._block_bytes, link.start_s, used))
        return tuple(flows)

    def resharded(self, cluster: Cluster) -> FittedCost:
        """Return the cost by the profile of instances with this cluster's split.

        Raises:
            ParameterError: there is no such profile.
        """
        profiles = (self._profile, *self._others)
        match = next((profile for profile in profiles if profile.profile_key.tp == cluster.spec.tp), None)
        if match is None:
            known = " and ".join(str(profile.profile_key.tp) for profile in profiles)
            problem = f"is of instances with tp {known}, but a phase uses {cluster}: measure that, too"
            raise ParameterError("profile", problem)
        others = [profile for profile in profiles if profile is not match]
        return FittedCost(match, self._shape, block_size=self._block_size, cluster=cluster, others=others)

    def reshard(self, cluster: Cluster) -> ReshardCost:  # noqa: ARG002 - a CPU copies nothing
        """Return no cost, since shards on a CPU are views of the same weights."""
        return ReshardCost(0.0, 0.0)

    def _known_link(self, link_class: LinkClass) -> LinkFit:
        if (link := self._links[link_class]) is None:
            problem = (
                f"lacks times of messages between two ranks{_words(link_class)}, for KV and hidden states: measure 2 "
                f"instances or more{_remedy(link_class)}"
            )
            raise ParameterError("profile", problem)
        return link

    def _class_of(self, group: tuple[int, ...]) -> LinkClass:
        if group not in self._classes:
            self._classes[group] = SAME_HOST if self._cluster is None else link_of_group(self._cluster, group)
        return self._classes[group]

    def _fits_over(self, link_class: LinkClass) -> _Fits:
        profile = self._profile.over(link_class)
        return _Fits(profile.times(self._measured_as), profile.decode_fits(), profile.waits_s())

    def _fits_of(self, part: Part) -> _Fits:
        """Return the fits of the times over the class of link that the group of a part has."""
        return self._fits.get(self._class_of(part.group), _Fits({}, {}, {}))

    def exposed_s(self, forward: Forward) -> None:
        """Return None, since steps were measured as a whole."""

    def stage_seconds(self, forward: Forward) -> dict[int, tuple[float, ...]]:
        unsplit_s, cluster = self._unsplit_s(forward), self._cluster
        if cluster is None or not cluster.has_stages:
            return {instance: (seconds,) for instance, seconds in unsplit_s.items()}
        tokens, sampled = (
            computed_tokens(forward),
            Counter(part.sample.instance for part in forward.parts if part.sample),
        )
        by_stage = {}
        for instance, seconds in unsplit_s.items():
            weight = sampled[instance] * cluster.head_layers  # of the head, relative to a layer with weight 1 per token
            head_s = seconds * weight / (tokens[instance] * cluster.num_layers + weight) if weight else 0.0
            layer_s, stages = (seconds - head_s) / cluster.num_layers, range(cluster.pp(instance))
            hidden_bytes = tokens[instance] * self._hidden_bytes
            times = [
                len(cluster.layers(instance, stage)) * layer_s + self._hop_s(cluster, instance, stage, hidden_bytes)
                for stage in stages
            ]
            by_stage[instance] = (*times[:-1], times[-1] + head_s)
        return by_stage

    def _hop_s(self, cluster: Cluster, instance: int, stage: int, num_bytes: float) -> float:
        """Return the seconds of hidden states from the stage before."""
        if not stage or not num_bytes:
            return 0.0
        ranks = (*cluster.stage_ranks(instance, stage - 1), *cluster.stage_ranks(instance, stage))
        link_class = slowest_link([cluster.locations[rank] for rank in ranks]) if cluster.locations else SAME_HOST
        return self._known_link(link_class).seconds(num_bytes)

    def _unsplit_s(self, forward: Forward) -> dict[int, float]:
        """Return the seconds of instances without stages."""
        starts, rest = dict.fromkeys(forward.instances, 0.0), dict.fromkeys(forward.instances, 0.0)
        prefilling: set[int] = set()
        for part in forward.parts:
            if not self._decodes_in(part):
                whole_s, fixed_s = self._prefill_s(part), self._of_prefill(part).fit.start_s
                prefilling.update(part.group)
                for instance in part.group:
                    starts[instance] = max(starts[instance], fixed_s)
                    rest[instance] += max(0.0, whole_s - fixed_s)
        decoding: dict[tuple[tuple[int, ...], Exchange], float] = {}  # in order, so that sums are reproducible
        for part in forward.parts:
            if self._decodes_in(part):
                exchange, waits_s = part.exchange.exact_form, self._fits_of(part).waits_s
                is_first = (part.group, exchange) not in decoding
                decoding[part.group, exchange] = waits_s.get((len(part.group), exchange), 0.0)
                self._add_decode(part, starts, rest, prefilling, is_first=is_first)
        self._add_hosts(forward, rest)
        computing = {i for part in forward.parts for i, runs in zip(part.group, part.runs, strict=True) if runs}
        for (group, _), wait_s in decoding.items():
            if len(computing.intersection(group)) > 1 and prefilling.isdisjoint(group):
                for instance in group:
                    rest[instance] += wait_s
        unsplit_s = {instance: starts[instance] + seconds for instance, seconds in rest.items()}
        for coupled in coupled_instances({part.group for part in forward.parts if len(part.group) > 1}):
            unsplit_s.update(dict.fromkeys(coupled, max(unsplit_s[instance] for instance in coupled)))
        wait_for_balances(forward, unsplit_s, self)
        return unsplit_s

    def _add_decode(
        self, part: Part, starts: dict[int, float], rest: dict[int, float], prefilling: set[int], *, is_first: bool
    ) -> None:
        fit = self._fits_of(part).decodes[len(part.group), part.exchange.exact_form]
        start_s = min(fit.start_s, self._alone.decodes[1, LOCAL].start_s)
        messages_s = fit.start_s - start_s if is_first else 0.0
        context_s = messages_s + fit.context_s * part.start * self._read_share(part)
        for instance in part.group:
            if instance in prefilling:
                rest[instance] += self._alone.times[1, LOCAL].fit.token_s + context_s
            else:
                starts[instance] = max(starts[instance], start_s)
                rest[instance] += fit.request_s + context_s

    def _read_share(self, part: Part) -> float:
        """Return the share of the keys that a decode reads."""
        if part.exchange.sparse is None:
            return 1.0
        from longspan.core.sparse_plan import decode_share  # noqa: PLC0415 - few requests are sparse

        return decode_share(part.exchange.sparse, part.stop, len(part.group), self.num_layers)

    def _add_hosts(self, forward: Forward, rest: dict[int, float]) -> None:
        """Add the copies of KV from hosts to devices. On a CPU the pools share the memory."""
        for part in forward.parts if self.device != "cpu" else ():
            if part.hosted:
                link = self._host_link or self._known_link(SAME_HOST)
                seconds = max(part.hosted) * self._block_bytes / (link.bytes_per_s * self._tp)
                if not self._decodes_in(part):
                    seconds -= self._prefill_s(part) - self._of_prefill(part).seconds(part.stop - part.start)
                for instance in part.group:
                    rest[instance] += max(0.0, seconds)

    def _decodes_in(self, part: Part) -> bool:
        """Return whether a part counts as a decode: a single token, by an exchange with measured decodes."""
        kind = len(part.group), part.exchange.exact_form
        return part.stop - part.start == 1 and kind in self._fits_of(part).decodes

    def _prefill_s(self, part: Part) -> float:
        new_tokens, group = part.stop - part.start, len(part.group)
        if not part.exchange.traits.in_order or part.runs == self._sharded(part.exchange, part.start, part.stop, group):
            new_tokens = _as_even(part.runs)
        key = self._class_of(part.group), group, part.exchange, new_tokens, part.start
        if key not in self._known:
            self._known[key] = self._of_prefill(part).seconds(new_tokens, part.start)
        seconds = self._known[key]
        return seconds * self._sparse_share(part) if part.exchange.is_priced_by_share else seconds

    def _sparse_share(self, part: Part) -> float:
        """Predict the time of a step with drops or micro-partitions, relative to the measured exact exchange."""
        from longspan.cost.csa_pipeline import Members  # noqa: PLC0415 - few prompts are sparse
        from longspan.cost.csa_price import measured_over_predicted, rates_of_profile  # noqa: PLC0415

        cluster = self._cluster
        hosts = tuple([0 if cluster is None else cluster.hosts[cluster.rank(instance)] for instance in part.group])
        link_class, kind = self._class_of(part.group), part.exchange.exact_form.kind
        rates = rates_of_profile(self._profile, self._shape, len(hosts), link_class)
        if rates is None:
            return 1.0
        members = Members(hosts, self._shape, rates)
        if (hosts, kind) not in self._sparse:
            self._sparse[hosts, kind] = measured_over_predicted(self._profile, members, kind, link_class)
        return self._sparse[hosts, kind] * sparse_share(part, members)

    def _measured_as(self, prefill: Prefill) -> int:
        """Return the number of new tokens that a measured prefill counts as."""
        members, exchange = prefill.kind
        start = prefill.cached_tokens
        return _as_even(self._sharded(exchange, start, start + prefill.new_tokens, members))

    def _sharded(self, exchange: Exchange, start: int, stop: int, members: int) -> SpanShards:
        """Shard as evenly as blocks allow."""
        return shard_span(exchange.traits.layouts[0], start, stop, members, align=self._block_size, head=0)

    def _of_prefill(self, part: Part) -> Times:
        members, exchange = len(part.group), part.exchange.exact_form  # see `_sparse_share`
        times = self._fits_of(part).times
        if (members, exchange) not in times:
            link_class = self._class_of(part.group)
            problem = (
                f"lacks times of {members} instances{_words(link_class)} with exchange {exchange}: measure {members} "
                f"instances or more{_remedy(link_class)}, or choose other options of the policy"
            )
            raise ParameterError("profile", problem)
        return times[members, exchange]


def _link(profiles: Sequence[Profile], kind: TransferKind, members: int, link_class: LinkClass) -> LinkFit | None:
    """Return the first measured link. Links do not depend on the split of instances."""
    links = (profile.link(kind, members, link_class) for profile in profiles)
    return next((link for link in links if link is not None), None)


def _words(link_class: LinkClass) -> str:
    return {"same_host": "", "other_host": " on several hosts", "other_rack": " in several racks"}[link_class]


def _remedy(link_class: LinkClass) -> str:
    """Return the condition for a measurement over this class of link."""
    return "" if link_class == SAME_HOST else " on such hosts, since times on one host are not used for several"


def _as_even(sharded: SpanShards) -> int:
    """Return the number of tokens if each member had as many as the busiest."""
    return len(sharded) * max(sum(map(len, runs)) for runs in sharded)
