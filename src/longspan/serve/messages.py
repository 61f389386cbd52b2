"""Messages between the API server and the engine core: msgpack over a socket in a private folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from longspan.core.request import FinishReason
from longspan.core.sampling import SamplingParams
from longspan.core.steps import BytesSent
from longspan.outputs import LogprobsOfToken
from longspan.policy.spec import PolicySettings
from longspan.text.input_processor import EngineRequest


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with which the engine core starts.

    Attributes:
        arguments: of `Deployment`, by name.
        max_num_queued_reqs, max_num_queued_tokens: bounds of what waits; None for none.
        stats_interval_s: least time between two `Stats`.
        engine_timeout_s: an engine core that serves and says nothing for so long is taken for lost; with nothing
            else to say, it sends `Stats` four times as often.
    """

    model: str
    arguments: dict[str, Any]
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    stats_interval_s: float = 0.5
    engine_timeout_s: float = 60.0


class Add(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An engine request under an id that the API server has chosen.

    Attributes:
        is_accepted: it had a place in the queue of an engine core that was lost, and has one now.
    """

    id: int
    text: str | None
    token_ids: tuple[int, ...]
    grammar: str
    params: dict[str, Any]
    is_accepted: bool

    @staticmethod
    def of(number: int, engine_request: EngineRequest, *, is_accepted: bool = False) -> Add:
        """Return the message that asks for `engine_request`."""
        params = msgspec.to_builtins(replace(engine_request.params, logit_bias=None, structured_outputs=None))
        params["logit_bias"] = dict(engine_request.params.biases)
        return Add(
            id=number,
            text=engine_request.text,
            token_ids=engine_request.token_ids,
            grammar=engine_request.grammar,
            params=params,
            is_accepted=is_accepted,
        )

    def engine_request(self) -> EngineRequest:
        """Rebuild the engine request; its grammar stands for its structured output."""
        return EngineRequest(
            text=self.text, token_ids=self.token_ids, params=SamplingParams(**self.params), grammar=self.grammar
        )


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop computing a request: nobody waits for it any more."""

    id: int


class SetPolicy(msgspec.Struct, frozen=True, tag=True):
    """Change options of the policy; the answer is `PolicySet` or `PolicyRefused` with the same id."""

    id: int
    options: dict[str, str]


class Quit(msgspec.Struct, frozen=True, tag=True):
    """Stop the workers and end the engine core."""


Command = Add | Cancel | SetPolicy | Quit


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one choice, from the engine core to the answer; see `outputs.CompletionOutput`.

    Attributes:
        id: the request.
        choice: its number among the request's choices.
        logprobs: of the new tokens; None unless asked for.
        num_cached_tokens: prompt tokens whose KV was there already.
        prompt_logprobs: with the first delta of a request, if asked for.
    """

    id: int
    choice: int
    text: str
    token_ids: list[int]
    logprobs: list[LogprobsOfToken] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_cached_tokens: int = 0
    prompt_logprobs: list[LogprobsOfToken | None] | None = None


def joined(deltas: Sequence[Delta]) -> Delta:
    """Return one delta with all that successive deltas of a choice bring."""
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    return msgspec.structs.replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=None if deltas[-1].logprobs is None else logprobs,
    )


class Started(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine core can serve.

    Attributes:
        name, tokenizer_dir, trust_remote_code: see `ModelFiles`; there is no folder where only token ids are served.
        num_kv_blocks: of all instances together.
    """

    name: str
    tokenizer_dir: str | None
    trust_remote_code: bool
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    num_instances: int
    num_kv_blocks: int
    block_size: int
    worker_pids: list[int]


class NotStarted(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine core ends without having served: by the user's mistake, or a worker that did not start."""

    reason: str
    is_mistake: bool


class PolicySet(msgspec.Struct, frozen=True, tag=True):
    """The policy's settings from now on are these: sent after a change, and, without an id, before `Started`."""

    settings: PolicySettings
    id: int | None = None


class PolicyRefused(msgspec.Struct, frozen=True, tag=True):
    """The engine core refused a change of options: none was changed."""

    id: int
    reason: str


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The engine core has queued a request."""

    id: int


class QueueFull(msgspec.Struct, frozen=True, tag=True):
    """The queue has no room for a request."""

    id: int
    reason: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A request ends with an error; the other ones go on.

    Attributes:
        param: the field of the request that is the cause; None when its sender is not to blame.
    """

    id: int
    reason: str
    param: str | None = None


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that a finished choice spent per stage; None for a stage that it never reached."""

    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    ttft_s: float | None
    e2e_s: float


class FinishedChoice(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A choice has finished: what metrics and traces say of it."""

    id: int
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    is_first_choice: bool
    times: Times


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state at a moment, and its counters since it started.

    Attributes:
        num_prefix_queries, num_prefix_hits: tokens of prompts looked up, and found, in the prefix cache.
        used_blocks: KV blocks per instance that requests hold.
        busy_s: seconds per instance in which it had a step to run, since the start.
        bytes_sent: between ranks, since the start.
    """

    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_restarts: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int
    used_blocks: list[int]
    busy_s: list[float]
    bytes_sent: BytesSent
    worker_pids: list[int]


class StepOutputs(msgspec.Struct, tag=True, kw_only=True):
    """All that one engine step has brought.

    Attributes:
        ttft_s: of requests that got their first token.
        num_prompt_tokens: of these requests together.
        tbt_s: between each new token and the one before it in its choice.
    """

    deltas: list[Delta] = []
    finished: list[FinishedChoice] = []
    ttft_s: list[float] = []
    num_prompt_tokens: int = 0
    tbt_s: list[float] = []
    stats: Stats | None = None


class Restarting(msgspec.Struct, frozen=True, tag=True):
    """The workers were lost; nothing is served until `Restarted`."""

    reason: str


class Restarted(msgspec.Struct, frozen=True, tag=True):
    """New workers have started, and requests go on."""


Report = (
    Started
    | NotStarted
    | PolicySet
    | PolicyRefused
    | Accepted
    | QueueFull
    | Failed
    | StepOutputs
    | Restarting
    | Restarted
)


def address(folder: str) -> str:
    """Return the address of the socket between the two."""
    return f"ipc://{Path(folder) / 'engine.sock'}"
