"""`python -m longspan.attn.check`: every exchange between processes, against attention on one device.

Each rank is a process; gloo connects them. All ranks draw the same random cases, and each compares its own outputs.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Annotated, NoReturn

import torch
import torch.distributed as dist
import typer

from longspan.attn.cases import EXCHANGES, IN_ORDER, member_case, random_batch, random_spec
from longspan.attn.comm import Group, TorchTransport, meet
from longspan.attn.exchanges.gather_hidden import hidden_hops
from longspan.core.cluster import hosts_of, places_of_ranks
from longspan.core.steps import Link

_MOST_ERROR = 1e-5
_MOST_RANKS = 64
_TIMEOUT_S = 60.0


@dataclass
class Found:
    """What some ranks found of an exchange."""

    error: float = 0.0
    sent: Counter[tuple[str, Link]] = field(default_factory=Counter)

    def add(self, other: Found) -> None:
        """Joins what other ranks or cases found."""
        self.error = max(self.error, other.error)
        self.sent.update(other.sent)

    def line(self, name: str) -> str:
        """For people."""
        same, other = (sum(n for (_, link), n in self.sent.items() if link == wanted) for wanted in _LINKS)
        return f"{name:18}largest error {self.error:.1e}   {same:,} bytes sent on the same host, {other:,} to another"


_LINKS: tuple[Link, Link] = ("same_host", "other_host")


@dataclass(frozen=True, kw_only=True)
class Check:
    """What is to be checked: some exchanges in groups of `len(hosts)` ranks."""

    names: tuple[str, ...]
    hosts: tuple[int, ...]
    seed: int
    num_cases: int


class RankFailedError(Exception):
    """A rank raised or was lost; it said why on stderr."""


def main(
    ranks: Annotated[int, typer.Option(min=1, max=_MOST_RANKS, help="Processes in the group.")] = 2,
    exchange: Annotated[str, typer.Option(help="all, or the name of one.")] = "all",
    seed: Annotated[int, typer.Option(help="Of the random cases.")] = 0,
    cases: Annotated[int, typer.Option(min=1, help="How many of them, for each exchange.")] = 20,
    hosts: Annotated[
        str,
        typer.Option(envvar="LONGSPAN_HOSTS", help="Hosts on which the ranks pretend to lie, or rack-host of each."),
    ] = "1",
) -> None:
    """Compares exchanges with attention on one device; exit code 1 when an error exceeds 1e-5."""
    names = tuple(name for name in EXCHANGES if exchange in ("all", name.partition(",")[0]))
    if not names:
        known = ", ".join(dict.fromkeys(name.partition(",")[0] for name in EXCHANGES))
        raise typer.BadParameter(f"unknown exchange {exchange!r}: choose all, {known}", param_hint="--exchange")
    try:
        hosts_of_all = hosts_of(places_of_ranks(ranks, hosts))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--hosts") from error
    signal.signal(signal.SIGTERM, _on_sigterm)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background starts us with it ignored
    try:
        found = run(Check(names=names, hosts=hosts_of_all, seed=seed, num_cases=cases))
    except RankFailedError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    for name in names:
        typer.echo(found[name].line(name))
    if any(one.error > _MOST_ERROR for one in found.values()):
        typer.echo(f"not exact: an error exceeds {_MOST_ERROR:.0e}", err=True)
        raise typer.Exit(1)


def run(check: Check) -> dict[str, Found]:
    """Runs a process per rank; what all of them found, by exchange. None is left when it returns or raises.

    Raises:
        RankFailedError: when a rank does not come to an end.
    """
    context = multiprocessing.get_context("fork")  # whatever was imported is there at once
    found = {name: Found() for name in check.names}
    processes = []
    reports: dict[Connection, int] = {}
    with tempfile.TemporaryDirectory(prefix="longspan-check-") as folder:
        try:
            for rank in range(len(check.hosts)):
                report, to_parent = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(check, rank, f"{folder}/store", to_parent), daemon=True)
                process.start()
                processes.append(process)
                to_parent.close()
                reports[report] = rank
            while reports:
                ready = wait(list(reports))
                for report in [report for report in reports if report in ready]:
                    _take(report, reports.pop(report), found)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
    return found


def _take(report: Connection, rank: int, found: dict[str, Found]) -> None:
    try:
        for name, one in report.recv().items():
            found[name].add(one)
    except EOFError:
        raise RankFailedError(f"rank {rank} failed") from None


def _work(check: Check, rank: int, store: str, report: Connection) -> None:
    """One rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    found = {name: Found() for name in check.names}
    meet(store, rank, len(check.hosts), timeout_s=_TIMEOUT_S)
    transport = TorchTransport()
    for name, one in _compare(check, rank, transport):
        found[name].add(one)
    dist.barrier()
    report.send(found)
    dist.destroy_process_group()


def _compare(check: Check, rank: int, transport: TorchTransport) -> Iterator[tuple[str, Found]]:
    """What this rank finds of each exchange in each case."""
    size, tag = len(check.hosts), 0
    for number, in_order in itertools.product(range(check.num_cases), (False, True)):
        names = [name for name in check.names if (name in IN_ORDER) == in_order]
        if not names:
            continue
        draw = random.Random(f"{check.seed} {number}")
        spec = random_spec(draw)
        batch = random_batch(draw, size, in_order=in_order)
        case = member_case(batch, rank, spec, seed=number, new_in_pool=not in_order)
        wanted = torch.cat([request.wanted(rank, spec) for request in batch], dim=1)
        for name in names:
            group = Group(transport, range(size), rank, hosts=check.hosts, name=name, first_tag=tag)
            tag += hidden_hops(size)  # no exchange has more
            error = (EXCHANGES[name](group, case, spec) - wanted).abs().nan_to_num(torch.inf)
            transport.flush()
            yield name, Found(error.max().item() if error.numel() else 0.0, group.sent)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is a child process"
    parent.join()
    os._exit(1)


def _on_sigterm(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


if __name__ == "__main__":
    typer.run(main)
