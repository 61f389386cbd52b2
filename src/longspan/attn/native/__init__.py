"""Kernels of our own for bfloat16 on CPUs with AVX512_BF16, where PyTorch's are three times slower.

They are compiled on first use by g++ (or what CXX says). Without it, or on another processor, PyTorch's kernels do
the same work, as they do for other types and for what ours do not know.
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
from torch import Tensor

from longspan.attn.backends import Partial
from longspan.attn.backends.pytorch import TorchCpu
from longspan.attn.paged import PagedKv, PagedPlan
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Relation

_SOURCES = ("flash.cpp", "paged.cpp", "sparse.cpp")
_HEADERS = ("simd.h", "strips.h")
_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-fopenmp"),
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mfma"),
)
_FAR = 1 << 40
_MAX_DIM = 256
_TIMEOUT_S = 120.0
_FEWEST_QUERIES = 17
"""Packing the keys for fewer costs more than the products gain."""


class UnavailableError(Exception):
    """The kernel cannot be had on this machine; the message says why."""


class _Flash(ctypes.Structure):
    """`Problem` of flash.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse")),
        *((name, ctypes.c_long) for name in ("heads", "kv_heads", "queries", "keys", "dim")),
        *((name, ctypes.c_long) for name in ("q_head", "q_row", "k_head", "k_row", "v_head", "v_row")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_long) for name in ("lower", "upper", "dense")),
        ("kept", ctypes.c_void_p),
    )


class _Paged(ctypes.Structure):
    """`Problem` of paged.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "keys", "values", "out", "lse")),
        *((name, ctypes.c_void_p) for name in ("first_item", "blocks", "low", "high")),
        *((name, ctypes.c_long) for name in ("queries", "heads", "kv_heads", "dim", "block_size", "q_head", "q_row")),
        ("scale", ctypes.c_float),
    )


class _Rating(ctypes.Structure):
    """`Rating` of sparse.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "lse", "seen", "ratings")),
        *((name, ctypes.c_long) for name in ("heads", "kv_heads", "samples", "keys", "dim")),
        *((name, ctypes.c_long) for name in ("q_head", "k_head", "k_row")),
        ("scale", ctypes.c_float),
    )


class _Partial(ctypes.Structure):
    """`Partial` of sparse.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("out", "lse")),
        *((name, ctypes.c_long) for name in ("rows", "head", "row", "lse_head")),
        ("places", ctypes.c_void_p),
        ("kv_heads", ctypes.c_long),
    )


class _Merge(ctypes.Structure):
    """`Merge` of sparse.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("partials", "out", "lse")),
        *((name, ctypes.c_long) for name in ("number", "heads", "queries", "dim", "head", "row")),
    )


_library: ctypes.CDLL | None = None


def build(folder: Path) -> Path:
    """Compiles the kernels into `folder` unless they are there.

    Raises:
        UnavailableError: when the processor or the compiler lacks what is needed.
    """
    if "avx512_bf16" not in _processor_flags():
        raise UnavailableError("the processor has no AVX512_BF16")
    # Not clang++, whose OpenMP is another than that of PyTorch: two would compete for the cores.
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    texts = [Path(__file__).with_name(name).read_bytes() for name in (*_SOURCES, *_HEADERS)]
    key = hashlib.sha256(repr((texts, _FLAGS, compiler, torch.__version__)).encode()).hexdigest()[:16]
    library = folder / f"attention-{key}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise UnavailableError(f"{folder} belongs to somebody else, whose programs are not run")
        if not library.exists():
            _compile(compiler, library)
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"they cannot be compiled ({type(error).__name__}: {error})") from error
    return library


def load(library: Path) -> None:
    """Uses the kernel in this process from now on."""
    global _library  # noqa: PLW0603 - a library is loaded once per process
    _library = ctypes.CDLL(str(library))


def is_loaded() -> bool:
    return _library is not None


