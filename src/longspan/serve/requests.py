"""Request bodies, as pydantic models. They are part of the OpenAPI document.

Values of other types are not converted. Null always means that a field was not given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag, model_validator
from typing_extensions import TypeAliasType

from longspan.core.options import OptionValue, PolicySettings, SettledError, option_text
from longspan.serve.errors import WireError

MAX_COUNT = 2**31 - 1
"""Upper bound of counts. Model and memory allow much less."""

Whole = Annotated[int, Field(ge=0, le=MAX_COUNT)]
SomeText = Annotated[str, Field(min_length=1)]

# Lists fail at their first wrong item: a body of a million wrong items must not make a million errors.
Texts = TypeAliasType("Texts", Annotated[list[SomeText], Field(min_length=1), FailFast()])
TokenIds = TypeAliasType("TokenIds", Annotated[list[Whole], Field(min_length=1), FailFast()])
TokenLists = TypeAliasType("TokenLists", Annotated[list[TokenIds], Field(min_length=1), FailFast()])
StopTokens = TypeAliasType("StopTokens", Annotated[list[Whole], FailFast()])
Choices = TypeAliasType("Choices", Annotated[list[SomeText], Field(min_length=1), FailFast()])
StopStrings = TypeAliasType("StopStrings", Annotated[list[SomeText], FailFast()])


def _kind_of_prompt(value: object) -> str | None:
    """Return the tag of a prompt's type by its first item, so that only this type is validated. None for no type."""
    if not isinstance(value, list):
        return "text" if isinstance(value, str) else None
    first = value[0] if value else None
    if isinstance(first, list):
        return "token_lists"
    return "token_ids" if isinstance(first, int) else "texts"


Prompts = Annotated[
    Annotated[SomeText, Tag("text")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[TokenIds, Tag("token_ids")]
    | Annotated[TokenLists, Tag("token_lists")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt_type",
        custom_error_message="must be a text, a list of texts, a list of token ids or a list of such lists",
    ),
]
"""One prompt or several, each a text or its token ids."""

LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(json_schema_extra={"additionalProperties": False}),
]
"""Biases by token id. JSON has no integer keys, so the ids are strings."""

Schema = dict[str, Any]


_CHAT_TOOLS = "only chats have tools: use /v1/chat/completions"
_NO_GUIDED = "use structured_outputs or response_format"
_TEXT_ONLY = "only text is served"
UNSERVED: Mapping[str, tuple[Sequence[object], str]] = {
    "allowed_token_ids": (([],), "use logit_bias or structured_outputs"),
    "audio": ((), _TEXT_ONLY),
    "bad_words": (([],), "use logit_bias"),
    "chat_template": ((), "the model's own is used; chat_template_kwargs sets its variables"),
    "chat_template_kwargs": (({},), "only chats have a template: use /v1/chat/completions"),
    "continue_final_message": ((False,), "only chats have a template: use /v1/chat/completions"),
    "custom_logit_processor": ((), "use logit_bias or structured_outputs"),
    "documents": (([],), "put documents into a message"),
    "echo": ((False,), "only /v1/completions repeats a prompt"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "functions": (([],), "use tools"),
    "guided_choice": ((), _NO_GUIDED),
    "guided_grammar": ((), _NO_GUIDED),
    "guided_json": ((), _NO_GUIDED),
    "guided_regex": ((), _NO_GUIDED),
    "include_stop_str_in_output": ((False,), "append stop_reason to the text"),
    "length_penalty": ((1,), "it belongs to beam search"),
    "logits_processors": (([],), "use logit_bias or structured_outputs"),
    "lora_path": ((), "start a server for each model"),
    "modalities": ((["text"],), _TEXT_ONLY),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "reasoning_effort": (("none",), "only chats have a template: use /v1/chat/completions"),
    "return_hidden_states": ((False,), "only text and logprobs are served"),
    "return_tokens_as_token_ids": ((False,), "use return_token_ids"),
    "skip_special_tokens": ((True,), "use return_token_ids"),
    "stop_regex": ((), "use stop or structured_outputs"),
    "structural_tag": ((), "use grammar"),
    "suffix": (("",), "only continuations are served"),
    "tool_choice": (("none", "auto"), _CHAT_TOOLS),
    "tools": (([],), _CHAT_TOOLS),
    "top_logprobs": ((0,), "use logprobs, which is a number here"),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
    "use_beam_search": ((False,), "use n and temperature"),
    "web_search_options": ((), "put the results of a search into a message"),
    "whitespace_pattern": ((), "use grammar"),
}
"""Fields of OpenAI's and vLLM's API that would change the answer and are not served.

Each has its neutral values, in addition to null, and a remedy. Other unknown fields are ignored, as by OpenAI's and
vLLM's servers.
"""


class WireModel(BaseModel):
    """Ignores unknown fields, except fields of `unserved` with a value that is not neutral."""

    unserved: ClassVar[Mapping[str, tuple[Sequence[object], str]]] = UNSERVED
    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, data: object) -> object:
        if isinstance(data, dict):
            for name, value in data.items():
                if name in cls.model_fields or name not in cls.unserved or value is None:
                    continue
                neutral, remedy = cls.unserved[name]
                if value not in neutral:
                    raise WireError(f"it is not supported: {remedy}", name)
        return data


