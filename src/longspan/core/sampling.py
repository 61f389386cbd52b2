"""Sampling parameters: what a request asks of the sampler."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from numbers import Integral, Real
from typing import Annotated, Any

from longspan.core.options import Option, id_list, key_values
from longspan.errors import ParameterError

LogitBias = Mapping[Any, float] | tuple[tuple[int, float], ...]
"""Token id to bias. JSON has no integer keys, so that ids may come as strings of digits; kept as sorted pairs.

(One kind of mapping, since msgspec cannot tell two apart.)
"""

MAX_BIAS = 100.0
"""OpenAI's bound, either way. It is ample to force a token or to rule one out."""

_WHOLE = ("n", "top_k", "min_tokens")
_WHOLE_OR_NONE = ("seed", "max_tokens", "logprobs", "prompt_logprobs")
_REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an output must have: exactly one of these is given. Names are vLLM's. Instances are hashable.

    Attributes:
        json: a JSON schema, as text (kept as it is) or as a dictionary (kept as text).
        regex: a regular expression that the whole output matches.
        choice: the output is one of these texts.
        grammar: a context-free grammar in Lark's notation.
        json_object: the output is any JSON object.

    Raises:
        ValueError: unless exactly one is given, or for one of the wrong type.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise _form_error(f"json_object must be true or false, but {self.json_object!r} given", self.json_object)
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(field.name for field in fields(self))
            found = " and ".join(given) or "none"
            raise ParameterError("structured_outputs", f"must have exactly one of {names}, but {found} given", given)
        if isinstance(self.json, dict):
            object.__setattr__(self, "json", _json_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("json", "regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise _form_error(f"{name} must be a text that is not empty, but {value!r:.60} given", value)


def _read_biases(pairs: Sequence[str]) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in key_values(pairs).items()}
    except ValueError as error:
        raise ValueError(f"must be a token id, = and a number: {error}") from None


_choice, _end = partial(Option, group="Sampling"), partial(Option, group="Length and end")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Says how the next tokens of a request are chosen and when it ends. Names, defaults and ranges are vLLM's.

    They apply in this order: logit_bias, min_tokens, penalties, structured_outputs, temperature, min_p, top_k, top_p.
    Instances are hashable whatever collections they were given.

    Attributes:
        n: how many outputs are drawn for the prompt, each from random numbers of its own.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: only the k most likely tokens, and those exactly as likely as the last of them, stay; 0 or -1 keeps all.
        top_p: only the smallest set of most likely tokens whose probability reaches p stays, with those exactly as
            likely as its last.
        min_p: tokens less likely than this fraction of the most likely token's probability go.
        repetition_penalty: positive logits of tokens in the prompt or the output are divided by it, negative ones
            multiplied; above 1 discourages them.
        presence_penalty: taken from the logit of every token in the output.
        frequency_penalty: taken from a token's logit as often as the token is in the output.
        logit_bias: added to the logits of these token ids.
        seed: of this request's random numbers; None draws one from the engine's seed.
        stop: strings that end the output; they are not part of it.
        stop_token_ids: tokens that end the output.
        min_tokens: until so many tokens are out, end-of-sequence tokens, stop tokens and stop strings do not end the
            request; end-of-sequence and stop tokens are not sampled at all.
        max_tokens: at most so many output tokens; None means up to the model's context.
        ignore_eos: generate on past end-of-sequence tokens.
        logprobs: report the log-probability of each output token, and of so many of the most likely tokens beside it.
        prompt_logprobs: the same for the tokens of the prompt.
        structured_outputs: what form the output must have. It counts before `min_tokens`: an output that can only end
            ends. With `ignore_eos`, end-of-sequence tokens follow until `max_tokens`.
        output_logits: return the float32 logits that each output token was chosen from (before all of the above).

    Raises:
        ValueError: for a value out of range or of the wrong type.
    """

    temperature: Annotated[float, _choice("0 is greedy.")] = 1.0
    top_k: Annotated[int, _choice("Keep the k most likely tokens; -1 or 0 keeps all.")] = -1
    top_p: Annotated[float, _choice("Keep the most likely tokens that reach this probability together.")] = 1.0
    min_p: Annotated[float, _choice("Least probability, as a share of the most likely token's.")] = 0.0
    repetition_penalty: Annotated[float, _choice("Above 1: tokens of prompt and output become less likely.")] = 1.0
    presence_penalty: Annotated[float, _choice("Subtracted from the logits of tokens in the output.")] = 0.0
    frequency_penalty: Annotated[float, _choice("As before, for each time that they are in it.")] = 0.0
    logit_bias: Annotated[
        LogitBias | None,
        _choice(
            "Added to the logit of a token id; repeatable.", metavar="ID=VALUE", repeatable=True, read=_read_biases
        ),
    ] = None
    seed: Annotated[int | None, _choice("Of all random numbers, those of dummy weights too.")] = None
    n: Annotated[int, _choice("Outputs per prompt.")] = 1
    logprobs: Annotated[int | None, _choice("Report the logprobs of output tokens and so many most likely ones.")] = (
        None
    )
    prompt_logprobs: Annotated[int | None, _choice("The same for the tokens of the prompt.")] = None
    max_tokens: Annotated[
        int | None, _end("Most output tokens; if there is no default, what the context has left.")
    ] = 16
    min_tokens: Annotated[int, _end("The output does not end before so many.")] = 0
    stop: Annotated[
        Sequence[str] | str | None, _end("A string that ends the output; repeatable.", repeatable=True, read=tuple)
    ] = ()
    stop_token_ids: Annotated[
        Sequence[int] | None, _end("Token ids that end the output.", metavar="1,2,3", read=id_list)
    ] = ()
    ignore_eos: Annotated[bool, _end("Go on past end-of-sequence tokens.")] = False
    structured_outputs: StructuredOutputsParams | None = None
    output_logits: bool = False

    def __post_init__(self) -> None:
        for name in _WHOLE:
            self._set(name, _whole(name, getattr(self, name)))
        for name in _WHOLE_OR_NONE:
            value = getattr(self, name)
            self._set(name, None if value is None else _whole(name, value))
        for name in _REAL:
            self._set(name, _real(name, getattr(self, name)))
        self._set("stop", _strings(self.stop))
        self._set("stop_token_ids", _token_ids(self.stop_token_ids))
        self._set("logit_bias", None if self.logit_bias is None else _biases(self.logit_bias))
        for checks in (_distribution_checks, _penalty_checks, _length_checks, _report_checks):
            for holds, name, problem in checks(self):
                if not holds:
                    raise ParameterError(name, problem, getattr(self, name))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Stop strings are a tuple here, whatever form they were given in."""
        assert isinstance(self.stop, tuple), "normalised in the constructor"
        return self.stop

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Stop token ids are a tuple here, whatever form they were given in."""
        assert isinstance(self.stop_token_ids, tuple), "normalised in the constructor"
        return self.stop_token_ids

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Biases are pairs of token id and bias here, by ascending id; empty for None."""
        assert self.logit_bias is None or isinstance(self.logit_bias, tuple), "normalised in the constructor"
        return self.logit_bias or ()

    def check_vocab(self, vocab_size: int) -> None:
        """Hold what names tokens against a model's vocabulary.

        Raises:
            ValueError: for a token id that is not below `vocab_size`, or more logprobs than there are tokens.
        """
        named = {"logit_bias": [token for token, _ in self.biases], "stop_token_ids": self.stop_ids}
        for name, tokens in named.items():
            for token in tokens:
                if token >= vocab_size:
                    problem = f"names token {token}, but this model's token ids are 0 to {vocab_size - 1}: remove it"
                    raise ParameterError(name, problem, token)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > vocab_size:
                problem = f"must be at most this model's {vocab_size} tokens, but {count} given"
                raise ParameterError(name, problem, count)


_Check = tuple[bool, str, str]
"""A condition, the parameter that it is about, and the problem if it does not hold."""


def _distribution_checks(params: SamplingParams) -> Iterator[_Check]:
    temperature, top_k, top_p, min_p = params.temperature, params.top_k, params.top_p, params.min_p
    finite = 0.0 <= temperature < float("inf")
    yield finite, "temperature", f"must be 0 or more and finite, but {temperature} given"
    yield top_k >= -1, "top_k", f"must be -1 or 0 (all) or positive, but {top_k} given"
    yield 0.0 < top_p <= 1.0, "top_p", f"must be above 0 and at most 1, but {top_p} given"
    yield 0.0 <= min_p <= 1.0, "min_p", f"must be from 0 to 1, but {min_p} given"
    seed = params.seed
    yield seed is None or 0 <= seed < 2**63, "seed", f"must be at least 0 and below 2**63, but {seed} given"
    yield params.n >= 1, "n", f"must be at least 1, but {params.n} given"
    greedy = f"must be 1 when using greedy sampling, but {params.n} given: set n=1 or a temperature above 0"
    yield params.n == 1 or temperature > 0, "n", greedy


def _penalty_checks(params: SamplingParams) -> Iterator[_Check]:
    repetition = params.repetition_penalty
    in_range = 0.0 < repetition < float("inf")
    yield in_range, "repetition_penalty", f"must be above 0 and finite, 1 for none, but {repetition} given"
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(params, name)
        yield -2.0 <= value <= 2.0, name, f"must be from -2 to 2, 0 for none, but {value} given"
    for token, bias in params.biases:
        in_range = -MAX_BIAS <= bias <= MAX_BIAS
        yield in_range, "logit_bias", f"must be from {-MAX_BIAS:g} to {MAX_BIAS:g}, but {bias} given for token {token}"


def _length_checks(params: SamplingParams) -> Iterator[_Check]:
    longest, least = params.max_tokens, params.min_tokens
    yield all(params.stop_strings), "stop", "must not be empty: leave it out"
    yield longest is None or longest >= 1, "max_tokens", f"must be at least 1, but {longest} given"
    yield least >= 0, "min_tokens", f"must be at least 0, but {least} given"
    yield longest is None or least <= longest, "min_tokens", f"({least}) must not exceed max_tokens({longest})"


def _report_checks(params: SamplingParams) -> Iterator[_Check]:
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        yield value is None or value >= 0, name, f"must be at least 0, or None for no report, but {value} given"
    form = params.structured_outputs
    is_form = isinstance(form, StructuredOutputsParams | None)
    yield is_form, "structured_outputs", f"must be StructuredOutputsParams, but {form!r:.60} given"


def _whole(name: str, value: object, what: str = "") -> int:
    """The number; `what` says which one of several that the parameter holds."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ParameterError(name, f"{what}must be a whole number, but {value!r} given", value)
    return int(value)


def _real(name: str, value: object, what: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ParameterError(name, f"{what}must be a number, but {value!r} given", value)
    return float(value)


def _strings(stop: Sequence[str] | str | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for string in strings:
        if not isinstance(string, str):
            raise ParameterError(
                "stop", f"must be a string or several, but {string!r} given: token ids go to stop_token_ids", string
            )
    return strings


def _token_ids(tokens: object) -> tuple[int, ...]:
    if tokens is None:
        return ()
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Iterable):
        raise ParameterError("stop_token_ids", f"must be a list of token ids, but {tokens!r} given", tokens)
    return tuple(_token_id("stop_token_ids", token) for token in tokens)


def _token_id(name: str, token: object) -> int:
    number = _whole(name, token, ": a token id ")
    if number < 0:
        raise ParameterError(name, f": a token id must be at least 0, but {number} given", number)
    return number


def _biases(bias: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(bias, Mapping | tuple):
        raise ParameterError("logit_bias", f"must map token ids to numbers, but {bias!r} given", bias)
    biases: dict[int, float] = {}
    for key, value in bias.items() if isinstance(bias, Mapping) else bias:
        digits = isinstance(key, str) and key.isascii() and key.isdigit()
        token = _token_id("logit_bias", int(key) if digits else key)
        if token in biases:
            raise ParameterError("logit_bias", f"names token {token} twice: keep one", token)
        biases[token] = _real("logit_bias", value, f"of token {token} ")
    return tuple(sorted(biases.items()))


def _form_error(problem: str, value: object) -> ParameterError:
    return ParameterError("structured_outputs", f": {problem}", value)


def _json_text(schema: dict[str, Any]) -> str:
    try:
        return jsonlib.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _form_error(f"the schema in json cannot be written as JSON: {error}", schema) from None


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Iterable):
        raise _form_error(f"choice must be a list of texts, but {choices!r:.60} given", choices)
    texts = tuple(choices)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _form_error(f"choice must be texts that are not empty, but {text!r:.60} given", text)
    if not texts:
        raise _form_error("choice must have at least one text, but none given", choices)
    return texts
