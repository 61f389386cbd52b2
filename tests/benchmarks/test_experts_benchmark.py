"""Public times per output token of models with experts, and their predictions."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

from longspan.core.cluster import Cluster
from longspan.core.exchange import LOCAL
from longspan.cost.estimate import estimate_decode, estimate_prefill
from longspan.cost.forward import rooflines
from longspan.cost.topology import Devices
from longspan.simulation import read_architecture

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import experts


def test_predictions_are_near_the_public_measurements() -> None:
    errors = [error for load in experts.LOADS for error in experts.errors_of(load).values()]
    assert len(errors) == 16
    assert statistics.fmean(map(abs, errors)) < 0.25


def test_a_request_waits_for_the_prompts_of_other_requests() -> None:
    [load] = [load for load in experts.LOADS if load.model == "qwen3-30b-a3b"]
    [line] = rooflines(
        read_architecture(load.model), Devices(hardware=load.hardware, gpus_per_host=8), Cluster.of(load.parallel)
    )
    step_s = estimate_decode(line, 1, LOCAL, 2048 + 512, 10).seconds
    prompts_s = 9 * estimate_prefill(line, 1, LOCAL, 2048).seconds
    assert load.predicted_ms(10) == pytest.approx(1e3 * (step_s + prompts_s / 1024))
