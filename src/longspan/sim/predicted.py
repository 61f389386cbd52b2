"""What a profile would have measured on a machine that is only known by its cost."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from longspan.core.exchange import LOCAL, Exchange
from longspan.core.runs import shard_span
from longspan.core.steps import Forward, Part
from longspan.cost.profile import Prefill, Profile, ProfileKey
from longspan.cost.step_cost import StepCost


def predicted_profile(
    cost: StepCost,
    profile_key: ProfileKey,
    *,
    num_instances: int,
    prompts: Iterable[tuple[int, int]],
    exchanges: Sequence[Exchange],
    sizes: Collection[int] = (),
) -> Profile:
    """Prefills, of (new, cached) tokens in one step each, on one instance and on groups of 2, 4, 8 and so on to all, so
    that policies can choose as they do by a profile of real hardware.

    Args:
        sizes: of further groups, as far as there are so many instances.
    """
    powers = {2**power for power in range(num_instances.bit_length())}
    wanted = {size for size in powers.union(sizes) if 1 <= size <= num_instances}
    prefills = [
        Prefill(
            members=members,
            exchange=str(exchange),
            new_tokens=new,
            cached_tokens=cached,
            seconds=(max(cost.seconds(_prefill(members, exchange, new, cached)).values()),),
        )
        for members in sorted(wanted | {num_instances})
        for exchange in (exchanges if members > 1 else (LOCAL,))
        for new, cached in prompts
    ]
    return Profile(profile_key=profile_key, prefills=tuple(prefills))


def _prefill(members: int, exchange: Exchange, new: int, cached: int) -> Forward:
    """Dealt as policies deal it."""
    part = Part(
        request_id=0,
        start=cached,
        stop=cached + new,
        tokens=range(new),
        group=tuple(range(members)),
        runs=shard_span(exchange.traits.layouts[0], cached, cached + new, members, head=0),
        exchange=exchange,
        first_block=0,
        blocks=(),
        sample=None,
    )
    return Forward(number=1, parts=(part,))
