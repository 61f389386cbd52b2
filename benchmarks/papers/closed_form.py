"""Offline throughput with constant lengths in closed form: Seesaw, appendix A, Eq. 1, with corrections.

A layer's forward pass over a micro-batch takes, on every rank (Table 3 of the paper),

    T_L = max(T_dm_linear, T_comp_linear) + max(T_dm_attn, T_comp_attn) + T_nw

for weights and products, keys and scores, and sums over the ranks of a stage. In each of DP instances, a full pipeline
ends a pass every T_stage = L / PP * T_L. A pass advances 1 / PP of an instance's requests by one token, so its rate is
1 / Eq. 1 = b / PP / T_stage. Corrections of the paper:

- Table 3 has d² in the operations of attention. A score is a product of d numbers, and its value takes d operations. A
  prompt therefore takes 2 b h_q s² d, because half of its pairs are masked. A token behind s tokens takes 4 b h_q s d.
- Eq. 1 counts prompts with the times of prefill, and single tokens with the times of decode. A request with N tokens
  (in Table 2, and nowhere else) takes one prefill for the first of them, and N - 1 passes of decode.
- "A micro-batch of b / PP" is of all instances together. One instance finishes b / (PP * DP).
- s is the prompt in prefill, s + N / 2 on average in decode, and s + N at its end.
- b_max counts all memory. Activations, the driver and unused memory are not for KV.

The paper leaves out some terms that are not small, and are included here:

- shares of the peaks that devices reach, as in `cost/roofline.py`. Weights and products do not overlap fully, so their
  maximum is smoothed as measured. Operators between products take time, and all operators take time to start.
- B_ar(TP) of a ring, and the latency of each sum;
- the output head, which the last stage has in addition to its layers, and layers that do not divide;
- chunked prefill: answers are decoded in the passes that compute prompts, and have fewer passes of their own;
- requests in prefill hold memory, too. It is idle while PP stages wait for the last pass of a prompt;
- prompts are admitted when they fit, so growing answers preempt N / (s + N) of the requests. These recompute
  s + N / 2 tokens on average.
- of r requests, the first fill the pipeline, and the last do not fill a batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from longspan.cost.estimate import full_step
from longspan.cost.forward import Roofline
from longspan.errors import ParameterError

_NUM_PRODUCTS, _NUM_ATTENTION = 4, 2
"""Operators of a layer that take time to start: products, and attention with the merge of its parts."""
_ITERATIONS = 30


@dataclass(frozen=True, kw_only=True)
class OfflineWork:
    """Equal requests that all arrive at once.

    Attributes:
        stage_seqs: maximum requests per pipeline stage.
        host_s, seq_s: seconds of the host before each pass, and for each of its decodes, in which the devices wait.

    Raises:
        ParameterError: for a number or length below 1.
    """

    num_requests: int
    input_len: int
    output_len: int
    stage_seqs: float = math.inf
    host_s: float = 0.0
    seq_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_requests", "input_len", "output_len"):
            if (value := getattr(self, name)) < 1:
                raise ParameterError(name, f"must be at least 1, but {value} given", value)

    @property
    def num_passes(self) -> int:
        """Forward passes of each request after its prefill."""
        return self.output_len - 1

    @property
    def mean_len(self) -> float:
        """Tokens of a request on average while it decodes."""
        return self.input_len + self.output_len / 2

    def passed(self, prompt: float, decodes: float) -> Pass:
        """Make a pass over tokens of prompts and decodes."""
        return Pass(prompt, self.input_len / 2, decodes, self.mean_len, self.host_s + decodes * self.seq_s)


class Pass(NamedTuple):
    """One forward pass of an instance.

    Attributes:
        prompt: tokens of prompts.
        prompt_seen: tokens that each token of a prompt attends to on average.
        decodes: single tokens.
        decode_seen: tokens that each decode attends to on average.
        host_s: seconds of the host before the pass.
    """

    prompt: float
    prompt_seen: float
    decodes: float
    decode_seen: float
    host_s: float = 0.0


class LayerTerms(NamedTuple):
    """Seconds of one layer on one rank by Table 3, and T_L with the terms that the paper leaves out.

    Attributes:
        weights_s: T_dm_linear.
        products_s: T_comp_linear.
        kv_s: T_dm_attn.
        scores_s: T_comp_attn.
        network_s: T_nw.
        total_s: T_L.
    """

    weights_s: float
    products_s: float
    kv_s: float
    scores_s: float
    network_s: float
    total_s: float


def layer_terms(line: Roofline, forward: Pass) -> LayerTerms:
    """Return the terms of Table 3 at the speeds that devices reach. Shared terms are divided by TP."""
    layer, model, shape = line.layer, line.layer.model, line.layer.model.attention
    device, curve, tokens = layer.device, layer.curve(model.precision.ffn), forward.prompt + forward.decodes
    bytes_per_s, peak = device.bytes_per_s * curve.memory, device.peak(model.precision.weights)
    projections, ffn = shape.attention_weights / layer.tp, model.ffn_weights / layer.tp
    weights_s = (projections * model.precision.weight_bytes + ffn * model.precision.ffn_bytes) / bytes_per_s
    products_s = 2 * tokens * (projections / peak + ffn / device.peak(model.precision.ffn)) / curve.compute
    queries_bytes = forward.prompt * layer.heads * shape.head_dim * shape.bytes_per_element
    kv_s = (queries_bytes + (forward.prompt + forward.decodes * forward.decode_seen) * layer.kv_bytes) / bytes_per_s
    pairs = forward.prompt * forward.prompt_seen + forward.decodes * forward.decode_seen
    scores_s = pairs * layer.heads * layer.flash.pair_s
    num_sums, hidden_bytes = 1 if model.parallel else 2, tokens * shape.hidden_size * layer.bytes_per_element
    network_s = num_sums * line.topology.all_reduce_s(hidden_bytes)
    linear_s = (weights_s**curve.smooth + products_s**curve.smooth) ** (1 / curve.smooth)
    starts_s = _NUM_PRODUCTS * curve.start_us * 1e-6 + _NUM_ATTENTION * layer.start_s
    elementwise_s = layer.before(tokens).elementwise_s + layer.behind(tokens).elementwise_s
    total_s = linear_s + max(kv_s, scores_s) + network_s + starts_s + elementwise_s
    return LayerTerms(weights_s, products_s, kv_s, scores_s, network_s, total_s)


def stage_s(line: Roofline, forward: Pass) -> float:
    """Return T_stage of the slowest stage, which is the time between two passes of a full pipeline."""
    layers_s = layer_terms(line, forward).total_s * line.layer.model.attention.num_layers
    num_sampled = forward.decodes + (1 if forward.prompt else 0)
    return forward.host_s + max(line.by_stage(layers_s, line.layer.head_s(num_sampled), 0.0))


def kv_tokens(line: Roofline, pass_tokens: int) -> float:
    """Return the tokens whose KV fits into an instance, next to weights and passes of `pass_tokens`."""
    return full_step(line, pass_tokens).kv_room / (line.layer.kv_bytes * max(map(len, line.stages)))


def max_batch(line: Roofline, work: OfflineWork, pass_tokens: int) -> float:
    """Return b_max of one instance: the number of requests that fit, on average over their answers.

    Raises:
        ValueError: if no request fits.
    """
    capacity = kv_tokens(line, pass_tokens)
    if capacity < work.input_len + work.output_len:
        raise ValueError(
            f"no request of {work.input_len} + {work.output_len} tokens fits next to a pass over {pass_tokens}: "
            f"{full_step(line, pass_tokens).arithmetic}: use more devices, or fewer max_num_batched_tokens"
        )
    return min(capacity / work.mean_len, work.stage_seqs * len(line.stages))


def static_throughput(line: Roofline, instances: int, work: OfflineWork, max_num_batched_tokens: int) -> float:
    """Return requests per second of one parallel spec with chunked prefill, as by policy `chunked`.

    Args:
        line: the cost model of one of the `instances`.
        max_num_batched_tokens: tokens of a step, split evenly over the PP passes in flight.

    Raises:
        ValueError: if no request fits.
    """
    num_stages = len(line.stages)
    tokens = -(-max_num_batched_tokens // num_stages)
    largest, own = max_batch(line, work, tokens), work.num_requests / instances
    # If memory never delays a prefill, the running requests are the arrivals during one request.
    decodes = tokens * work.num_passes / (work.input_len + work.num_passes)
    passes = work.input_len / (tokens - decodes)
    served_passes = passes + num_stages - 1 + work.num_passes * num_stages
    if served_passes / passes <= largest:
        mixed_s = stage_s(line, work.passed(tokens - decodes, decodes))
        last_s = stage_s(line, work.passed(0, decodes)) if decodes else 0.0
        idle_s = (num_stages - 1) * mixed_s + work.num_passes * num_stages * last_s
        return work.num_requests / (own * passes * mixed_s + idle_s)
    passes, decodes = _bound_by_memory(work, tokens, largest, num_stages)
    mixed_s, alone_s = (stage_s(line, work.passed(prompt, decodes)) for prompt in (tokens - decodes, 0))
    alone_passes = max(0.0, work.num_passes / decodes - passes)
    idle_s = (num_stages - 1) * (mixed_s - alone_s)  # once in each round of `largest` requests
    request_s = passes * mixed_s + alone_passes * alone_s + idle_s / largest
    ends_s = (num_stages - 1) * mixed_s + work.num_passes / 2 * num_stages * alone_s
    return work.num_requests / (own * request_s + ends_s)


def _bound_by_memory(work: OfflineWork, tokens: int, batch: float, num_stages: int) -> tuple[float, float]:
    """Return the passes of a request's prompt, and the decodes of every pass, with `batch` running requests."""
    preempted = work.output_len / (work.input_len + work.output_len) if work.num_passes else 0.0
    prompt_tokens = work.input_len + preempted * work.mean_len
    decode_passes, decodes = work.num_passes * num_stages, 0.0
    passes = prompt_tokens / tokens
    for _ in range(_ITERATIONS):  # tokens of decodes lengthen prefills, in which fewer requests decode
        decodes = batch / num_stages * decode_passes / (decode_passes + passes + num_stages - 1)
        decodes = min(decodes, tokens / 2)
        passes = prompt_tokens / (tokens - decodes)
    return passes, decodes