class StreamOptions(WireModel):
    """Options of the chunks of a stream."""

    include_usage: bool | None = None
    """End with a chunk that has no choices but the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """Every chunk has the usage of its choice so far. Needs `include_usage`."""


class TextFormat(WireModel):
    """The output may be any text."""

    type: Literal["text"]


class JsonObjectFormat(WireModel):
    """The output is any JSON object, or, as in llama.cpp, a JSON object that follows a schema."""

    type: Literal["json_object"]
    schema_: Schema | None = Field(default=None, alias="schema")


class NamedSchema(WireModel):
    """A JSON schema that outputs always follow, `strict` or not."""

    name: str
    schema_: Schema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(WireModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def exactly_one(*names: str) -> Schema:
    """Return the JSON schema that requires exactly one of these fields. Null and false count as not given."""
    given = {"not": {"enum": [None, False]}}
    return {"oneOf": [{"required": [name], "properties": {name: given}} for name in names]}


def check_exactly_one(values: Mapping[str, object]) -> None:
    """Raise a WireError unless exactly one of these fields is given."""
    given = [name for name, value in values.items() if value is not None and value is not False]
    if len(given) != 1:
        raise WireError(f"exactly one of {', '.join(values)} must be given, but {' and '.join(given) or 'none'} is")


class StructuredOutputs(WireModel):
    """Constraint that outputs must follow: exactly one of these fields."""

    model_config = ConfigDict(json_schema_extra=exactly_one("json", "regex", "choice", "grammar", "json_object"))

    json_: SomeText | Schema | None = Field(default=None, alias="json")
    """A JSON schema, or its text."""
    regex: SomeText | None = None
    """The text that the whole output must match."""
    choice: Choices | None = None
    """Texts, one of which is the output."""
    grammar: SomeText | None = None
    """A grammar in Lark's notation."""
    json_object: bool | None = None
    """The output is any JSON object."""

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        check_exactly_one(self.model_dump(by_alias=True))
        return self


def has_value(field: str, schema: Schema) -> Schema:
    """Return the JSON schema that requires a field with a value that follows `schema`."""
    return {"required": [field], "properties": {field: schema}}


_NOT_NULL: Schema = {"not": {"type": "null"}}
ONE_CONSTRAINT: Schema = {
    "if": has_value("structured_outputs", _NOT_NULL),
    "then": {"properties": {"response_format": {"anyOf": [{"type": "null"}, has_value("type", {"const": "text"})]}}},
}


