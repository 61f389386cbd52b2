"""Messages between the API server and the engine core: msgpack over a socket in a private folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from longspan.args import EngineArgs
from longspan.core.options import PolicySettings
from longspan.core.request import ErrorKind, FinishReason
from longspan.core.steps import BytesSent
from longspan.outputs import LogprobsOfToken
from longspan.text.input_processor import EngineRequest
from longspan.text.output_processor import RequestState


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with which the engine core starts.

    Attributes:
        max_num_queued_reqs, max_num_queued_tokens: bounds of what waits.
        engine_timeout_s: an engine core that serves and says nothing for so long is taken for lost; with nothing
            else to say, it sends `Stats` four times as often.
        max_worker_restarts: lost workers are replaced so often, and then done without; None for as often as need be.
    """

    engine: EngineArgs
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    engine_timeout_s: float = 60.0
    max_worker_restarts: int | None = None


class Add(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An engine request under an id that the API server has chosen; its grammar stands for its structured output.

    If it `is_accepted`, it had a place in the queue of an engine core that was lost, and has one now.
    """

    id: int
    engine_request: EngineRequest
    is_accepted: bool = False


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop computing a request: nobody waits for it any more."""

    id: int


class SetPolicy(msgspec.Struct, frozen=True, tag=True):
    """Change options of the policy; the answer is `PolicySet` or `Failed` with the same id.

    There is no id when a new engine core is set as the last one was.
    """

    id: int | None
    options: dict[str, str | None]


class SetParallel(msgspec.Struct, frozen=True, tag=True):
    """Take another parallel spec; the answer is `ParallelSet`, once that is done, or `Failed` with the same id.

    There is no id when a new engine core is set as the last one was. The `options` of the policy that were changed
    before come with the spec then, because the policy follows from both.
    """

    id: int | None
    parallel: str
    options: dict[str, str | None] = {}


class Quit(msgspec.Struct, frozen=True, tag=True):
    """Stop the workers and end the engine core."""


Command = Add | Cancel | SetPolicy | SetParallel | Quit


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one choice, from the engine core to the answer; see `outputs.CompletionOutput`.

    Logprobs are there if asked for, those of the prompt with the first delta of a request.
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


def delta_of(
    number: int, state: RequestState, index: int, *, text_start: int = 0, token_start: int = 0, with_prompt: bool = True
) -> Delta:
    """Returns what choice `index` of request `number` has brought from these positions of its output on."""
    choice = state.choices[index]
    request = choice.request
    return Delta(
        id=number,
        choice=index,
        text=choice.text[text_start:],
        token_ids=request.output[token_start:],
        logprobs=None if request.params.logprobs is None else choice.logprobs[token_start:],
        finish_reason=request.finish_reason,
        stop_reason=choice.stop_reason,
        num_cached_tokens=state.choices[0].request.metrics.num_cached_tokens,
        prompt_logprobs=state.prompt_logprobs() if with_prompt else None,
    )


class Started(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine core can serve.

    Attributes:
        name, tokenizer_dir, trust_remote_code: see `ModelFiles`; there is no folder where only token ids are served.
        parallel: the spec of its instances.
        num_kv_blocks: of all instances together.
    """

    name: str
    tokenizer_dir: str | None
    trust_remote_code: bool
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    parallel: str
    num_instances: int
    num_kv_blocks: int
    block_size: int
    policy: PolicySettings


class NotStarted(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine core ends without having served: by the user's mistake, or a worker that did not start.

    Attributes:
        parameter: the one that the mistake is in, if it is in one; `reason` is the problem with it then.
    """

    reason: str
    is_mistake: bool
    parameter: str | None = None


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The engine core ends although it has served: its workers cannot be replaced."""

    reason: str


class PolicySet(msgspec.Struct, frozen=True, tag=True):
    """The policy's settings from now on are these."""

    settings: PolicySettings
    id: int | None


class ParallelSet(msgspec.Struct, frozen=True, tag=True):
    """The parallel spec from now on is this one, and the policy was resolved for it.

    There is no id when a loss of workers has changed it.
    """

    parallel: str
    policy: PolicySettings
    id: int | None


class RequestLength(msgspec.Struct, frozen=True, tag=True):
    """The longest request from now on: prompt and output together, in tokens. A change under way counts as made."""

    max_model_len: int


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The engine core has queued a request."""

    id: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A command ends with an error, a request perhaps long after it was accepted; others go on.

    Attributes:
        param: the field of the request that is the cause; None when its sender is not to blame.
        is_full: the queue has no room for the request.
        code: the word that clients know the error by; None for its HTTP status.
    """

    id: int | None
    reason: str
    param: str | None = None
    is_full: bool = False
    code: str | None = None


def failed(number: int, kind: ErrorKind, reason: str) -> Failed:
    """Reports that request `number` ended with an error. Only a grammar is its sender's choice."""
    return Failed(number, reason, kind) if kind == "structured_outputs" else Failed(number, reason, code=kind)


class FinishedChoice(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A choice has finished: what metrics and traces say of it. Of a stage that it never reached, seconds are None."""

    id: int
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    is_first_choice: bool
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    ttft_s: float | None
    e2e_s: float


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state at a moment, and its counters since it started.

    Attributes:
        num_kv_blocks: of all instances together.
        used_blocks: KV blocks per instance that requests hold.
        busy_s: seconds per instance in which it had a step to run, since the start.
        num_prefix_queries, num_prefix_hits: tokens of prompts looked up, and found, in the prefix cache.
        num_external_queries, num_host_hits: tokens whose KV was looked up, and found, in the memory of hosts.
        num_disk_hits: tokens whose KV was found on disks.
        num_kv_violations: violations that checks of the KV account have found, see `core/kv/check.py`.
        host_blocks, disk_blocks: KV blocks that hosts and their disks hold, each of `block_bytes`.
        bytes_sent: between ranks, or copied to and from hosts, since the start.
    """

    num_kv_blocks: int
    used_blocks: list[int]
    busy_s: list[float]
    num_running: int = 0
    num_waiting: int = 0
    num_restarts: int = 0
    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_external_queries: int = 0
    num_host_hits: int = 0
    num_disk_hits: int = 0
    num_kv_violations: int = 0
    host_blocks: int = 0
    disk_blocks: int = 0
    block_bytes: int = 0
    bytes_sent: BytesSent = {}


class StepOutputs(msgspec.Struct, tag=True, kw_only=True):
    """The outputs that one engine step has brought.

    Attributes:
        ttft_s, num_prompt_tokens: of requests that got their first token, the latter of all together.
        tbt_s: between each new token and the one before it in its choice.
        longest_outputs: of each request that has ended, the tokens of its longest choice.
    """

    deltas: list[Delta] = []
    finished: list[FinishedChoice] = []
    ttft_s: list[float] = []
    num_prompt_tokens: int = 0
    tbt_s: list[float] = []
    longest_outputs: list[int] = []
    stats: Stats | None = None


class Restarting(msgspec.Struct, frozen=True, tag=True):
    """The workers were lost; nothing is served until `Restarted`. Without a replacement the other instances go on."""

    reason: str
    is_replaced: bool = True


class Restarted(msgspec.Struct, frozen=True, tag=True):
    """New workers have started, and requests go on."""


Report = (
    Started
    | NotStarted
    | Ended
    | PolicySet
    | ParallelSet
    | RequestLength
    | Accepted
    | Failed
    | StepOutputs
    | Restarting
    | Restarted
)


def address(folder: str) -> str:
    """Returns the address of the socket between the two."""
    return f"ipc://{Path(folder) / 'engine.sock'}"
