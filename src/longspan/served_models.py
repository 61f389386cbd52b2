"""The layouts and the memory of a model, by its configuration alone, and the reason if longspan does not serve it.

Each layout is resolved as at a start, for a model whose weights take no memory. So the checks are those of a start, and
both store the results of trials on small copies under the same names.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from longspan import limits, native
from longspan.args import EngineArgs
from longspan.core.cluster import Cluster
from longspan.core.exchange import GATHER_HIDDEN, exchanges
from longspan.cost.memory import rank_block_bytes
from longspan.errors import ParameterError
from longspan.model.files import ModelError, Quantization, ResourceError, one_line, read_json
from longspan.model.folder import CONFIG, GENERATION_CONFIG
from longspan.model.quantization import quantised_bytes
from longspan.model.source import local_folder
from longspan.model.store import DTYPES
from longspan.planner.candidates import specs_of
from longspan.pool_sizes import KvBytes, by_rule, unbounded
from longspan.progress import Say
from longspan.resolve import EngineModel, ResolvedEngine
from longspan.runtime.pool import PROCESS_BYTES

Device = Literal["cpu", "cuda"]

_MAX_CONFIG_BYTES = 2**24
LENGTHS = (8 << 10, 128 << 10, 1 << 20)
"""Lengths in tokens for which the memory of KV is shown."""
_SHARED = tuple(exchange.kind for exchange in exchanges() if exchange.traits.level == "attention")
"""Exchanges that work with every model that two instances serve."""
LAYOUTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("1", ()),
    ("2", _SHARED),
    ("2", (GATHER_HIDDEN.kind,)),
    ("tp2", ()),
    ("tp4", ()),
    ("tp8", ()),
    ("pp2", ()),
)
"""The parallel specs that are tried, and the exchanges between their instances."""
_MAX_INSTANCE_RANKS = 8
"""Ranks of an instance in the layouts of a machine. Each number of shards and stages is tried on a copy, in seconds."""
_TYPES = "served_types.json"


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Layers that store equal KV and have equal windows.

    Attributes:
        window: the sliding window, or the size of chunks, in tokens. None: a token attends to all tokens before it.
        kv_bytes: bytes of keys and values per token and layer.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    kv_bytes: int

    def visible(self, num_tokens: int) -> int:
        """Return the bytes of KV in these layers that the last of `num_tokens` tokens attends to."""
        return self.num_layers * self.kv_bytes * min(num_tokens, self.window or num_tokens)


@dataclass(frozen=True, kw_only=True)
class KvSize:
    """KV of a request of `tokens` tokens.

    Attributes:
        stored_bytes: whole blocks of all layers. Pools also keep the tokens outside of sliding windows.
        visible_bytes: the part that the last token attends to.
        is_within_context: the model's context has that many tokens.
    """

    tokens: int
    stored_bytes: int
    visible_bytes: int
    is_within_context: bool


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A parallel spec with exchanges between its instances. A `reason` why it is refused, if it is."""

    parallel: str
    exchanges: tuple[str, ...]
    reason: str | None


