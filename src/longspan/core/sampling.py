"""Sampling parameters of a request."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import inf
from numbers import Integral, Real
from typing import Annotated, Any

from longspan.core.arguments import suggesting
from longspan.core.options import Option, id_list, key_values
from longspan.errors import ParameterError

LogitBias = Mapping[Any, float] | tuple[tuple[int, float], ...]
"""Token id to bias, stored as sorted pairs. JSON has no integer keys, so ids may be strings of digits.

(One mapping type, since msgspec cannot distinguish two.)
"""

MAX_BIAS = 100.0
"""OpenAI's bound of the absolute value. It is enough to force or exclude a token."""


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an output must have. Exactly one field is given. Names are vLLM's. Instances are hashable.

    Attributes:
        json: a JSON schema, as text (kept as it is) or as a dictionary (kept as text).
        regex: a regular expression that the whole output matches.
        choice: the output is one of these texts.
        grammar: a context-free grammar in Lark's notation.
        json_object: the output is any JSON object.

    Raises:
        ValueError: not exactly one field is given, or a field has the wrong type.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise _form_error(f"`json_object` must be true or false, but {self.json_object!r} given", self.json_object)
        all_names = [field.name for field in fields(self)]
        given = [name for name in all_names if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(f"`{name}`" for name in all_names)
            present = " and ".join(f"`{name}`" for name in given) or "none"
            problem = f"must have exactly one of {names}, but {present} given"
            raise ParameterError("structured_outputs", problem, given)
        if isinstance(self.json, dict):
            object.__setattr__(self, "json", _json_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("json", "regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise _form_error(f"`{name}` must be a text that is not empty, but {value!r:.60} given", value)


def _read_biases(pairs: Sequence[str]) -> dict[int, float]:
    biases = {}
    texts = key_values(pairs)
    for token, bias in texts.items():
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            problem = f"must be a token id, = and a number such as 5=-1.5, but '{token}={bias}' given"
            raise ValueError(problem) from None
    return biases


_choice, _end = partial(Option, group="Sampling"), partial(Option, group="Length and end")


@suggesting
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The choice of the next tokens of a request, and its end. Names, defaults and ranges are vLLM's. Hashable.

    They apply in this order: logit_bias, min_tokens, penalties, structured_outputs, temperature, min_p, top_k, top_p.

    Attributes:
        n: number of outputs of the prompt, each with its own random numbers. Greedy outputs are equal.
        temperature: 0 is greedy. Otherwise logits are divided by it.
        top_k: keep the k most likely tokens, and tokens exactly as likely as the last of them. 0 or -1 keeps all.
        top_p: keep the most likely tokens whose probability reaches p, and tokens exactly as likely as the last.
        min_p: drop tokens less likely than this fraction of the most likely token's probability.
        repetition_penalty: positive logits of tokens in the prompt or the output are divided by it, negative logits
            are multiplied. Values above 1 make these tokens less likely.
        presence_penalty: subtracted from the logit of every token in the output.
        frequency_penalty: subtracted from a token's logit for each time that the token is in the output.
        logit_bias: added to the logits of these token ids.
        seed: seed of this request's random numbers. None draws a seed from the engine's seed.
        stop: strings that end the output. They are not part of it.
        stop_token_ids: tokens that end the output.
        min_tokens: before this number of output tokens, end-of-sequence tokens, stop tokens and stop strings do not end
            the request. End-of-sequence and stop tokens are not sampled.
        max_tokens: maximum output tokens. None means up to the model's context.
        ignore_eos: continue after end-of-sequence tokens.
        logprobs: report the log-probability of each output token, and of this number of most likely tokens.
        prompt_logprobs: the same for the tokens of the prompt.
        attention_from: report the attention that the prompt's tokens get from its tokens at this position and after.
        structured_outputs: the form of the output. It takes precedence over `min_tokens`: an output that can only end
            ends. With `ignore_eos`, end-of-sequence tokens follow until `max_tokens`.
        output_logits: return the float32 logits of each output token, before any of the above is applied.

    Raises:
        ValueError: for a value out of range or of the wrong type.
    """

    temperature: Annotated[float, _choice("0 is greedy.")] = 1.0
    top_k: Annotated[int, _choice("Keep the k most likely tokens. -1 or 0 keeps all.")] = -1
    top_p: Annotated[float, _choice("Keep the most likely tokens that reach this probability together.")] = 1.0
    min_p: Annotated[float, _choice("Minimum probability, relative to the likeliest token.")] = 0.0
    repetition_penalty: Annotated[float, _choice("Above 1: tokens of prompt and output become less likely.")] = 1.0
    presence_penalty: Annotated[float, _choice("Subtracted from the logits of tokens in the output.")] = 0.0
    frequency_penalty: Annotated[float, _choice("Likewise, once per occurrence.")] = 0.0
    logit_bias: Annotated[
        LogitBias | None,
        _choice(
            "Added to the logit of a token id. Repeatable.", metavar="ID=VALUE", repeatable=True, read=_read_biases
        ),
    ] = None
    seed: Annotated[int | None, _choice("Seed of all random numbers, and of dummy weights.")] = None
    n: Annotated[int, _choice("Outputs per prompt.")] = 1
    logprobs: Annotated[int | None, _choice("Report logprobs of output tokens and of this many likeliest.")] = None
    prompt_logprobs: Annotated[int | None, _choice("The same for the tokens of the prompt.")] = None
    max_tokens: Annotated[
        int | None, _end("Maximum output tokens. If there is no default, the rest of the context.")
    ] = 16
    min_tokens: Annotated[int, _end("Minimum output tokens.")] = 0
    stop: Annotated[
        Sequence[str] | str | None, _end("A string that ends the output. Repeatable.", repeatable=True, read=tuple)
    ] = ()
    stop_token_ids: Annotated[
        Sequence[int] | None, _end("Token ids that end the output.", metavar="1,2,3", read=id_list)
    ] = ()
    ignore_eos: Annotated[bool, _end("Continue after end-of-sequence tokens.")] = False
    structured_outputs: StructuredOutputsParams | None = None
    output_logits: bool = False
    attention_from: int | None = None

    def __post_init__(self) -> None:
        for name, (read, in_range, valid) in _NUMBERS.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            self._set(name, value := read(name, value))
            if not in_range(value):
                raise ParameterError(name, f"must be {valid}, but {value} given", value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            problem = f"must be at most `max_tokens` {self.max_tokens}, but {self.min_tokens} given"
            raise ParameterError("min_tokens", problem, self.min_tokens)
        for name in ("ignore_eos", "output_logits"):
            if not isinstance(value := getattr(self, name), bool):
                raise ParameterError(name, f"must be True or False, but {value!r:.60} given", value)
        self._set("stop", _strings(self.stop))
        self._set("stop_token_ids", _token_ids(self.stop_token_ids))
        self._set("logit_bias", None if self.logit_bias is None else _biases(self.logit_bias))
        form: object = self.structured_outputs
        if not isinstance(form, StructuredOutputsParams | None):
            raise ParameterError("structured_outputs", f"must be StructuredOutputsParams, but {form!r:.60} given", form)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        assert isinstance(self.stop, tuple), "normalised in the constructor"
        return self.stop

    @property
    def stop_ids(self) -> tuple[int, ...]:
        assert isinstance(self.stop_token_ids, tuple), "normalised in the constructor"
        return self.stop_token_ids

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """Pairs of token id and bias, by ascending id. Empty for None."""
        assert self.logit_bias is None or isinstance(self.logit_bias, tuple), "normalised in the constructor"
        return self.logit_bias or ()

    def check_vocab(self, vocab_size: int) -> None:
        """Check token ids and numbers of logprobs against a vocabulary."""
        for name, tokens in ("logit_bias", [token for token, _ in self.biases]), ("stop_token_ids", self.stop_ids):
            token = max(tokens, default=0)
            if token >= vocab_size:
                problem = f"names token {token}, but this model's token ids are 0 to {vocab_size - 1}: remove it"
                raise ParameterError(name, problem, token)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count > vocab_size:
                problem = f"must be at most this model's {vocab_size} tokens, but {count} given"
                raise ParameterError(name, problem, count)


def _whole(name: str, value: object, what: str = "") -> int:
    """Return a value as int. `what` names the element, if the parameter has several."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ParameterError(name, f"{what}must be a whole number, but {value!r} given", value)
    return int(value)


def _real(name: str, value: object, what: str = "") -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ParameterError(name, f"{what}must be a number, but {value!r} given", value)
    return float(value)


def _at_least(minimum: int) -> Callable[[Any], bool]:
    return lambda value: value >= minimum


_NUMBERS: dict[str, tuple[Callable[[str, object], float], Callable[[Any], bool], str]] = {
    "temperature": (_real, lambda value: 0.0 <= value < inf, "0 or more and finite"),
    "top_k": (_whole, _at_least(-1), "-1 or 0 (all) or positive"),
    "top_p": (_real, lambda value: 0.0 < value <= 1.0, "above 0 and at most 1"),
    "min_p": (_real, lambda value: 0.0 <= value <= 1.0, "from 0 to 1"),
    "repetition_penalty": (_real, lambda value: 0.0 < value < inf, "above 0 and finite, 1 for none"),
    "presence_penalty": (_real, lambda value: -2.0 <= value <= 2.0, "from -2 to 2, 0 for none"),
    "frequency_penalty": (_real, lambda value: -2.0 <= value <= 2.0, "from -2 to 2, 0 for none"),
    "seed": (_whole, lambda value: 0 <= value < 2**63, "at least 0 and below 2**63"),
    "n": (_whole, _at_least(1), "at least 1"),
    "logprobs": (_whole, _at_least(0), "at least 0, or None for no report"),
    "prompt_logprobs": (_whole, _at_least(0), "at least 0, or None for no report"),
    "max_tokens": (_whole, _at_least(1), "at least 1"),
    "min_tokens": (_whole, _at_least(0), "at least 0"),
    "attention_from": (_whole, _at_least(0), "at least 0, or None for no report"),
}
"""The converter, range check and range in words of each parameter."""
_MAY_BE_NONE = ("seed", "logprobs", "prompt_logprobs", "max_tokens", "attention_from")


def _strings(stop: object) -> tuple[str, ...]:
    several = stop or () if stop is None or isinstance(stop, Iterable) else (stop,)
    strings: tuple[Any, ...] = (stop,) if isinstance(stop, str) else tuple(several)
    for string in strings:
        if not isinstance(string, str):
            problem = f"must be a string or several, but {string!r} given: token ids go to `stop_token_ids`"
            raise ParameterError("stop", problem, string)
    if not all(strings):
        raise ParameterError("stop", "must not be empty: leave it out", stop)
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
        biases[token] = number = _real("logit_bias", value, f"of token {token} ")
        if not -MAX_BIAS <= number <= MAX_BIAS:
            problem = f"must be from {-MAX_BIAS:g} to {MAX_BIAS:g}, but {number} given for token {token}"
            raise ParameterError("logit_bias", problem, number)
    return tuple(sorted(biases.items()))


def _form_error(problem: str, value: object) -> ParameterError:
    return ParameterError("structured_outputs", f": {problem}", value)


def _json_text(schema: dict[str, Any]) -> str:
    try:
        return jsonlib.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _form_error(f"the schema in `json` cannot be written as JSON: {error}", schema) from None


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Iterable):
        raise _form_error(f"`choice` must be a list of texts, but {choices!r:.60} given", choices)
    if not (texts := tuple(choices)):
        raise _form_error("`choice` must have at least one text, but none given", choices)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _form_error(f"`choice` must be texts that are not empty, but {text!r:.60} given", text)
    return texts
