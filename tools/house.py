"""Count the code: lines of packages, long classes and files, closures of policies and exchanges, import circles.

    python tools/house.py [ROOT]      # prints the counts; ROOT is the folder of the package

`tests/test_house.py` holds the counts to the limits in `tests/limits/`, one file per package.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

MAX_CLASS, MAX_FILE = 300, 500
"""The largest number of lines of a class, and of a file."""
ROOT = Path(__file__).parents[1] / "src" / "longspan"


class House:
    """The modules of a package, by name, with their module-level imports.

    Args:
        root: the folder of the package.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self.files = {self._name(file): file for file in sorted(root.rglob("*.py"))}
        self.lines = {name: len(file.read_text(encoding="utf-8").splitlines()) for name, file in self.files.items()}
        self._trees = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in self.files.items()}
        self.imports = {name: set(self._imported(name, tree.body)) for name, tree in self._trees.items()}

    def _name(self, file: Path) -> str:
        parts = (self._root.name, *file.relative_to(self._root).with_suffix("").parts)
        return ".".join(parts).removesuffix(".__init__")

    def _imported(self, name: str, body: Iterable[ast.stmt]) -> Iterator[str]:
        """Yield the modules that statements import when the module loads, without imports for type checkers."""
        for statement in body:
            match statement:
                case ast.ImportFrom(module=str(module), level=0):
                    yield from self._known(module, statement.names)
                case ast.Import(names=names):
                    yield from (alias.name for alias in names if alias.name in self.files)
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    yield from self._imported(name, statement.orelse)
                case ast.If() | ast.Try() | ast.With():
                    yield from self._imported(name, statement.body)

    def _known(self, module: str, names: Iterable[ast.alias]) -> Iterator[str]:
        if module in self.files:
            yield module
        yield from (whole for alias in names if (whole := f"{module}.{alias.name}") in self.files)

    def closure(self, name: str) -> set[str]:
        """Return the modules that loading a module loads, including their parent packages."""
        loaded, waiting = set[str](), [name]
        while waiting:
            module = waiting.pop()
            if module in loaded:
                continue
            loaded.add(module)
            waiting += self.imports[module]
            if "." in module:
                waiting.append(module.rpartition(".")[0])
        return loaded

    def closure_lines(self, name: str) -> int:
        return sum(self.lines[module] for module in self.closure(name))

    def packages(self) -> dict[str, int]:
        """Return the lines of each package. Modules of the root count as one package."""
        counts = Counter[str]()
        for name, lines in self.lines.items():
            folder = self.files[name].parent
            counts["root" if folder == self._root else folder.relative_to(self._root).parts[0]] += lines
        return dict(sorted(counts.items()))

    def long_classes(self) -> dict[str, int]:
        """Return the lines of each class beyond `MAX_CLASS`, by module and name."""
        classes = (
            (f"{name}.{node.name}", (node.end_lineno or 0) - node.lineno + 1)
            for name, tree in self._trees.items()
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
        )
        return {name: lines for name, lines in classes if lines > MAX_CLASS}

    def long_files(self) -> dict[str, int]:
        """Return the lines of each module beyond `MAX_FILE`."""
        return {name: lines for name, lines in self.lines.items() if lines > MAX_FILE}

    def single_importers(self) -> list[str]:
        """Return the modules, without packages, that exactly one other module imports."""
        users = Counter(target for name, targets in self.imports.items() for target in targets if target != name)
        modules = (name for name, file in self.files.items() if file.name != "__init__.py")
        return [name for name in modules if users[name] == 1]

    def circles(self) -> list[tuple[str, str]]:
        """Return pairs of modules that load each other, without their parent packages."""
        reach = {name: self._reach(name) for name in self.files}
        return [(a, b) for a in self.files for b in reach[a] if a < b and a in reach[b]]

    def _reach(self, name: str) -> set[str]:
        reached, waiting = set[str](), [*self.imports[name]]
        while waiting:
            module = waiting.pop()
            if module not in reached:
                reached.add(module)
                waiting += self.imports[module]
        return reached


def main() -> None:
    """Print all counts."""
    house = House(*map(Path, sys.argv[1:]))
    _print("lines of packages", house.packages())
    _print(f"classes beyond {MAX_CLASS} lines", house.long_classes())
    _print(f"files beyond {MAX_FILE} lines", house.long_files())
    parts = (f"{house.files['longspan'].parent.name}.policy", "longspan.attn.exchanges")
    closures = {name: house.closure_lines(name) for name in house.files if name.rpartition(".")[0] in parts}
    _print("closures of policies and exchanges", closures)
    print(f"modules with one importer: {len(house.single_importers())} of {len(house.files)}")
    print(f"import circles: {len(house.circles())}")


def _print(title: str, counts: Mapping[str, int]) -> None:
    print(f"{title}: {sum(counts.values())} in {len(counts)}")
    for name, lines in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"  {lines:6} {name}")


if __name__ == "__main__":
    main()
