"""Hosts of a Ray cluster for the ranks of an engine, and the options that they exclude."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from longspan.args import EngineArgs
from longspan.core.placement import Racks, parse_racks
from longspan.errors import ParameterError
from longspan.file_errors import unread

if TYPE_CHECKING:
    from longspan.runtime.executor.ray_hosts import RayHosts


def reserve_hosts(given: EngineArgs) -> RayHosts:
    """Reserve CPUs and devices for all ranks.

    Raises:
        ParameterError: the options exclude each other, Ray is not installed, or its cluster is missing or too small.
    """
    if given.executor == "local":
        name = "topology" if given.ray_address is None else "ray_address"
        problem = f"{getattr(given, name)} is for ranks on a Ray cluster: give `executor` ray, too"
        raise ParameterError(name, problem, getattr(given, name))
    resolved, racks = given.resolve(), None if given.topology is None else read_racks(given.topology)
    try:
        from longspan.runtime.executor.ray_hosts import RayHosts  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        problem = f"ray needs a package that is missing ({error.name}): pip install 'longspan[ray]'"
        raise ParameterError("executor", problem, given.executor) from error
    return RayHosts(
        resolved.phases or (resolved.cluster,),
        address=given.ray_address,
        racks=Racks(racks),
        device=given.device,
        threads=given.threads_per_rank,
        load_format=given.load_format,
        seed=given.seed,
    )


def read_racks(path: str) -> dict[str, str]:
    """Return the name of the rack of each host address, by a topology file. Raise ParameterError for a wrong file."""
    try:
        return parse_racks(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError("topology", unread(Path(path), error), path) from None
