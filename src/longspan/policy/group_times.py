"""Measured times and speeds of groups, by the class of link between their members."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longspan.core.group_links import between_hosts, link_of_group, links_by_size
from longspan.core.link_classes import SAME_HOST, LinkClass
from longspan.cost.profile import Kind, Profile, Times
from longspan.policy.facts import Facts

if TYPE_CHECKING:
    from longspan.cost.csa_pipeline import Rates


def nearest_times(facts: Facts) -> Profile | None:
    """Return the profile with the times of groups of each size that lie on as few hosts and racks as possible."""
    if facts.profile is None or facts.cluster is None:
        return None if facts.profile is None else facts.profile.over(SAME_HOST)
    return facts.profile.of_sizes(links_by_size(facts.cluster))


def class_of(facts: Facts, group: tuple[int, ...]) -> LinkClass:
    return SAME_HOST if facts.cluster is None else link_of_group(facts.cluster, group)


def times_over(facts: Facts, link_class: LinkClass) -> dict[Kind, Times]:
    """Return the times of single instances, and of groups over a class of link. Empty without a profile."""
    return {} if facts.profile is None else facts.profile.over(link_class).times()


def measured_rates(facts: Facts, hosts: tuple[int, ...]) -> Rates | None:
    """Return the speeds of a member of a group on these hosts by the profile, or None if they were not measured."""
    if facts.profile is None or facts.shape is None:
        return None
    from longspan.cost.csa_price import rates_of_profile  # noqa: PLC0415 - few policies ask

    return rates_of_profile(facts.profile, facts.shape, len(hosts), _between(facts, hosts))


def sparse_factor(facts: Facts, hosts: tuple[int, ...], kind: str) -> float:
    """Return the seconds of measured sparse prompts of a group, relative to predicted seconds. 1 without any."""
    rates = measured_rates(facts, hosts)
    if rates is None or facts.profile is None or facts.shape is None:
        return 1.0
    from longspan.cost.csa_pipeline import Members  # noqa: PLC0415 - few policies ask
    from longspan.cost.csa_price import measured_over_predicted  # noqa: PLC0415

    between = _between(facts, hosts)
    return measured_over_predicted(facts.profile, Members(hosts, facts.shape, rates), kind, between)


def _between(facts: Facts, hosts: tuple[int, ...]) -> LinkClass:
    if facts.cluster is None or len(set(hosts)) == 1:
        return SAME_HOST
    return between_hosts(facts.cluster, len(hosts))


def unmeasured_on_hosts(facts: Facts) -> list[int]:
    """Return the sizes of groups on several hosts that the profile has no times of. Empty on one host."""
    if facts.cluster is None or (profile := nearest_times(facts)) is None:
        return []
    measured = {prefill.members for prefill in profile.prefills}
    classes = links_by_size(facts.cluster)
    return [size for size, link_class in classes.items() if link_class != SAME_HOST and size not in measured]
