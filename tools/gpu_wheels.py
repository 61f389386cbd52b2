"""Collect the wheels that `scripts/gpu_check.sh` needs on a machine with PyTorch and a GPU, but without an index.

    python tools/gpu_wheels.py FOLDER [--python 3.12] [--machine x86_64] [--there out/report.json]

The wheels have the versions that are installed here. Packages that the other machine has are excluded, unless their
version is known and does not fit. `--there` is a file with these packages. It is a report of the GPU check of that
machine, or a list in the format of `pip freeze`, with versions or without. The default list, `tools/gpu_machine.txt`,
was read on such a machine.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import distribution
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
_OF_TESTS = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
There = Mapping[str, str | None]
"""The packages of the other machine and their versions. None is an unknown version."""
_OLDEST_GLIBC, _NEWEST_GLIBC = 17, 34


def main() -> int:
    """Download the wheels and return pip's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="Python version of the other machine")
    parser.add_argument("--machine", default="x86_64")
    parser.add_argument("--there", type=Path, default=ROOT / "tools" / "gpu_machine.txt", metavar="FILE")
    args = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["gguf"], *_OF_TESTS]
    names = closure(required, args.python, packages_there(args.there))
    wheels = [f"{name}=={distribution(name).version}" for name in sorted(names)]
    glibcs = range(_OLDEST_GLIBC, _NEWEST_GLIBC + 1)
    platforms = [f"--platform=manylinux_2_{minor}_{args.machine}" for minor in glibcs]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    target = [f"--python-version={args.python}", *platforms, f"--dest={args.folder}"]
    code = subprocess.run([*command, *target, *wheels], check=False).returncode
    megabytes = sum(wheel.stat().st_size for wheel in args.folder.glob("*.whl")) / 1e6
    print(f"{len(wheels)} wheels, {megabytes:.1f} MB in {args.folder}: {', '.join(wheels)}")
    return code


def packages_there(file: Path) -> There:
    """Read the packages of a machine from the report of its GPU check, or from a list."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        results = [check["results"] for check in json.loads(text)["checks"] if check["name"] == "versions"]
        if not results or "versions" not in results[0]:
            raise SystemExit(f"{file} has no versions of packages: its check `versions` found none")
        return dict(results[0]["versions"]["installed"])
    lines = [re.split(r"\s*#", line)[0].strip() for line in text.splitlines()]
    named = [line.partition("==") for line in lines if line]
    return {canonicalize_name(name): version or None for name, _, version in named}


def closure(roots: Iterable[str], python: str, there: There) -> set[str]:
    """Return the names of all packages that requirements need on a Python version, by the packages installed here.

    Packages that are `there` in a version that fits are excluded, together with their own requirements.
    """
    version = {"python_version": python, "python_full_version": f"{python}.0"}
    environment: dict[str, str] = {**default_environment(), **version}  # type: ignore[dict-item]  # all are strings
    waiting = [Requirement(root) for root in roots]
    done = set[tuple[str, str]]()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if not _applies(requirement, environment) or _fits(requirement, there):
            continue
        for extra in {"", *requirement.extras}:
            if (name, extra) not in done:
                done.add((name, extra))
                required = map(Requirement, distribution(name).requires or ())
                waiting += [other for other in required if _applies(other, environment | {"extra": extra})]
    return {name for name, _ in done}


def _fits(requirement: Requirement, there: There) -> bool:
    name = canonicalize_name(requirement.name)
    version = there.get(name)
    return name in there and (version is None or requirement.specifier.contains(version, prereleases=True))


def _applies(requirement: Requirement, environment: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""} | environment)


if __name__ == "__main__":
    sys.exit(main())
