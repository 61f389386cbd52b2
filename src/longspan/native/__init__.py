"""Our own kernels for bfloat16 on CPUs with AVX512_BF16. They use AMX if the processor has it.

They are compiled on first use by g++, or the compiler in CXX. PyTorch's kernels are used without a compiler, on other
processors, for other types and for unsupported cases. `attn.backends.native` calls the attention kernels, `model.fused`
the kernels of the layers around attention, and `native.chain` runs several kernels in one call.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

_SOURCES = ("flash.cpp", "sparse.cpp", "linear.cpp", "paged.cpp", "chain.cpp")
_HEADERS = ("simd.h", "tiles.h", "kernels.h")
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fopenmp"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
)
_AMX_FLAGS = ("-mamx-tile", "-mamx-bf16", "-DLONGSPAN_AMX")
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_TIMEOUT_S = 120.0


class UnavailableError(Exception):
    """This machine cannot compile or run the kernels. The message has the reason."""


_library: ctypes.CDLL | None = None


def build(folder: Path) -> Path:
    """Compile the kernels into `folder` unless it contains them.

    Raises:
        UnavailableError: if the processor or the compiler does not support them.
    """
    if "avx512_bf16" not in processor_flags():
        raise UnavailableError("the processor has no AVX512_BF16")
    flags = (*_FLAGS, *_AMX_FLAGS) if has_amx() else _FLAGS
    # Not clang++, since its OpenMP differs from that of PyTorch. Two would compete for the cores.
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    texts = [Path(__file__).with_name(name).read_bytes() for name in (*_SOURCES, *_HEADERS)]
    key = hashlib.sha256(repr((texts, flags, compiler, torch.__version__)).encode()).hexdigest()[:16]
    library = folder / f"kernels-{key}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise UnavailableError(f"{folder} belongs to another user, whose programs are not run")
        if not library.exists():
            _compile([*compiler, *flags], library)
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"they cannot be compiled ({type(error).__name__}: {error})") from error
    return library


def load(library: Path) -> None:
    """Use the kernels in this process from now on."""
    global _library  # noqa: PLW0603 - a library is loaded once per process
    has_amx()  # requests permission to use AMX
    _library = ctypes.CDLL(str(library))


def is_loaded() -> bool:
    return _library is not None


def loaded() -> ctypes.CDLL:
    assert _library is not None, "the kernels are loaded"
    return _library


def has_amx() -> bool:
    """Return True if this process may use AMX tiles for bfloat16. Requests them from the operating system."""
    if not {"amx_tile", "amx_bf16"} <= processor_flags():
        return False
    code: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return code == 0


def _compile(compiler: Sequence[str], library: Path) -> None:
    """Compile in a temporary folder, and move the result to `library` when it can be loaded."""
    # PyTorch's own OpenMP, so that there is one thread pool. Two would spin against each other.
    openmp = [str(path) for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        whole = Path(folder) / library.name
        parts = {Path(__file__).with_name(name): Path(folder) / f"{name}.o" for name in _SOURCES}
        steps: list[tuple[str, ...]] = [
            (*compiler, "-c", str(source), "-o", str(part)) for source, part in parts.items()
        ]
        linked = (*map(str, parts.values()), *(openmp or ["-lgomp"]), "-Wl,-z,defs")
        steps.append((*compiler, "-shared", *linked, "-o", str(whole)))
        steps.append((sys.executable, "-P", "-c", "import ctypes, sys, torch; ctypes.CDLL(sys.argv[1])", str(whole)))
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
            if done.returncode:
                words = next((line for line in done.stderr.splitlines() if "rror" in line), done.stderr[:200])
                raise UnavailableError(f"{Path(step[0]).name} failed: {words}")
        whole.replace(library)


def processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())
