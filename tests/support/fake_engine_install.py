"""`fake_engine.py` in place of the real engine core, for tests that run the rest of a server in their own."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from longspan.serve import core_process


@contextmanager
def fake_engine_installed() -> Iterator[None]:
    """Use `fake_engine.py` for engine processes. No folder that is shared with one may be left."""
    with tempfile.TemporaryDirectory(prefix="ls-") as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", name)
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        patch.setattr(core_process, "ENGINE_MODULE", "fake_engine")
        yield
        assert not list(Path(name).glob("longspan-*"))


def told(events: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the messages of these kinds that fake engines received."""
    lines = map(json.loads, events.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["event"] in kinds]


async def until(true: Callable[[], bool], timeout_s: float = 60) -> None:
    """Run other tasks until the condition is true."""
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.02)
