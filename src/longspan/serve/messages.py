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
        max_num_queued_reqs, max_num_queued_tokens: bounds of waiting requests.
        engine_timeout_s: an engine core that serves and sends nothing in this time is treated as lost. An idle engine
            core sends `Stats` four times in it.
        max_worker_restarts: number of times that lost workers are replaced. Afterwards their instances are removed.
            None for no limit.
        tune_idle: partitions of chains are measured while no request runs.
        log_level, log_format: see `logs.configure`.
    """

    engine: EngineArgs
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    engine_timeout_s: float = 60.0
    max_worker_restarts: int | None = None
    tune_idle: bool = False
    log_level: str = "info"
    log_format: str = "text"


class Add(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """An engine request under an id of the API server. Its grammar replaces its structured output.

    If it `is_accepted`, an engine core that was lost had queued it, and the queue's bounds do not apply.
    """

    id: int
    engine_request: EngineRequest
    is_accepted: bool = False


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop computing a request whose client waits no longer."""

    id: int


class SetPolicy(msgspec.Struct, frozen=True, tag=True):
    """Change options of the policy. The reply is `PolicySet` or `Failed` with the same id.

    The id is None if the command repeats earlier changes for a new engine core.
    """

    id: int | None
    options: dict[str, str | None]


class SetParallel(msgspec.Struct, frozen=True, tag=True):
    """Change the parallel spec. The reply is `ParallelSet`, when that is done, or `Failed`, with the same id.

    The id is None if the command repeats earlier changes for a new engine core. It then has the changed `options` of
    the policy, too, because the policy follows from both.
    """

    id: int | None
    parallel: str
    options: dict[str, str | None] = {}


class SetRecording(msgspec.Struct, frozen=True, tag=True):
    """Start or stop to record requests and steps. The reply is a `Timeline` without a trace.

    The id is None if the command repeats an earlier one for a new engine core.
    """

    id: int | None
    is_on: bool


class GetTimeline(msgspec.Struct, frozen=True, tag=True):
    """Return the last seconds of the recording. The reply is a `Timeline`."""

    id: int
    seconds: float


class Quit(msgspec.Struct, frozen=True, tag=True):
    """Stop the workers and end the engine core."""


Command = Add | Cancel | SetPolicy | SetParallel | SetRecording | GetTimeline | Quit


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one choice, see `outputs.CompletionOutput`.

    It has logprobs if they are requested. The first delta of a request has the logprobs of the prompt.
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
    """Return the output of choice `index` of request `number` from these positions on."""
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


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration of KV pools, with vLLM's names.

    Attributes:
        cache_dtype: the data type of keys and values.
    """

    block_size: int
    cache_dtype: str
    enable_prefix_caching: bool


class Started(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine core can serve.

    Attributes:
        name, tokenizer_dir, trust_remote_code: see `ModelFiles`. `tokenizer_dir` is None if only token ids are served.
        parallel: the parallel spec of its instances.
        stats: its first stats, before any request.
    """

    name: str
    tokenizer_dir: str | None
    trust_remote_code: bool
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    parallel: str
    cache_config: CacheConfig
    policy: PolicySettings
    stats: Stats


