"""Weights are stored once per host, and every worker maps them: each model and dtype has a folder in the cache.

`weights.json` describes the model: its ModelInfo, and the place of each parameter and buffer by its name in the module
tree. A place lies in the checkpoint's own safetensors files if these hold the tensor as `from_pretrained` leaves it.
All other tensors are in `tensors.bin`: converted to the dtype, stacked experts, rotary frequencies. Tied tensors and
equal bytes are stored once.

Dummy weights for devices other than CPUs are not stored. The file describes the matrices, and each rank draws them.
"""

import hashlib
import json
import logging
import os
import shutil
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import IO

import msgspec
import torch
from filelock import FileLock
from safetensors import SafetensorError
from torch import Tensor, nn

from longspan.model.contents import check_unchanged, hash_files, joint_hash
from longspan.model.files import (
    HashedFile,
    ModelError,
    ModelFiles,
    Quantization,
    cache_root,
    make_writable,
    not_written,
    one_line,
)
from longspan.model.folder import description_files, weight_files
from longspan.model.info import ModelInfo
from longspan.model.mapped import MappedFile, Place

_FORMAT = 6
"""The version of the file layout, and of the checks that a model passes before its file is written."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NUMBERS, GRID = ".numbers", ".grid"
"""Suffixes of the names of levels, after the name of the weight."""
DESCRIPTION, TENSORS = "weights.json", "tensors.bin"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WeightForm:
    """The form in which the weights of a checkpoint are stored. Its fields are part of the name of the file's folder.

    Attributes:
        dummy_seed: draw random weights, as transformers initialises a new model. The checkpoint needs no weights then.
        drawn: leave the matrices of dummy weights out of the file, see `StoredTensors`.
        quantization: round the matrices, and store their levels too, see `quantization.map_levels`.
    """

    dtype: str
    dummy_seed: int | None = None
    drawn: bool = False
    quantization: Quantization | None = None
    trust_remote_code: bool = False


def ensure_weights(config_dir: Path, form: WeightForm) -> tuple[Path, tuple[HashedFile, ...]]:
    """Return the description of the weights of the model in `config_dir`, and the files that it names.

    The first use checks the model and writes its folder, whose name is a hash of the checkpoint's contents. The folder
    also has a copy of the configuration. Raise ModelError if the model cannot be served, or the checkpoint does not
    match its configuration.
    """

    def hashed() -> tuple[str, list[HashedFile]]:
        sources = description_files(config_dir, trust_remote_code=form.trust_remote_code)
        if form.dummy_seed is None:
            sources |= weight_files(config_dir)
        files = hash_files(sources)
        formats = [_FORMAT, msgspec.json.schema(ModelInfo), version("transformers")]
        identity = [*formats, joint_hash(files), *astuple(form)]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32], files

    name, files = hashed()
    folder = cache_root() / "weights" / name
    if not folder.is_dir():
        from longspan.model.checkpoint import write_weights  # noqa: PLC0415 - imports transformers' models: seconds
        from longspan.model.probe import check_supported  # noqa: PLC0415

        def build(unfinished: Path) -> None:
            log.info("adding the %s weights of %s to the cache, once", form.quantization or form.dtype, config_dir)
            write_weights(config_dir, unfinished, form)
            for file, path in description_files(config_dir, trust_remote_code=form.trust_remote_code).items():
                (unfinished / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, unfinished / file)
            if hashed()[0] != name:
                raise ModelError(f"{config_dir} changed while it was read: start again when it is complete")

        check_supported(config_dir, form.trust_remote_code)
        build_once(folder, build)
    description = read_description(folder / DESCRIPTION)
    for note in description.notes:
        log.warning("%s: %s", config_dir, note)
    return folder / DESCRIPTION, tuple(file for file in files if file.name in description.files)


class Matrices(msgspec.Struct, frozen=True, kw_only=True):
    """The matrices of dummy weights that ranks draw: normally distributed elements.

    Attributes:
        deviation: the standard deviation of the elements.
        shapes: by the names of the matrices.
    """

    seed: int
    dtype: str
    deviation: float
    shapes: dict[str, tuple[int, ...]]

    def draw(self, name: str, device: torch.device) -> Tensor:
        """Draw a whole matrix. It depends only on its name, the seed and the kind of device."""
        seed = int.from_bytes(hashlib.sha256(f"{self.seed} {name}".encode()).digest()[:8])
        generator = torch.Generator(device).manual_seed(seed)
        matrix = torch.empty(self.shapes[name], dtype=DTYPES[self.dtype], device=device)
        return matrix.normal_(0.0, self.deviation, generator=generator)


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the weights of a model, in `weights.json`.

    Attributes:
        tensors: the places of parameters, buffers and levels.
        aliases: for each further name of a tied tensor, its name in `tensors` or in `matrices`.
        matrices: only of drawn weights.
        notes: sentences that every start logs as warnings.
    """

    info: ModelInfo
    dtype: str
    tensors: dict[str, Place]
    aliases: dict[str, str]
    matrices: Matrices | None = None
    notes: list[str] = []

    @property
    def files(self) -> set[str]:
        """The names of the files that hold tensors."""
        return {place.file for place in self.tensors.values()}


