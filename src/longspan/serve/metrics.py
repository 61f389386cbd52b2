"""Prometheus metrics of `/metrics`, under vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import get_args

from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from longspan.core.request import FinishReason
from longspan.serve.messages import FinishedChoice, Stats, StepOutputs

_TTFT_S = (0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
_TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(digit * 10**power for power in range(7) for digit in (1, 2, 5))
"""Bounds of the histograms' buckets: those of vLLM, and longer ones for long prompts."""

_COUNTERS = (
    ("num_preemptions", "num_preemptions", "How often a request gave up its KV to others."),
    ("num_prefix_queries", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    ("num_prefix_hits", "prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    ("num_restarts", "worker_restarts", "How often lost workers were replaced."),
)
"""Counters of an engine core: the field of `Stats`, the metric, its help."""

# When each series began is of no use to anybody, and these would be further series.
disable_created_metrics()  # type: ignore[no-untyped-call]  # as prometheus_client has it


class Metrics:
    """Counts what engine steps bring; `text` is the page.

    Args:
        prefix: of all names, with its colon: `longspan:`, or `vllm:` for dashboards made for vLLM.
        model_name: the label of every series.
        num_kv_blocks: of all instances together.
    """

    def __init__(self, prefix: str, model_name: str, *, num_instances: int, num_kv_blocks: int) -> None:
        self._registry = CollectorRegistry()
        self._label = {"model_name": model_name}
        self._prefix = prefix
        counter, histogram = self._counter, self._histogram
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self._generation_tokens = counter("generation_tokens", "Output tokens.")
        self._success = Counter(
            f"{prefix}request_success",
            "Finished requests; n outputs count n times.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        for reason in get_args(FinishReason):
            self._success.labels(model_name, reason)
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.", buckets=_TTFT_S)
        self._itl = histogram("inter_token_latency_seconds", "Between consecutive tokens.", buckets=_TOKEN_S)
        self._e2e = histogram("e2e_request_latency_seconds", "From arrival to the last token.", buckets=_REQUEST_S)
        self._queue = histogram("request_queue_time_seconds", "From arrival to admission.", buckets=_REQUEST_S)
        self._prefill = histogram(
            "request_prefill_time_seconds", "From admission to the first token.", buckets=_REQUEST_S
        )
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last.", buckets=_REQUEST_S)
        self._num_prompt = histogram("request_prompt_tokens", "Length of prompts.", buckets=_TOKENS)
        self._num_generated = histogram("request_generation_tokens", "Length of outputs.", buckets=_TOKENS)
        self._latest = _Latest(prefix, model_name, num_instances, num_kv_blocks)
        self._registry.register(self._latest)

    def _counter(self, name: str, words: str) -> Counter:
        name = self._prefix + name
        return Counter(name, words, ["model_name"], registry=self._registry).labels(**self._label)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        name = self._prefix + name
        return Histogram(name, words, ["model_name"], registry=self._registry, buckets=buckets).labels(**self._label)

    def take_step(self, outputs: StepOutputs) -> None:
        """Count what an engine step has brought."""
        self._generation_tokens.inc(sum(len(delta.token_ids) for delta in outputs.deltas))
        self._prompt_tokens.inc(outputs.num_prompt_tokens)
        for histogram, values in ((self._ttft, outputs.ttft_s), (self._itl, outputs.tbt_s)):
            for value in values:
                histogram.observe(value)
        for choice in outputs.finished:
            self._take_finished(choice)
        if outputs.stats is not None:
            self._latest.take(outputs.stats)

    def take_loss(self) -> None:
        """Note that the engine core is gone; another one counts from 0 again."""
        self._latest.lose()

    def _take_finished(self, choice: FinishedChoice) -> None:
        self._success.labels(**self._label, finished_reason=choice.reason).inc()
        self._num_generated.observe(choice.num_output_tokens)
        self._e2e.observe(choice.e2e_s)
        if choice.decode_s is not None:
            self._decode.observe(choice.decode_s)
        if not choice.is_first_choice:
            return
        self._num_prompt.observe(choice.num_prompt_tokens)
        for histogram, value in ((self._queue, choice.queue_s), (self._prefill, choice.prefill_s)):
            if value is not None:
                histogram.observe(value)

    def text(self) -> bytes:
        """Return the page in Prometheus' exposition format."""
        return generate_latest(self._registry)


class _Latest(Collector):
    """The latest stats of the engine core, read when somebody asks."""

    def __init__(self, prefix: str, model_name: str, num_instances: int, num_kv_blocks: int) -> None:
        self._prefix, self._model_name = prefix, model_name
        self._num_instances, self._num_kv_blocks = num_instances, num_kv_blocks
        self._num_losses = 0
        self._lost = self._stats = Stats(used_blocks=[0] * num_instances, busy_s=[0.0] * num_instances)

    def take(self, stats: Stats) -> None:
        """Take stats of the engine core; what those before it have counted is added."""
        lost = self._lost
        self._stats = replace(
            stats,
            **{name: getattr(lost, name) + getattr(stats, name) for name, _, _ in _COUNTERS},
            busy_s=[sum(pair) for pair in zip(lost.busy_s, stats.busy_s, strict=True)],
            bytes_sent={name: lost.bytes_sent.get(name, 0) + number for name, number in stats.bytes_sent.items()},
        )

    def lose(self) -> None:
        """Reset gauges while there is no engine core; counters stay."""
        self._num_losses += 1
        none = [0] * self._num_instances
        self._lost = self._stats = replace(self._stats, num_running=0, num_waiting=0, used_blocks=none)

    def collect(self) -> Iterator[Metric]:
        """Yield one family after the other."""
        stats = self._stats
        yield self._gauge("num_requests_running", "Requests that hold KV.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for room.", stats.num_waiting)
        used_share = sum(stats.used_blocks) / self._num_kv_blocks
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used_share)
        for field, name, words in _COUNTERS:
            yield self._counter(name, words, (), [((), getattr(stats, field))])
        words = "How often a lost engine core was replaced."
        yield self._counter("engine_restarts", words, (), [((), self._num_losses)])
        instances = [str(i) for i in range(self._num_instances)]
        used = GaugeMetricFamily(
            f"{self._prefix}instance_kv_blocks_used", "KV blocks in use.", labels=["model_name", "instance"]
        )
        for instance, value in zip(instances, stats.used_blocks, strict=True):
            used.add_metric([self._model_name, instance], value)
        yield used
        busy = zip([(instance,) for instance in instances], stats.busy_s, strict=True)
        words = "Seconds in which an instance had a step to run; its rate is the busy share."
        yield self._counter("instance_busy_seconds", words, ("instance",), busy)
        words = "Bytes sent between ranks, on the same host or from one host to another."
        yield self._counter("exchanged_bytes", words, ("exchange", "link"), stats.bytes_sent.items())

    def _gauge(self, name: str, words: str, value: float) -> Metric:
        family = GaugeMetricFamily(self._prefix + name, words, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(
        self, name: str, words: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
    ) -> Metric:
        family = CounterMetricFamily(self._prefix + name, words, labels=["model_name", *labels])
        for key, value in values:
            family.add_metric([self._model_name, *key], value)
        return family
