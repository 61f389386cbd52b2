"""Weights live once per host: one module-layout safetensors file per model and dtype, mapped by every worker.

The file holds every parameter and buffer of the model exactly as transformers' `from_pretrained` leaves them
(converted to the dtype, experts stacked, rotary frequencies computed), under their names in the module tree.
Tensors that the model ties are stored once. Its metadata holds the ModelInfo.

Dummy weights for other devices than CPUs are in no file: it describes the matrices, and each rank draws its own.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

import msgspec
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longspan.model.contents import content_hash
from longspan.model.files import ModelError, cache_root, make_writable, not_written, one_line
from longspan.model.folder import description_files, weight_files
from longspan.model.info import ModelInfo
from longspan.model.quantization import GRID, NUMBERS, Levels, Quantization

_FORMAT = 4
"""The layout of the files, and the checks that a model has passed when its file is there."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NOTES = "notes"
"""The entry of a file's metadata with sentences that every start logs as warnings."""
_FILE = "model.safetensors"

log = logging.getLogger(__name__)


def ensure_weights(
    config_dir: Path,
    *,
    dtype: str,
    dummy_seed: int | None = None,
    drawn: bool = False,
    quantization: Quantization | None = None,
    trust_remote_code: bool = False,
) -> Path:
    """Returns the weight file of the model in `config_dir`; at first use checks the model and writes it to the cache.

    The file is found by the contents of the checkpoint, wherever that is. The configuration is copied beside it.
    With `dummy_seed` the weights are random, drawn as transformers initialises a new model, and the folder needs no
    weights; if they are `drawn`, the file has no matrices, see `StoredTensors`. With a `quantization` matrices are
    those that their levels stand for, and the levels lie beside them, see `map_levels`. Raises ModelError for a model
    that cannot be served, or a checkpoint that does not match its configuration.
    """

    def key() -> str:
        sources = description_files(config_dir, trust_remote_code=trust_remote_code)
        if dummy_seed is None:
            sources |= weight_files(config_dir)
        what = [_FORMAT, msgspec.json.schema(ModelInfo), version("transformers")]  # another description, another file
        identity = [*what, content_hash(sources), dtype, dummy_seed, drawn, quantization, trust_remote_code]
        return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]

    found = key()
    folder = cache_root() / "weights" / found
    if not folder.is_dir():
        from longspan.model.checkpoint import write_weights  # noqa: PLC0415 - imports transformers' models: seconds
        from longspan.model.skeleton import check_supported  # noqa: PLC0415

        def build(unfinished: Path) -> None:
            log.info("writing the %s weights of %s to the cache, once", quantization or dtype, config_dir)
            write_weights(
                config_dir,
                unfinished / _FILE,
                dtype=DTYPES[dtype],
                dummy_seed=dummy_seed,
                drawn=drawn,
                quantization=quantization,
                trust_remote_code=trust_remote_code,
            )
            for name, path in description_files(config_dir, trust_remote_code=trust_remote_code).items():
                (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, unfinished / name)
            if key() != found:
                raise ModelError(f"{config_dir} changed while it was read: start again when it is complete")

        check_supported(config_dir, trust_remote_code)
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
    """Returns the facts stored with a weight file; reads its header only."""
    return ModelInfo.from_json(_metadata(weights)["info"])


class Matrices(msgspec.Struct, frozen=True, kw_only=True):
    """The matrices of dummy weights that are in no file: normally distributed numbers.

    Attributes:
        shapes: by the names of the matrices.
        deviation: the standard deviation of their numbers.
    """

    seed: int
    dtype: str
    deviation: float
    shapes: dict[str, tuple[int, ...]]

    def draw(self, name: str, device: torch.device) -> Tensor:
        """Returns a whole matrix, which depends on its name, the seed and the kind of device only."""
        seed = int.from_bytes(hashlib.sha256(f"{self.seed} {name}".encode()).digest()[:8])
        generator = torch.Generator(device).manual_seed(seed)
        matrix = torch.empty(self.shapes[name], dtype=DTYPES[self.dtype], device=device)
        return matrix.normal_(0.0, self.deviation, generator=generator)


class StoredTensors(Mapping[str, Tensor]):
    """The parameters and buffers of a model by their names in the module tree.

    What is in the file is a view of it, on the CPU. Its pages are shared by all processes of the host for as long as
    nobody writes to them, and tied names share one tensor object. Matrices that are not are drawn on `device` whenever
    somebody asks for them, and kept by nobody else.

    Attributes:
        info: the facts that are stored with them.
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
        """Returns the first of the names that are tied to this one."""
        return self._aliases.get(name, name)

    def is_drawn(self, name: str) -> bool:
        return self._matrices is not None and self.owner(name) in self._matrices.shapes

    def shape(self, name: str) -> torch.Size:
        """Returns the shape of a tensor, which is not drawn for that."""
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


def map_levels(weights: Path) -> dict[str, Levels]:
    """Maps the levels of a quantised weight file, by the names of the weights; of any other file there are none."""
    with safe_open(weights, framework="pt") as file:
        names = [name.removesuffix(GRID) for name in file.keys() if name.endswith(GRID)]  # noqa: SIM118
        return {
            name: Levels(numbers=file.get_tensor(name + NUMBERS), grid=file.get_tensor(name + GRID)) for name in names
        }


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Returns `folder`, filled by `build` if it does not exist yet.

    `build` gets an empty folder beside it, which is renamed when complete: other processes see all of it or nothing,
    and a lock lets one of several that start together do the work. A failure leaves nothing behind. Raises ModelError
    when the cache cannot be written to.
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
    """Write a file to the disk now: after a power failure the folder may have its name, and must have its contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
