"""Entry points of installed packages: policies of the group `longspan.policies`, exchanges of `longspan.exchanges`.

The metadata of packages is read once per process. A package is imported when its name is first used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from longspan.errors import PluginError

_REMEDY = "update the distribution, or uninstall it"


@dataclass(frozen=True)
class Plugin:
    """An entry point, see `core.extensions.Extension`."""

    entry_point: EntryPoint

    @property
    def distribution(self) -> str:
        """The name and version of the package that has the entry point."""
        dist = self.entry_point.dist
        return "an unnamed distribution" if dist is None else f"{dist.name} {dist.version}"

    @property
    def origin(self) -> str:
        point = self.entry_point
        return f"entry point {point.name} = {point.value} of group {point.group} in distribution {self.distribution}"

    def load(self) -> object:
        """Import the object that the entry point names."""
        return self.resolve(self.entry_point.value)

    def check(self, reference: str) -> None:
        """Raise PluginError if the module of another object of the package does not exist. Do not import it."""
        module = reference.partition(":")[0]
        try:
            spec = find_spec(module)
        except (ImportError, ValueError):  # its package does not exist, or it is no name of a module
            spec = None
        if spec is None:
            raise PluginError(f"{self.origin} refers to {reference}, but there is no module {module}: {_REMEDY}")

    def resolve(self, reference: str) -> object:
        """Import another object of the package."""
        try:
            return EntryPoint(name=self.entry_point.name, value=reference, group=self.entry_point.group).load()
        except Exception as error:  # the package may raise anything
            problem = f"{self.origin} does not load {reference} ({type(error).__name__}: {error})"
            raise PluginError(f"{problem}: {_REMEDY}") from error


@cache
def find(group: str) -> Mapping[str, Plugin]:
    """Return the entry points of a group by name. Raise PluginError if two distributions have the same name."""
    plugins: dict[str, Plugin] = {}
    for entry_point in entry_points(group=group):
        plugin, other = Plugin(entry_point), plugins.get(entry_point.name)
        if other is not None and other.entry_point.value != entry_point.value:
            raise PluginError(f"{plugin.origin} has the name of {other.origin}: uninstall one of them")
        plugins[entry_point.name] = plugin
    return plugins
