"""Options of parallelism, and the cluster that they describe."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated

from longspan.core.cluster import Cluster
from longspan.core.options import Option
from longspan.core.splits import ParallelSpec
from longspan.errors import ParameterError

instance_option = partial(Option, group="Instances", configures=True)


@dataclass(frozen=True, kw_only=True)
class ParallelArgs:
    """The instances of a cluster as users write them, see `parse_parallel`."""

    parallel: Annotated[
        str | None,
        instance_option("N or [Nx][tpT][ppP]: N instances, each of T * P ranks.", metavar="SPEC", default="one rank"),
    ] = None
    prefill_parallel: Annotated[
        str | None,
        instance_option(
            "Instead: instances that only prefill, on the first devices. With seesaw, they use all devices in a phase.",
            metavar="SPEC",
        ),
    ] = None
    decode_parallel: Annotated[
        str | None,
        instance_option(
            "With it: instances that only decode, and receive KV from these, or with seesaw from hosts.",
            metavar="SPEC",
        ),
    ] = None
    transfer_backends: Annotated[
        int | None,
        instance_option(
            "Transfers of KV that each of these receives at once.", metavar="N", default="one per prefill instance"
        ),
    ] = None


def parse_parallel(
    parallel: str | None = None,
    prefill_parallel: str | None = None,
    decode_parallel: str | None = None,
    *,
    transfer_backends: int | None = None,
    **degrees: int | None,
) -> Cluster:
    """Return a cluster from one of three forms. Without any of them, the cluster has one rank.

    Args:
        parallel: the spec of instances that prefill and decode.
        prefill_parallel, decode_parallel: instead, the specs of instances that only prefill, and that only decode.
        transfer_backends: see `Cluster`.
        degrees: instead, `instances`, `tp` and `pp` by name.

    Raises:
        ParameterError: for two forms, a role without the other, or a degree that is not possible.
    """
    forms = (
        {"parallel": parallel},
        degrees,
        {"prefill_parallel": prefill_parallel, "decode_parallel": decode_parallel},
    )
    given = [[name for name, value in form.items() if value is not None] for form in forms]
    if len(first := [names[0] for names in given if names]) > 1:
        raise ParameterError(first[0], f"and `{first[1]}` exclude each other: give one of them")
    if (prefill_parallel is None) != (decode_parallel is None):
        name, other, spec = "prefill_parallel", "decode_parallel", prefill_parallel
        if prefill_parallel is None:
            name, other, spec = other, name, decode_parallel
        raise ParameterError(name, f"{spec!r} needs `{other}`, too: prefill instances do not decode", spec)
    if (text := prefill_parallel if parallel is None else parallel) is not None:
        return Cluster.of(text, decode_parallel, transfer_backends=transfer_backends)
    spec_of_degrees = ParallelSpec(**{name: degree for name, degree in degrees.items() if degree is not None})
    return Cluster(spec=spec_of_degrees, transfer_backends=transfer_backends)
