"""The rendezvous store of ranks on several hosts: a `torch.distributed.Store` over the encrypted control plane.

PyTorch's own TCPStore accepts every client. The table of this store is a part of the controller's process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Self

import msgspec
import zmq
from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]  # public, but not in its __all__

from longspan.runtime.contact import Contact


class SetKey(msgspec.Struct, frozen=True, tag="set"):
    """Store a value. With `expected`, only in place of that value, or of no value if it is empty."""

    key: str
    value: bytes
    expected: bytes | None = None


class AddTo(msgspec.Struct, frozen=True, tag="add"):
    """Add to a number, which is 0 at first."""

    key: str
    amount: int


class GetKeys(msgspec.Struct, frozen=True, tag="get"):
    """Return the values of all keys. The answer waits until all of them exist."""

    keys: tuple[str, ...]


class CountKeys(msgspec.Struct, frozen=True, tag="count"):
    """Return the number of existing keys among `keys`, or of all keys."""

    keys: tuple[str, ...] | None = None


class DeleteKey(msgspec.Struct, frozen=True, tag="delete"):
    """Delete a key with its value. Return 1 if it existed, else 0."""

    key: str


Request = SetKey | AddTo | GetKeys | CountKeys | DeleteKey
Answer = tuple[bytes, ...]
"""Values, or one number as a decimal text, as PyTorch stores numbers."""


class StoreTable:
    """The keys and values of a store, and the requests that wait for keys."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: list[tuple[bytes, GetKeys]] = []
        self._decoder = msgspec.msgpack.Decoder(Request)

    def take(self, client: bytes, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Execute the request of a client. Yield clients with their answers, also of requests that waited."""
        request = self._decoder.decode(data)
        if isinstance(request, GetKeys):
            self._waiting.append((client, request))
        else:
            yield client, msgspec.msgpack.encode((self._execute(request),))
        for waiting in [(client, get) for client, get in self._waiting if self._values.keys() >= {*get.keys}]:
            self._waiting.remove(waiting)
            client, get = waiting
            yield client, msgspec.msgpack.encode([self._values[key] for key in get.keys])

    def _execute(self, request: SetKey | AddTo | CountKeys | DeleteKey) -> bytes:
        match request:
            case SetKey(key, value, expected):
                if expected is None or self._values.get(key, b"") == expected:
                    self._values[key] = value
                return self._values.get(key, expected or b"")
            case AddTo(key, amount):
                self._values[key] = _number(int(self._values.get(key, b"0")) + amount)
                return self._values[key]
            case CountKeys(None):
                return _number(len(self._values))
            case CountKeys(keys):
                return _number(sum(key in self._values for key in keys or ()))
            case DeleteKey(key):
                return _number(self._values.pop(key, None) is not None)


def _number(value: int) -> bytes:
    return str(int(value)).encode()


class ControllerStore(Store):
    """The store of a run, as a rank sees it. Threads may share it, since each request has a socket of its own.

    PyTorch calls the methods by these names. A request takes about a millisecond.
    """

    def __init__(self, contact: Contact) -> None:
        super().__init__()
        self._contact, self._context = contact, zmq.Context[zmq.Socket[bytes]]()
        self._decoder = msgspec.msgpack.Decoder(Answer)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(SetKey(key, _data(value)))

    def get(self, key: str) -> bytes:
        return self._ask(GetKeys((key,)))[0]

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(AddTo(key, amount))[0])

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        return self._ask(SetKey(key, _data(value), _data(expected)))[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(GetKeys(tuple(keys)), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return int(self._ask(CountKeys(tuple(keys)))[0]) == len(keys)

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - the name in C++
        return self._ask(DeleteKey(key))[0] == b"1"

    def getNumKeys(self) -> int:  # noqa: N802 - the name in C++
        return int(self._ask(CountKeys())[0])

    def clone(self) -> Self:
        return self

    def close(self) -> None:
        """Close its sockets. No request is under way."""
        self._context.destroy(linger=0)

    def _ask(self, request: Request, timeout: timedelta | None = None) -> Answer:
        """Return the answer to a request. Raise DistStoreError after the timeout."""
        limit: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]  # of C++
        assert self._contact.store is not None, "the controller has a store"
        socket = self._context.socket(zmq.REQ)
        socket.sndtimeo = socket.rcvtimeo = int(limit.total_seconds() * 1000)  # a refused client cannot even send
        try:
            if self._contact.keys is not None:
                self._contact.keys.encrypt(socket)
            socket.connect(self._contact.store)
            socket.send(msgspec.msgpack.encode(request))
            return self._decoder.decode(socket.recv())
        except zmq.Again as error:
            raise DistStoreError(f"the rendezvous store did not answer {request!r:.200} for {limit}") from error
        finally:
            socket.close(linger=0)


def _data(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