def read_description(weights: Path) -> Description:
    """Read the description of stored weights. Raise ModelError if it or `tensors.bin` is damaged."""
    path = weights
    try:
        description = msgspec.json.decode(weights.read_bytes(), type=Description)
        if needed := max((place.end for place in description.tensors.values() if not place.file), default=0):
            path = weights.with_name(TENSORS)
            if path.stat().st_size < needed:
                raise ValueError(f"it has less than {needed} bytes")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged ({one_line(error)}): remove its folder {path.parent}") from error
    return description


def read_info(weights: Path) -> ModelInfo:
    """Return the facts stored with the weights."""
    return read_description(weights).info


class StoredTensors(Mapping[str, Tensor]):
    """The parameters and buffers of a model by their names in the module tree.

    Stored tensors are views of files, on the CPU. All processes of the host share their pages until one writes to them.
    Tied names share one tensor object. Other matrices are drawn on `device` at each access, and not kept.

    Raise ModelError if a file of the checkpoint has changed since its contents were hashed, or was removed.

    Attributes:
        levels: the parts of quantised weights, see `quantization.map_levels`.
    """

    def __init__(self, files: ModelFiles, device: torch.device) -> None:
        stored = read_description(files.weights)
        self._checked: list[tuple[IO[bytes], HashedFile]] = []
        mapped = {name: self._map(files, name) for name in sorted(stored.files)}
        tensors = {name: mapped[place.file].tensor(place) for name, place in stored.tensors.items()}
        self.levels = {name: tensor for name, tensor in tensors.items() if name.endswith((NUMBERS, GRID))}
        self._mapped = {name: tensor for name, tensor in tensors.items() if name not in self.levels}
        self._aliases, self._matrices, self.info = stored.aliases, stored.matrices, stored.info
        self._device = device

    def _map(self, files: ModelFiles, name: str) -> MappedFile:
        """Map the file of the store, or a file of the checkpoint. The latter stays open for `check`."""
        if not name:
            with files.weights.with_name(TENSORS).open("rb") as own:
                return MappedFile(own, name)
        hashed = next(file for file in files.checkpoint if file.name == name)
        try:
            file = hashed.path.open("rb", buffering=0)
        except OSError as error:
            problem = f"{hashed.path} has weights of the model, but cannot be read any more ({one_line(error)})"
            raise ModelError(f"{problem}: put it back, or start again") from error
        weakref.finalize(self, file.close)
        self._checked.append((file, check_unchanged(file, hashed)))
        return MappedFile(file, name)

    def check(self) -> None:
        """Raise ModelError if the contents of a mapped file of the checkpoint have changed."""
        self._checked = [(file, check_unchanged(file, hashed)) for file, hashed in self._checked]

    def owner(self, name: str) -> str:
        """Return the first of the names that are tied to this name."""
        return self._aliases.get(name, name)

    def is_drawn(self, name: str) -> bool:
        return self._matrices is not None and self.owner(name) in self._matrices.shapes

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a tensor without drawing it."""
        if self._matrices is not None and self.is_drawn(name):
            return torch.Size(self._matrices.shapes[self.owner(name)])
        return self._mapped[self.owner(name)].shape

    def __getitem__(self, name: str) -> Tensor:
        owner = self.owner(name)
        if self._matrices is not None and owner in self._matrices.shapes:
            return self._matrices.draw(owner, self._device)
        return self._mapped[owner]

    def __iter__(self) -> Iterator[str]:
        drawn = () if self._matrices is None else self._matrices.shapes
        return iter((*self._mapped, *drawn, *self._aliases))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return all parameters and buffers by their first names, and the first name for each further name of a tensor."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first_names: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if (first := first_names.setdefault(id(tensor), name)) != name:
            aliases[name] = first
        else:
            tensors[name] = tensor
    return tensors, aliases


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder` after `build` has filled it, unless it exists already.

    `build` gets an empty folder with another name, which is renamed when complete, so other processes see all files or
    none. A lock lets one process build. A failure removes the unfinished folder. Raise ModelError if the cache cannot
    be written to.
    """
    if folder.is_dir():
        return folder
    make_writable(folder.parent)
    unfinished = folder.with_name(folder.name + ".unfinished")
    try:
        with FileLock(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():
                shutil.rmtree(unfinished, ignore_errors=True)
                try:
                    unfinished.mkdir()
                    build(unfinished)
                    for path in unfinished.rglob("*"):
                        _sync(path)
                    unfinished.rename(folder)
                except BaseException:
                    shutil.rmtree(unfinished, ignore_errors=True)
                    raise
    except (OSError, SafetensorError) as error:
        raise not_written(folder, error) from error
    return folder


def _sync(path: Path) -> None:
    """Write a file to the disk now: after a power failure a folder with its final name must have its contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
