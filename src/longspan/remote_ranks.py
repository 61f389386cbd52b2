"""Hosts of a Ray cluster for the ranks of an engine, and the options that they exclude."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longspan.args import EngineArgs
from longspan.errors import ParameterError

if TYPE_CHECKING:
    from longspan.runtime.executor.ray_hosts import RayHosts


def reserve_hosts(given: EngineArgs) -> RayHosts:
    """Reserve CPUs and devices for all ranks.

    Raises:
        ParameterError: the options exclude each other, Ray is not installed, or its cluster is missing or too small.
    """
    if given.executor == "local":
        problem = f"{given.ray_address} is for ranks on a Ray cluster: give `executor` ray, too"
        raise ParameterError("ray_address", problem, given.ray_address)
    for name in ("host_kv_gib", "disk_kv_gib"):
        if getattr(given, name):
            problem = (
                "is not possible with `executor` ray, since the engine keeps that KV on its own host: leave it out"
            )
            raise ParameterError(name, problem, getattr(given, name))
    resolved = given.resolve()
    try:
        from longspan.runtime.executor.ray_hosts import RayHosts  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as error:
        problem = f"ray needs a package that is missing ({error.name}): pip install 'longspan[ray]'"
        raise ParameterError("executor", problem, given.executor) from error
    return RayHosts(
        resolved.phases or (resolved.cluster,),
        address=given.ray_address,
        device=given.device,
        threads=given.threads_per_rank,
        load_format=given.load_format,
        seed=given.seed,
    )