@dataclass(frozen=True, kw_only=True)
class MachineLayout:
    """A layout on this machine.

    Attributes:
        kv_tokens: tokens in the KV pools of all instances.
        longest_request: in tokens, prompt and output together.
        kv_cache_memory_bytes: the option without which the pools are too small for the wanted length.
        reason: why a request of that length does not fit, or why the layout is refused. None if it fits.
    """

    parallel: str
    kv_tokens: int | None = None
    longest_request: int | None = None
    kv_cache_memory_bytes: int | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices of one kind. Cores are the devices of a CPU, which share `memory_bytes`. GPUs have that much each."""

    device: Device
    num_devices: int
    memory_bytes: int
    layouts: tuple[MachineLayout, ...]


@dataclass(frozen=True, kw_only=True)
class Support:
    """The answer about a model.

    Attributes:
        reason: why the model is not served. The other fields are not known then.
        weight_bytes: by dtype and quantization.
        request_tokens: the length that layouts of this machine should hold.
    """

    model: str
    model_type: str | None
    reason: str | None = None
    dtype: str | None = None
    quantization: Quantization | None = None
    context_length: int | None = None
    num_parameters: int | None = None
    weight_bytes: dict[str, int] | None = None
    layers: tuple[LayerKind, ...] = ()
    kv: tuple[KvSize, ...] = ()
    layouts: tuple[Layout, ...] = ()
    request_tokens: int | None = None
    machines: tuple[Machine, ...] = ()


def _path(model: str) -> Path:
    """Return the path of a model, which need not exist. Raise ModelError for a name that no file can have."""
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(f"model {model[:80]!r} is no usable path ({one_line(error)}): give another") from error
    return path


@contextmanager
def config_folder(model: str, *, trust_remote_code: bool) -> Iterator[Path]:
    """Yield a folder with the configuration of a model, which is an alias, a folder, a config.json or a hub id.

    Only the configuration is fetched from the hub, and code if it is trusted. A file may have any name.
    """
    path = _path(model)
    if path.suffix == ".gguf" or (path.is_dir() and not (path / CONFIG).is_file() and any(path.glob("*.gguf"))):
        raise ModelError(f"{model!r} has no config.json, which only a start makes of a GGUF file: give the original's")
    if not path.is_file() or path.name == CONFIG:
        wanted = [CONFIG, GENERATION_CONFIG, *(["*.py"] if trust_remote_code else [])]
        yield local_folder(str(path.parent) if path.is_file() else model, with_weights=False, wanted=wanted)
        return
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise ModelError(f"{path} is larger than any config.json: give the configuration, or the model's folder")
    read_json(path)
    with tempfile.TemporaryDirectory(prefix="longspan-config-") as folder:
        copied = Path(folder) / CONFIG
        shutil.copyfile(path, copied)
        try:
            yield Path(folder)
        except ModelError as error:
            raise type(error)(str(error).replace(str(copied), str(path))) from error


class Inspection:
    """The checks of one model with some options of an engine.

    Args:
        given: `dtype`, `quantization`, `max_model_len` and `trust_remote_code` count.
        folder: has the configuration.

    Raises:
        ValueError: the configuration cannot be read, or options are wrong.
    """

    def __init__(self, given: EngineArgs, folder: Path) -> None:
        if given.quantization is not None and given.required_dtype != "bfloat16":
            problem = f"{given.quantization} computes in bfloat16, but `dtype` {given.dtype} given: leave one out"
            raise ParameterError("quantization", problem, given.quantization)
        self._given, self._folder = given, folder
        self.model_type: str | None = read_json(folder / CONFIG).get("model_type")

    @cached_property
    def reason(self) -> str | None:
        """Why longspan does not serve the model, or None.

        Raises:
            ModelError: the configuration is invalid, or this machine cannot check it.
        """
        from transformers import CONFIG_MAPPING, __version__  # noqa: PLC0415 - seconds

        from longspan.model.skeleton import load_config  # noqa: PLC0415

        config = read_json(self._folder / CONFIG)
        kind = config.get("model_type")
        if isinstance(kind, str) and kind not in CONFIG_MAPPING and "auto_map" not in config:
            return f"transformers {__version__} has no model type {kind}: a later version may have it"
        load_config(self._folder, self._given.trust_remote_code)
        try:
            _ = self.model
        except ResourceError:
            raise
        except ModelError as error:
            return str(error)
        return self.layout(*LAYOUTS[0]).reason

    @cached_property
    def model(self) -> EngineModel:
        """The model with its facts, and with matrices that take no memory. Raise ModelError if it is not served."""
        options = self._options(device="cuda", load_format="dummy")  # each rank would draw its own matrices
        return EngineModel.of(replace(options, dtype=self._given.required_dtype))

    def layout(self, parallel: str, exchanges: tuple[str, ...]) -> Layout:
        """Try a layout on a small copy of the model, unless it was tried before.

        Raises:
            ParameterError: `max_model_len` exceeds the model's context.
            ResourceError: this machine cannot try it.
        """
        exchange = exchanges[0] if exchanges == (GATHER_HIDDEN.kind,) else "auto"
        options = self._options(parallel=parallel, exchange=exchange)
        reason = None
        try:
            ResolvedEngine.of(options, self.model, kv_bytes=unbounded)
        except ResourceError:
            raise
        except ValueError as error:
            if isinstance(error, ParameterError) and error.parameter == "max_model_len":
                raise
            reason = str(error)
        return Layout(parallel=parallel, exchanges=exchanges, reason=reason)

    def _options(self, **changes: Any) -> EngineArgs:  # noqa: ANN401 - options of several types
        """Return the options of an engine, whose weights are not quantised since kernels were not checked."""
        return replace(self._given, model=str(self._folder), quantization=None, **changes)

    @cached_property
    def num_parameters(self) -> int:
        return sum(weight.numel() for weight in self._skeleton.parameters())

    @cached_property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of all parameters, including embeddings, by dtype and quantization."""
        plain = {name: self.num_parameters * dtype.itemsize for name, dtype in DTYPES.items()}
        return plain | {name: quantised_bytes(self._skeleton, name) for name in get_args(Quantization)}

    @cached_property
    def _skeleton(self) -> Any:  # noqa: ANN401 - a module, whatever its class
        from longspan.model.skeleton import build_skeleton, load_config  # noqa: PLC0415 - seconds

        trusted = self._given.trust_remote_code
        skeleton = build_skeleton(load_config(self._folder, trusted), trusted)
        skeleton.tie_weights()
        return skeleton

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        specs, record = self.model.info.specs, self.model.record
        counts = Counter(
            (spec.num_kv_heads, spec.head_dim, spec.visibility.max_keys, layer.block_bytes // self._given.block_size)
            for spec, layer in zip(specs, record.layers, strict=True)
        )
        return tuple(
            LayerKind(num_layers=number, num_kv_heads=heads, head_dim=dim, window=window, kv_bytes=kv_bytes)
            for (heads, dim, window, kv_bytes), number in counts.items()
        )

    def kv(self, lengths: Sequence[int]) -> tuple[KvSize, ...]:
        size, block_bytes, layers = self._given.block_size, self.model.record.block_bytes, self.layers
        return tuple(
            KvSize(
                tokens=tokens,
                stored_bytes=-(-tokens // size) * block_bytes,
                visible_bytes=sum(kind.visible(tokens) for kind in layers),
                is_within_context=tokens <= self.model.info.context_length,
            )
            for tokens in lengths
        )

    @property
    def request_tokens(self) -> int:
        return self._given.max_model_len or self.model.info.context_length

    # ------------------------------------------------------------ this machine

    def specs(self, num_devices: int) -> list[str]:
        """Return the parallel specs that use all devices, and the spec of one rank."""
        specs = specs_of(num_devices, self.model.info.num_layers)
        return list(dict.fromkeys(["1", *(str(spec) for spec in specs if spec.tp * spec.pp <= _MAX_INSTANCE_RANKS)]))

    def on_machine(self, device: Device, parallel: str) -> MachineLayout:
        """Return whether weights and one request of `request_tokens` tokens fit in a layout of this machine."""
        if (reason := self._missing_kernels(device)) is not None:
            return MachineLayout(parallel=parallel, reason=reason)
        options = self._options(device=device, parallel=parallel, max_model_len=None)
        try:
            setup = ResolvedEngine.of(options, self.model, kv_bytes=self._kv_bytes(options))
        except ResourceError:
            raise
        except ValueError as error:
            return MachineLayout(parallel=parallel, reason=str(error))
        longest, cluster = setup.config.longest(setup.policy), setup.config.cluster
        num_tokens = sum(cluster.num_blocks) * options.block_size
        found = MachineLayout(parallel=parallel, kv_tokens=num_tokens, longest_request=longest)
        if longest >= self.request_tokens:
            return found
        block_bytes = rank_block_bytes(self.model.record, cluster, 0)
        num_bytes = block_bytes * -(-cluster.num_blocks[0] * self.request_tokens // longest)
        if device == "cuda":
            free = f"{block_bytes * cluster.num_blocks[0] / 2**30:.1f} GiB are left for it"
            return replace(found, reason=f"KV takes {num_bytes / 2**30:.1f} GiB per device, but {free}")
        needed = num_bytes * cluster.num_ranks + self._held(device, cluster) + PROCESS_BYTES
        available = limits.memory().available
        if needed <= available:
            return replace(found, kv_cache_memory_bytes=num_bytes)
        free = f"{available / 2**30:.1f} GiB are available"
        return replace(found, reason=f"weights and KV take {needed / 2**30:.1f} GiB, but {free}")

    def _kv_bytes(self, options: EngineArgs) -> KvBytes:
        """Return the rule of a start for the memory of KV, except that weights must fit into memory."""
        rule, device = by_rule(options), options.device

        def kv_bytes(cluster: Cluster, instance: int, weight_bytes: int) -> int:
            held, available = self._held(device, cluster), limits.memory().available
            if device == "cuda":
                return rule(cluster, instance, weight_bytes * held // self.weight_bytes[self.model.files.dtype])
            if held > available:
                free = f"{available / 2**30:.1f} GiB are available"
                raise ModelError(f"the weights take {held / 2**30:.1f} GiB, but {free}")
            return rule(cluster, instance, weight_bytes)

        return kv_bytes

    def _held(self, device: Device, cluster: Cluster) -> int:
        """Return the bytes of the weights that one instance reads. Shares of tp on CPUs read no quantised weights."""
        quantization = self._given.quantization if device == "cuda" or cluster.spec.tp == 1 else None
        return self.weight_bytes[quantization or self.model.files.dtype]

    def _missing_kernels(self, device: Device) -> str | None:
        """Return why a device has no kernels for the quantization, if it has none."""
        quantization = self._given.quantization
        if quantization is None:
            return None
        if device == "cuda":
            return None if find_spec("triton") else f"{quantization} needs Triton"
        return None if "avx512_bf16" in native.processor_flags() else f"{quantization} needs a CPU with AVX512_BF16"


def devices() -> Iterator[tuple[Device, int, int]]:
    """Yield the kinds of devices of this machine, with their number and memory as in `Machine`."""
    yield "cpu", limits.cores(), limits.memory().available
    if torch.cuda.is_available():
        yield "cuda", torch.cuda.device_count(), torch.cuda.mem_get_info(0)[0]


def inspect(model: str, given: EngineArgs, say: Say) -> Support:
    """Read the configuration of a model, and try layouts. `say` gets the layout under trial.

    Raises:
        ValueError: the model is not found, its configuration cannot be read, or options are wrong.
    """
    with config_folder(model, trust_remote_code=given.trust_remote_code) as folder:
        inspection = Inspection(given, folder)
        reason = inspection.reason and inspection.reason.replace(f"{folder}", model)
        support = Support(model=model, model_type=inspection.model_type, reason=reason)
        if support.reason is not None:
            return support
        layouts, machines = [], []
        for parallel, shared in LAYOUTS:
            say(f"trying {parallel}")
            layouts.append(inspection.layout(parallel, shared))
        for device, number, num_bytes in devices():
            own = []
            for parallel in inspection.specs(number):
                say(f"trying {parallel} on {device}")
                own.append(inspection.on_machine(device, parallel))
            machines.append(Machine(device=device, num_devices=number, memory_bytes=num_bytes, layouts=tuple(own)))
        return replace(
            support,
            dtype=inspection.model.files.dtype,
            quantization=given.quantization,
            context_length=inspection.model.info.context_length,
            num_parameters=inspection.num_parameters,
            weight_bytes=inspection.weight_bytes,
            layers=inspection.layers,
            kv=inspection.kv(sorted({*LENGTHS, inspection.request_tokens})),
            layouts=tuple(layouts),
            request_tokens=inspection.request_tokens,
            machines=tuple(machines),
        )


def served_types() -> tuple[str, dict[str, list[str]]]:
    """Return the types that `make models` found exact, with the layouts, and the version of transformers it ran."""
    stored: dict[str, Any] = json.loads(files("longspan").joinpath(_TYPES).read_text(encoding="utf-8"))
    return stored["transformers"], stored["types"]
