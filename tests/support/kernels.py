"""Our own kernels in the process of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from longspan import native
from longspan.model.files import cache_root


@contextmanager
def loaded_kernels() -> Iterator[None]:
    """Load the kernels inside a block. Skip the test where the machine cannot have them."""
    try:
        library = native.build(cache_root() / "native")
    except native.UnavailableError as error:
        pytest.skip(str(error))
    native.load(library)
    try:
        yield
    finally:
        native._library = None
