"""Compares measurements of papers with predictions of the cost model, each within a tolerance."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.table import Table

from longspan.core.cluster import Cluster
from longspan.core.exchange import RING_Q, exchange_of
from longspan.cost import catalog
from longspan.cost.architecture import Architecture, from_config
from longspan.cost.catalog import Efficiency, Kernels
from longspan.cost.channels import ExchangeCost
from longspan.cost.estimate import Estimate, Fractions, estimate_decode, estimate_prefill
from longspan.cost.forward import Roofline, rooflines
from longspan.cost.precision import Format, Precision
from longspan.cost.step_cost import RooflineCost
from longspan.cost.topology import Devices


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One number of a paper.

    Attributes:
        tolerance: the largest accepted relative error.
    """

    name: str
    paper: float
    ours: float
    tolerance: float
    unit: str = "s"

    @property
    def error(self) -> float:
        """The relative error, positive if `ours` is larger."""
        return self.ours / self.paper - 1

    @property
    def near(self) -> bool:
        """True if the error is within the tolerance."""
        return abs(self.error) <= self.tolerance


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model on devices, with the parameters of `longspan estimate`.

    Attributes:
        costs: by kind of exchange, for exchanges that the paper implements differently than longspan.
        speed: factors of the speed of links, see `Topology`.
    """

    model: str
    hardware: str
    gpus_per_host: int = 8
    hosts: int = 1
    kernels: Kernels = "flash"
    ffn_dtype: Format | None = None
    link: str | None = None
    link_gbytes_per_s: float | None = None
    constants: Efficiency | None = None
    costs: Mapping[str, ExchangeCost] = field(default_factory=dict)
    block_size: int = 256
    speed: Callable[[int, int], float] | None = None

    def prefill(
        self,
        parallel: str,
        exchange: str,
        length: int,
        cached: int = 0,
        fractions: Fractions = None,
        *,
        batch: int = 1,
    ) -> Estimate:
        cluster = Cluster.of(parallel)
        line, number = self._cost(cluster), cluster.num_instances
        return estimate_prefill(line, number, exchange_of(exchange), length, cached, fractions=fractions, batch=batch)

    def decode(self, parallel: str, length: int, batch: int = 1) -> Estimate:
        cluster = Cluster.of(parallel)
        return estimate_decode(self._cost(cluster), cluster.num_instances, RING_Q, length, batch)

    def attention_flops_per_s(self, parallel: str, tokens: int) -> float:
        """Return the FLOPS of one device in causal attention alone, over `tokens` tokens with the heads of one rank."""
        layer = self._cost(Cluster.of(parallel)).layer
        pairs, head_dim = tokens * (tokens + 1) / 2, layer.model.attention.head_dim
        seconds = layer.attended_s(queries=tokens, pairs=pairs, keys=tokens, heads=layer.heads, kv_heads=layer.kv_heads)
        return 4 * pairs * layer.heads * head_dim / seconds

    def steps(self, parallel: str) -> RooflineCost:
        """Return the cost model of steps that simulations use on these devices."""
        cluster = Cluster.of(parallel)
        return RooflineCost(self._model, self._cluster, cluster, block_size=self.block_size, kernels=self.kernels)

    def _cost(self, cluster: Cluster) -> Roofline:
        line = rooflines(self._model, self._cluster, cluster, self.kernels, self.constants)[0]
        return replace(line, costs=self.costs, topology=replace(line.topology, speed=self.speed))

    @property
    def _model(self) -> Architecture:
        return from_config(
            catalog.model_config(self.model), name=self.model, precision=Precision.of("bfloat16", ffn=self.ffn_dtype)
        )

    @property
    def _cluster(self) -> Devices:
        return Devices(
            hardware=self.hardware,
            gpus_per_host=self.gpus_per_host,
            hosts=self.hosts,
            link=self.link,
            link_gbytes_per_s=self.link_gbytes_per_s,
        )


def mean_error(cells: Sequence[Cell]) -> float:
    """Return the mean of the absolute relative errors."""
    return statistics.fmean(abs(cell.error) for cell in cells)


def report(title: str, cells: Sequence[Cell], *, mean_tolerance: float | None = None) -> bool:
    """Print a row per cell, and the mean and worst error. Return True if all errors are within the tolerances."""
    table = Table("", "paper", "ours", "error", "", title=title)
    for cell in cells:
        mark = "" if cell.near else f"[red]more than {cell.tolerance:.0%}"
        table.add_row(
            cell.name, f"{cell.paper:g} {cell.unit}", f"{cell.ours:.3g} {cell.unit}", f"{cell.error:+.1%}", mark
        )
    Console().print(table)
    mean, worst = mean_error(cells), max(cells, key=lambda cell: abs(cell.error))
    far = [cell for cell in cells if not cell.near]
    passed = not far and (mean_tolerance is None or mean <= mean_tolerance)
    limit = "" if mean_tolerance is None else f" (wanted: at most {mean_tolerance:.0%})"
    print(
        f"{title}: {'pass' if passed else 'FAIL'}: mean error {mean:.1%}{limit}, worst {worst.error:+.1%} "
        f"({worst.name}), {len(far)} of {len(cells)} cells too far\n"
    )
    return passed
