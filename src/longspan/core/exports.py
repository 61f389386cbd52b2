"""Fast imports: public names that load on first use (PEP 562), without garbage collections meanwhile."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module


def lazy_exports(package: str, owners: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package. They return a name of a module, or a submodule itself.

    Args:
        package: its `__name__`.
        owners: the module to import for each public name.
    """

    def load(name: str) -> object:
        if name not in owners:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with uncollected():
            module = import_module(owners[name])
        value: object = module if owners[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *owners})

    return load, names


@contextmanager
def uncollected() -> Iterator[None]:
    """Stop garbage collection during imports. It would scan all modules repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
