"""Files of profiles in the cache folder, by model, precision and machine. Partition files also depend on block size."""

from __future__ import annotations

import hashlib
import logging
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch

from longspan.cost.profile_key import ProfileKey, Stored
from longspan.model.files import ModelError, ModelFiles, cache_root, write_file

if TYPE_CHECKING:
    from longspan.cost.partition_table import PartitionTable
    from longspan.cost.profile import Profile
    from longspan.policy.traffic import Traffic

StoredT = TypeVar("StoredT", bound=Stored)
_REVISION = 5
_log = logging.getLogger("longspan")
"""Increased with every change of the engine's speed or of the measurements, so that old profiles are not used."""


def profile_key_of(files: ModelFiles, device: str, *, tp: int, threads: int, native: bool, sizes: str) -> ProfileKey:
    """Return the key of a profile. `native`: measured with our own attention kernel. `sizes`: hash of layer sizes."""
    folder = Path(files.name)
    return ProfileKey(
        model=str(folder.resolve()) if folder.is_dir() else files.name,
        dtype=files.dtype if files.quantization is None else f"{files.dtype}-{files.quantization}",
        device=device,
        tp=tp,
        threads=threads,
        kernel="native" if native else "torch",
        machine=f"{_cpu_name()}, {_gpu_name()}" if device == "cuda" else _cpu_name(),
        revision=_REVISION,
        sizes=sizes,
    )


def profile_file(profile_key: ProfileKey) -> Path:
    digest = hashlib.sha256(msgspec.json.encode(profile_key)).hexdigest()[:12]
    name = re.sub(r"[^A-Za-z0-9.]+", "-", Path(profile_key.model).name)
    return cache_root() / "profiles" / f"{name}-{digest}.json"


def load_profile(profile_key: ProfileKey) -> Profile | None:
    """Read the profile with this key, or None if there is no file. Raises ModelError for an invalid file."""
    path = profile_file(profile_key)
    if not path.exists():
        return None
    from longspan.cost.profile import Profile  # noqa: PLC0415 - only on machines with a profile

    return _load(Profile, path)


def load_partitions(profile_key: ProfileKey, block_size: int) -> PartitionTable:
    """Read the partitions with this key, or an empty table without a file. Raises ModelError for an invalid file."""
    from longspan.cost.partition_table import PartitionTable  # noqa: PLC0415 - only when partitions are needed

    return _load(PartitionTable, _partitions_file(profile_key, block_size)) or PartitionTable()


def load_traffic(profile_key: ProfileKey, fleet: str) -> Traffic | None:
    """Read the traffic of a fleet, such as `4`. None without a file, or with a warning for an invalid one."""
    path = _traffic_file(profile_key, fleet)
    if not path.exists():
        return None
    from longspan.policy.traffic import Traffic  # noqa: PLC0415 - only where a server has recorded it

    try:
        return _load(Traffic, path)
    except ModelError as error:
        _log.warning("the policy starts without earlier requests: %s", error)
        return None


def _load(kind: type[StoredT], path: Path) -> StoredT | None:
    try:
        return kind.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}): remove it, or measure again") from error


def _partitions_file(profile_key: ProfileKey, block_size: int) -> Path:
    return profile_file(profile_key).with_suffix(f".chains-of-{block_size}.json")


def save_partitions(profile_key: ProfileKey, block_size: int, table: PartitionTable) -> None:
    write_file(_partitions_file(profile_key, block_size), table.to_json())


def _traffic_file(profile_key: ProfileKey, fleet: str) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", fleet)
    return profile_file(profile_key).with_suffix(f".traffic-of-{name}.json")


def save_traffic(profile_key: ProfileKey, fleet: str, traffic: Traffic) -> None:
    write_file(_traffic_file(profile_key, fleet), traffic.to_json())


def save_profile(profile: Profile) -> None:
    write_file(profile_file(profile.profile_key), profile.to_json())


def _cpu_name() -> str:
    name = _search(Path("/proc/cpuinfo"), r"^model name\s*:\s*(.+)$")
    return name or platform.processor() or platform.machine()


def _gpu_name() -> str:
    """Read the driver's files first, since a CUDA call takes device memory, in a process that computes nothing."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    name = _search(files[0], r"^Model:\s*(.+)$") if files else None
    return name or torch.cuda.get_device_name()  # some containers hide the files


def _search(path: Path, pattern: str) -> str | None:
    try:
        match = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return match[1].strip() if match else None
