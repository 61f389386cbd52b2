"""Policy `csps` with a tuned file: settings are chosen for each prompt, by an objective."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from invented_tuned import RATES, TINY_SHAPE, invented_tuned

from longspan.core.cluster import Cluster
from longspan.core.exchange import LOCAL
from longspan.core.imitated_hosts import locations_of_ranks
from longspan.core.policy import Policy
from longspan.core.splits import ParallelSpec
from longspan.cost.profile import Prefill, Profile, Transfer
from longspan.cost.profile_key import ProfileKey
from longspan.errors import ParameterError
from longspan.policy.csps.chooser import GRID, CsaChooser, bucket, rates_of
from longspan.policy.csps.objective import Objective
from longspan.policy.csps.search import least_loss, least_ttft
from longspan.policy.facts import Facts
from longspan.policy.registry import make_policy

TUNED = invented_tuned()
FACTS = Facts(
    shape=TINY_SHAPE,
    cluster=Cluster(spec=ParallelSpec.parse("4"), locations=locations_of_ranks(4, "2")),
)
HOSTS = (0, 0, 1, 1)
CHOOSER = CsaChooser(TUNED, FACTS, range(4), "alltoall")


def csps(**options: str) -> Policy:
    given: Mapping[str, str] = {"csa": TUNED.brief.to_json(indent=0), "threshold": "100", **options}
    return make_policy("csps", num_instances=4, options=given, facts=FACTS)


def test_without_an_objective_nothing_is_lost() -> None:
    setting = csps().sparse(3000, 16, 10_000)
    assert setting is not None and setting.num_levels == 2
    most = TUNED.max_drop_without_loss(3445, 2, setting.mode)
    assert most is not None and 0 < setting.ratio(1, 0, 2) <= most + 1e-9
    assert csps().sparse(90, 16, 10_000) is None, "one instance computes it"


def test_more_loss_buys_more_drops_and_less_time() -> None:
    found = [CHOOSER.choose(4000, 4, Objective(max_loss=most)) for most in (0.0, 3.0, 8.0, 30.0)]
    assert all(one.is_met for one in found)
    times, losses = [one.ttft_s for one in found], [one.loss for one in found]
    assert times == sorted(times, reverse=True) and times[0] > times[-1]
    assert losses == sorted(losses) and losses[0] <= 1.0 < losses[-1] <= 30
    ratios = [csps(max_accuracy_loss=most).sparse(4000, 16, 10_000).ratio(1, 0, 2) for most in ("0", "30")]
    assert ratios[0] < ratios[1]


def test_a_target_takes_the_least_loss_that_is_in_time() -> None:
    quick, slow = (CHOOSER.choose(4000, 4, Objective(max_loss=most)).ttft_s for most in (30.0, 0.0))
    found = [CHOOSER.choose(4000, 4, Objective(target_s=target)) for target in (1.1 * quick, 1.2 * slow)]
    assert all(one.is_met for one in found)
    assert found[0].ttft_s <= 1.1 * quick and found[0].loss > found[1].loss == 0


def test_a_target_that_cannot_be_met_is_come_near() -> None:
    found = CHOOSER.choose(4000, 4, Objective(target_s=1e-6))
    assert not found.is_met
    assert found.ttft_s <= CHOOSER.choose(4000, 4, Objective(max_loss=1e9)).ttft_s
    assert found.configuration.drop <= GRID.drops[-1] <= 0.5


def test_where_any_drop_loses_nothing_is_dropped() -> None:
    chooser = CsaChooser(invented_tuned(kv=50000.0, qkv=50000.0), FACTS, range(4), "alltoall")
    found = chooser.choose(4000, 4, Objective())
    assert (found.configuration.levels, found.configuration.drop, found.loss) == (2, 0, 0)


@settings(max_examples=10)
@given(num_tokens=st.integers(1000, 60_000), most=st.floats(0, 20), is_target=st.booleans())
def test_choices_are_as_quick_as_enumeration_s(num_tokens: int, most: float, is_target: bool) -> None:
    """Choices also satisfy the constraint, at the bucket of the prompt's length."""
    length = bucket(num_tokens)
    tables = CHOOSER.tables(4)
    best_s = min(one.ttft_s for table in tables for one in table.choices(length, lambda *_: 0.0))
    objective = Objective(target_s=best_s * (1 + most / 5)) if is_target else Objective(max_loss=most)
    chosen = CHOOSER.choose(num_tokens, 4, objective)
    enumerated = []
    for group in (table.group for table in tables):
        loss = TUNED.loss_in(HOSTS, group.mode)
        if objective.target_s is None:
            enumerated.append(least_ttft(GRID.choices(group, length, loss), objective.loss_bound))
        else:
            enumerated.append(least_loss(GRID.choices(group, length, loss), objective.target_s))
    known = [one for one in enumerated if one is not None]
    if not known or not chosen.is_met:
        return
    if objective.target_s is None:
        assert chosen.loss <= objective.loss_bound
        assert chosen.ttft_s <= 1.05 * min(one.ttft_s for one in known)
    else:
        [group] = [table.group for table in tables if table.group.mode == chosen.mode]
        assert chosen.ttft_s <= objective.target_s
        assert group.ttft_s(length, chosen.configuration) <= 1.02 * objective.target_s


@given(st.integers(1, 10**6))
def test_lengths_of_a_bucket_have_one_choice(num_tokens: int) -> None:
    assert bucket(bucket(num_tokens)) == bucket(num_tokens)
    if 512 <= num_tokens <= 512 * 4**5:
        assert num_tokens <= bucket(num_tokens) <= num_tokens * 2**0.125 + 1


