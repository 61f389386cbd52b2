"""Fixtures for tests of real processes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture
def own_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other engines on this machine have their run folders elsewhere."""
    with tempfile.TemporaryDirectory(prefix="ls-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