def pair_throughput(
    prefill: Roofline,
    decode: Roofline,
    instances: int,
    work: OfflineWork,
    max_num_batched_tokens: int,
    host_kv_tokens: float,
) -> float:
    """Return requests per second of Seesaw: prompts by one spec until hosts are full, answers by the other.

    KV is copied over each device's bus concurrently with the passes. When the spec changes, all devices copy their
    weights over it without overlap, and the pipeline empties.

    Args:
        prefill, decode: the cost models of an instance by each spec. Both have the same number of `instances`.
        host_kv_tokens: tokens whose KV fits into the memory of all hosts.

    Raises:
        ValueError: if no request fits.
    """
    own = work.num_requests / instances
    tokens = -(-max_num_batched_tokens // len(prefill.stages))
    prompt_s = stage_s(prefill, work.passed(tokens, 0))
    prefill_s = max(work.input_len / tokens * prompt_s, _swap_s(prefill, work.input_len))
    batch = min(max_batch(decode, work, -(-max_num_batched_tokens // len(decode.stages))), own)
    decodes = max(1.0, batch / len(decode.stages))
    alone_s = stage_s(decode, work.passed(0, decodes)) if work.num_passes else 0.0
    decode_s = max(work.num_passes / decodes * alone_s, _swap_s(decode, work.input_len)) if work.num_passes else 0.0
    rounds = max(1.0, work.num_requests * work.input_len / host_kv_tokens) if work.num_passes else 1.0
    ends_s = (len(prefill.stages) - 1) * prompt_s + work.num_passes / 2 * len(decode.stages) * alone_s
    changes_s = rounds * _weights_s(decode) + (rounds - 1) * _weights_s(prefill) if work.num_passes else 0.0
    return work.num_requests / (own * (prefill_s + decode_s) + rounds * ends_s + changes_s)


def _swap_s(line: Roofline, tokens: float) -> float:
    """Return the seconds of KV copies between an instance and its host, each device over its own bus."""
    num_bytes = tokens * line.layer.kv_bytes * max(map(len, line.stages))
    return num_bytes / line.layer.device.bus.bytes_per_s


def _weights_s(line: Roofline) -> float:
    """Return the seconds of the largest weight copy of a device over its bus."""
    num_bytes = max(map(line.layer.model.stage_bytes, line.stages)) / line.layer.tp
    return num_bytes / line.layer.device.bus.bytes_per_s
