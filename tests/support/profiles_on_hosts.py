"""Profiles with other classes of links."""

from __future__ import annotations

from msgspec import structs

from longspan.core.cluster import Cluster
from longspan.core.group_links import links_by_size
from longspan.cost.profile import Profile


def measured_on(profile: Profile, cluster: Cluster) -> Profile:
    """Return the profile as if its groups had been measured on the nearest instances of a cluster."""
    classes = links_by_size(cluster)
    prefills = [
        structs.replace(each, link_class=classes[each.members]) for each in profile.prefills if each.members in classes
    ]
    decodes = [
        structs.replace(each, link_class=classes[each.members]) for each in profile.decodes if each.members in classes
    ]
    return structs.replace(profile, prefills=tuple(prefills), decodes=tuple(decodes))