class GenerationRequest(WireModel):
    """Fields that completions and chats have in common. Fields that are not given have OpenAI's defaults."""

    model: str | None = None
    """A name of `/v1/models`. May be omitted."""
    n: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """Choices per prompt."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    """0 or -1 for all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    logit_bias: LogitBias | None = None
    """Values to add to logits, by token id as a string."""
    seed: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None
    """-1 for none."""
    stop: SomeText | StopStrings | None = None
    stop_token_ids: StopTokens | None = None
    min_tokens: Whole | None = None
    """Output tokens before which nothing but `max_tokens` ends an output."""
    ignore_eos: bool | None = None
    prompt_logprobs: Whole | None = None
    """Report the log-probability of each prompt token, and of this number of most likely tokens."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    """Ignored without `stream`."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """Not together with a `response_format` other than text."""
    add_special_tokens: bool | None = None
    """The tokenizer adds its special tokens to a text. By default to prompts, but not to conversations."""
    cache_salt: SomeText | None = None
    """Requests share KV only if they have the same salt, or if they have none."""
    return_token_ids: bool | None = None
    """Answer with `prompt_token_ids` and `token_ids`, too."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_second_counts(cls, data: object) -> object:
        """Refuse `best_of` and `max_completion_tokens`, unless they equal `n` and `max_tokens` as some clients send."""
        if isinstance(data, dict):
            for name, other, default in (("best_of", "n", 1), ("max_completion_tokens", "max_tokens", None)):
                if name not in cls.model_fields and data.get(name) not in (None, data.get(other) or default):
                    raise WireError(f"it is not supported: use {other}", name)
        return data

    @model_validator(mode="after")
    def _fit(self) -> GenerationRequest:
        if self.structured_outputs and self.response_format and self.response_format.type != "text":
            raise WireError("it cannot be combined with response_format: keep one of them", "structured_outputs")
        return self


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`."""

    model_config = ConfigDict(json_schema_extra={"allOf": [ONE_CONSTRAINT]})

    prompt: Prompts
    max_tokens: Whole | None = None
    """Default 16. 0 for no tokens, which is useful with `echo`."""
    echo: bool | None = None
    """Begin the text and the logprobs with the prompt."""
    logprobs: Whole | None = None
    """Report the log-probability of each token, and of this number of most likely tokens."""


class DetokenizeRequest(WireModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


_MAX_CHARACTERS = 4096

GivenText = Annotated[str, Field(max_length=_MAX_CHARACTERS)]
Given = GivenText | bool | Annotated[int, Field(ge=-MAX_COUNT, le=MAX_COUNT)] | float | None
"""An option's value: a text as on the command line, a number, true, false, or null to remove the option."""


class PolicyUpdate(WireModel):
    """`POST /admin/policy`: the new values of the policy's options, by name."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Given] = Field(init=False)

    def options(self, settings: PolicySettings) -> dict[str, str | None]:
        """Return the options as texts.

        Raises:
            WireError: 400 for no option or an unknown option, 409 for an option that cannot change while it serves.
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
        given = self.__pydantic_extra__.items()
        return {name: None if value is None else option_text(value) for name, value in given}


class Parallel(WireModel):
    """`GET` and `POST /admin/parallel`: the parallel spec of the instances that serve."""

    parallel: GivenText


class Recording(WireModel):
    """`POST /admin/timeline`, and its response: whether requests and steps are recorded."""

    recording: Annotated[bool, Field(strict=True)]


class PolicyInfo(BaseModel):
    """`GET /admin/policy`, and the response to a change: the policy and all its options in force."""

    policy: str
    options: dict[str, OptionValue]
    changeable: list[str]
    """The options that can change while the policy serves."""

    @classmethod
    def of(cls, settings: PolicySettings) -> PolicyInfo:
        """Make the response body of a policy's settings."""
        return cls(policy=settings.name, options=dict(settings.options), changeable=list(settings.changeable))