class NotStarted(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The engine core ends without having served: by the user's mistake, or a worker that did not start.

    Attributes:
        parameter: the wrong parameter, if the mistake is in one. `reason` is the problem with it then.
    """

    reason: str
    is_mistake: bool
    parameter: str | None = None


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The engine core ends after it has served: its lost workers cannot be replaced."""

    reason: str


class PolicySet(msgspec.Struct, frozen=True, tag=True):
    """The policy has these settings from now on."""

    settings: PolicySettings
    id: int | None


class ParallelSet(msgspec.Struct, frozen=True, tag=True):
    """The instances have this parallel spec from now on, and the policy was resolved for it.

    The id is None if a loss of workers has changed the spec.
    """

    parallel: str
    policy: PolicySettings
    id: int | None


class Timeline(msgspec.Struct, frozen=True, tag=True):
    """The reply to commands about recordings.

    Attributes:
        is_on: whether requests and steps are recorded.
        trace: a Perfetto trace as JSON. None if it was not asked for, or nothing is recorded.
    """

    id: int | None
    is_on: bool
    trace: str | None = None


class RequestLength(msgspec.Struct, frozen=True, tag=True):
    """The longest request from now on: prompt and output together, in tokens, as after a change under way."""

    max_model_len: int


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The engine core has queued a request. `expected_ttft_s` is predicted if the machine was profiled."""

    id: int
    expected_ttft_s: float | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A command ends with an error. A request may fail long after it was accepted.

    Attributes:
        param: the field of the request that is the cause. None if no field is.
        is_full: the queue has no capacity for the request.
        code: the error's code for clients. None for its HTTP status.
    """

    id: int | None
    reason: str
    param: str | None = None
    is_full: bool = False
    code: str | None = None


def failed(number: int, kind: ErrorKind, reason: str) -> Failed:
    """Return the report that request `number` ended with an error. Only a grammar is a field of the request."""
    return Failed(number, reason, kind) if kind == "structured_outputs" else Failed(number, reason, code=kind)


class FinishedChoice(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """A choice has finished: its figures for metrics and traces. The seconds of a stage are None if not reached.

    Attributes:
        num_cached_tokens: prompt tokens whose KV was cached.
        n, max_tokens: the request's parameters. `max_tokens` is the remaining context if the request has none.
        is_corrupted: the model computed NaN or infinity for it.
    """

    id: int
    reason: FinishReason
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    n: int
    max_tokens: int
    is_first_choice: bool
    is_corrupted: bool
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    ttft_s: float | None
    e2e_s: float


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's state at a moment, and its counters since it started.

    Attributes:
        num_kv_blocks: number of KV blocks of all instances together.
        num_host_blocks: number of KV blocks of the pools of all hosts together.
        used_blocks: KV blocks per instance that requests hold.
        busy_s: seconds per instance in which it had a step to run, since the start.
        num_prefix_queries, num_prefix_hits: prompt tokens looked up, and found, in the prefix cache.
        num_external_queries, num_host_hits: tokens whose KV was looked up, and found, in the memory of hosts.
        num_disk_hits: tokens whose KV was found on disks.
        num_transitions: changes of clusters.
        transition_swap_s, transition_reshard_s: seconds of changes without computation, while KV left the devices, and
            while ranks took their new places.
        num_kv_violations: violations that checks of the KV account have detected, see `core/kv/check.py`.
        host_blocks, disk_blocks: KV blocks that hosts and their disks hold, each of `block_bytes`.
        bytes_sent: bytes sent between ranks, or copied to and from hosts, since the start.
    """

    num_kv_blocks: int
    used_blocks: list[int]
    busy_s: list[float]
    num_host_blocks: int = 0
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
    num_transitions: int = 0
    transition_swap_s: float = 0.0
    transition_reshard_s: float = 0.0
    host_blocks: int = 0
    disk_blocks: int = 0
    block_bytes: int = 0
    bytes_sent: BytesSent = {}


class StepOutputs(msgspec.Struct, tag=True, kw_only=True):
    """The outputs of one engine step.

    Attributes:
        ttft_s: times to first token of the requests that got their first token.
        num_prompt_tokens, num_cached_tokens: sums of these requests' prompt lengths and cached prompt tokens.
        tbt_s: seconds between each new token and the previous token of its choice.
        longest_outputs: tokens of the longest choice of each request that has ended.
        progress: the id, the computed and all prompt tokens of each long prompt that is being computed.
    """

    deltas: list[Delta] = []
    finished: list[FinishedChoice] = []
    ttft_s: list[float] = []
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    tbt_s: list[float] = []
    longest_outputs: list[int] = []
    progress: list[tuple[int, int, int]] = []
    stats: Stats | None = None


class Restarting(msgspec.Struct, frozen=True, tag=True):
    """No request is served until `Restarted`, since workers were lost. Without `is_replaced`, other instances go on."""

    reason: str
    is_replaced: bool = True


class Restarted(msgspec.Struct, frozen=True, tag=True):
    """New workers have started, and requests resume."""


Report = (
    Started
    | NotStarted
    | Ended
    | PolicySet
    | ParallelSet
    | Timeline
    | RequestLength
    | Accepted
    | Failed
    | StepOutputs
    | Restarting
    | Restarted
)


def address(folder: str) -> str:
    """Return the address of the socket between API server and engine core."""
    return f"ipc://{Path(folder) / 'engine.sock'}"
