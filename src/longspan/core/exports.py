"""A package's public names that load on first use (PEP 562), so that importing the package is quick."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_exports(package: str, owners: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Makes the package's `__getattr__` and `__dir__`, which give a name from its module, or a submodule itself.

    Args:
        package: its `__name__`.
        owners: by public name the module to import.
    """

    def load(name: str) -> object:
        if name not in owners:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(owners[name])
        value: object = module if owners[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *owners})

    return load, names
