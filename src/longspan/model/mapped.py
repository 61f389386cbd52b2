"""Tensors that are views of mapped files: of the store, or of the checkpoint itself.

The mappings are private. All processes of a host share the pages of a file until one of them writes to a page.
"""

from __future__ import annotations

import math
import mmap
import resource
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import msgspec
import torch
from torch import Tensor

from longspan.model.files import ResourceError, cache_root, not_written

_ALIGNMENT = 64
"""Bytes of a cache line. Each tensor that is written begins at a multiple."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of a tensor.

    Attributes:
        file: the name of a file of the checkpoint. Empty for the file of the store.
        offset: of the first byte.
        dtype: PyTorch's name, such as bfloat16.
    """

    file: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        itemsize: int = getattr(torch, self.dtype).itemsize
        return self.offset + math.prod(self.shape) * itemsize


class MappedFile:
    """A mapping of an open file from the byte `start` on.

    Args:
        start: a multiple of `mmap.ALLOCATIONGRANULARITY`.
    """

    def __init__(self, file: IO[bytes], name: str, start: int = 0) -> None:
        self._name, self._start = name, start
        self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY, offset=start)
        self._address = torch.frombuffer(self._bytes, dtype=torch.uint8).data_ptr()

    def tensor(self, place: Place) -> Tensor:
        """Return a view of the file."""
        dtype: torch.dtype = getattr(torch, place.dtype)
        if not (size := math.prod(place.shape)):
            return torch.empty(place.shape, dtype=dtype)
        view = torch.frombuffer(self._bytes, dtype=dtype, count=size, offset=place.offset - self._start)
        return view.view(place.shape)

    def place(self, tensor: Tensor) -> Place | None:
        """Return the place of a tensor in this file, if it lies there in one aligned piece."""
        offset = tensor.data_ptr() - self._address
        if not 0 <= offset < len(self._bytes) or offset % tensor.itemsize or not tensor.is_contiguous():
            return None
        return _placed(tensor, self._name, self._start + offset)

    def release(self) -> None:
        """Remove its pages from the memory of this process. An access reads them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._bytes.madvise(mmap.MADV_DONTNEED)


def _placed(tensor: Tensor, name: str, offset: int) -> Place:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Place(file=name, offset=offset, dtype=dtype, shape=tuple(tensor.shape))


def _raise_file_limit() -> None:
    """Raise the limit of open files to the highest. A long conversion has many mappings, and each keeps one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class TensorWriter:
    """Writes the tensors of a model that no file of the checkpoint holds, and finds the places of all tensors.

    Args:
        path: the file of the store. It is made for the first tensor.

    Attributes:
        levels: written levels of quantised weights, by name.
    """

    def __init__(self, path: Path) -> None:
        _raise_file_limit()
        self._path, self._files = path, list[MappedFile]()
        self.levels: dict[str, Tensor] = {}

    def map_checkpoint(self, path: Path, name: str) -> MappedFile:
        """Map a file of the checkpoint. Its tensors need not be written."""
        with path.open("rb") as file:
            self._files.append(MappedFile(file, name))
        return self._files[-1]

    def place(self, tensor: Tensor) -> Place | None:
        """Return the place of a tensor in a mapped or written file. None if it must be written."""
        return next((place for file in self._files if (place := file.place(tensor)) is not None), None)

    def places(self, tensors: Mapping[str, Tensor]) -> dict[str, Place]:
        """Return the places of tensors, and write the tensors that have none."""
        found = {name: place for name, tensor in tensors.items() if (place := self.place(tensor)) is not None}
        missing = {name: tensor for name, tensor in tensors.items() if name not in found}
        self.check_space(sum(tensor.nbytes for tensor in missing.values()))
        return found | dict(zip(missing, self.write([*missing.values()]), strict=True))

    def add(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Write tensors, and return equal tensors, which are views of the file."""
        if not any(tensor.numel() for tensor in tensors):
            return list(tensors)
        places = self.write(tensors)
        first = places[0].offset
        with self._path.open("rb") as file:
            self._files.append(MappedFile(file, "", first - first % mmap.ALLOCATIONGRANULARITY))
        return [self._files[-1].tensor(place) for place in places]

    def write(self, tensors: Sequence[Tensor]) -> list[Place]:
        """Write tensors, and return their places."""
        places: list[Place] = []
        if not tensors:
            return places
        try:
            with self._path.open("ab") as file:
                for tensor in tensors:
                    file.write(bytes(_ALIGNMENT - file.tell() % _ALIGNMENT))
                    places.append(_placed(tensor, "", file.tell()))
                    file.write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
        except OSError as error:
            raise not_written(self._path, error) from error
        return places

    def check_space(self, num_bytes: int) -> None:
        """Raise ResourceError if the disk has no space for more bytes."""
        if num_bytes > (free := shutil.disk_usage(self._path.parent).free):
            problem = f"the converted weights need {num_bytes / 1e9:.2f} GB in {cache_root()}, but {free / 1e9:.2f}"
            raise ResourceError(f"{problem} are free: free some space, or set LONGSPAN_CACHE to another folder")

    def release(self) -> None:
        """Remove the pages of all files from the memory of this process."""
        for file in self._files:
            file.release()
