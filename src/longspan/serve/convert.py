"""Conversion of requests: from bytes to pydantic models within limits, and from these to engine requests.

Functions raise a WireError if the model or server does not support a request. They tokenize, which takes long for long
prompts: call them in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from inspect import signature
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from longspan.core.request import check_room
from longspan.core.sampling import SamplingParams, StructuredOutputsParams
from longspan.serve.chat_requests import (
    AssistantMessage,
    ChatCompletionRequest,
    GivenMessage,
    NamedTool,
    TokenizeRequest,
)
from longspan.serve.errors import WireError, as_wire_errors, shortened, wire_error
from longspan.serve.requests import (
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    ResponseFormat,
    Schema,
)
from longspan.serve.settings import RequestLimits, ServerSettings
from longspan.text.call_formats import variants
from longspan.text.call_formats.base import CallFormat, OutputReader, parse_json
from longspan.text.call_grammar import calls_grammar, detect_format
from longspan.text.call_reader import CallReader
from longspan.text.input_processor import TEMPLATE_ERRORS, EngineRequest, InputProcessor
from longspan.text.json_schema import reduced, without_annotations
from longspan.text.output_reader import SectionReader
from longspan.text.reasoning import ReasoningFormat, ReasoningReader, after_reasoning, after_text, reasoning_format

RequestT = TypeVar("RequestT", bound=BaseModel)
_log = logging.getLogger("longspan")
_MAX_LOGGED = 8
"""Ignored fields in a line of the log."""
_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""
_SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "stop", "stop_token_ids", "ignore_eos"),
)
"""Fields that are sampling parameters of the same name and meaning."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The model that requests are converted for, and the settings of its server, with limits of requests."""

    input_processor: InputProcessor
    settings: ServerSettings

    @cached_property
    def call_format(self) -> CallFormat | None:
        """The format of the model's calls, if it is known."""
        return detect_format(self.input_processor, self.settings.tool_call_parser)

    @property
    def addressed_format(self) -> CallFormat | None:
        """The format of the model's calls, if all its outputs begin with their recipient."""
        return self.call_format if self.call_format is not None and self.call_format.answer_begin else None

    @cached_property
    def reasoning_format(self) -> ReasoningFormat | None:
        """The format of the model's reasoning sections, if it has some."""
        tokenizer = self.input_processor.tokenizer
        return reasoning_format(self.settings.reasoning_parser, None if tokenizer is None else tokenizer.chat_template)

    def check_name(self, name: str | None) -> None:
        """Raise a WireError 404 when a request names another model."""
        names = self.settings.model_names
        if name is not None and name not in names:
            problem = f"there is no model {name[:100]!r} here, but {', '.join(names)} (--served-model-name)"
            raise WireError(problem, "model", 404, "model_not_found")


def read_request(model: type[RequestT], body: bytes, limits: RequestLimits) -> RequestT:
    """Parse a body as `model`. Raise WireError if it is invalid, too large or nested too deeply."""
    if len(body) > limits.max_body_bytes:
        raise WireError(f"the body has more than {limits.max_body_bytes} bytes (--max-body-bytes)", status=413)
    with as_wire_errors(None):
        num = num_elements(body, limits.max_elements)
        limits.check("max_elements", num, "the body has too many strings, lists and objects", "send several requests")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise WireError(f"the body must be a JSON object, but is not JSON: {shortened(str(error), 100)}") from error
    if not isinstance(value, dict):
        raise WireError("the body must be a JSON object")
    with as_wire_errors(None):
        limits.check("max_nesting", _depth(value), "lists and objects are nested too deeply", "flatten them")
    try:
        request = model.model_validate(value)
    except ValidationError as error:
        raise wire_error(error, value) from error
    if model.model_config.get("extra") == "ignore":
        ignored = sorted(name for name in value.keys() - model.model_fields.keys() if value[name] is not None)
        if ignored:
            _log_ignored(model.__name__, *map(shortened, ignored[:_MAX_LOGGED]))
    return request


