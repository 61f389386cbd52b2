"""CSPS: one prompt by the cost model: shares of its time, bytes of messages, and the threshold of supplement A."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise, product

import csps_serving
from cells import Setting
from csps_serving import DATA_SETS, GPUS_PER_HOST, LONG, MODELS, NUM_GPUS, PARTITION, DataSet
from rich.console import Console
from rich.table import Table
from verdicts import Check, Claim, in_range, numbers

from longspan.core.cluster import Cluster
from longspan.core.exchange import ALLTOALL, GATHER_HIDDEN, Exchange
from longspan.core.runs import Run
from longspan.core.sparse_plan import Savings, savings
from longspan.cost import catalog
from longspan.cost.architecture import Architecture, from_config
from longspan.cost.channels import exchanged_bytes
from longspan.cost.estimate import Estimate, PromptShape
from longspan.cost.forward import Roofline, rooflines
from longspan.cost.topology import Devices
from longspan.workload.arrivals import Arrival, Workload, text

_MODEL = "internlm2.5-7b"
_ENDS = (1000, 1_000_000)
LENGTHS = {"128K": 2**17, "256K": 2**18, "512K": 2**19, "1M": 2**20}
_BLOCK = 256


def mixed_decodes() -> list[Claim]:
    """Compare decodes that share steps with prompts, before SP decode (section 4.1)."""
    tbt_s = dict(zip(("1K", "1M"), map(mixed_tbt_s, _ENDS), strict=True))
    tokens_per_s = dict(zip(("1K", "1M"), map(mixed_rate, _ENDS), strict=True))
    chunk_s = mixed_tbt_s(_ENDS[1], 256)
    batches = (
        "The paper has neither the tokens of a step nor its batch. Ours are whole partitions of 64K, and full memory. "
        f"With chunks of 256 on each GPU a step takes {chunk_s:.2g} s at 1M."
    )
    return [
        Claim(
            "4.1, Fig. 10",
            "TBT of decodes that share steps with prompts grows from 0.4 s at 1K tokens to 6.7 s at 1M.",
            numbers({name: (paper, tbt_s[name]) for name, paper in (("1K", 0.4), ("1M", 6.7))}),
            batches,
        ),
        Claim(
            "4.1, Fig. 11",
            "Throughput of these decodes falls from 357 to 5 tokens/s.",
            numbers({name: (paper, tokens_per_s[name]) for name, paper in (("1K", 357.0), ("1M", 5.0))}),
            batches,
        ),
    ]


def mixed_tbt_s(length: int, chunk: int = PARTITION) -> float:
    """Return the seconds of a step with up to `chunk` tokens on each GPU, at the end of a prompt of InternLM2.5."""
    return prefill(_MODEL, length, chunk).seconds


def mixed_rate(length: int) -> float:
    """Return the tokens per second of all requests of this length that fit next to such a step."""
    estimate = prefill(_MODEL, length)
    shape, gpus = _architecture(_MODEL).attention, -(-length // PARTITION)
    batch = gpus * estimate.memory.kv_room // (length * shape.kv_bytes * shape.num_layers)
    return batch / estimate.seconds


def denominators() -> dict[str, float]:
    """Return the bytes of a token's denominators, in float32, in per cent of its queries, keys and values."""
    shapes = {name: _architecture(model).attention for model, name in MODELS.items()}
    return {
        name: 100 * 4 * shape.num_heads / (shape.num_heads * shape.head_dim * shape.bytes_per_element + shape.kv_bytes)
        for name, shape in shapes.items()
    }


@cache
def sarathi_ttft_s(lengths: tuple[int, ...]) -> dict[int, float]:
    """Return TTFT of Sarathi-Serve with chunks of 256, by length of InternLM2.5's prompts, each alone on 8 GPUs."""
    experiment = csps_serving.sarathi(_MODEL, 256)
    arrivals = [
        Arrival(due_s=0.0, prompt=text(3 * number + 2, length), output_len=2) for number, length in enumerate(lengths)
    ]
    times_s = experiment.at_light_load(Workload(arrivals=arrivals, shares=False)).ttfts_s.tolist()
    return dict(zip(lengths, times_s, strict=True))


def sarathi_tbt_s(length: int) -> float:
    """Return the seconds of a step of Sarathi-Serve with a chunk of 256 at the end of a prompt."""
    setting = Setting(model=_MODEL, hardware=csps_serving.HARDWARE)
    return setting.prefill("tp4pp2", "local", length, max(0, length - 256)).seconds


def decode_rate(length: int) -> float:
    """Return the tokens per second of all requests of this length that fit into 8 GPUs, in such steps."""
    setting = Setting(model=_MODEL, hardware=csps_serving.HARDWARE)
    memory, shape = (
        setting.prefill("tp4pp2", "local", length, max(0, length - 256)).memory,
        _architecture(_MODEL).attention,
    )
    return GPUS_PER_HOST * memory.kv_room // (length * shape.kv_bytes * shape.num_layers) / sarathi_tbt_s(length)


