"""A transport that orders calls as NCCL does: no tags, each communicator runs a rank's calls one after the other.

A call is a group of sends and receives, which run together when all calls before it on this rank are over. A send and
a receive meet when the calls of both are running, and a sum when those of all its ranks are. A hang on NCCL
fails here at once, and the error names the circle of calls that wait for each other. A message in the wrong buffer is
found by its tag or its size.

Streams of a CUDA device share hardware queues. A call at the head of a queue that waits for a peer blocks all calls
behind it, also calls of other communicators. `shared_queues` models this.
"""

from __future__ import annotations

import threading
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from longspan.attn.comm import Calls, CommError, Pending, Sums


@dataclass(eq=False)
class _Call:
    """One rank's grouped call. `sends` and `receives` are the messages without a counterpart so far.

    Or its term of a sum, until that is made: then the term has become the sum.

    Attributes:
        waiter: wakes the thread that waits for the call. None while no thread waits.
    """

    communicator: str
    rank: int
    tag: int = 0
    sends: dict[int, Tensor] = field(default_factory=dict)
    receives: dict[int, Tensor] = field(default_factory=dict)
    term: Tensor | None = None
    members: Sequence[int] = ()
    number: int = 0
    waiter: threading.Condition | None = None

    @property
    def is_over(self) -> bool:
        return not self.sends and not self.receives and self.term is None

    @property
    def peers(self) -> set[int]:
        return {*self.sends, *self.receives, *self.members} - {self.rank}

    def __str__(self) -> str:
        if self.members:
            return f"rank {self.rank}'s sum {self.number} on {self.communicator}"
        parts = [f"to {peer}" for peer in self.sends] + [f"from {peer}" for peer in self.receives]
        return f"rank {self.rank}'s call {self.number} on {self.communicator} (tag {self.tag}, {', '.join(parts)})"


QueueOf = Callable[[str], Hashable]
"""Return the hardware queue of a communicator. Each device has one such queue of its own."""


def own_queue(communicator: str) -> Hashable:
    """Return a hardware queue that no other communicator uses."""
    return communicator


def shared_queues(number: int) -> QueueOf:
    """Spread the communicators over `number` hardware queues. With 1 all calls of a device run one after the other."""
    return lambda communicator: zlib.crc32(communicator.encode()) % number


