"""Requests to engine requests. This tokenizes, which takes a while for long prompts: call it in a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any, Literal, Protocol

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from longspan.core.request import check_room
from longspan.core.sampling import SamplingParams, StructuredOutputsParams
from longspan.serve.errors import WireError, blaming, cut
from longspan.serve.settings import RequestLimits
from longspan.serve.wire.fields import for_template, num_chars
from longspan.serve.wire.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from longspan.text.chat_template import TemplateOptions
from longspan.text.input_processor import EngineRequest, InputProcessor

DEFAULT_MAX_TOKENS = 16
"""Of completions, as OpenAI's."""

_SAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "stop", "stop_token_ids", "ignore_eos"),
)
"""Fields that are parameters of sampling as they are."""

_NOT_VARIABLES = frozenset(
    {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters, *signature(render_jinja_template).parameters}
) | {"messages"}
"""What a template's variables cannot be called, since rendering has a parameter of that name."""


class Served(Protocol):
    """The model and the limits that requests are made for."""

    @property
    def input_processor(self) -> InputProcessor:
        """Makes the engine requests."""

    @property
    def limits(self) -> RequestLimits:
        """Bounds of what a request asks for."""


def completion_requests(request: CompletionRequest, served: Served, grammar: str | None = None) -> list[EngineRequest]:
    """Make one engine request per prompt, in order; `grammar` is what `grammar_of` returned, if it was called.

    Raises:
        WireError: when the request asks for what this model or server cannot do.
    """
    _check_sizes(request, served.limits)
    most = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    scored = (request.prompt_logprobs, request.logprobs if request.echo else None)
    params = _params(
        request,
        max_tokens=max(1, most),  # the engine's least; `echo` with 0 leaves the token out of the answer
        logprobs=request.logprobs,
        prompt_logprobs=max((count for count in scored if count is not None), default=None),
    )
    special = request.add_special_tokens is not False
    prompts = prompts_of(request)
    with blaming("n"):
        served.limits.check_choices(len(prompts), params.n)
    names = ["prompt"] if len(prompts) == 1 else [f"prompt[{index}]" for index in range(len(prompts))]
    for prompt, name in zip(prompts, names, strict=True):
        if isinstance(prompt, str):
            with blaming(name):
                served.input_processor.check_chars(len(prompt))
    engine_requests = []
    for prompt, name in zip(prompts, names, strict=True):
        with blaming(name, _names(request)):
            text, ids = _text_and_ids(prompt, served.input_processor, special)
            engine_requests.append(served.input_processor.checked(text, ids, params, grammar))
        if request.max_tokens is not None:
            with blaming("max_tokens"):
                check_room("max_tokens", request.max_tokens, len(ids), served.input_processor.max_model_len)
    return engine_requests


def chat_request(request: ChatCompletionRequest, served: Served, grammar: str | None = None) -> EngineRequest:
    """Make a conversation's engine request; for `grammar` see `completion_requests`.

    Raises:
        WireError: when the request asks for what this model or server cannot do.
    """
    _check_sizes(request, served.limits)
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    most: int | None = getattr(request, name)
    params = _params(
        request,
        max_tokens=most,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )
    text, ids = _rendered(request, served.input_processor, served.input_processor.check_chars)
    with blaming("messages", _names(request)):
        engine_request = served.input_processor.checked(text, ids, params, grammar)
    if most is not None:
        with blaming(name):
            check_room(name, most, len(ids), served.input_processor.max_model_len)
    return engine_request


def tokenized(request: TokenizeRequest, served: Served) -> dict[str, Any]:
    """Answer a request for tokens.

    Raises:
        WireError: when there is no tokenizer, the text is too long, or the conversation is wrong.
    """
    _check_sizes(request, served.limits)
    input_processor = served.input_processor
    with blaming("prompt"):
        if request.messages is None:
            text = request.prompt or ""
            served.limits.check_tokenize(len(text))
            ids = input_processor.tokenize(text, add_special_tokens=request.add_special_tokens is not False)
        else:
            _, ids = _rendered(request, input_processor, served.limits.check_tokenize)
    assert input_processor.tokenizer is not None, "it has tokenized"
    names = input_processor.tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": input_processor.max_model_len, "tokens": ids, "token_strs": names}