class NativeCpu(TorchCpu):
    """The kernels of this module, which must be loaded, and PyTorch's wherever they do not apply."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, spec: AttnSpec, *, dense: bool = False
    ) -> Partial:
        if q.shape[1] < _FEWEST_QUERIES or not _applies(q, spec, multiple=2):
            return super().attend(q, k, v, relation, spec, dense=dense)
        is_full = relation.kind == "full"  # maybe of several runs of keys, of which the relation is that of the last
        band = (-_FAR, _FAR) if is_full else (relation.lower, relation.upper)
        return _attended(q, k, v, spec, band=band, dense=dense)

    def attend_kept(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, spec: AttnSpec) -> Partial:
        """Packs the kept keys from where they are."""
        if q.shape[1] < _FEWEST_QUERIES or not indices.shape[1] or not _applies(q, spec, multiple=2):
            return super().attend_kept(q, k, v, indices, spec)
        return _attended(q, k, v, spec, kept=indices)

    def attend_paged(self, q: Tensor, kv: PagedKv, plan: PagedPlan, spec: AttnSpec) -> Partial:
        """Uses our own kernel for a dense pool, and PyTorch's otherwise."""
        if not _applies(q, spec, multiple=32):
            return super().attend_paged(q, kv, plan, spec)
        assert q.shape[1] == plan.num_queries, "the plan is for these queries"
        q = q if q.stride(-1) == 1 else q.contiguous()
        out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2], dtype=torch.float32)
        problem = _Paged(
            *(tensor.data_ptr() for tensor in (q, kv.keys, kv.values, out, lse)),
            *(numbers.ctypes.data for numbers in plan.items),
            *(q.shape[1], q.shape[0], kv.keys.shape[1], q.shape[2], kv.block_size, q.stride(0), q.stride(1)),
            spec.scale,
        )
        if _loaded().longspan_attend_paged_bf16(ctypes.byref(problem), torch.get_num_threads()):
            raise MemoryError("no memory for partial outputs")
        return out, lse

    def merge_into(self, out: Tensor, partials: Sequence[Partial], order: Tensor | None = None) -> Tensor:
        if not _is_bf16(out, *(one for one, _ in partials)):
            return super().merge_into(out, partials, order)
        lse = torch.empty(out.shape[:2], dtype=torch.float32)
        each = (_Partial * len(partials))(
            *(
                _Partial(one.data_ptr(), found.data_ptr(), one.shape[1], *one.stride()[:2], found.stride(0))
                for one, found in partials
            )
        )
        if order is not None:
            numbers = torch.arange(order.shape[1], dtype=torch.int32).expand_as(order)
            places = torch.empty(order.shape, dtype=torch.int32).scatter_(1, order.long(), numbers)
            for one in each[1:]:
                one.places, one.kv_heads = places.data_ptr(), len(places)
        problem = _Merge(
            *(ctypes.addressof(each), out.data_ptr(), lse.data_ptr()),
            *(len(partials), *out.shape, *out.stride()[:2]),
        )
        _loaded().longspan_merge_bf16(ctypes.byref(problem), torch.get_num_threads())
        return lse

    def rate(self, q: Tensor, lse: Tensor, seen: Tensor, k: Tensor, spec: AttnSpec) -> Tensor:
        if not _applies(q, spec, multiple=2):
            return super().rate(q, lse, seen, k, spec)
        q, lse, seen = q.contiguous(), lse.contiguous(), seen.to(torch.int64)
        k = k if k.stride(-1) == 1 else k.contiguous()
        ratings = torch.empty(k.shape[:2], dtype=torch.float32)
        problem = _Rating(
            *(tensor.data_ptr() for tensor in (q, k, lse, seen, ratings)),
            *(q.shape[0], k.shape[0], q.shape[1], k.shape[1], q.shape[2], q.stride(0), *k.stride()[:2]),
            spec.scale,
        )
        if _loaded().longspan_rate_bf16(ctypes.byref(problem), torch.get_num_threads()):
            raise MemoryError("no memory for packed keys")
        return ratings


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttnSpec,
    *,
    band: tuple[int, int] = (-_FAR, _FAR),
    dense: bool = False,
    kept: Tensor | None = None,
) -> Partial:
    """Calls the kernel for queries that see a band of the keys, or of those that are kept for each KV head."""
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q, k, v))
    kept = None if kept is None else kept.to(torch.int32).contiguous()
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2], dtype=torch.float32)
    problem = _Flash(
        *(tensor.data_ptr() for tensor in (q, k, v, out, lse)),
        *(q.shape[0], k.shape[0], q.shape[1], k.shape[1] if kept is None else kept.shape[1], q.shape[2]),
        *(stride for tensor in (q, k, v) for stride in tensor.stride()[:2]),
        spec.scale,
        *band,
        dense,
        None if kept is None else kept.data_ptr(),
    )
    if _loaded().longspan_attend_bf16(ctypes.byref(problem), torch.get_num_threads()):
        raise MemoryError("no memory for packed keys and values")
    return out, lse


def _is_bf16(*tensors: Tensor) -> bool:
    """Tells whether all are bfloat16 on a CPU, with dense rows."""
    return all(one.device.type == "cpu" and one.dtype == torch.bfloat16 and one.stride(-1) == 1 for one in tensors)


def _applies(q: Tensor, spec: AttnSpec, *, multiple: int) -> bool:
    """Tells whether a kernel that needs such a multiple as head size can compute `q [H, T, D]`."""
    return (
        q.device.type == "cpu"
        and q.dtype == torch.bfloat16
        and spec.softcap is None
        and q.shape[2] % multiple == 0
        and q.shape[2] <= _MAX_DIM
    )


def _loaded() -> ctypes.CDLL:
    assert _library is not None, "the kernels are loaded"
    return _library


def _compile(compiler: Sequence[str], library: Path) -> None:
    """Compiles beside `library`, and moves it there when it is whole and can be loaded."""
    # PyTorch's own OpenMP, so that there is one pool of threads: two would spin against each other.
    openmp = [str(path) for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        whole = Path(folder) / library.name
        parts = {Path(__file__).with_name(name): Path(folder) / f"{name}.o" for name in _SOURCES}
        steps: list[tuple[str, ...]] = [
            (*compiler, *_FLAGS, "-c", str(source), "-o", str(part)) for source, part in parts.items()
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


def _processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())
