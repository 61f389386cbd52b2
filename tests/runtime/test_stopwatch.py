"""Recorded times of workers, on a CUDA device that is not there."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from longspan.args import EngineArgs
from longspan.attn.memory import MemoryTransport, Wires
from longspan.runtime.timing import Stopwatch, TimedTransport


@pytest.mark.parametrize("enabled", [False, True])
def test_only_recorded_times_synchronize_the_device(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a served engine would wait for the device at each layer."""
    synchronize = mock.Mock()
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    watch = Stopwatch(enabled=enabled, device=torch.device("cuda"))
    module = torch.nn.Linear(2, 2)
    watch.watch_linear(module)
    transport = TimedTransport(MemoryTransport(Wires(1), 0), watch)
    with watch.during("other"):
        module(torch.zeros(1, 2))
        with watch.during("attention"):
            transport.start({}, {}, 0).wait()
        transport.complete_sends()
    assert (synchronize.call_count > 0) == enabled
    assert bool(watch.seconds()) == enabled


def test_times_are_not_recorded_by_default() -> None:
    assert not EngineArgs("model").record_times
