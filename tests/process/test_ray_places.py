"""Places on the hosts of a Ray cluster, without a cluster: failures of reservations, and the end of a look-out."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

ray: Any = pytest.importorskip("ray", reason="pip install 'longspan[ray]'")

from longspan.runtime.executor import ray_places  # noqa: E402 - needs Ray
from longspan.runtime.executor.ray_places import LookOut, Reservation, reason_of  # noqa: E402


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_reservation_that_fails_releases_its_first_bundles(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[int] = []

    def reserve(*_: object, **__: object) -> int:
        if len(reserved) == 2:
            raise error
        reserved.append(len(reserved))
        return reserved[-1]

    monkeypatch.setattr(ray_places, "placement_group", reserve)
    released: list[int] = []
    monkeypatch.setattr(ray_places, "remove_placement_group", released.append)
    with pytest.raises(error):
        Reservation([{"CPU": 1.0}] * 3, [])
    assert released == reserved == [0, 1]


def test_the_end_of_a_look_out_ends_its_preparation_and_no_other_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_places, "_LOOK_S", 0.01)
    prepared: list[int] = []
    begun = threading.Event()

    def prepare(bundle: int, end: threading.Event) -> bool:
        prepared.append(bundle)
        begun.set()
        return not end.wait(60)

    look_out = LookOut(lambda: {0: "a", 1: "b", 2: "c"}, prepare)
    look_out.begin([0])
    assert begun.wait(10)
    threads = threading.active_count()
    look_out.close()
    assert threading.active_count() == threads - 1
    time.sleep(0.1)
    assert prepared == [1] and not look_out.has_news


def test_the_reason_of_an_error_in_an_actor_is_the_error() -> None:
    cause = OSError("no interface has the address")
    failed = ray.exceptions.RayTaskError("RankActor.start", "Traceback:\n  at line 1\nOSError: no interface", cause)
    assert reason_of(failed.as_instanceof_cause()) == reason_of(failed) == "OSError: no interface"
    assert reason_of(ray.exceptions.RayActorError()).startswith("The actor")
    assert reason_of(ray.exceptions.GetTimeoutError("too late\nmore")) == "too late"
