"""The page for Prometheus: its names are those of vLLM, and its numbers follow the requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_server import OUTPUT, STATS, client_of, fake_of, make_server
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from longspan.serve.messages import StepOutputs
from longspan.serve.server import Server

GAUGES = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "instance_kv_blocks_used"),
    *("local_cache_usage", "local_storage_usage", "tier_kv_blocks", "num_requests_waiting_by_reason"),
    "cache_config_info",
}
COUNTERS = {
    *("prompt_tokens", "generation_tokens", "request_success", "num_preemptions", "prefix_cache_queries"),
    *("prefix_cache_hits", "instance_busy_seconds", "exchanged_bytes", "worker_restarts", "engine_restarts"),
    *("external_prefix_cache_queries", "external_prefix_cache_hits", "disk_prefix_cache_hits", "kv_cache_violations"),
    *("prompt_tokens_cached", "corrupted_requests", "cluster_transitions", "cluster_transition_exposed_seconds"),
}
HISTOGRAMS = {
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
    *("request_time_per_output_token_seconds", "request_prompt_tokens", "request_generation_tokens"),
    *("request_max_num_generation_tokens", "iteration_tokens_total", "request_inference_time_seconds"),
    *("request_params_n", "request_params_max_tokens", "request_prefill_kv_computed_tokens"),
}
Sample = Callable[..., float]


def sampler(server: Server, prefix: str = "longspan:") -> Sample:
    """Looks up a value on the page as it is now."""
    text = client_of(server).get("/metrics").text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def value(name: str, **labels: str) -> float:
        wanted = {"model_name": "tiny", "engine": "0", **labels}
        [found] = [sample.value for sample in samples if (sample.name, sample.labels) == (prefix + name, wanted)]
        return found

    return value


@pytest.mark.parametrize("prefix", ["longspan:", "vllm:"])
def test_every_metric_is_there_under_either_prefix(prefix: str) -> None:
    server = make_server(metrics_prefix=prefix)
    server.metrics.take_step(StepOutputs(stats=STATS))
    response = client_of(server).get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    expected = (
        dict.fromkeys(GAUGES, "gauge") | dict.fromkeys(COUNTERS, "counter") | dict.fromkeys(HISTOGRAMS, "histogram")
    )
    assert {name.removeprefix(prefix): family.type for name, family in families.items()} == expected
    assert all(name.startswith(prefix) for name in families)
    assert all(family.documentation for family in families.values())
    for name in COUNTERS:
        assert f"\n{prefix}{name}_total{{" in response.text


def test_counts_begin_at_zero() -> None:
    """A dashboard that takes rates needs the series before the first request."""
    value = sampler(make_server())
    assert value("prompt_tokens_total") == value("generation_tokens_total") == 0
    for reason in ("stop", "length", "abort", "error"):
        assert value("request_success_total", finished_reason=reason) == 0


def test_counts_follow_requests() -> None:
    server = make_server()
    client = client_of(server)
    assert client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 2}).status_code == 200
    two = {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 2, "n": 3, "stream": True}
    assert client.post("/v1/completions", json=two).status_code == 200
    assert client.post("/v1/completions", json={"prompt": [1000]}).status_code == 400
    value, num_prompts, num_choices = sampler(server), 3, 7
    assert value("request_success_total", finished_reason="length") == num_choices
    assert value("request_success_total", finished_reason="stop") == 0
    assert value("prompt_tokens_total") == 3 + 3 + 2
    assert value("generation_tokens_total") == num_choices * len(OUTPUT)
    for name in ("time_to_first_token_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"):
        assert value(f"{name}_count") == num_prompts
    for name in ("e2e_request_latency_seconds", "request_decode_time_seconds", "inter_token_latency_seconds"):
        assert value(f"{name}_count") == num_choices
    assert value("request_prompt_tokens_sum") == 3 + 3 + 2
    assert value("prompt_tokens_cached_total") == num_prompts
    assert value("request_prefill_kv_computed_tokens_count") == num_prompts
    assert value("request_prefill_kv_computed_tokens_sum") == 3 + 3 + 2 - num_prompts
    assert value("request_inference_time_seconds_count") == num_choices
    assert value("request_inference_time_seconds_sum") == pytest.approx(1.25 * num_choices)
    assert (value("request_params_n_count"), value("request_params_n_sum")) == (num_prompts, 1 + 3 + 3)
    assert value("request_params_max_tokens_sum") == 2 * num_prompts
    assert value("corrupted_requests_total") == 0
    assert value("request_time_per_output_token_seconds_count") == num_choices
    assert value("request_time_per_output_token_seconds_sum") == pytest.approx(0.25 * num_choices)
    assert value("request_max_num_generation_tokens_count") == num_prompts
    assert value("request_max_num_generation_tokens_sum") == num_prompts * len(OUTPUT)
    assert value("iteration_tokens_total_sum") == value("prompt_tokens_total") + value("generation_tokens_total")
    assert value("request_generation_tokens_sum") == num_choices * len(OUTPUT)
    assert value("time_to_first_token_seconds_sum") == pytest.approx(1.5 * num_prompts)
    assert value("time_to_first_token_seconds_bucket", le="2.5") == num_prompts
    assert value("time_to_first_token_seconds_bucket", le="1.0") == 0


def test_gauges_are_the_engines_latest_word() -> None:
    value = sampler(make_server())  # it has them when it takes the server on
    assert (value("num_requests_running"), value("num_requests_waiting")) == (3, 2)
    assert value("kv_cache_usage_perc") == pytest.approx(7 / 20)
    assert [value("num_requests_waiting_by_reason", reason=reason) for reason in ("capacity", "deferred")] == [2, 0]
    assert [value("instance_kv_blocks_used", instance=i) for i in "01"] == [5, 2]
    assert [value("instance_busy_seconds_total", instance=i) for i in "01"] == [1.5, 0.5]
    assert value("exchanged_bytes_total", exchange="ring_kv", link="same_host") == 1000
    assert [value("tier_kv_blocks", tier=tier) for tier in ("device", "host", "disk")] == [7, 3, 6]
    assert (value("local_cache_usage"), value("local_storage_usage")) == (300, 600)
    assert (value("worker_restarts_total"), value("num_preemptions_total")) == (1, 4)
    assert (value("prefix_cache_queries_total"), value("prefix_cache_hits_total")) == (50, 30)
    assert value("cluster_transitions_total") == 5
    exposed_s = [value("cluster_transition_exposed_seconds_total", part=part) for part in ("kv_swap", "reshard")]
    assert exposed_s == [0.25, 2.0]


def test_counters_outlive_the_engine_process_and_gauges_do_not() -> None:
    server = make_server()
    fake_of(server).on_loss()
    value = sampler(server)
    assert (value("engine_restarts_total"), value("worker_restarts_total")) == (1, 1)
    assert (value("num_requests_running"), value("num_requests_waiting"), value("kv_cache_usage_perc")) == (0, 0, 0)
    assert value("instance_kv_blocks_used", instance="0") == 0
    for _ in range(2):  # the second engine core speaks twice
        server.metrics.take_step(StepOutputs(stats=STATS))
    value = sampler(server)
    assert (value("engine_restarts_total"), value("worker_restarts_total")) == (1, 2)
    assert value("instance_busy_seconds_total", instance="0") == 3.0
    assert value("exchanged_bytes_total", exchange="ring_kv", link="same_host") == 2000
    assert value("num_preemptions_total") == 8
    assert value("cluster_transitions_total") == 10
    assert value("cluster_transition_exposed_seconds_total", part="kv_swap") == 0.5
    assert value("num_requests_running") == 3


def test_series_of_a_lost_engine_process_stay_though_the_next_never_counts_them() -> None:
    server = make_server()
    fake_of(server).on_loss()
    assert sampler(server)("tier_kv_blocks", tier="disk") == 0
    other = replace(STATS, busy_s=[1.0], bytes_sent={("ring_q", "other_host"): 1, ("offload", "host"): 2})
    server.metrics.take_step(StepOutputs(stats=other))
    value = sampler(server)
    assert [value("instance_busy_seconds_total", instance=i) for i in "01"] == [2.5, 0.5]
    labels = (("ring_kv", "same_host"), ("ring_q", "other_host"), ("offload", "host"))
    sums = [value("exchanged_bytes_total", exchange=exchange, link=link) for exchange, link in labels]
    assert sums == [1000, 25, 2]


def test_the_models_first_name_labels_everything() -> None:
    server = make_server(model_names=("first", "also-known-as"))
    server.metrics.take_step(StepOutputs(stats=STATS))
    text = client_of(server).get("/metrics").text
    assert "also-known-as" not in text
    lines = [line for line in text.splitlines() if not line.startswith("#") and "cache_config_info" not in line]
    assert all('engine="0"' in line and 'model_name="first"' in line for line in lines)


def test_sizes_of_pools_are_labels_as_in_vllm() -> None:
    """Routers multiply `block_size` by `num_gpu_blocks`. As in vLLM, the series has no label `model_name`."""
    text = client_of(make_server()).get("/metrics").text
    [line] = [line for line in text.splitlines() if line.startswith("longspan:cache_config_info")]
    labels = dict(part.split("=") for part in line.partition("{")[2].partition("}")[0].split(","))
    assert line.endswith(" 1.0")
    assert labels == {
        "engine": '"0"',
        "block_size": '"16"',
        "cache_dtype": '"float32"',
        "enable_prefix_caching": '"True"',
        "num_gpu_blocks": '"20"',
        "num_cpu_blocks": '"9"',
    }