def test_speeds_are_the_profile_s_if_there_is_one() -> None:
    assert rates_of(TUNED, FACTS, HOSTS) == TUNED.rates
    key = ProfileKey(model="m", dtype="float32", device="cpu", tp=1, threads=1, kernel="torch", machine="m")
    pair_s, token_s = 2e-9, 3e-5
    prefills = tuple(
        Prefill(
            members=1,
            exchange=str(LOCAL),
            new_tokens=new,
            cached_tokens=cached,
            seconds=(token_s * new + pair_s * (new * cached + new**2 / 2),),
        )
        for new in (512, 1024, 2048, 4096)
        for cached in (0, 1024)
    )
    transfers = tuple(
        Transfer(
            kind="point_to_point", members=2, num_bytes=size, seconds=(1e-4 + size / speed,), link_class=link_class
        )
        for link_class, speed in (("same_host", 4e9), ("other_host", 1e9))
        for size in (2**10, 2**20, 2**24)
    )
    profile = Profile(profile_key=key, prefills=prefills, transfers=transfers)
    found = rates_of(TUNED, replace(FACTS, profile=profile), HOSTS)
    assert found.pairs_per_s == pytest.approx(TINY_SHAPE.num_heads * TINY_SHAPE.num_layers / pair_s, rel=1e-3)
    assert found.rest_s == pytest.approx(token_s / 4, rel=1e-3)
    assert found.between.bytes_per_s == pytest.approx(1e9, rel=1e-3)
    assert found.inside.bytes_per_s == pytest.approx(4e9, rel=1e-3)
    assert found.between.message_s == pytest.approx(1e-4, rel=1e-3)


def test_users_hear_whose_speeds_and_how_far_a_target_reaches() -> None:
    assert csps().hint == "csa goes by speeds of none, where its file was tuned: run longspan profile"
    [least_s, most_s] = (CHOOSER.choose(length, 4, Objective(max_loss=1e9)).ttft_s for length in (4096, 16384))
    some = csps(target_ttft=str((least_s + most_s) / 2)).hint
    assert some is not None and "are expected for prompts of up to" in some
    none = csps(target_ttft="1e-6").hint
    assert none is not None and "are expected for no prompt" in none


def test_objectives_change_while_it_serves() -> None:
    policy = csps()
    before = policy.sparse(4000, 16, 10_000)
    policy.update({"max_accuracy_loss": "30"})
    more = policy.sparse(4000, 16, 10_000)
    assert before is not None and more is not None and more.ratio(1, 0, 2) > before.ratio(1, 0, 2)
    policy.update({"target_ttft": "1000"})
    assert policy.settings.options["max_accuracy_loss"] is None, "one takes the place of the other"
    relaxed = policy.sparse(4000, 16, 10_000)
    assert relaxed is not None and relaxed.ratio(1, 0, 2) == 0
    policy.update({"csa": json.dumps({"levels": 2, "drop": 0.25})})
    assert policy.settings.options["target_ttft"] is None
    fixed = policy.sparse(4000, 16, 10_000)
    assert fixed is not None and fixed.ratio(1, 0, 2) == 0.25
    policy.update({"csa": "off"})
    assert policy.sparse(4000, 16, 10_000) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"csa": "off", "target_ttft": "20"}, "target_ttft is for csa auto, or a tuned file, but csa is off"),
        ({"csa": '{"levels": 2}', "max_accuracy_loss": "1"}, "max_accuracy_loss is for csa auto"),
        ({"csa": "off", "max_accuracy_loss": "0"}, "max_accuracy_loss is for csa auto, or a tuned file"),
        ({"max_accuracy_loss": "1", "target_ttft": "2"}, "exclude each other"),
        ({"max_accuracy_loss": "-1"}, "max_accuracy_loss must be a number from 0 on, but -1 given"),
        ({"target_ttft": "nan"}, "target_ttft must be a number above 0, but nan given"),
        ({"target_ttft": "soon"}, "target_ttft must be a number, but 'soon' given"),
        ({"exchange": "ring_kv"}, "csa is for exchange alltoall, gather_hidden"),
        ({"csa": '{"tuned_for": "x"}'}, "not a file of longspan tune csa"),
        ({"csa": "auto"}, "csa is off, auto or settings as JSON, but"),
        ({"csa": '{"levels": 2, "drop": {"2": []}}'}, "Expected `array` of length >= 1"),
    ],
)
def test_mistakes_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        csps(**options)
    policy = csps()
    if "csa" not in options and "exchange" not in options:
        with pytest.raises(ValueError, match=words):
            policy.update(options)
        assert policy.settings == csps().settings


def test_more_instances_compute_less_each_outside_attention() -> None:
    rest = [rates_of(TUNED, FACTS, (0,) * members).rest_s for members in (2, len(TUNED.hosts), 8)]
    assert rest[1] == TUNED.rates.rest_s
    assert rest[0] * 2 == pytest.approx(rest[1] * len(TUNED.hosts)) == pytest.approx(rest[2] * 8)


def test_a_file_of_another_model_is_refused() -> None:
    other = Facts(shape=TINY_SHAPE.__class__(**{**vars(TINY_SHAPE), "num_layers": 5}), cluster=FACTS.cluster)
    with pytest.raises(ParameterError, match="was tuned for invented with num_layers 4, but the model here has 5"):
        make_policy("csps", num_instances=4, options={"csa": TUNED.to_json()}, facts=other)


def test_the_model_need_not_be_known_yet() -> None:
    """Options are checked before a model is fetched."""
    policy = make_policy("csps", num_instances=4, options={"csa": TUNED.to_json()})
    assert policy.sparse(4000, 16, 10_000) is None
    assert math.isfinite(TUNED.rates.pairs_per_s) and RATES.pairs_per_s > 0
