"""Prometheus metrics of `/metrics`, with vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, get_args

from msgspec.structs import asdict, replace
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from longspan.core.request import FinishReason
from longspan.serve.messages import CacheConfig, Stats, StepOutputs

_TTFT_S = (0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
_N = (1, 2, 5, 10, 20)
"""Bounds of the histograms' buckets: vLLM's bounds, and larger bounds for long prompts."""

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _TTFT_S),
    "inter_token_latency_seconds": ("Between consecutive tokens.", _TOKEN_S),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _REQUEST_S),
    "request_queue_time_seconds": ("From arrival to admission.", _REQUEST_S),
    "request_prefill_time_seconds": ("From admission to the first token.", _REQUEST_S),
    "request_decode_time_seconds": ("From the first token to the last.", _REQUEST_S),
    "request_inference_time_seconds": ("From admission to the last token.", _REQUEST_S),
    "request_time_per_output_token_seconds": ("Mean time between the tokens of an output.", _TOKEN_S),
    "request_prompt_tokens": ("Length of prompts.", _TOKENS),
    "request_generation_tokens": ("Length of outputs.", _TOKENS),
    "request_max_num_generation_tokens": ("Length of the longest output of a request.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens of a request without cached tokens.", _TOKENS),
    "request_params_max_tokens": ("Parameter max_tokens, or the remaining context without it.", _TOKENS),
    "request_params_n": ("Parameter n.", _N),
    "iteration_tokens_total": ("Output tokens of a step, and tokens of prompts whose prefill it has ended.", _TOKENS),
}
"""Help and buckets of the histograms by name."""
_COUNTERS = (
    ("num_preemptions", "num_preemptions", "Number of preemptions: a request released its KV for another."),
    ("num_prefix_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("num_prefix_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("num_external_queries", "external_prefix_cache_queries", "Tokens looked up in the memory of hosts."),
    ("num_host_hits", "external_prefix_cache_hits", "Tokens whose KV was copied back from the memory of hosts."),
    ("num_disk_hits", "disk_prefix_cache_hits", "Tokens whose KV was copied from disks to the memory of hosts."),
    (
        "num_kv_violations",
        "kv_cache_violations",
        "Violations in the account of KV blocks that a check of the idle engine detected: the log has details.",
    ),
    ("num_restarts", "worker_restarts", "Number of times that lost workers were replaced."),
    ("num_transitions", "cluster_transitions", "Number of changes between clusters."),
)
"""Counters of an engine core: field of `Stats`, metric name, help."""
_TRANSITION_S = {"kv_swap": "transition_swap_s", "reshard": "transition_reshard_s"}
"""Fields of `Stats` by the label `part`."""

_SUMMED = (*(field for field, _, _ in _COUNTERS), *_TRANSITION_S.values())

_ENGINE = "0"
_LABELS = ["model_name", "engine"]
"""The label `engine` of every series, as in vLLM: the index of the engine core. A server has one."""

_Labels = tuple[str, Any]
_Values = Mapping[Any, float]
"""Values of a family by a tuple of labels."""

# The creation times of counters would be further series without use.
disable_created_metrics()  # type: ignore[no-untyped-call]  # as prometheus_client has it


class Metrics(Collector):
    """Counts the outputs of engine steps. `text` is the page.

    Args:
        prefix: prefix of all names, with its colon: `longspan:`, or `vllm:` for dashboards made for vLLM.
        model_name: the label of every series.
        stats: the first stats of the first engine core.
        cache_config: the labels of the series `cache_config_info`, with the numbers of blocks.
    """

    def __init__(self, prefix: str, model_name: str, stats: Stats, cache_config: CacheConfig) -> None:
        self._prefix, self._labels, self._cache_config = prefix, (model_name, _ENGINE), cache_config
        self._num_losses = 0
        self._lost = self._stats = stats
        self._registry = registry = CollectorRegistry()
        self._prompt_tokens, self._cached_tokens, self._generation_tokens, self._corrupted = (
            Counter(prefix + name, words, _LABELS, registry=registry).labels(*self._labels)
            for name, words in (
                ("prompt_tokens", "Prompt tokens of requests that got their first token."),
                ("prompt_tokens_cached", "Cached prompt tokens of requests that got their first token."),
                ("generation_tokens", "Output tokens."),
                ("corrupted_requests", "Requests for which the model computed NaN or infinity."),
            )
        )
        words, labels = "Finished requests; n outputs count n times.", [*_LABELS, "finished_reason"]
        self._success = Counter(f"{prefix}request_success", words, labels, registry=registry)
        for reason in get_args(FinishReason):
            self._success.labels(*self._labels, reason)
        self._histograms = {
            name: Histogram(prefix + name, words, _LABELS, registry=registry, buckets=buckets).labels(*self._labels)
            for name, (words, buckets) in _HISTOGRAMS.items()
        }
        registry.register(self)

    def take_step(self, outputs: StepOutputs) -> None:
        """Count the outputs of an engine step."""
        num_tokens = sum(len(delta.token_ids) for delta in outputs.deltas)
        self._generation_tokens.inc(num_tokens)
        if outputs.deltas:
            self._observe("iteration_tokens_total", outputs.num_prompt_tokens + num_tokens)
        self._observe("request_max_num_generation_tokens", *outputs.longest_outputs)
        self._prompt_tokens.inc(outputs.num_prompt_tokens)
        self._cached_tokens.inc(outputs.num_cached_tokens)
        self._observe("time_to_first_token_seconds", *outputs.ttft_s)
        self._observe("inter_token_latency_seconds", *outputs.tbt_s)
        for choice in outputs.finished:
            self._success.labels(*self._labels, choice.reason).inc()
            self._corrupted.inc(choice.is_corrupted)
            self._observe("request_generation_tokens", choice.num_output_tokens)
            self._observe("e2e_request_latency_seconds", choice.e2e_s)
            self._observe("request_decode_time_seconds", choice.decode_s)
            if choice.decode_s is not None and choice.num_output_tokens > 1:
                self._observe("request_time_per_output_token_seconds", choice.decode_s / (choice.num_output_tokens - 1))
            if choice.prefill_s is not None and choice.decode_s is not None:
                self._observe("request_inference_time_seconds", choice.prefill_s + choice.decode_s)
            if choice.is_first_choice:
                self._observe("request_prompt_tokens", choice.num_prompt_tokens)
                self._observe("request_params_n", choice.n)
                self._observe("request_params_max_tokens", choice.max_tokens)
                self._observe("request_queue_time_seconds", choice.queue_s)
                self._observe("request_prefill_time_seconds", choice.prefill_s)
                if choice.prefill_s is not None:
                    num_computed = choice.num_prompt_tokens - choice.num_cached_tokens
                    self._observe("request_prefill_kv_computed_tokens", num_computed)
        if outputs.stats is not None:
            self._take_stats(outputs.stats)

    def _observe(self, name: str, *values: float | None) -> None:
        for value in values:
            if value is not None:
                self._histograms[name].observe(value)

    def _take_stats(self, stats: Stats) -> None:
        """Set the stats, with the counters of earlier engine cores added."""
        lost = self._lost
        self._stats = replace(
            stats,
            **{name: getattr(lost, name) + getattr(stats, name) for name in _SUMMED},
            busy_s=[sum(pair) for pair in zip_longest(lost.busy_s, stats.busy_s, fillvalue=0.0)],
            bytes_sent=_sums(lost.bytes_sent, stats.bytes_sent),
        )

    def take_loss(self) -> None:
        """Reset gauges while there is no engine core. Counters keep their values, though a new core counts from 0."""
        self._num_losses += 1
        none = [0] * len(self._stats.used_blocks)
        self._lost = self._stats = replace(
            self._stats, num_running=0, num_waiting=0, used_blocks=none, host_blocks=0, disk_blocks=0
        )

    def text(self) -> bytes:
        """Return the metrics in Prometheus' exposition format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of the latest stats."""
        stats = self._stats
        yield self._gauge("num_requests_running", "Requests that hold KV.", {(): stats.num_running})
        yield self._gauge("num_requests_waiting", "Requests that wait for admission.", {(): stats.num_waiting})
        words = "Requests that wait for admission. None is deferred: requests that wait for copies of KV are running."
        reasons = {("capacity",): stats.num_waiting, ("deferred",): 0}
        yield self._gauge("num_requests_waiting_by_reason", words, reasons, "reason")
        used_share = sum(stats.used_blocks) / stats.num_kv_blocks
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", {(): used_share})
        for field, name, words in _COUNTERS:
            yield self._counter(name, words, {(): getattr(stats, field)})
        words = "Seconds of changes between clusters without computation: KV left devices, or ranks took new places."
        parts = {(part,): getattr(stats, field) for part, field in _TRANSITION_S.items()}
        yield self._counter("cluster_transition_exposed_seconds", words, parts, "part")
        words = "Number of times that a lost engine core was replaced."
        yield self._counter("engine_restarts", words, {(): self._num_losses})
        words = "Bytes of KV in the memory of hosts."
        yield self._gauge("local_cache_usage", words, {(): stats.host_blocks * stats.block_bytes})
        words = "Bytes of KV on the disks of hosts."
        yield self._gauge("local_storage_usage", words, {(): stats.disk_blocks * stats.block_bytes})
        yield self._cache_config_info()
        tiers = {("device",): sum(stats.used_blocks), ("host",): stats.host_blocks, ("disk",): stats.disk_blocks}
        yield self._gauge("tier_kv_blocks", "KV blocks in use on devices, and held by hosts and disks.", tiers, "tier")
        used = {(str(instance),): value for instance, value in enumerate(stats.used_blocks)}
        yield self._gauge("instance_kv_blocks_used", "KV blocks in use.", used, "instance")
        busy_s = {(str(instance),): value for instance, value in enumerate(stats.busy_s)}
        words = "Seconds in which an instance had a step to run; its rate is the busy share."
        yield self._counter("instance_busy_seconds", words, busy_s, "instance")
        words = "Bytes sent between ranks of one host or of several hosts, or copied to and from a host."
        yield self._counter("exchanged_bytes", words, stats.bytes_sent, "exchange", "link")

    def _cache_config_info(self) -> Metric:
        """Return the gauge with vLLM's labels, which has no label `model_name`. Its value is always 1."""
        sizes = {"num_gpu_blocks": self._stats.num_kv_blocks, "num_cpu_blocks": self._stats.num_host_blocks}
        labels = {"engine": _ENGINE, **asdict(self._cache_config), **sizes}
        words = "Configuration of the KV pools of all devices and hosts. The value is 1."
        family = GaugeMetricFamily(f"{self._prefix}cache_config_info", words, labels=[*labels])
        family.add_metric([str(value) for value in labels.values()], 1)
        return family

    def _gauge(self, name: str, words: str, values: _Values, *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily(self._prefix + name, words, labels=[*_LABELS, *labels]), values)

    def _counter(self, name: str, words: str, values: _Values, *labels: str) -> Metric:
        return self._filled(CounterMetricFamily(self._prefix + name, words, labels=[*_LABELS, *labels]), values)

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, values: _Values) -> Metric:
        for labels, value in values.items():
            family.add_metric([*self._labels, *labels], value)
        return family


def _sums(lost: Mapping[_Labels, int], counted: Mapping[_Labels, int]) -> dict[_Labels, int]:
    """Return the sums of both counts. A series of a lost engine core stays, though the new core may never count it."""
    return {name: lost.get(name, 0) + counted.get(name, 0) for name in (*lost, *(counted.keys() - lost.keys()))}
