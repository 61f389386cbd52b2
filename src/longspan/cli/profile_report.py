"""A profile for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import msgspec
from rich.table import Table

from longspan.core.exchange import Exchange
from longspan.cost.partitions import PartitionTable
from longspan.cost.profile import Profile


def as_fields(profile: Profile, table: PartitionTable) -> dict[str, object]:
    """What `--json` prints: what was measured, and what follows from it."""
    links = [
        {"kind": kind, "members": members, **asdict(fit)}
        for kind, members in profile.links
        if (fit := profile.link(kind, members)) is not None
    ]
    fits = [
        {"members": members, "exchange": str(exchange), **asdict(fit)}
        for (members, exchange), fit in profile.fits().items()
    ]
    waits_s = profile.waits_s()
    decode_fits = [
        {"members": members, "exchange": str(exchange), **asdict(fit), "wait_s": waits_s.get((members, exchange))}
        for (members, exchange), fit in profile.decode_fits().items()
    ]
    groups = sorted({prefill.members for prefill in profile.prefills})
    rules = [
        {"members": members, **asdict(ring.rule), "num_missed": len(ring.missed)}
        for members in groups
        if (ring := profile.ring_rule(members)) is not None
    ]
    return {
        **msgspec.to_builtins(profile),
        "fits": fits,
        "decode_fits": decode_fits,
        "ring_rules": rules,
        "links": links,
        **msgspec.to_builtins(table),
    }


def tables(profile: Profile, table: PartitionTable) -> Iterator[Table]:
    """Seconds by length, the fits, speeds of links, partitions."""
    profile_key = profile.profile_key
    yield _seconds(
        profile,
        f"{profile_key.model}, {profile_key.dtype}, {profile_key.threads} threads per rank, {profile_key.machine}",
    )
    yield _fits(profile)
    yield _decodes(profile)
    yield _links(profile)
    if table.partitions:
        yield _partitions(table)


def _seconds(profile: Profile, title: str) -> Table:
    kinds = sorted({(prefill.members, prefill.exchange) for prefill in profile.prefills})
    table = Table(title=f"Median seconds to the first token: {title}", title_justify="left")
    table.add_column("new", justify="right")
    table.add_column("cached", justify="right")
    for members, exchange in kinds:
        table.add_column(_name(members, exchange), justify="right")
    for new, cached in sorted({(p.new_tokens, p.cached_tokens) for p in profile.prefills}, key=lambda at: at[::-1]):
        found = (profile.find(*kind, new, cached) for kind in kinds)
        table.add_row(f"{new:,}", f"{cached:,}", *("" if one is None else f"{one.median_s:.3f}" for one in found))
    return table


def _fits(profile: Profile) -> Table:
    table = Table(title="Fits: a + b L + c P L + d L² for L new tokens behind P cached", title_justify="left")
    for name in ("", "a, ms", "b, µs", "c, ns", "d, ns", "mean error", "largest"):
        table.add_column(name, justify="right" if name else "left")
    for (members, exchange), fit in profile.fits().items():
        terms = (fit.start_s * 1e3, fit.token_s * 1e6, fit.cached_s * 1e9, fit.square_s * 1e9)
        errors = (f"{fit.mean_error:.1%}", f"{fit.max_error:.1%}")
        table.add_row(_name(members, exchange), *(f"{term:.4g}" for term in terms), *errors)
    return table


def _decodes(profile: Profile) -> Table:
    title = "Seconds between tokens: a + b B + c B C for B requests behind C tokens, + w where several members compute"
    table, waits_s = Table(title=title, title_justify="left"), profile.waits_s()
    for name in ("", "a, ms", "b, ms", "c, µs", "mean error", "largest", "w, ms"):
        table.add_column(name, justify="right" if name else "left")
    for (members, exchange), fit in profile.decode_fits().items():
        terms = (fit.start_s * 1e3, fit.request_s * 1e3, fit.context_s * 1e6)
        errors, wait_s = (f"{fit.mean_error:.1%}", f"{fit.max_error:.1%}"), waits_s.get((members, exchange))
        waits = "" if wait_s is None else f"{wait_s * 1e3:.4g}"
        table.add_row(_name(members, exchange), *(f"{term:.4g}" for term in terms), *errors, waits)
    return table


def _links(profile: Profile) -> Table:
    table = Table(title="Links: what each rank sends in a call", title_justify="left")
    for name in ("", "ranks", "µs per call", "GB/s", "largest error"):
        table.add_column(name, justify="right" if name else "left")
    for kind, members in profile.links:
        if (fit := profile.link(kind, members)) is not None:
            speeds = (f"{fit.start_s * 1e6:.1f}", f"{fit.bytes_per_s / 1e9:.2f}")
            table.add_row(kind, str(members), *speeds, f"{fit.max_error:.0%}")
    return table


def _partitions(partitions: PartitionTable) -> Table:
    table = Table(title="Partitions of prompts in chains", title_justify="left")
    table.add_column("instances", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("parts")
    for entry in sorted(partitions.partitions, key=lambda entry: (entry.members, entry.length)):
        parts = ", ".join(f"{fraction:.3f}" for fraction in entry.fractions)
        table.add_row(str(entry.members), f"{entry.length:,}", parts)
    return table


def _name(members: int, exchange: Exchange | str) -> str:
    return "alone" if members == 1 else f"{members} {exchange}"