def chunks() -> list[Claim]:
    """Compare Sarathi-Serve with chunks of 256 (Figs. 2 and 3)."""
    ttft_s = sarathi_ttft_s(_ENDS)
    memory = "The paper has neither the batch nor the memory. Ours is all requests that fit, in steps with a chunk."
    return [
        Claim(
            "3.1, Fig. 2",
            "With chunks of 256 one after the other TTFT grows from 1.6 s at 1K tokens to 213 s at 1M.",
            numbers({"1K": (1.6, ttft_s[_ENDS[0]]), "1M": (213, ttft_s[_ENDS[1]])}),
            "Ours are of InternLM2.5 and requests alone, on 8 GPUs. The paper's at 1K wait for other requests. At 1M "
            "ours reach less of the peak in chunks of 256 than in chunks of 8,192, which take 171 s.",
        ),
        Claim(
            "3.1, Fig. 2",
            "TBT of Sarathi-Serve grows from 0.54 s at 1K tokens to 9.6 s at 1M.",
            numbers({"1K": (0.54, sarathi_tbt_s(_ENDS[0])), "1M": (9.6, sarathi_tbt_s(_ENDS[1]))}),
            "Ours is of a token that waits for a chunk of 256 after as many tokens. A step computes nothing else but "
            "decodes. The paper does not state other causes of waiting.",
        ),
        Claim(
            "3.1, Fig. 3",
            "Its prefill throughput falls from 487 tokens/s at 1K to 191 at 1M.",
            numbers({"1K": (487, _ENDS[0] / ttft_s[_ENDS[0]]), "1M": (191, _ENDS[1] / ttft_s[_ENDS[1]])}),
            "Ours is a prompt over its TTFT. The paper's own TTFT would give 625 and 4,700 tokens/s.",
        ),
        Claim(
            "3.1, Fig. 3",
            "Its decode throughput falls from 204 tokens/s to 5.",
            numbers({"1K": (204, decode_rate(_ENDS[0])), "1M": (5, decode_rate(_ENDS[1]))}),
            memory,
        ),
    ]


