"""Options of policies that change while they serve: allowed and refused changes. Requests continue."""

from __future__ import annotations

import pytest
from test_tetris import chunks_of, machine, tetris
from workloads import assert_lawful

from longspan.core.options import OptionValue, SettledError, option_text
from longspan.core.policy import Policy
from longspan.errors import ParameterError
from longspan.policy.registry import make_policy
from longspan.policy.tetris.rates import RateTable, RateWatch

CHANGEABLE = ("improvement_rate", "improvement_rates", "chunking", "min_chunk")


def policy_of(name: str, **options: str) -> Policy:
    instances = 1 if name == "chunked" else 4
    return make_policy(name, num_instances=instances, options=options, facts=machine(1, 2, 4))


def in_force(policy: Policy) -> dict[str, OptionValue]:
    """Those options that may change."""
    return {name: policy.settings.options[name] for name in policy.settings.changeable}


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("chunked", {}, {}),
        ("context", {"threshold": "2000"}, {"threshold": 2000, "long_share": 0.75, "decode": "ring_q"}),
        ("runahead", {"home": "computed"}, {"home": "computed", "partition": "auto", "threshold": "auto"}),
        ("fixed-sp", {"sp": "2"}, {"sp": 2, "layout": "auto"}),
        ("tetris", {"improvement_rate": "0.4"}, {"improvement_rate": 0.4, "chunking": True, "min_chunk": 256}),
    ],
)
def test_a_policy_tells_its_name_and_all_its_options(
    name: str, given: dict[str, str], expected: dict[str, OptionValue]
) -> None:
    settings = policy_of(name, **given).settings
    assert settings.name == name
    assert expected.items() <= settings.options.items()
    assert settings.changeable == (CHANGEABLE if name == "tetris" else ())
    assert settings.given == given
    again = policy_of(name, **{key: option_text(value) for key, value in settings.options.items() if value is not None})
    assert again.settings.options == settings.options, "options in force can be given with -o"


def test_auto_is_told_by_its_real_name() -> None:
    assert make_policy("auto", num_instances=2, options={}).settings.name == "auto"
    assert make_policy("auto", num_instances=1, options={}).settings.name == "chunked"


@pytest.mark.parametrize(
    ("name", "change", "kind", "words"),
    [
        ("tetris", {"improvement_rate": "1"}, ValueError, "improvement_rate must be at least 0 and below 1, but 1.0"),
        ("tetris", {"improvement_rate": "nan"}, ValueError, "improvement_rate must be at least 0 and below 1, but nan"),
        ("tetris", {"improvement_rate": "much"}, ParameterError, "must be one of a number, auto, but 'much' given"),
        ("tetris", {"improvement_rate": "0.1", "improvement_rates": "1:0.2"}, ValueError, "leave one out"),
        ("tetris", {"improvement_rates": "1-0.2"}, ValueError, "look like 0.5:0.1,1:0.3, but '1-0.2' given"),
        ("tetris", {"chunking": "perhaps"}, ParameterError, "must be one of true, false, but 'perhaps' given"),
        ("tetris", {"min_chunk": "0"}, ParameterError, "min_chunk must be at least 1, but 0 given"),
        ("tetris", {"rate": "1"}, ValueError, "no option 'rate'; its options that may change while it serves: impr"),
        ("tetris", {"sp_sizes": "1"}, SettledError, "restart, and give policy option sp_sizes=VALUE"),
        ("tetris", {"chunking": "false", "layout": "striped"}, SettledError, "option layout of policy tetris cannot"),
        ("fixed-sp", {"sp": "4"}, SettledError, "option sp of policy fixed-sp cannot .*: none"),
        ("context", {"threshold": "1"}, SettledError, "option threshold of policy context cannot"),
        ("runahead", {"home": "last"}, SettledError, "option home of policy runahead cannot"),
        ("csps", {"csa": "/some/file"}, ParameterError, "csa is off, auto or settings as JSON, but '/some/file' given"),
        ("csps", {"csa": "Off"}, ParameterError, "csa is off, auto or settings as JSON, but 'Off' given"),
        ("csps", {"csa": ""}, ParameterError, "csa is off, auto or settings as JSON, but '' given"),
        ("chunked", {"improvement_rate": "0.3"}, ValueError, "policy chunked has no option 'improvement_rate'.*: none"),
    ],
)
def test_a_refused_update_changes_nothing(
    name: str, change: dict[str, str], kind: type[ValueError], words: str
) -> None:
    policy = policy_of(name, **({"sp": "2"} if name == "fixed-sp" else {}))
    before = policy.settings
    with pytest.raises(ValueError, match=words) as caught:
        policy.update(change)
    assert type(caught.value) is kind
    assert policy.settings == before
    policy.update({})
    assert policy.settings == before


def test_a_rate_takes_the_place_of_a_table_and_the_reverse() -> None:
    policy = policy_of("tetris", improvement_rate="0.3")
    policy.update({"improvement_rates": "0.5:0.1,1:0.4"})
    assert in_force(policy)["improvement_rate"] == "auto"
    policy.update({"chunking": "false", "min_chunk": "8"})
    assert in_force(policy) == dict(zip(CHANGEABLE, ("auto", "0.5:0.1,1:0.4", False, 8), strict=True))
    policy.update({"improvement_rate": "0.2"})
    assert in_force(policy) == dict(zip(CHANGEABLE, (0.2, "", False, 8), strict=True))
    policy.update({name: option_text(value) for name, value in in_force(policy).items()})
    assert in_force(policy) == dict(zip(CHANGEABLE, (0.2, "", False, 8), strict=True)), (
        "all at once is no contradiction"
    )


def test_a_rate_that_is_taken_back_leaves_the_table() -> None:
    policy = policy_of("tetris", improvement_rates="0:0.1")
    policy.update({"improvement_rate": None})
    assert policy.given == {"improvement_rates": "0:0.1"}


def test_another_table_counts_for_the_arrivals_of_the_last_window() -> None:
    watch = RateWatch(RateTable.parse("0:0.05,1:0.3"))
    for now_s in range(31):
        watch.arrived(float(now_s))
        watch.renew(float(now_s))
    assert watch.improvement_rate == 0.3
    watch.use(RateTable.parse("0:0.1,1:0.6"))
    assert watch.improvement_rate == 0.6


def test_another_rate_counts_for_prompts_to_come_and_running_ones_stay() -> None:
    """Two instances shorten a prompt by a third: enough at first, but not when it must be by three quarters."""
    cluster = tetris()
    before = cluster.add(range(1000), max_tokens=40)
    cluster.engine.emit()
    cluster.policy.update({"improvement_rate": "0.75"})
    after = cluster.add([9] * 1000, max_tokens=40)
    cluster.run()
    assert_lawful(cluster)
    assert chunks_of(cluster, before) == [((0, 1), 1000)], "the rest of it, too"
    assert [len(group) for group, _ in chunks_of(cluster, after)] == [1]
    for request in (before, after):
        assert request.output == cluster.expected_output(request)


@pytest.mark.parametrize("change", [{"chunking": "false"}, {"min_chunk": "2000"}])
def test_chunks_can_be_switched_off(change: dict[str, str]) -> None:
    """As in `test_tetris.py`, where the long prompt begins with a chunk of 992 tokens on the idle instances."""
    cluster = tetris()
    cluster.policy.update(change)
    cluster.add(range(1000), max_tokens=1)
    long = cluster.add([7] * 8000, max_tokens=1)
    cluster.run()
    assert chunks_of(cluster, long) == [((0, 1, 2, 3), 8000)]