@lru_cache(maxsize=256)
def _log_ignored(model: str, *names: str) -> None:
    """Log that these fields of a request are ignored, once for each set of names in the cache."""
    _log.info("a %s had fields that are ignored: %s", model, ", ".join(map(ascii, names)))


def num_elements(body: bytes, enough: int) -> int:
    """Count strings, lists and objects in a JSON body, including field names, without parsing it.

    Counting may stop at more than `enough`. In an invalid body, at least the elements before its first mistake count.
    """
    upper_bound = body.count(b'"') // 2 + _num_opened(body)
    if upper_bound <= enough:
        return upper_bound
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every remaining quote begins or ends a string
    num_strings = (plain.count(b'"') + 1) // 2
    if num_strings > enough:
        return num_strings
    return num_strings + _num_opened(b"".join(plain.split(b'"')[::2]))


def _num_opened(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")


def _depth(value: object) -> int:
    """Return the nesting depth of lists and objects. The JSON parser has bounded it already."""
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max((_depth(child) for child in children if isinstance(child, dict | list)), default=0)


def completion_requests(
    request: CompletionRequest, served: ServedModel, grammar: str | None = None
) -> list[EngineRequest]:
    """Make one engine request per prompt, in order. `grammar` is the result of `grammar_of`, if it was called."""
    _check_sizes(request, served.settings.limits)
    scored = (request.prompt_logprobs, request.logprobs if request.echo else None)
    params = _params(
        request,
        # The engine makes at least 1 token. The response to `max_tokens` 0 omits it.
        max_tokens=_DEFAULT_MAX_TOKENS if request.max_tokens is None else max(1, request.max_tokens),
        logprobs=request.logprobs,
        prompt_logprobs=max((count for count in scored if count is not None), default=None),
    )
    grammar = grammar_of(request, served) if grammar is None else grammar
    input_processor = served.input_processor
    given: Any = request.prompt
    is_single = isinstance(given, str) or isinstance(given[0], int)
    prompts = [given] if is_single else given
    with as_wire_errors("n"):
        problem = f"{params.n} for each of {len(prompts)} prompts are {len(prompts) * params.n} choices"
        served.settings.limits.check("max_choices", len(prompts) * params.n, problem, "send several requests")
    named = [("prompt" if is_single else f"prompt[{index}]", prompt) for index, prompt in enumerate(prompts)]
    for name, prompt in named:  # check all prompts before the first is tokenized
        if isinstance(prompt, str):
            with as_wire_errors(name):
                input_processor.check_chars(len(prompt))
    engine_requests = []
    for name, prompt in named:
        with as_wire_errors(name):
            text, ids = None, prompt
            if isinstance(prompt, str):
                text, with_special = prompt, request.add_special_tokens is not False
                ids = input_processor.tokenize(text, add_special_tokens=with_special)
                if not ids:
                    raise ValueError("this model's tokenizer has no tokens for this text: give another one")
            salt = request.cache_salt or ""
            engine_requests.append(input_processor.checked(text, ids, params, grammar, cache_salt=salt))
        if request.max_tokens is not None:
            with as_wire_errors("max_tokens"):
                check_room("max_tokens", request.max_tokens, len(ids), input_processor.max_model_len)
    return engine_requests


def chat_request(request: ChatCompletionRequest, served: ServedModel, grammar: str | None = None) -> EngineRequest:
    """Make the engine request of a conversation. `grammar` is the result of `grammar_of`, if it was called."""
    _check_sizes(request, served.settings.limits)
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_tokens: int | None = getattr(request, name)
    params = _params(
        request,
        max_tokens=max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=request.prompt_logprobs,
    )
    grammar = grammar_of(request, served) if grammar is None else grammar
    text, ids = _rendered(request, served.input_processor, served.input_processor.check_chars)
    reasoning = served.reasoning_format
    if grammar and reasoning is not None and (start := _reasoning_start(request, reasoning, text)) != "closed":
        special = served.input_processor.special_tokens
        grammar = after_reasoning(grammar, reasoning, is_inside=start == "inside", special=special)
    elif grammar and (to_all := served.addressed_format) is not None and not request.callable_functions:
        grammar = after_text(grammar, to_all.answer_begin) if text.endswith(to_all.begin) else grammar
    with as_wire_errors("messages"):
        salt = request.cache_salt or ""
        engine_request = served.input_processor.checked(text, ids, params, grammar, cache_salt=salt)
    forms = [form for form in (reasoning, call_format(request, served)) if form is not None]
    if forms:
        special = served.input_processor.special_tokens
        markers = dict.fromkeys(marker for form in forms for marker in form.markers)
        shown = tuple(special[marker] for marker in markers if marker in special)
        engine_request = replace(engine_request, shown_token_ids=shown)
    if max_tokens is not None:
        with as_wire_errors(name):
            check_room(name, max_tokens, len(ids), served.input_processor.max_model_len)
    return engine_request


def _reasoning_start(
    request: ChatCompletionRequest, form: ReasoningFormat, prompt: str
) -> Literal["inside", "maybe", "closed"]:
    """Return where the output begins, by the end of the prompt, or by the message that the output continues."""
    last = request.messages[-1].content or ""
    content = last if isinstance(last, str) else "".join(part.text for part in last)
    return form.start(prompt, content if request.continue_final_message else None)


def tokenized(request: TokenizeRequest, served: ServedModel) -> dict[str, Any]:
    """Return the body of the response to `/tokenize`."""

    def check_chars(length: int) -> None:
        served.settings.limits.check("max_tokenize_length", length, f"it has length {length}", "send it in parts")

    _check_sizes(request, served.settings.limits)
    input_processor = served.input_processor
    with as_wire_errors("prompt"):
        if request.messages is None:
            text = request.prompt or ""
            check_chars(len(text))
            ids = input_processor.tokenize(text, add_special_tokens=request.add_special_tokens is not False)
        else:
            _, ids = _rendered(request, input_processor, check_chars)
    assert input_processor.tokenizer is not None, "it has tokenized"
    names = input_processor.tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None
    return {"count": len(ids), "max_model_len": input_processor.max_model_len, "tokens": ids, "token_strs": names}


def detokenized(request: DetokenizeRequest, served: ServedModel) -> dict[str, Any]:
    """Return the body of the response to `/detokenize`. Special tokens appear by name."""
    length, vocab_size = len(request.tokens), served.input_processor.vocab_size
    with as_wire_errors("tokens"):
        served.settings.limits.check("max_tokenize_length", length, f"it has length {length}", "send it in parts")
    if served.input_processor.tokenizer is None:
        raise WireError("this server has no tokenizer (--skip-tokenizer-init): start it without that flag", "tokens")
    unknown = next((token for token in request.tokens if token >= vocab_size), None)
    if unknown is not None:
        raise WireError(f"token id {unknown} is not in the vocabulary: ids go from 0 to {vocab_size - 1}", "tokens")
    return {"prompt": served.input_processor.tokenizer.decode(request.tokens, skip_special_tokens=False)}


def grammar_kind(request: GenerationRequest) -> str:
    """Return the kind of structured output, or `text` for free text. Checks of all but `json_object` take seconds."""
    if isinstance(request, ChatCompletionRequest) and request.callable_functions:
        return "tools"
    if request.structured_outputs is not None:
        return "json_object" if request.structured_outputs.json_object else "other"
    if _schema_of(request.response_format) is not None:
        return "json_schema"
    return "text" if request.response_format is None else request.response_format.type


def grammar_of(request: GenerationRequest, served: ServedModel) -> str:
    """Return the grammar of the request's outputs, or an empty text for free text."""
    if isinstance(request, ChatCompletionRequest) and (called := call_format(request, served)) is not None:
        return _tool_grammar(request, called, served)
    with as_wire_errors(None, {} if request.structured_outputs else {"structured_outputs": "response_format"}):
        form = structured_outputs(request)
        return "" if form is None else served.input_processor.grammar(form)


def call_format(request: ChatCompletionRequest, served: ServedModel) -> CallFormat | None:
    """Return the format of the calls that an answer may have, or None without calls."""
    if not request.callable_functions:
        return None
    with as_wire_errors("tools"):
        served.input_processor.check_knows_tools()
    if not request.must_call and not served.settings.enable_auto_tool_choice:
        problem = "auto is disabled on this server (--enable-auto-tool-choice)"
        raise WireError(f"{problem}: set tool_choice to required, or to a function", "tool_choice")
    if not request.must_call and served.call_format is None:
        _log_unknown_format()
        return None
    return served.call_format or variants("llama3_json")[0]


@lru_cache(maxsize=1)
def _log_unknown_format() -> None:
    """Log once that answers have calls as text."""
    _log.warning(
        "the chat template writes calls in an unknown format: answers have them as text unless tool_choice is "
        "required; name the format by --tool-call-parser"
    )


def output_reader(
    request: ChatCompletionRequest, served: ServedModel, prompt: str
) -> Callable[[], OutputReader] | None:
    """Return a constructor of the readers of a prompt's outputs, or None if outputs are content alone."""
    form, reasoning = call_format(request, served), served.reasoning_format
    for structured in (form, served.addressed_format, reasoning):
        if structured is not None and (whole := structured.output_reader()) is not None:
            return type(whole)
    if form is None and reasoning is None:
        return None
    is_text = request.response_format is None or request.response_format.type == "text"
    start = None if reasoning is None else _reasoning_start(request, reasoning, prompt)
    schemas = {function.name: reduced(function.parameters).schema for function in request.callable_functions}

    def reader() -> OutputReader:
        calls = None
        if form is not None:
            calls = CallReader(
                form,
                schemas,
                at_start=not is_text or request.must_call,
                marker_is_token=form.begin in served.input_processor.special_tokens,
            )
        return SectionReader(None if reasoning is None or start is None else ReasoningReader(reasoning, start), calls)

    return reader


def _tool_grammar(request: ChatCompletionRequest, form: CallFormat, served: ServedModel) -> str:
    schema = _schema_of(request.response_format)
    if isinstance(request.response_format, JsonObjectFormat):
        schema = schema or {"type": "object"}
    with as_wire_errors("tools"):
        return calls_grammar(
            form,
            request.callable_functions,
            served.input_processor,
            required=request.must_call,
            parallel=request.parallel_tool_calls is not False and not isinstance(request.tool_choice, NamedTool),
            content=None if schema is None else without_annotations(schema),
            excluded=served.reasoning_format.begin if served.reasoning_format else "",
        )


def structured_outputs(request: GenerationRequest) -> StructuredOutputsParams | None:
    """Return the constraint of outputs, or None for free text. Raise ValueError if the constraint is malformed."""
    if (schema := _schema_of(request.response_format)) is not None:
        return StructuredOutputsParams(json=schema)
    if isinstance(request.response_format, JsonObjectFormat):
        return StructuredOutputsParams(json_object=True)
    given = request.structured_outputs
    return None if given is None else StructuredOutputsParams(**given.model_dump(by_alias=True, exclude_none=True))


def _schema_of(form: ResponseFormat | None) -> Schema | None:
    """Return the JSON schema of a response format, if it has one."""
    if isinstance(form, JsonSchemaFormat):
        return form.json_schema.schema_
    return form.schema_ if isinstance(form, JsonObjectFormat) else None


def _params(
    request: GenerationRequest, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    names = {"max_tokens": "max_completion_tokens"} if getattr(request, "max_completion_tokens", None) else {}
    given: dict[str, Any] = {name: value for name in _SAMPLING_FIELDS if (value := getattr(request, name)) is not None}
    with as_wire_errors(None, names):
        return SamplingParams(
            **given,
            seed=None if request.seed == -1 else request.seed,
            min_tokens=request.min_tokens or 0,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


def _rendered(
    request: ChatCompletionRequest | TokenizeRequest,
    input_processor: InputProcessor,
    check_chars: Callable[[int], None],
) -> tuple[str, list[int]]:
    """Render a conversation as text and token ids. `check_chars` bounds the contents first, then the text."""
    assert request.messages is not None, "the caller has checked"
    variables = request.template_variables
    if variables and (reserved := sorted(variables.keys() & _not_variables())):
        raise WireError(
            f"{shortened(reserved[0])} is not a variable of templates: leave it out", "chat_template_kwargs"
        )
    shows_tools = not isinstance(request, ChatCompletionRequest) or request.tool_choice != "none"
    tools = [tool.for_template() for tool in request.tools or () if shows_tools]
    render = partial(
        input_processor.render_chat,
        tools=tools,
        add_generation_prompt=not request.continue_final_message and request.add_generation_prompt is not False,
        continue_final_message=bool(request.continue_final_message),
        chat_template_kwargs=variables,
    )
    with as_wire_errors("messages"):
        check_chars(sum(map(_num_chars, request.messages)))
        try:
            try:
                text = render(_for_template(request.messages))
            except TypeError:  # Functionary's templates join arguments to texts
                text = render(_for_template(request.messages, text_arguments=True))
        except TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template cannot render these messages: {shortened(str(error), 100)}") from error
        check_chars(len(text))
        return text, input_processor.tokenize(text, add_special_tokens=bool(request.add_special_tokens))


def _num_chars(message: GivenMessage | AssistantMessage) -> int:
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.text) for part in content)


def _for_template(
    messages: Sequence[GivenMessage | AssistantMessage], *, text_arguments: bool = False
) -> list[dict[str, Any]]:
    """Return messages in the form of chat templates: without null, with arguments as objects, functions by name.

    With `text_arguments`, the arguments are JSON.
    """
    names, plain = dict[str | None, str](), [message.model_dump(exclude_none=True) for message in messages]
    for message, shown in zip(messages, plain, strict=True):
        if isinstance(message, AssistantMessage):
            shown.setdefault("content", "")
            reasoning = shown.get("reasoning_content", shown.get("reasoning"))
            if isinstance(reasoning, str):  # templates read either name
                shown["reasoning_content"] = shown["reasoning"] = reasoning
            for call in shown.get("tool_calls", ()):
                names[call["id"]] = call["function"]["name"]
                if not text_arguments:
                    call["function"]["arguments"] = _arguments(call["function"]["arguments"])
        elif message.role == "tool" and message.tool_call_id in names:  # Hermes' template needs it
            shown.setdefault("name", names[message.tool_call_id])
    return plain


def _arguments(text: str) -> dict[str, Any] | str:
    """Parse the arguments of a call. A text that is no JSON object is returned unchanged."""
    try:
        value = parse_json(text or "{}")
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _check_sizes(request: GenerationRequest | TokenizeRequest, limits: RequestLimits) -> None:
    for name in type(request).model_fields:
        with as_wire_errors(name):
            limits.check_field(name, getattr(request, name))


@lru_cache(maxsize=1)
def _not_variables() -> frozenset[str]:
    """Return the names that a template's variables cannot have: names of parameters of the rendering functions."""
    from transformers import PreTrainedTokenizerBase  # noqa: PLC0415 - imported already if there is a tokenizer
    from transformers.utils.chat_template_utils import render_jinja_template  # noqa: PLC0415

    renderers = (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
    return frozenset(("messages", *(name for renderer in renderers for name in signature(renderer).parameters)))