@dataclass
class Fabric:
    """The hardware queues of all ranks, and the call that each thread waits for.

    A thread wakes when its call is over, when a rank is gone or when a call fails. It sleeps through other messages.
    """

    timeout_s: float = 60.0
    queue_of: QueueOf = own_queue
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _queues: defaultdict[tuple[int, Hashable], deque[_Call]] = field(default_factory=lambda: defaultdict(deque))
    _numbers: defaultdict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    _callers: dict[tuple[str, int], threading.Thread] = field(default_factory=dict)
    _threads: defaultdict[int, set[threading.Thread]] = field(default_factory=lambda: defaultdict(set))  # by rank
    _waiting: dict[threading.Thread, _Call] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)
    _opened: defaultdict[int, list[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(list))  # of how many
    _num_opened: defaultdict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    _failure: str = ""

    def open(self, rank: int, num_ranks: int, groups: Sequence[Sequence[int]]) -> None:
        """Make communicators among `num_ranks` ranks. All ranks must make the same ones in the same order."""
        with self._lock:
            opened = self._opened[num_ranks]
            for members in map(tuple, groups):
                number = self._num_opened[rank, num_ranks]
                self._num_opened[rank, num_ranks] += 1
                if number == len(opened):
                    opened.append(members)
                if opened[number] != members:
                    self._fail(f"rank {rank} opens {members} where another opens {opened[number]}")

    def add(self, lane: str, rank: int, num_ranks: int, members: Sequence[int], term: Tensor) -> Tensor:
        """Replace a term by the sum of the terms of all members. Wait for them."""
        with self._lock:
            opened = self._opened[num_ranks][: self._num_opened[rank, num_ranks]]
            assert tuple(members) in opened and rank in members, f"rank {rank} has opened {opened}, not {members}"
        name = f"{lane} of {tuple(members)} among {num_ranks}"
        self.wait(self._enter(_Call(name, rank, term=term, members=members)))
        return term

    def call(self, communicator: str, rank: int, sends: Calls, receives: Calls, tag: int) -> _Call:
        call = _Call(communicator, rank, tag, dict(sends), dict(receives))
        assert len(call.sends) == len(sends) and len(call.receives) == len(receives), "one message per peer"
        return self._enter(call)

    def _enter(self, call: _Call) -> _Call:
        with self._lock:
            key, rank = (call.communicator, call.rank), call.rank
            self._check(rank)
            call.number = self._numbers[key]
            self._numbers[key] += 1
            self._queue(call).append(call)
            self._callers[key] = threading.current_thread()
            self._threads[rank].add(threading.current_thread())
            self._run(call)
            self._look_for_circle(call)
            return call

    def wait(self, call: _Call) -> None:
        thread = threading.current_thread()
        with self._lock:
            if call.is_over:
                return
            self._waiting[thread] = call
            call.waiter = threading.Condition(self._lock)
            try:
                self._look_for_circle(call)
                is_over = call.waiter.wait_for(
                    lambda: call.is_over or self._failure or self._gone & {call.rank, *call.peers}, self.timeout_s
                )
            finally:
                call.waiter = None
                del self._waiting[thread]
            if not call.is_over:
                self._check(call.rank)
                peers = self._gone & call.peers
                raise CommError(f"rank {peers} is gone" if is_over else f"{call} waited for {self.timeout_s} s")

    def close(self, rank: int) -> None:
        with self._lock:
            self._gone.add(rank)
            self._wake_all()

    @property
    def left(self) -> list[str]:
        """The calls that are not over."""
        return [str(call) for queue in self._queues.values() for call in queue]

    def _check(self, rank: int) -> None:
        if self._failure:
            raise CommError(self._failure)
        if rank in self._gone:
            raise CommError(f"rank {rank} is gone")

    def _fail(self, words: str) -> None:
        self._failure = words
        self._wake_all()
        raise CommError(words)

    def _wake_all(self) -> None:
        for call in self._waiting.values():
            _wake(call)

    def _queue(self, call: _Call, rank: int | None = None) -> deque[_Call]:
        """Return the hardware queue of a call, or of its counterpart on another rank."""
        return self._queues[call.rank if rank is None else rank, self.queue_of(call.communicator)]

    def _running(self, call: _Call, rank: int) -> _Call | None:
        """Return the running call of a rank on the communicator of a call."""
        queue = self._queue(call, rank)
        return queue[0] if queue and queue[0].communicator == call.communicator else None

    def _run(self, call: _Call) -> None:
        """Run a call if it is the first of its queue, and all calls that can run then."""
        changed = [call]
        while changed:
            queue = self._queue(changed.pop())
            while queue and (head := queue[0]):
                ended = self._meet(head)
                for other in ended:
                    _wake(self._queue(other).popleft())
                changed += [other for other in ended if other is not head]
                if head not in ended:
                    break

    def _meet(self, call: _Call) -> list[_Call]:
        """Exchange messages with the peers' running calls. Return the calls that are over."""
        self._meet_all(call)
        others = [other for peer in call.peers if (other := self._running(call, peer)) is not None]
        for other in others:
            for source, target in ((call, other), (other, call)):
                if target.rank in source.sends and source.rank in target.receives:
                    self._deliver(source, target)
        return [one for one in (call, *others) if one.is_over]

    def _deliver(self, source: _Call, target: _Call) -> None:
        buffer, room = source.sends.pop(target.rank), target.receives.pop(source.rank)
        if target.tag != source.tag or room.nbytes != buffer.nbytes:
            self._fail(f"{source} of {buffer.nbytes} bytes reaches {target}, which has room for {room.nbytes}")
        room.copy_(buffer)

    def _meet_all(self, call: _Call) -> None:
        """Make a sum if all terms are there, not in the order of the ranks."""
        running = [other for member in call.members if (other := self._running(call, member)) is not None]
        if call.term is None or len(running) < len(call.members):
            return
        terms = [one.term for one in running if one.term is not None]
        if any((term.shape, term.dtype) != (call.term.shape, call.term.dtype) for term in terms):
            self._fail(f"{call} adds what is not alike: {[tuple(term.shape) for term in terms]}")
        total = sum(terms[1:-1], terms[-1].clone()) + terms[0]
        for one, term in zip(running, terms, strict=True):
            term.copy_(total)
            one.term = None

    def _look_for_circle(self, call: _Call) -> None:
        """Fail if a call waits for itself, also through other calls."""
        way: list[_Call] = []
        done: set[int] = set()

        def visit(one: _Call) -> None:
            if one in way:
                circle = [*way[way.index(one) :], one]
                self._fail("no call can go on: " + ", which waits for ".join(map(str, circle)))
            if id(one) in done:
                return
            way.append(one)
            for following in self._blockers(one):
                visit(following)
            way.pop()
            done.add(id(one))

        visit(call)

    def _blockers(self, call: _Call) -> Iterator[_Call]:
        """Yields the calls without whose end this one does not end."""
        if call.is_over:
            return
        if (head := self._queue(call)[0]) is not call:
            yield head
            return
        for peer in call.peers:
            other = next((one for one in self._queue(call, peer) if one.communicator == call.communicator), None)
            if other is not None:
                if not call.members or other is not self._running(call, peer):
                    yield other  # of something else, or behind another call: matching messages were delivered
                continue  # else it has called, and waits for the same ranks
            caller = self._caller(call.communicator, peer)
            if caller is not None and (waited := self._waiting.get(caller)) is not None:
                yield waited  # the calling thread waits for something

    def _caller(self, communicator: str, rank: int) -> threading.Thread | None:
        """Return the thread that has called for a rank there, or the only thread of the rank. None if unknown."""
        known = self._threads[rank]
        return self._callers.get((communicator, rank), next(iter(known)) if len(known) == 1 else None)


def _wake(call: _Call) -> None:
    if call.waiter is not None:
        call.waiter.notify()


class InOrderTransport:
    """One rank's end of a lane.

    Args:
        is_grouped: all messages of a call go through one communicator of all ranks. Otherwise each message is a call
            of its own, and goes through the communicator of its pair of ranks.
        summing: number of ranks whose communicators were opened for sums. 0 for a transport without sums.
    """

    tagged = False

    def __init__(self, fabric: Fabric, rank: int, lane: str, *, is_grouped: bool = True, summing: int = 0) -> None:
        self._fabric, self._rank, self._lane, self._is_grouped = fabric, rank, lane, is_grouped
        self.sums: Sums | None = partial(fabric.add, lane, rank, summing) if summing else None

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        if self._is_grouped:
            return _Waiting(self._fabric, [self._fabric.call(self._lane, self._rank, sends, receives, tag)])
        calls = [self._call(peer, [], [(peer, room)], tag) for peer, room in receives]
        return _Waiting(self._fabric, calls + [self._call(peer, [(peer, one)], [], tag) for peer, one in sends])

    def complete_sends(self) -> None:
        """Waits for nothing, as with NCCL."""

    def _call(self, peer: int, sends: Calls, receives: Calls, tag: int) -> _Call:
        low, high = sorted((self._rank, peer))
        return self._fabric.call(f"{self._lane} of {low} and {high}", self._rank, sends, receives, tag)


class _Waiting:
    def __init__(self, fabric: Fabric, calls: list[_Call]) -> None:
        self._fabric, self._calls = fabric, calls

    def wait(self) -> None:
        for call in self._calls:
            self._fabric.wait(call)