def detokenized(request: DetokenizeRequest, served: Served) -> dict[str, Any]:
    """Answer a request for text; special tokens have the text that stands for them.

    Raises:
        WireError: when there is no tokenizer, or there are too many tokens, or one is not in the vocabulary.
    """
    input_processor = served.input_processor
    with blaming("tokens"):
        served.limits.check_tokenize(len(request.tokens))
    if input_processor.tokenizer is None:
        raise WireError("there is no tokenizer (skip_tokenizer_init)", "tokens")
    wrong = next((token for token in request.tokens if token >= input_processor.vocab_size), None)
    if wrong is not None:
        raise WireError(
            f"token id {wrong} is not in the vocabulary: ids go from 0 to {input_processor.vocab_size - 1}", "tokens"
        )
    return {"prompt": input_processor.tokenizer.decode(request.tokens, skip_special_tokens=False)}


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts of a request, one or several, in a list."""
    prompt: Any = request.prompt
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def grammar_kind(request: GenerationRequest) -> Literal["free", "json_object", "other"]:
    """Return the kind of structured output; to check a grammar of the `other` kind may take seconds."""
    chosen, given = request.response_format, request.structured_outputs
    if given is not None:
        return "json_object" if given.json_object else "other"
    kinds: dict[str, Literal["free", "json_object"]] = {"text": "free", "json_object": "json_object"}
    return "free" if chosen is None else kinds.get(chosen.type, "other")


def grammar_of(request: GenerationRequest, served: Served) -> str:
    """Return the grammar that the request's outputs must follow; they must follow one.

    Raises:
        WireError: when it cannot be followed.
    """
    with blaming(None, _names(request)):
        form = structured_outputs(request)
        assert form is not None, "the caller has looked"
        return served.input_processor.grammar(form)


def structured_outputs(request: GenerationRequest) -> StructuredOutputsParams | None:
    """Return what outputs must follow; None if they are free.

    Raises:
        ValueError: when that is not of the right form.
    """
    chosen = request.response_format
    if chosen is not None and chosen.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if chosen is not None and chosen.type == "json_schema":
        return StructuredOutputsParams(json=chosen.json_schema.schema_)
    if request.structured_outputs is None:
        return None
    fields = request.structured_outputs.fields
    return StructuredOutputsParams(**{name: value for name, value in fields.items() if value is not None})


def _params(
    request: GenerationRequest, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Make sampling params; raise a WireError for values that do not go together."""
    given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    least = request.min_tokens or 0
    with blaming(None, _names(request)):
        return SamplingParams(
            **given,
            seed=None if request.seed == -1 else request.seed,
            min_tokens=least if max_tokens is None else min(least, max_tokens),
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            structured_outputs=structured_outputs(request),
        )


def _text_and_ids(
    prompt: str | list[int], input_processor: InputProcessor, special: bool
) -> tuple[str | None, list[int]]:
    if not isinstance(prompt, str):
        return None, prompt
    ids = input_processor.tokenize(prompt, add_special_tokens=special)
    if not ids:
        raise ValueError("this model's tokenizer has no token for anything in this text")
    return prompt, ids


def _names(request: GenerationRequest) -> dict[str, str]:
    """Return the fields that stand for parameters of other names."""
    return {} if request.structured_outputs is not None else {"structured_outputs": "response_format"}


def _rendered(
    request: ChatCompletionRequest | TokenizeRequest,
    input_processor: InputProcessor,
    check_chars: Callable[[int], None],
) -> tuple[str, list[int]]:
    """Render a conversation as text and token ids; `check_chars` bounds its contents before it bounds the text."""
    assert request.messages is not None, "the caller has looked"
    variables = request.chat_template_kwargs or {}
    if taken := sorted(_NOT_VARIABLES & variables.keys()):
        raise WireError(f"{cut(taken[0])} is not a variable of templates: leave it out", "chat_template_kwargs")
    options = TemplateOptions(
        add_generation_prompt=not request.continue_final_message and request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        chat_template_kwargs=variables,
    )
    with blaming("messages"):
        check_chars(sum(map(num_chars, request.messages)))
        text = _render([for_template(message) for message in request.messages], options, input_processor)
        check_chars(len(text))
        return text, input_processor.tokenize(text, add_special_tokens=bool(request.add_special_tokens))


def _render(messages: Sequence[dict[str, Any]], options: TemplateOptions, input_processor: InputProcessor) -> str:
    try:
        return input_processor.render_chat(messages, **options)
    except (TypeError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
        # A template is a program, and it is the request that it did not expect.
        raise ValueError(f"the chat template cannot render these messages: {cut(str(error), 100)}") from error


def _check_sizes(request: GenerationRequest | TokenizeRequest, limits: RequestLimits) -> None:
    for name in type(request).model_fields:
        with blaming(name):
            limits.check(name, getattr(request, name))