def prefill(model: str, length: int, chunk: int = PARTITION) -> Estimate:
    """Estimate SP-NTP without drops, on a GPU for each 64K tokens: the last `chunk` tokens on each, or the prompt."""
    gpus = -(-length // PARTITION)
    hosts = -(-gpus // GPUS_PER_HOST)
    setting = Setting(model=model, hardware=csps_serving.HARDWARE, hosts=hosts, gpus_per_host=gpus // hosts)
    return setting.prefill(str(gpus), ALLTOALL.kind, length, max(0, length - chunk * gpus))


def messages() -> Check:
    return in_range(0.13, 0.34, _shares(lambda estimate: estimate.breakdown.exchange_s))


def attention() -> Check:
    return in_range(0.18, 0.43, _shares(lambda estimate: estimate.breakdown.attention_s))


def _shares(part_s: Callable[[Estimate], float]) -> dict[str, float]:
    shares = {}
    for model, (name, length) in product(MODELS, LENGTHS.items()):
        estimate = prefill(model, length)
        shares[f"{MODELS[model]} {name}"] = part_s(estimate) / estimate.seconds
    return shares


def print_shares() -> None:
    """Print shares of TTFT, and the FLOPs and bytes sent of each GPU in a layer."""
    shown = Table("SP-NTP", "GPUs", "TTFT", "messages", "attention", "of its FLOPs", title="Fig. 5: shares of TTFT")
    for model, (name, length) in product(MODELS, LENGTHS.items()):
        estimate, gpus = prefill(model, length), length // PARTITION
        attended, projected = _flops(_architecture(model), length, gpus)
        shown.add_row(
            f"{MODELS[model]} {name}",
            f"{gpus}",
            f"{estimate.seconds:.3g} s",
            f"{estimate.breakdown.exchange_s / estimate.seconds:.1%}",
            f"{estimate.breakdown.attention_s / estimate.seconds:.1%}",
            f"{attended / (attended + projected):.1%}",
        )
    Console(width=120).print(shown)
    for model, (name, length) in product(MODELS, (("128K", 2**17), ("1M", 2**20))):
        gpus = length // PARTITION
        attended, projected = _flops(_architecture(model), length, gpus)
        peak = catalog.device(csps_serving.HARDWARE).flops_per_s
        num_bytes = prefill(model, length).bytes_exchanged / _architecture(model).attention.num_layers / gpus
        per_gpu = num_bytes / 300e9 if gpus <= GPUS_PER_HOST else num_bytes * GPUS_PER_HOST / 2 / 50e9
        print(
            f"{MODELS[model]}, {name} on {gpus} GPUs, a GPU and layer: 4 d L^2/2 / {gpus} = {attended / 1e12:.0f} "
            f"TFLOP of attention and 2 P L / {gpus} = {projected / 1e12:.0f} of products, {attended / peak * 1e3:.0f} "
            f"and {projected / peak * 1e3:.0f} ms at the peak; {num_bytes / 1e9:.2f} GB, {per_gpu * 1e3:.0f} ms over "
            f"{'300 GB/s of NVLink' if gpus <= GPUS_PER_HOST else 'half of it, with 8 GPUs, over 50 GB/s of the host'}"
        )
    print()


def _flops(model: Architecture, length: int, gpus: int) -> tuple[float, float]:
    """Return the FLOPs of a GPU in a layer: of causal attention, and of products with weights."""
    shape = model.attention
    attended = 4 * shape.num_heads * shape.head_dim * length**2 / 2
    weights = shape.attention_weights + model.ffn_weights
    return attended / gpus, 2 * weights * length / gpus


def print_load() -> None:
    """Print the least FLOPS that one request per second needs, by the deviations of Table 2."""
    for model, data_set in product(MODELS, DATA_SETS):
        least = attention_flops(model, data_set)
        print(
            f"{MODELS[model]}, {data_set.name}: the mean of L^2 is at least {data_set.input_std:,}^2, attention of a "
            f"request 2 layers d L^2 = {least:.2g} FLOP: at 1 request/s {least_load(model, data_set):.2f} of the peak "
            f"of {NUM_GPUS} A100"
        )
    print()


def least_load(model: str, data_set: DataSet) -> float:
    """Return the share of the peak of 64 A100 that attention needs at least at one request per second."""
    return attention_flops(model, data_set) / (NUM_GPUS * catalog.device(csps_serving.HARDWARE).flops_per_s)


def attention_flops(model: str, data_set: DataSet) -> float:
    """Return a lower bound of a mean request's attention FLOPs: the mean of squares is at least the variance."""
    shape = _architecture(model).attention
    return 2 * shape.num_layers * shape.num_heads * shape.head_dim * data_set.input_std**2


def kv_over_q() -> dict[str, float]:
    """Return ratios of seconds over the NVLink of 8 GPUs: all keys and values of a layer to queries of one token."""
    ratios = {}
    for model, (data_set, length) in product(MODELS, (("1M", 2**20), ("406K", 406_000))):
        line = _line(_architecture(model), GPUS_PER_HOST)
        shape, group = line.layer.model.attention, tuple(range(GPUS_PER_HOST))
        query = shape.num_heads * shape.head_dim * shape.bytes_per_element
        sent_s = line.topology.alltoall_s((GPUS_PER_HOST - 1) * query, group)
        gathered_s = line.topology.gather_s(length / GPUS_PER_HOST * shape.kv_bytes, group)
        ratios[f"{MODELS[model]} {data_set}"] = gathered_s / sent_s
    return ratios


def dropped() -> Check:
    saved = dropping(_MODEL, DATA_SETS[0])
    return numbers(
        {
            "dropped": (0.22, saved.mean_drop_ratio),
            "messages": (0.19, saved.bytes_saved_share),
            "attention": (0.28, saved.attention_flops_saved_share),
        }
    )


def dropping(model: str, data_set: DataSet) -> Savings:
    """Return the savings of all long prompts together, with the policy's settings. Saved bytes save link time."""
    shape, parts = _architecture(model).attention, []
    experiment = csps_serving.ntp_by_length(model, csps_serving.csa())
    chosen = experiment.policy()
    for length in csps_serving.lengths(data_set)[0]:
        if length <= LONG:
            continue
        setting = chosen.sparse(length, _BLOCK, experiment.cluster.num_blocks[0])
        assert setting is not None, f"{length} tokens are shared"
        cuts = [*range(0, length, setting.partition), length]
        runs = tuple((Run(start, stop),) for start, stop in pairwise(cuts))
        parts.append((setting, runs, runs))
    layers = [(shape.num_heads, shape.num_kv_heads, shape.head_dim)] * shape.num_layers
    return savings(parts, layers, [range(shape.num_layers)], round(shape.bytes_per_element))


# ---------------------------------------------------------------- supplement A


def crossing(model: Architecture, members: int) -> float:
    """Return the tokens from which SP-NTP with gathered weights sends less in a layer than SP-TP.

    Bytes are counted as at run time, with one exception. `gather_hidden` sends keys and values to the owners of their
    tokens, and the paper keeps them with their heads, so these bytes are excluded.
    """
    layer, length = _line(model, members).layer, 2**14
    weights = (members - 1) * model.attention.attention_weights * layer.bytes_per_element

    def token_bytes(exchange: Exchange) -> float:
        shape = PromptShape(exchange=exchange, group=tuple(range(members)), new=length, cached=0, batch=1)
        return exchanged_bytes(layer, shape.channel(None, layer.model.attention)) / length

    kept = model.attention.kv_bytes * (members - 1) / members
    return weights / (token_bytes(GATHER_HIDDEN) - kept - token_bytes(ALLTOALL))


def wide() -> Architecture:
    """Return a model of size 16K with a KV head for each query head, as in the supplement."""
    config = {
        "model_type": "llama",
        "hidden_size": 2**14,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "vocab_size": 128256,
    }
    return from_config(config, name="model of size 16K")


def _architecture(model: str) -> Architecture:
    return from_config(catalog.model_config(model), name=model)


def _line(model: Architecture, gpus: int) -> Roofline:
    return rooflines(model, Devices(hardware=csps_serving.HARDWARE, gpus_per_host=gpus), Cluster.of(str(gpus)))[0]
