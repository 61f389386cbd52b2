"""The traffic of a server is saved next to the profile, and a later policy starts from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from longspan.core.cluster import Cluster
from longspan.cost.profile_key import ProfileKey
from longspan.model.files import ModelError
from longspan.policy.facts import Facts
from longspan.policy.runahead import Runahead
from longspan.policy.traffic import Traffic
from longspan.profiling.store import load_traffic, profile_file
from longspan.serve.upkeep import Upkeep

KEY = ProfileKey(model="m", dtype="d", device="cpu", tp=1, threads=1, kernel="k", machine="m")
FIRST = Traffic(lengths=(100, 200), answer_tokens=7.5)
SECOND = Traffic(lengths=(200, 300), answer_tokens=7.5, improvement_rates="1:0.3")


class Served:
    """In place of a `Service`."""

    def __init__(self, cluster: Cluster, traffic: Traffic | None = None) -> None:
        self.policy = SimpleNamespace(traffic=traffic)
        config = SimpleNamespace(cluster=cluster, fleet=(cluster,))
        facts = Facts(traffic=load_traffic(KEY, str(cluster)))
        self.setup = SimpleNamespace(policy=self.policy, config=config, profile_key=KEY, facts=facts)

    def upkeep(self) -> Upkeep:
        return Upkeep(cast(Any, self), tune_idle=False)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    return tmp_path


def test_traffic_is_saved_when_it_has_changed_and_new_rates_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    served = Served(Cluster.of("2"))
    upkeep = served.upkeep()
    with caplog.at_level("INFO", "longspan"):
        upkeep.keep_traffic()
        assert load_traffic(KEY, "2") is None, "there is none"
        served.policy.traffic = FIRST
        upkeep.keep_traffic()
        assert load_traffic(KEY, "2") == FIRST and not caplog.text, "there are no rates"
        served.policy.traffic = SECOND
        upkeep.keep_traffic()
        upkeep.keep_traffic()
    assert load_traffic(KEY, "2") == SECOND
    assert caplog.messages == ["improvement rates by requests per second, for the last 2 prompts: 1:0.3"]


def test_each_layout_has_its_own_record_next_to_the_profile() -> None:
    layouts = [Cluster.of("2"), Cluster.of("2xtp2"), Cluster.of("2", "tp2")]
    for number, cluster in enumerate(layouts, start=1):
        Served(cluster, Traffic(lengths=(number,))).upkeep().keep_traffic()
    for number, cluster in enumerate(layouts, start=1):
        key = ProfileKey(model="m", dtype="d", device="cpu", tp=cluster.spec.tp, threads=1, kernel="k", machine="m")
        assert load_traffic(key, str(cluster)) == Traffic(lengths=(number,))
    assert {file.parent for file in profile_file(KEY).parent.iterdir()} == {profile_file(KEY).parent}


def test_a_record_that_was_loaded_is_not_saved_again(cache: Path) -> None:
    Served(Cluster.of("2"), FIRST).upkeep().keep_traffic()
    [file] = cache.rglob("*.traffic-of-2.json")
    later = Served(Cluster.of("2"))
    later.policy.traffic = later.setup.facts.traffic
    file.unlink()
    later.upkeep().keep_traffic()
    assert later.setup.facts.traffic == FIRST and not file.exists()


class Tuner:
    """In place of an `IdleTuner`, whose prompts run until `stop`."""

    def __init__(self, cuts: object, error: ModelError | None = None) -> None:
        self.cuts, self.error, self.is_timing = cuts, error, False

    def begin(self, _: float) -> bool:
        if self.error is not None:
            raise self.error
        self.is_timing = True
        return True

    def stop(self, _: float) -> bool:
        was_timing, self.is_timing = self.is_timing, False
        return was_timing


def tuning(
    monkeypatch: pytest.MonkeyPatch, error: ModelError | None = None, at_start: ModelError | None = None
) -> Upkeep:
    policy = object.__new__(Runahead)
    policy.cuts = cast(Any, SimpleNamespace(is_tunable=True))

    def tuner_of(*_: object) -> Tuner:
        if at_start is not None:
            raise at_start
        return Tuner(policy.cuts, error)

    monkeypatch.setattr("longspan.profiling.idle.tuner_of", tuner_of)
    served = Served(Cluster.of("2"))
    served.setup.policy = policy
    service = SimpleNamespace(setup=served.setup, engine=None, max_model_len=64, info=SimpleNamespace(vocab_size=9))
    return Upkeep(cast(Any, service), tune_idle=True)


@pytest.mark.parametrize("kind", ["error", "at_start"])
def test_partitions_that_cannot_be_read_or_saved_end_tuning_and_no_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    upkeep = tuning(monkeypatch, **{kind: ModelError("no space is left")})
    assert not upkeep.tune() and not upkeep.tune()
    assert caplog.messages == ["partitions are not measured any more: no space is left"]


def test_the_loss_of_a_worker_during_a_timed_prompt_ends_tuning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    upkeep = tuning(monkeypatch)
    assert upkeep.tune()
    upkeep.stop_tuning()
    upkeep.stop_tuning(worker_lost=True)
    assert upkeep.tune(), "no prompt ran when the worker was lost"
    upkeep.stop_tuning(worker_lost=True)
    assert not upkeep.tune() and "a worker was lost during a prompt" in caplog.text


@pytest.mark.parametrize(
    "text", ["{", '{"profile_key": 1}', *(SECOND.to_json().replace("1:0.3", x) for x in ("0:0.3", "x"))]
)
def test_an_invalid_record_is_named_and_not_used(cache: Path, caplog: pytest.LogCaptureFixture, text: str) -> None:
    Served(Cluster.of("2"), FIRST).upkeep().keep_traffic()
    [file] = cache.rglob("*.traffic-of-2.json")
    file.write_text(text)
    assert load_traffic(KEY, "2") is None
    assert str(file) in caplog.text


def test_a_cache_that_cannot_be_written_stops_no_server(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    (cache / "profiles").write_text("a file")
    Served(Cluster.of("2"), FIRST).upkeep().keep_traffic()
    assert "the next server starts without the requests of this one" in caplog.text
