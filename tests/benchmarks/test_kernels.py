"""The fit of kernel constants: it finds curves that made its data, and follows the better of two frameworks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from measured_kernels.frame import Array, KernelErrors, held_out, summary
from measured_kernels.products import PROFILES, Products, fit

from longspan.cost import catalog
from longspan.cost.precision import Format


def products(weights: Format, *, source: str, slower: float = 1.0, noise: float = 0.0) -> Products:
    """Return 800 random products on an H100 whose seconds are those of the cost model times `slower`."""
    draw, device = np.random.default_rng(1), catalog.device("h100-sxm-80g")
    sizes = np.exp2(draw.uniform([[0], [9], [9]], [[14], [15], [15]], size=(3, 800)))
    part = Products(device=device, weights=weights, source=source, sizes=sizes, seconds=np.ones(800))
    seconds = part.predicted(catalog.efficiency().curve(device, weights))
    return replace(part, seconds=slower * seconds * np.exp(noise * draw.standard_normal(800)))


@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
def test_a_fit_finds_the_curve_that_made_the_products_despite_outliers(weights: Format) -> None:
    measured = products(weights, source="vllm", noise=0.03)
    outliers = np.where(held_out(800), 5.0, 1.0)
    curve = fit([replace(measured, seconds=measured.seconds * outliers)])
    exact = products(weights, source="vllm")
    assert np.abs(exact.error(curve)).mean() < 0.03


def test_a_fit_follows_the_better_framework_and_is_between_kernels_and_layers() -> None:
    quick, slow = products("bfloat16", source="vllm"), products("bfloat16", source="trtllm", slower=2.0)
    assert np.median(np.abs(quick.error(fit([quick, slow])))) < 0.02
    layers = products("bfloat16", source=PROFILES, slower=1.2)
    assert 0.03 < np.median(quick.error(fit([quick, layers]))) < 0.17


def test_the_summary_has_means_over_all_sizes_that_layers_have() -> None:
    def part(size: str, after: Array, *, minor: bool = False) -> KernelErrors:
        return KernelErrors(kind="product", device="h", dtype="fp8", size=size, before=None, after=after, minor=minor)

    parts = [part("a", np.array([0.1, -0.3])), part("b", np.array([0.2])), part("c", np.array([9.0]), minor=True)]
    assert summary(parts)[1] == [("product", "h", "fp8", "—", "20.0 %", "—", "—")]
