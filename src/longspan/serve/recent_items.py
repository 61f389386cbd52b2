"""Items of recent responses, which later requests may name by their ids instead of sending them again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any

import msgspec

MAX_BYTES = 16 * 2**20
"""Bytes of kept items as JSON. More bytes serve references to older responses, at the cost of memory."""


class RecentItems:
    """Keeps the items of responses, up to a number of bytes. The items that were used least recently are removed.

    A client reads its own items only: it must send the key of the request that made them. Threads share this object.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._items: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = Lock()

    def add(self, key: str, items: Sequence[Mapping[str, Any]]) -> None:
        """Keep items under their ids for the client with `key`."""
        with self._lock:
            for item in items:
                name, data = (key, item["id"]), msgspec.json.encode(item)
                self._num_bytes += len(data) - len(self._items.pop(name, b""))
                self._items[name] = data
            while self._num_bytes > self._max_bytes:
                _, data = self._items.popitem(last=False)
                self._num_bytes -= len(data)

    def get(self, key: str, item_id: str) -> dict[str, Any] | None:
        """Return the item with this id, or None if it is unknown, too old, or of another client."""
        with self._lock:
            data = self._items.get((key, item_id))
            if data is None:
                return None
            self._items.move_to_end((key, item_id))
        item: dict[str, Any] = msgspec.json.decode(data)
        return item
