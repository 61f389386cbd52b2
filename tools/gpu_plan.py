"""The checks of a machine with a CUDA device: their commands, their seconds, and the aims for their results."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

GRACE_S = 4.0
"""Seconds from the signal that interrupts a check to the signal that kills it. They are part of the check's own."""
TOTAL_S = {"quick": 148.0, "full": 588.0}
"""Seconds of all checks: a machine may be borrowed for ten minutes a command, and a rerun of `quick` must fit, too."""
INSTALL_S = 40.0
LONGEST = 2**17
"""Tokens of the prompt that `quick` measures."""
_KERNELS = "tests/gpu/test_gpu_kernels.py"
_MEMORY = "tests/gpu/test_gpu_memory.py"


@dataclass(frozen=True)
class Check:
    """One command, run by the interpreter of the checks.

    Attributes:
        seconds: reserved for the check, independent of the seconds that earlier checks take.
        at_most: limit with the unused seconds of earlier checks included.
        results: JSON files in the folder of results, which become part of the report.
        junit: XML of tests in that folder.
        printed: the JSON that the command prints is a result with this name.
        stops: True if later checks are useless when this check fails.
        needs: earlier checks whose files it reads.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    at_most: float
    results: tuple[str, ...] = ()
    junit: str | None = None
    printed: str | None = None
    stops: bool = False
    needs: tuple[str, ...] = ()


def plan(mode: str, folder: str, packages: str, wheels: tuple[str, ...]) -> list[Check]:
    """Return the checks of `quick` or `full`, in their order.

    Args:
        folder: for results that the commands write.
        packages: folder of installed wheels.
    """
    checks = _install(packages, wheels) + _quick(folder, packages)
    if mode == "full":
        checks += _full(folder)
    assert sum(check.seconds for check in checks) <= TOTAL_S[mode], "each check has its seconds"
    return checks


def _install(packages: str, wheels: tuple[str, ...]) -> list[Check]:
    if not wheels:
        return []
    pip = ("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir")
    command = (*pip, "--disable-pip-version-check", "--upgrade", "--target", packages, *wheels)
    return [Check("wheels", command, seconds=14, at_most=INSTALL_S, stops=True)]


def _quick(folder: str, packages: str) -> list[Check]:
    versions = ("benchmarks/gpu_versions.py", "--json", f"{folder}/versions.json", "--carried", packages)
    ceilings = ("benchmarks/gpu_ceilings.py", "--json", f"{folder}/ceilings.json")
    prompt = ("--parts", "chosen", "--lengths", str(LONGEST), "--batches", "1", "--warm", "1", "--limit-s", "600")
    return [
        Check("versions", versions, seconds=8, at_most=25, results=("versions",)),
        Check("ceilings", ceilings, seconds=10, at_most=25, results=("ceilings",)),
        Check("compile", ("tests/gpu/compile_kernels.py",), seconds=12, at_most=40),
        _tests("kernels", folder, seconds=18, at_most=45, files=(_KERNELS,)),
        Check("reads", _of_8b(folder, "--parts", "reads"), seconds=10, at_most=45, results=("8b_reads",)),
        Check("prompt_128k", _of_8b(folder, *prompt), seconds=25, at_most=110, results=("8b_chosen",)),
    ]


def _full(folder: str) -> list[Check]:
    shape = f"{folder}/shape"
    model = ("--device", "cuda", "--dtype", "bfloat16", "--load-format", "dummy")
    measured = ("--threads-per-rank", "1", "--lengths", "128,1024,2048,4096", "--repeats", "2")
    profile = ("-m", "longspan", "profile", shape, *model, *measured, "--json")
    served = ("--instances", "1", "--policies", "chunked", "--num-requests", "40")
    judged = ("--stored", "--within", "0.1", "--json", f"{folder}/twin.json")
    twin = ("benchmarks/twin.py", "--model", shape, *model, *served, *judged)
    checks = [
        _tests(
            "models",
            folder,
            seconds=95,
            at_most=200,
            files=("tests/gpu", f"--ignore={_KERNELS}", f"--ignore={_MEMORY}"),
        ),
        _tests("memory", folder, seconds=60, at_most=170, files=(_MEMORY,), processes=0),
    ]
    for ranks in ("2", "4"):
        exchanges = ("-m", "longspan.attn.check", "--device", "cuda", "--ranks", ranks, "--cases", "5")
        checks.append(Check(f"exchanges_{ranks}", exchanges, seconds=15, at_most=30))
    for kernel in ("chosen", "cudnn", "flash"):
        command = _of_8b(folder, "--parts", kernel, "--limit-s", "12")
        checks.append(Check(f"8b_{kernel}", command, seconds=50, at_most=90, results=(f"8b_{kernel}",)))
    among_chats = _of_8b(folder, "--parts", "mixed", "--mixed-length", str(LONGEST // 2), "--batches", "1", "32")
    checks.append(Check("8b_mixed", among_chats, seconds=30, at_most=100, results=("8b_mixed",)))
    peer = _of_8b(folder, "--parts", "transformers")
    checks.append(Check("8b_transformers", peer, seconds=20, at_most=40, results=("8b_transformers",)))
    checks.append(Check("shape", _of_8b(folder, "--parts"), seconds=8, at_most=60))
    checks.append(Check("profile", profile, seconds=30, at_most=150, printed="profile", needs=("shape",)))
    checks.append(Check("twin", twin, seconds=40, at_most=100, results=("twin",), needs=("shape", "profile")))
    return checks


def chosen(checks: Sequence[Check], names: Collection[str]) -> list[Check]:
    """Return the named checks, the checks that they need, and the installation of wheels, in their order."""
    needed = {name for check in checks if check.name in names for name in check.needs}
    return [check for check in checks if check.stops or check.name in needed.union(names)]


def _tests(
    name: str, folder: str, *, seconds: float, at_most: float, files: tuple[str, ...], processes: int = 4
) -> Check:
    """Run tests with the required plugins only. A test that takes a minute fails, and the next test runs."""
    plugins = ("-p", "xdist", "-p", "timeout", "-p", "no:cacheprovider")
    options = (
        "-n",
        str(processes),
        "--timeout",
        "60",
        "--timeout-method",
        "signal",
        "--durations",
        "5",
        f"--junitxml={folder}/{name}.xml",
    )
    command = ("-m", "pytest", "-q", *plugins, *options, "-m", "gpu and not full", *files)
    return Check(name, command, seconds=seconds, at_most=at_most, junit=f"{name}.xml")


def _of_8b(folder: str, *options: str) -> tuple[str, ...]:
    return ("benchmarks/gpu_8b.py", folder, "--checkpoint", f"{folder}/shape", *options)


# ---------------------------------------------------------------- aims


@dataclass(frozen=True)
class Aim:
    """A minimum share of a ceiling that was measured on the same card in the same run.

    Attributes:
        check: the check with the result.
        file: the result's name.
        rows: the list in the result.
        value: the field of a row that is a share.
        wanted: the minimum share. It is an aim, not an earlier measurement.
        where: the fields that a row must have.
    """

    name: str
    check: str
    file: str
    rows: str
    value: str
    wanted: float
    where: tuple[tuple[str, int], ...]

    def judge(self, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the aim with the measured share, which is None without a measurement."""
        rows = results.get(self.check, {}).get(self.file, {}).get(self.rows, [])
        shares = [row.get(self.value) for row in rows if all(row.get(key) == value for key, value in self.where)]
        share = shares[0] if shares else None
        return {
            "aim": self.name,
            "wanted": self.wanted,
            "share": share,
            "met": share is not None and share >= self.wanted,
        }


_SHORT = 2**13
_QUICK = (
    Aim(
        "128K prompt, of the bfloat16 product",
        "prompt_128k",
        "8b_chosen",
        "prompts",
        "mfu",
        0.5,
        (("length", LONGEST),),
    ),
    Aim("reads of 8 x 32K, of a copy", "reads", "8b_reads", "reads", "share", 0.7, (("context", 2**15), ("batch", 8))),
    Aim(
        "reads of 1 x 128K, of a copy", "reads", "8b_reads", "reads", "share", 0.7, (("context", LONGEST), ("batch", 1))
    ),
)
_FULL = (
    Aim("8K prompt, of the bfloat16 product", "8b_chosen", "8b_chosen", "prompts", "mfu", 0.5, (("length", _SHORT),)),
    Aim(
        *("decode step of 1 x 8K, of a copy", "8b_chosen", "8b_chosen", "steps", "share", 0.6),
        (("context", _SHORT), ("batch", 1)),
    ),
)


def aims(mode: str, results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return each aim of a mode with the share that the results of its checks reach."""
    return [aim.judge(results) for aim in (*_QUICK, *(_FULL if mode == "full" else ()))]
