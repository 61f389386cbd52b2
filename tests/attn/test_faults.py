"""Exchanges when messages are late, overtake each other, get lost, lie, or when a member dies."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import exchange_member
import pytest
import torch
from engines import Row, pairwise
from forked import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exchanges import ALL, cases, exchange, outputs, spec_of
from torch import Tensor
from transports import DiedError, FaultyTransport, MemoryTransport, Wires, run_members

from longspan.attn.check import EXCHANGES, Request, attend, member_call, random_qkv
from longspan.attn.comm import CommError, Group, Message, Transport, hidden_hops
from longspan.core.layouts import shard_span

pytestmark = pytest.mark.usefixtures("one_thread")


@ALL
@settings(derandomize=True, deadline=None, max_examples=25)
@given(data=st.data(), seed=st.integers(0, 999))
def test_delays_and_reorderings_change_no_bit(name: str, data: st.DataObject, seed: int) -> None:
    case = data.draw(cases(in_order=EXCHANGES[name].traits.in_order))
    calm = exchange(name, case)
    stormy = exchange(name, case, lambda rank, inner: FaultyTransport(inner, seed=seed + rank, max_delay_s=0.01))
    assert stormy[1:] == calm[1:]
    for found, wanted in zip(stormy[0], calm[0], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def dealt_evenly(num_members: int) -> Request:
    """Half of the tokens are cached."""
    old, new = (
        shard_span("contiguous", 0, 5 * num_members, num_members),
        shard_span("contiguous", 5 * num_members, 10 * num_members, num_members),
    )
    kv_runs = tuple((*one, *other) for one, other in zip(old, new, strict=True))
    return Request(q_runs=new, kv_runs=kv_runs, seed=1)


def three_layers(name: str, num_members: int, wires: Wires, **faults_of_rank_1: object) -> list[object]:
    """Return the results or errors of members when rank 1 fails. None can finish if it fails before the last layer."""
    request, spec = dealt_evenly(num_members), spec_of()

    def member(rank: int, transport: Transport) -> list[Tensor]:
        hops = hidden_hops(num_members)
        layers = [
            Group(transport, range(num_members), rank, tags=range(hops * layer, hops * (layer + 1)))
            for layer in range(3)
        ]
        return [outputs(name, group, [request], spec)[0] for group in layers]

    def faults(rank: int, inner: Transport) -> FaultyTransport:
        return FaultyTransport(inner, seed=rank, max_delay_s=0.005, **(faults_of_rank_1 if rank == 1 else {}))

    return list(run_members(num_members, member, wires=wires, faults=faults))


@pytest.mark.parametrize("row", pairwise({"name": EXCHANGES, "num_members": (2, 3, 5), "die_at": (0, 1, 2, 3)}))
def test_death_reaches_every_member(row: Row) -> None:
    """Rank 1 dies in the first or second of three layers."""
    name, num_members, die_at = row.values()
    starts = {"ring_kv": num_members - 1, "gather_kv": 1, "gather_kv, dense": 1}.get(name, 2)
    results = three_layers(name, num_members, Wires(timeout_s=60), die_at=min(die_at, 2 * starts - 1))
    assert isinstance(results.pop(1), DiedError)
    assert all(isinstance(result, CommError) for result in results), results


@ALL
def test_lost_message_is_a_comm_error_for_all(name: str) -> None:
    results = three_layers(name, 3, Wires(timeout_s=0.5), drop_at=0)
    assert all(isinstance(result, CommError) for result in results), results
    assert any("waited" in str(result) for result in results)


def sealed(num_floats: int, tag: int) -> Message:
    message = Message([((num_floats,), torch.float32)], torch.device("cpu"))
    message.tensors[0].fill_(1.0)
    message.seal(tag)
    return message


@pytest.mark.parametrize(
    ("num_floats", "tag"), [(8, 6), (8, 2**31 + 7), (7, 7), (2, 7)], ids=["stale", "foreign", "shorter", "short"]
)
def test_wrong_message_is_recognised(num_floats: int, tag: int) -> None:
    """Under the tag 7 arrives a message of another tag, or of another size than the 8 floats that are due."""
    wires = Wires()
    MemoryTransport(wires, 0).start([(1, sealed(num_floats, tag).buffer)], [], 7)
    due = sealed(8, 1)  # a buffer that had a valid message before
    group = Group(MemoryTransport(wires, 1), range(2), 1, tags=range(5, 5 + 20))
    with pytest.raises(CommError, match="expected message 7 of 32 bytes"):
        group.start(sends={}, receives={0: due}, hop=2).wait()


def test_an_exchange_cannot_use_tags_of_other_exchanges() -> None:
    group = Group(MemoryTransport(Wires(), 1), range(2), 1, name="long", tags=range(5, 7))
    with pytest.raises(AssertionError, match="hop 2 of long, which has tags for 2"):
        group.start(sends={}, receives={}, hop=2)


def test_message_layout() -> None:
    """Tensors of any sizes and types share one buffer, and the trailer lies beyond them."""
    message = Message([((3, 5), torch.float32), ((0, 4), torch.float32), ((7,), torch.bfloat16)], torch.device("cpu"))
    assert message.payload_bytes == 60 + 0 + 14
    for value, tensor in enumerate(message.tensors):
        tensor.fill_(value)
    message.seal(3)
    message.verify(3)
    assert [tensor.float().unique().tolist() for tensor in message.tensors] == [[0.0], [], [2.0]]
    with pytest.raises(CommError):
        message.verify(4)


def test_a_sender_that_reuses_a_buffer_is_found_out() -> None:
    """The mailboxes copy on receipt, so the tests above would see a message that changes under way."""
    wires, message, due = Wires(), sealed(8, 0), sealed(8, 0)
    MemoryTransport(wires, 0).start([(1, message.buffer)], [], 0)
    message.tensors[0].fill_(2.0)
    Group(MemoryTransport(wires, 1), range(2), 1, sent=Counter()).start(sends={}, receives={0: due}, hop=0).wait()
    assert due.tensors[0].tolist() == [2.0] * 8


@ALL
def test_messages_are_copies(name: str) -> None:
    """Pool and tensors may be overwritten when an exchange returns. Late messages still have the right contents."""
    request, spec = dealt_evenly(3), spec_of()

    def member(rank: int, transport: Transport) -> Tensor:
        call = member_call(EXCHANGES[name], Group(transport, range(3), rank), [request], spec)
        out = attend(call)
        for tensor in (call.q, call.k, call.v, call.kv.keys, call.kv.values):
            tensor.fill_(torch.nan)
        return out

    def faults(rank: int, inner: Transport) -> FaultyTransport:
        return FaultyTransport(inner, seed=rank, max_delay_s=0.05)

    for rank, out in enumerate(run_members(3, member, faults=faults)):
        assert isinstance(out, Tensor)
        torch.testing.assert_close(out.double(), request.wanted(rank, spec), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "hosts",
    [(0, 0, 0), (0, 1, 2), (0, 0, 1), pytest.param((0, 0), marks=pytest.mark.full)],
    ids=["shared memory", "gloo", "both", "two ranks"],
)
def test_processes(hosts: tuple[int, ...], tmp_path: Path) -> None:
    """Real processes under random delays equal one device. When rank 1 is killed, its peers get CommError.

    Long before any time-out of theirs: gloo's is half an hour, and shared memory has none. Nothing is left where they
    met, but gloo's file.
    """
    ended = run_ranks(partial(exchange_member.main, hosts), tmp_path / "store", len(hosts))
    assert {path.name for path in tmp_path.iterdir()} <= {"store"}
    killed = ended.pop(1)
    assert killed.returncode == -9, killed
    for other in ended:
        assert other.returncode == 0 and "CommError" in other.stdout, other


def test_random_inputs_are_the_same_everywhere() -> None:
    """Members draw whole requests and cut their shares out."""
    first, second = (random_qkv(spec_of(), 5, 5, torch.float32, 3) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
