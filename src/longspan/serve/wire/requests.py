"""Bodies of requests, as pydantic models; the policy's update is one of them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from longspan.policy.spec import OptionValue, PolicySettings, SettledError, option_text
from longspan.serve.errors import WireError
from longspan.serve.wire.fields import (
    MOST,
    LogitBias,
    Messages,
    Prompts,
    ResponseFormat,
    Schema,
    SomeText,
    StopStrings,
    StopTokens,
    StreamOptions,
    StructuredOutputs,
    TokenIds,
    Whole,
    WireModel,
    check_exactly_one,
    exactly_one,
)


def _given(field: str, schema: Schema) -> Schema:
    return {"required": [field], "properties": {field: schema}}


_NOT_NULL: Schema = {"not": {"type": "null"}}
_GREEDY: Schema = {"if": _given("temperature", {"const": 0}), "then": {"properties": {"n": {"enum": [None, 1]}}}}
_ONE_CONSTRAINT: Schema = {
    "if": _given("structured_outputs", _NOT_NULL),
    "then": {"properties": {"response_format": {"anyOf": [{"type": "null"}, _given("type", {"const": "text"})]}}},
}
_TOP_NEEDS_LOGPROBS: Schema = {
    "if": _given("top_logprobs", {"type": "integer", "minimum": 1}),
    "then": _given("logprobs", {"const": True}),
}
_OPEN_END: Schema = {
    "if": _given("continue_final_message", {"const": True}),
    "then": {"properties": {"add_generation_prompt": {"enum": [None, False]}}},
}


class GenerationRequest(WireModel):
    """Fields that completions and chats have in common; those that are not given have OpenAI's defaults."""

    model: str | None = None
    """One of `/v1/models`; may be left out."""
    n: Annotated[int, Field(ge=1, le=MOST)] | None = None
    """Choices per prompt."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """0 is greedy, and allows one choice only."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MOST)] | None = None
    """0 or -1 for all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    logit_bias: LogitBias | None = None
    """Token id, as a string, to what is added to its logit."""
    seed: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None
    """-1 for none."""
    stop: SomeText | StopStrings | None = None
    stop_token_ids: StopTokens | None = None
    min_tokens: Whole | None = None
    """Output tokens before which nothing but `max_tokens` ends an output."""
    ignore_eos: bool | None = None
    prompt_logprobs: Whole | None = None
    """Report the log-probability of each prompt token, and of so many of the most likely tokens."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    """Of no meaning without `stream`."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """Not together with a `response_format` other than text."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to a text; by default to prompts, but not to conversations."""
    return_token_ids: bool | None = None
    """Answer with `prompt_token_ids` and `token_ids`, too."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_second_counts(cls, data: object) -> object:
        """Refuses two more numbers that would change the answer, unless they repeat another one: some clients do so."""
        if isinstance(data, dict):
            for name, other, default in (("best_of", "n", 1), ("max_completion_tokens", "max_tokens", None)):
                if name not in cls.model_fields and data.get(name) not in (None, data.get(other) or default):
                    raise WireError(f"it is not supported: use {other}", name)
        return data

    @model_validator(mode="after")
    def _fit(self) -> GenerationRequest:
        if self.temperature == 0 and (self.n or 1) > 1:
            raise WireError(
                f"it must be 1 when using greedy sampling, but {self.n} given: set a temperature above 0", "n"
            )
        if self.structured_outputs and self.response_format and self.response_format.type != "text":
            raise WireError("it cannot be combined with response_format: keep one of them", "structured_outputs")
        return self

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Return whether every chunk of a stream has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    model_config = ConfigDict(json_schema_extra={"allOf": [_GREEDY, _ONE_CONSTRAINT]})

    prompt: Prompts
    max_tokens: Whole | None = None
    """16 by default; 0 for none, which is of use with `echo`."""
    echo: bool | None = None
    """Begin the text, and the logprobs, with the prompt's."""
    logprobs: Whole | None = None
    """Report the log-probability of each token, and of so many of the most likely tokens."""


class TemplateFields(WireModel):
    """Fields that decide how a conversation becomes a prompt."""

    add_generation_prompt: bool | None = None
    """End the prompt with the beginning of an answer; by default, unless `continue_final_message`."""
    continue_final_message: bool | None = None
    """Leave the last message open and continue it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template."""

    @model_validator(mode="after")
    def _fit_ends(self) -> TemplateFields:
        if self.add_generation_prompt and self.continue_final_message:
            raise WireError(
                "it cannot be combined with add_generation_prompt: keep one of them", "continue_final_message"
            )
        return self


class ChatCompletionRequest(GenerationRequest, TemplateFields):
    """`POST /v1/chat/completions`."""

    model_config = ConfigDict(json_schema_extra={"allOf": [_GREEDY, _ONE_CONSTRAINT, _TOP_NEEDS_LOGPROBS, _OPEN_END]})

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=MOST)] | None = None
    """The name that `max_completion_tokens` had before."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=MOST)] | None = None
    """The rest of the context by default."""
    logprobs: bool | None = None
    """Report the log-probability of each token."""
    top_logprobs: Whole | None = None
    """With `logprobs`: also of so many of the most likely tokens."""

    @model_validator(mode="after")
    def _fit_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise WireError("it needs logprobs: set that to true", "top_logprobs")
        return self


class TokenizeRequest(TemplateFields):
    """`POST /tokenize`: a prompt, or a conversation."""

    model_config = ConfigDict(json_schema_extra={**exactly_one("prompt", "messages"), "allOf": [_OPEN_END]})

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """By default true for a prompt, false for a conversation."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _fit(self) -> TokenizeRequest:
        check_exactly_one({"prompt": self.prompt, "messages": self.messages})
        return self


class DetokenizeRequest(WireModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


_MOST_CHARACTERS = 4096

Given = Annotated[str, Field(max_length=_MOST_CHARACTERS)] | bool | Annotated[int, Field(ge=-MOST, le=MOST)] | float
"""An option's value: a text as the command line has it, or a number, or true or false."""


class PolicyUpdate(WireModel):
    """`POST /admin/policy`: options of the policy, by name, that are to change."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Given] = Field(init=False)

    def options(self, settings: PolicySettings) -> dict[str, str]:
        """Return the options as texts, if the policy has all of them and they may change.

        Raises:
            WireError: 400 for no option, or one that the policy lacks, 409 for one that may not change while it serves.
        """
        if not self.__pydantic_extra__:
            names = ", ".join(settings.changeable) or "it has none"
            raise WireError(f"give an option of policy {settings.name} that is to change, and its value: {names}")
        for name in self.__pydantic_extra__:
            try:
                settings.check_changes([name])
            except SettledError as error:
                raise WireError(str(error), param=name, status=409) from error
            except ValueError as error:
                raise WireError(str(error), param=name[:60]) from error
        return {name: option_text(value) for name, value in self.__pydantic_extra__.items()}


class PolicyInfo(BaseModel):
    """`GET /admin/policy`, and what a change answers: the policy with all options as they are in force."""

    policy: str
    options: dict[str, OptionValue]
    changeable: list[str]
    """The options that may change while it serves."""

    @classmethod
    def of(cls, settings: PolicySettings) -> PolicyInfo:
        """Make the body of an answer of a policy's settings."""
        return cls(policy=settings.name, options=dict(settings.options), changeable=list(settings.changeable))
