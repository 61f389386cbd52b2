"""Names that installed packages add to the registries of policies and exchanges.

Every process loads this module, so it imports nothing. `longspan/__init__.py` sets `finder`, which does the I/O.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from typing import Protocol

    class Extension(Protocol):
        """An entry point of a package."""

        @property
        def origin(self) -> str:
            """The name and group of the entry point, and its distribution, for messages."""

        def load(self) -> object:
            """Import the object. Raise PluginError if that fails."""

        def check(self, reference: str) -> None:
            """Raise PluginError if there is no module for `module:name`, without importing it."""

        def resolve(self, reference: str) -> object:
            """Import the object that `module:name` refers to. Raise PluginError if that fails."""


POLICIES, EXCHANGES = "longspan.policies", "longspan.exchanges"

finder: "Callable[[str], Mapping[str, Extension]] | None" = None
"""Returns the extensions of a group by name."""


def extensions(group: str, built_in: "Collection[str]") -> "Mapping[str, Extension]":
    """Return the extensions of a group by name.

    Raises:
        PluginError: two packages have the same name, or a package has the name of a built-in.
    """
    found = {} if finder is None else finder(group)
    for name in found:
        if name in built_in:
            from longspan.errors import PluginError  # noqa: PLC0415 - rare

            raise PluginError(f"{found[name].origin} takes the name of a built-in: rename the entry point")
    return found
