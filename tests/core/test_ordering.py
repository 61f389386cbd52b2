"""The state kept of steps in flight equals a recount over all steps."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from one_part import forward

from longspan.core.blocks import BlockRef
from longspan.core.queues import Occupancy, StepOrder
from longspan.core.steps import Completion, Forward, MoveKV

GROUPS = st.lists(st.integers(0, 4), min_size=1, max_size=4, unique=True).map(tuple)


def first_free(sent: list[Forward], reported: set[int], given: list[int]) -> int | None:
    """The lowest number of those reported that no earlier step on one of their instances stands before."""
    open_before: set[int] = set()
    for step in sent:
        if step.number in given:
            continue
        if step.number in reported and open_before.isdisjoint(step.instances):
            return step.number
        open_before.update(step.instances)
    return None


@given(st.data())
@settings(deadline=None)
def test_completions_wait_for_earlier_steps_on_their_instances(data: st.DataObject) -> None:
    order, sent = StepOrder(), list[Forward]()
    reported, expected, taken = set[int](), list[int](), list[int]()
    for action in data.draw(st.lists(st.sampled_from(["send", "send", "report", "take"]), max_size=60)):
        waiting = [step.number for step in sent if step.number not in reported]
        if action == "send":
            sent.append(forward(len(sent) + 1, data.draw(GROUPS), unknown_on=data.draw(st.none() | st.integers(0, 4))))
            order.send(sent[-1])
        elif action == "report" and waiting:
            number = data.draw(st.sampled_from(waiting))
            reported.add(number)
            order.complete(Completion(number=number, sampled=(), bytes_sent={}))
            while (found := first_free(sent, reported, expected)) is not None:
                expected.append(found)
        elif action == "take" and order.has_ready:
            step, done = order.take()
            assert step is sent[done.number - 1]
            taken.append(done.number)
        assert order.has_ready == (len(taken) < len(expected))
        assert taken == expected[: len(taken)]
        assert bool(order) == (len(taken) < len(sent))
    assert [step.number for step in order.clear()] == [step.number for step in sent if step.number not in taken]
    order.send(forward(100, (0, 1, 2, 3, 4)))
    order.complete(Completion(number=100, sampled=(), bytes_sent={}))
    assert order.has_ready, "earlier steps are forgotten"


@given(st.data(), st.lists(st.integers(1, 3), min_size=5, max_size=5))
def test_an_instance_with_a_step_is_busy_and_with_the_maximum_full(data: st.DataObject, most: list[int]) -> None:
    occupancy, in_flight = Occupancy(most), list[tuple[int, ...]]()
    busy_s = [0.0] * 5
    for now_s in range(data.draw(st.integers(0, 30))):
        number = Counter(instance for group in in_flight for instance in group)
        assert occupancy.busy == {i for i in range(5) if number[i]}
        assert occupancy.full == {i for i in range(5) if number[i] == most[i]}
        assert occupancy.all_full == (len(occupancy.full) == 5)
        assert occupancy.busy_s(now_s) == busy_s
        group = data.draw(GROUPS)
        if occupancy.full.isdisjoint(group):
            occupancy.begin(group, now_s)
            in_flight.append(group)
        elif in_flight:
            occupancy.end(in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1))), now_s)
        number = Counter(instance for group in in_flight for instance in group)
        busy_s = [seconds + bool(number[i]) for i, seconds in enumerate(busy_s)]


def test_receivers_of_a_step_derive_the_same_values() -> None:
    step = forward(1, (3, 1), MoveKV(number=2, request_id=0, copies=((BlockRef(3, 0), BlockRef(0, 5)),)), unknown_on=2)
    step.instances = (7,)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Forward)
    assert (again.instances, again.streams[0].sources, again.streams[0].targets) == ((1, 2, 3), (3,), (0,))
