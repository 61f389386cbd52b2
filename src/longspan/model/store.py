"""Weights are stored once per host: one safetensors file per model and dtype, mapped by every worker.

The file holds every parameter and buffer as transformers' `from_pretrained` leaves them, under their names in the
module tree. They are converted to the dtype, experts are stacked, and rotary frequencies are computed. Tied tensors are
stored once. The metadata holds the ModelInfo.

Dummy weights for devices other than CPUs are not stored. The file describes the matrices, and each rank draws them.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from longspan.model.contents import content_hash
from longspan.model.files import ModelError, Quantization, cache_root, make_writable, not_written, one_line
from longspan.model.folder import description_files, weight_files
from longspan.model.info import ModelInfo

_FORMAT = 4
"""The version of the file layout, and of the checks that a model passes before its file is written."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NOTES = "notes"
"""The metadata entry with sentences that every start logs as warnings."""
NUMBERS, GRID = ".numbers", ".grid"
"""Suffixes of the names of levels in a file, after the name of the weight."""
_FILE = "model.safetensors"

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


def ensure_weights(config_dir: Path, form: WeightForm) -> Path:
    """Return the weight file of the model in `config_dir`. The first use checks the model and writes the file.

    The name of its folder is a hash of the checkpoint's contents. The folder also has a copy of the configuration.
    Raise ModelError if the model cannot be served, or the checkpoint does not match its configuration.
    """

    def key() -> str:
        sources = description_files(config_dir, trust_remote_code=form.trust_remote_code)
        if form.dummy_seed is None:
            sources |= weight_files(config_dir)
        formats = [_FORMAT, msgspec.json.schema(ModelInfo), version("transformers")]
        identity = [*formats, content_hash(sources), *astuple(form)]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]

    name = key()
    folder = cache_root() / "weights" / name
    if not folder.is_dir():
        from longspan.model.checkpoint import write_weights  # noqa: PLC0415 - imports transformers' models: seconds
        from longspan.model.probe import check_supported  # noqa: PLC0415

        def build(unfinished: Path) -> None:
            log.info("writing the %s weights of %s to the cache, once", form.quantization or form.dtype, config_dir)
            write_weights(config_dir, unfinished / _FILE, form)
            for file, path in description_files(config_dir, trust_remote_code=form.trust_remote_code).items():
                (unfinished / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, unfinished / file)
            if key() != name:
                raise ModelError(f"{config_dir} changed while it was read: start again when it is complete")

        check_supported(config_dir, form.trust_remote_code)
        build_once(folder, build)
    for note in json.loads(_metadata(folder / _FILE)[NOTES]):
        log.warning("%s: %s", config_dir, note)
    return folder / _FILE


def _metadata(weights: Path) -> dict[str, str]:
    try:
        with safe_open(weights, framework="pt") as file:
            return dict(file.metadata())
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{weights} is damaged ({one_line(error)}): remove its folder {weights.parent}") from error


def read_info(weights: Path) -> ModelInfo:
    """Return the facts stored with a weight file. Only the header is read."""
    return ModelInfo.from_json(_metadata(weights)["info"])


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


class StoredTensors(Mapping[str, Tensor]):
    """The parameters and buffers of a model by their names in the module tree.

    Stored tensors are views of the file, on the CPU. All processes of the host share its pages until one writes to
    them. Tied names share one tensor object. Other matrices are drawn on `device` at each access, and not kept.
    """

    def __init__(self, weights: Path, device: torch.device) -> None:
        with safe_open(weights, framework="pt") as file:
            names = [name for name in file.keys() if not name.endswith((NUMBERS, GRID))]  # noqa: SIM118
            self._mapped: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
            self._aliases: dict[str, str] = json.loads(file.metadata()["aliases"])
            matrices = file.metadata().get("matrices")
            self.info = ModelInfo.from_json(file.metadata()["info"])
        self._matrices = None if matrices is None else msgspec.json.decode(matrices, type=Matrices)
        self._device = device

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
