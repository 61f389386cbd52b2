"""What requests may ask of the sampler: defaults, forms, and an error for everything else."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from longspan.core.sampling import SamplingParams
from longspan.errors import ParameterError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or more and finite, but -0.1"),
        ({"temperature": NAN}, "temperature .*but nan"),
        ({"temperature": INF}, "temperature .*but inf"),
        ({"temperature": "1"}, "temperature must be a number, but '1'"),
        ({"temperature": None}, "temperature must be a number, but None"),
        ({"top_k": -2}, "top_k .*but -2"),
        ({"top_k": 2.0}, "top_k must be a whole number, but 2.0"),
        ({"top_k": None}, "top_k must be a whole number, but None"),
        ({"top_p": 0.0}, "top_p .*but 0.0"),
        ({"top_p": 1.1}, "top_p .*but 1.1"),
        ({"top_p": NAN}, "top_p .*but nan"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1, but -0.1"),
        ({"min_p": 1.1}, "min_p must be from 0 to 1, but 1.1"),
        ({"min_p": NAN}, "min_p .*but nan"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0 and finite, 1 for none, but 0.0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty .*but -1.0"),
        ({"repetition_penalty": INF}, "repetition_penalty .*but inf"),
        ({"presence_penalty": 2.1}, "presence_penalty must be from -2 to 2, 0 for none, but 2.1"),
        ({"presence_penalty": NAN}, "presence_penalty .*but nan"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be from -2 to 2, 0 for none, but -2.1"),
        ({"logit_bias": {5: 100.5}}, "logit_bias must be from -100 to 100, but 100.5 given for token 5"),
        ({"logit_bias": {5: -INF}}, "logit_bias .*but -inf given for token 5"),
        ({"logit_bias": {5: NAN}}, "logit_bias .*but nan given for token 5"),
        ({"logit_bias": {5: "1"}}, "logit_bias of token 5 must be a number, but '1'"),
        ({"logit_bias": {-5: 1.0}}, "logit_bias: a token id must be at least 0, but -5"),
        ({"logit_bias": {"-5": 1.0}}, "logit_bias: a token id must be a whole number, but '-5'"),
        ({"logit_bias": {"the": 1.0}}, "logit_bias: a token id must be a whole number, but 'the'"),
        ({"logit_bias": {5: 1.0, "5": 2.0}}, "logit_bias names token 5 twice"),
        ({"logit_bias": [5]}, r"logit_bias must map token ids to numbers, but \[5\]"),
        ({"n": 0}, "n must be at least 1, but 0"),
        ({"n": True}, "n must be a whole number, but True"),
        ({"seed": -1}, "seed .*but -1"),
        ({"seed": 2**63}, "seed .*but 9223372036854775808"),
        ({"seed": 1.5}, "seed must be a whole number, but 1.5"),
        ({"stop": ["a", ""]}, "must not be empty"),
        ({"stop": ""}, "must not be empty"),
        ({"stop": [7]}, "stop must be a string or several, but 7 given: token ids go to stop_token_ids"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids: a token id must be at least 0, but -1"),
        ({"stop_token_ids": ["3"]}, "stop_token_ids: a token id must be a whole number, but '3'"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list of token ids, but 3"),
        ({"stop_token_ids": "33"}, "stop_token_ids must be a list of token ids, but '33'"),
        ({"max_tokens": 0}, "max_tokens .*but 0"),
        ({"min_tokens": -1}, "min_tokens .*but -1"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens\(9\) must not exceed max_tokens\(8\)"),
        ({"logprobs": -1}, "logprobs must be at least 0, or None for no report, but -1"),
        ({"logprobs": True}, "logprobs must be a whole number, but True"),
        ({"prompt_logprobs": -1}, "prompt_logprobs must be at least 0, or None for no report, but -1"),
    ],
    ids=str,
)
def test_invalid_values_are_refused(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message) as caught:
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
    """They hash, compare, travel, and can be made anew from one another; what they were made of may change after."""
    bias, stop = {"3": 1.0}, ["x"]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=[4], n=np.int64(2), top_p=np.float32(0.5))
    same = SamplingParams(logit_bias={3: 1}, stop="x", stop_token_ids=(4,), n=2, top_p=0.5)
    bias["5"] = 2.0
    stop.append("y")
    assert params == same and hash(params) == hash(same)
    assert replace(params, seed=None) == params == pickle.loads(pickle.dumps(params))
    assert type(params.n) is int and type(params.top_p) is float


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"logit_bias": {9: 1.0, 10: 1.0}}, "logit_bias names token 10, but this model's token ids are 0 to 9"),
        ({"stop_token_ids": [3, 11]}, "stop_token_ids names token 11, but this model's token ids are 0 to 9"),
        ({"logprobs": 11}, "logprobs must be at most this model's 10 tokens, but 11 given"),
        ({"prompt_logprobs": 11}, "prompt_logprobs must be at most this model's 10 tokens, but 11 given"),
    ],
)
def test_parameters_that_a_vocabulary_refuses(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wishes).check_vocab(10)


def test_parameters_that_a_vocabulary_allows() -> None:
    SamplingParams(logit_bias={9: 1.0}, stop_token_ids=[0, 9], logprobs=10, prompt_logprobs=10).check_vocab(10)
