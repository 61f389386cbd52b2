"""Places on the hosts of a Ray cluster: their reservation, hosts that answer, and places that can be used again."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_CONNECT_TIMEOUT_S = 1.0
"""Seconds for a connection to a node's Ray process. Ray itself notices a cut link after about 65 s."""
_LOOK_S = 3.0
"""Seconds between looks for new places."""
_RETRY_S = 30.0
"""Seconds before a place where no rank can start is tried again."""
_JOIN_TIMEOUT_S = 5.0
_log = logging.getLogger("longspan")


@dataclass(frozen=True)
class Place:
    """The place of a rank: a bundle of resources on a Ray node, and the rank's number in the bundle."""

    bundle: int
    slot: int
    node: str


class Reservation:
    """CPUs and devices that Ray has reserved: one bundle for each group of ranks that shares a host.

    Each bundle is a placement group of its own. Ray puts it on its node if that has the resources, or else on another.
    Ray moves the bundle of a lost node to another node with enough resources.

    Args:
        bundles: the resources of each bundle.
        nodes: the node for each bundle. Empty: Ray chooses.
    """

    def __init__(self, bundles: Sequence[dict[str, float]], nodes: Sequence[str]) -> None:
        self._groups: list[PlacementGroup] = []
        try:
            for bundle, node in zip_longest(bundles, nodes):
                self._groups.append(placement_group([bundle], strategy="STRICT_PACK", _soft_target_node_id=node))
        except BaseException:
            self.close()
            raise

    def wait(self, timeout_s: float) -> bool:
        """Wait until all bundles have their resources. Return False after `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        return all(group.wait(max(0.0, deadline_s - time.monotonic())) for group in self._groups)

    def nodes(self) -> dict[int, str]:
        """Return the node of each bundle that has one."""
        table = placement_group_table()
        return {
            bundle: node
            for bundle, group in enumerate(self._groups)
            for node in table[group.id.hex()]["bundles_to_node_id"].values()
        }

    def place(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        """Return the strategy of an actor in a bundle."""
        return PlacementGroupSchedulingStrategy(self._groups[bundle], placement_group_bundle_index=0)

    def close(self) -> None:
        for group in self._groups:
            remove_placement_group(group)


def reason_of(error: Exception) -> str:
    """Return the reason in one line. The first line of an error inside an actor is the place of a traceback."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1] if isinstance(error, RayTaskError) else lines[0]


def answering(nodes: Mapping[str, dict[str, Any]]) -> set[str]:
    """Return the ids of the nodes that accept a connection. A killed node and a cut link are noticed at once."""
    if not nodes:
        return set()
    with ThreadPoolExecutor(len(nodes)) as threads:
        answers = threads.map(_answers, nodes.values())
        return {node for node, answer in zip(nodes, answers, strict=True) if answer}


def _answers(node: dict[str, Any]) -> bool:
    address = node["NodeManagerAddress"], node["NodeManagerPort"]
    try:
        with socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S):
            return True
    except OSError:
        return False


class LookOut:
    """Looks for places in a thread, while an engine uses fewer than it could.

    Args:
        usable: returns the bundles that live hosts have, with their nodes.
        prepare: prepares a bundle for a rank, until an event is set. Returns False if the rank would not start there.
    """

    def __init__(
        self, usable: Callable[[], Mapping[int, str]], prepare: Callable[[int, threading.Event], bool]
    ) -> None:
        self._usable, self._prepare = usable, prepare
        self._end, self._news = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def has_news(self) -> bool:
        return self._news.is_set()

    def begin(self, known: Iterable[int]) -> None:
        """Look for bundles besides the known ones, in place of an earlier look-out."""
        self.close()
        self._end, self._news = threading.Event(), threading.Event()
        arguments = {*known}, self._end, self._news
        self._thread = threading.Thread(target=self._look, args=arguments, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the look-out, and the preparation of a bundle, whose resources are then free."""
        self._end.set()
        self._news = threading.Event()
        if self._thread is not None:
            self._thread.join(_JOIN_TIMEOUT_S)

    def _look(self, known: set[int], end: threading.Event, news: threading.Event) -> None:
        retry_s = defaultdict[tuple[int, str], float](float)  # by place
        while not end.wait(_LOOK_S):
            try:
                for place in self._usable().items():
                    if end.is_set() or place[0] in known or time.monotonic() < retry_s[place]:
                        continue
                    if self._prepare(place[0], end):
                        known.add(place[0])
                        news.set()
                    retry_s[place] = time.monotonic() + _RETRY_S
            except (RayError, RuntimeError) as error:  # of a connection to Ray that has ended
                if not end.is_set():
                    _log.warning("no answer of Ray about places on hosts: %s", str(error).partition("\n")[0])
