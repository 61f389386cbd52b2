"""Sampling parameters: defaults, forms, and errors for all other values."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from refusals import refused

from longspan.core.sampling import SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("wishes", "parameter"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": NAN}, "temperature"),
        ({"temperature": INF}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": None}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2.0}, "top_k"),
        ({"top_k": None}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": NAN}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": NAN}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
        ({"repetition_penalty": INF}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"presence_penalty": NAN}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"logit_bias": {5: 100.5}}, "logit_bias"),
        ({"logit_bias": {5: -INF}}, "logit_bias"),
        ({"logit_bias": {5: NAN}}, "logit_bias"),
        ({"logit_bias": {5: "1"}}, "logit_bias"),
        ({"logit_bias": {-5: 1.0}}, "logit_bias"),
        ({"logit_bias": {"-5": 1.0}}, "logit_bias"),
        ({"logit_bias": {"the": 1.0}}, "logit_bias"),
        ({"logit_bias": {5: 1.0, "5": 2.0}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [7]}, "stop"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids"),
        ({"stop_token_ids": ["3"]}, "stop_token_ids"),
        ({"stop_token_ids": 3}, "stop_token_ids"),
        ({"stop_token_ids": "33"}, "stop_token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
    ids=str,
)
def test_invalid_values_are_refused(wishes: dict[str, Any], parameter: str) -> None:
    with refused(parameter) as caught:
        SamplingParams(**wishes)
    assert caught.value.parameter in wishes


@pytest.mark.parametrize(
    "wishes",
    [
        {"temperature": 0, "n": 1},
        {"temperature": 1e-300, "n": 100},
        {"top_p": 1, "min_p": 1, "top_k": 10**9},
        {"repetition_penalty": 1e-3, "presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {0: -100, 7: 100}},
        {"logprobs": 0, "prompt_logprobs": 0},
        {"seed": 2**63 - 1, "max_tokens": None, "min_tokens": 10**6},
    ],
    ids=str,
)
def test_the_ends_of_ranges_are_allowed(wishes: dict[str, Any]) -> None:
    params = SamplingParams(**wishes)
    assert {name: getattr(params, name) for name in wishes if name != "logit_bias"} == {
        name: value for name, value in wishes.items() if name != "logit_bias"
    }


def test_defaults_change_nothing() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_k, params.top_p, params.min_p) == (1, 1.0, -1, 1.0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert params.logit_bias is params.logprobs is params.prompt_logprobs is params.seed is None
    assert params.stop_strings == params.stop_ids == params.biases == ()


@pytest.mark.parametrize(
    ("stop", "strings"), [("ab", ("ab",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ((), ()), (None, ())]
)
def test_stop_strings_take_any_form(stop: Any, strings: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == strings


@pytest.mark.parametrize("given", [[3, 1], (3, 1), np.array([3, 1])], ids=str)
def test_stop_tokens_take_any_form(given: Any) -> None:
    ids = SamplingParams(stop_token_ids=given).stop_ids
    assert ids == (3, 1) and all(type(token) is int for token in ids)
    assert SamplingParams(stop_token_ids=None).stop_ids == ()


@pytest.mark.parametrize(
    "given", [{"12": 1, "7": -2.5}, {12: 1.0, 7: -2.5}, {np.int64(12): np.float32(1), 7: -2.5}, ((12, 1), (7, -2.5))]
)
def test_logit_bias_takes_any_form(given: Any) -> None:
    assert SamplingParams(logit_bias=given).biases == ((7, -2.5), (12, 1.0))


def test_params_are_values() -> None:
    """They hash, compare, can be sent, and can be copied with changes. Their sources may change afterwards."""
    bias, stop = {"3": 1.0}, ["x"]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=[4], n=np.int64(2), top_p=np.float32(0.5))
    same = SamplingParams(logit_bias={3: 1}, stop="x", stop_token_ids=(4,), n=2, top_p=0.5)
    bias["5"] = 2.0
    stop.append("y")
    assert params == same and hash(params) == hash(same)
    assert replace(params, seed=None) == params == pickle.loads(pickle.dumps(params))
    assert type(params.n) is int and type(params.top_p) is float


@pytest.mark.parametrize(
    ("wishes", "parameter"),
    [
        ({"logit_bias": {9: 1.0, 10: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [3, 11]}, "stop_token_ids"),
        ({"logprobs": 11}, "logprobs"),
        ({"prompt_logprobs": 11}, "prompt_logprobs"),
    ],
)
def test_parameters_that_a_vocabulary_refuses(wishes: dict[str, Any], parameter: str) -> None:
    with refused(parameter):
        SamplingParams(**wishes).check_vocab(10)


def test_parameters_that_a_vocabulary_allows() -> None:
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[0, 9], logprobs=10, prompt_logprobs=10).check_vocab(10)
