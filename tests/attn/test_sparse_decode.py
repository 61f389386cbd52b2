"""Decodes with `drop_in_decode` read the keys that their definition names, and send the queries that are needed.

The prompt's slow reference gives the kept tokens of each layer. Attention over them is a mask over all scores.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from test_sparse import LAYERS, Reference, of_layer, random_setting, random_spec, spec_of, whole_prompt
from torch import Tensor
from transports import run_members

from longspan.attn.backends import Partial
from longspan.attn.backends.pytorch import TorchCpu
from longspan.attn.check import Request, attend, member_call, random_qkv, random_sinks
from longspan.attn.comm import Group, Transport
from longspan.attn.member import MemberParts
from longspan.attn.sparse.kept import KeptKeys
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import ALLTOALL, RING_Q_SPARSE
from longspan.core.runs import Run, coalesce, positions
from longspan.core.sparse import SparseSetting
from longspan.core.sparse_plan import decode_share, ratios_by_rule
from longspan.core.steps import Link

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True, kw_only=True)
class Decode(Request):
    """The token after a prompt, whose other tokens have the prompt's tensors."""

    prompt: Request

    def tensors(self, spec: AttnSpec) -> list[Tensor]:
        of_token = random_qkv(spec, 1, 1, torch.float32, self.prompt.seed + 7)
        return [torch.cat(both, dim=1) for both in zip(self.prompt.tensors(spec), of_token, strict=True)]


def decode_after(prompt: Request, owner: int) -> Decode:
    token = Run(prompt.num_tokens, prompt.num_tokens + 1)
    q_runs = tuple((token,) if member == owner else () for member in range(len(prompt.q_runs)))
    kv_runs = tuple(coalesce([*held, *new]) for held, new in zip(prompt.kv_runs, q_runs, strict=True))
    return Decode(q_runs=q_runs, kv_runs=kv_runs, seed=prompt.seed, prompt=prompt)


class CountingBackend(TorchCpu):
    """Counts the keys that are read, for each KV head."""

    num_reads = 0

    def attend(self, q: Tensor, k: Tensor, *arguments, **options) -> Partial:
        self.num_reads += k.shape[0] * k.shape[1]
        return super().attend(q, k, *arguments, **options)

    def attend_paged(self, q, kv, plan, spec) -> Partial:
        self.num_reads += spec.num_kv_heads * int((plan.items.high - plan.items.low).sum())
        return super().attend_paged(q, kv, plan, spec)


Found = tuple[list[Tensor], list[int]]


def run_decodes(
    setting: SparseSetting, prompts: Sequence[Request], decodes: Sequence[Decode], spec: AttnSpec
) -> tuple[list[Found], Counter[str]]:
    """Prefill all layers, then decode all layers. Return outputs and reads by layer of each member, and bytes."""
    size, counters = len(prompts[0].q_runs), list[Counter[tuple[str, Link]]]()

    def member(rank: int, transport: Transport) -> Found:
        counters.append(sent := Counter())
        memory: dict[object, object] = {}
        kept: list[dict[int, KeptKeys]] = [{} for _ in prompts]
        outs, reads = [], []
        for is_decode in (False, True):
            for layer in range(LAYERS):
                first = (LAYERS * is_decode + layer) * 100
                group = Group(
                    transport, range(size), rank, tags=range(first, first + 100), name=f"{is_decode}", sent=sent
                )
                exchange = RING_Q_SPARSE._replace(sparse=setting) if is_decode else ALLTOALL.sparse_form(setting)
                requests: list[Request] = [of_layer(one, layer) for one in prompts]
                if is_decode:
                    requests = [replace(one, prompt=of_layer(one.prompt, layer)) for one in decodes]
                call = member_call(exchange, group, requests, spec, seed=rank)
                backend = CountingBackend()
                parts = [replace(part, kept=own) for part, own in zip(call.parts, kept, strict=True)]
                call = replace(call, parts=MemberParts(parts, backend))
                call.parts.memory = memory
                out = attend(replace(call, layer=layer, num_layers=LAYERS, layers=range(LAYERS)))
                if is_decode:
                    outs.append(out)
                    reads.append(backend.num_reads)
        return outs, reads

    results = run_members(size, member)
    for result in results:
        if isinstance(result, Exception):
            raise result
    links: Counter[str] = Counter()
    for counter in counters:
        for (name, _), num_bytes in counter.items():
            links[name] += num_bytes
    return results, links


def visible(reference: Reference, prompt: Request, layer: int, head: int) -> set[int]:
    """The keys that the decode sees, by the definition: it is a query of the prompt's last partition."""
    last = prompt.num_tokens - 1
    found = {prompt.num_tokens}
    for key in range(prompt.num_tokens):
        level = reference.level(last, key)
        if level == 1 or key in reference.kept(prompt.kv_runs, layer, head, level):
            found.add(key)
    return found


def check(setting: SparseSetting, prompts: Sequence[Request], spec: AttnSpec, owner: int) -> None:
    decodes = [decode_after(prompt, (owner + index) % len(prompt.q_runs)) for index, prompt in enumerate(prompts)]
    results, sent = run_decodes(setting, prompts, decodes, spec)
    references = [Reference(setting, prompt, spec) for prompt in prompts]
    readers, size = spec.num_heads // spec.num_kv_heads, len(results)
    num_bytes, num_reads = 0, Counter[tuple[int, int]]()
    for layer in range(LAYERS):
        wanted: list[list[Tensor]] = [[] for _ in range(size)]
        for reference, prompt, decode in zip(references, prompts, decodes, strict=True):
            seen = [visible(reference, prompt, layer, head) for head in range(spec.num_kv_heads)]
            reference.layer(layer)
            [asker] = [member for member, runs in enumerate(decode.q_runs) if runs]
            for member, runs in enumerate(decode.kv_runs):
                held = {*positions(runs)}
                num_reads[member, layer] += sum(len(held & keys) for keys in seen)
                heads = sum(bool(held & keys) for keys in seen)
                num_bytes += (member != asker) * heads * readers * (2 * spec.head_dim + 1) * 4
            q, k, v = (tensor.double() for tensor in replace(decode, prompt=of_layer(prompt, layer)).tensors(spec))
            rows = []
            for head in range(spec.num_heads):
                keys = sorted(seen[head // readers])
                scores = k[head // readers, keys] @ q[head, -1] * spec.scale
                if spec.softcap is not None:
                    scores = torch.tanh(scores / spec.softcap) * spec.softcap
                if spec.has_sinks:
                    scores = torch.cat([scores, random_sinks(spec)[head : head + 1].double()])
                rows.append(torch.softmax(scores, dim=0)[: len(keys)] @ v[head // readers, keys])
            wanted[asker].append(torch.stack(rows)[:, None])
        for member, (outs, reads) in enumerate(results):
            if wanted[member]:
                torch.testing.assert_close(outs[layer].double(), torch.cat(wanted[member], 1), atol=1e-5, rtol=0)
            assert reads[layer] == num_reads[member, layer], f"member {member}, layer {layer}"
    assert sent["True"] == num_bytes


@pytest.mark.parametrize("seed", range(16))
def test_decodes_read_the_tokens_that_the_prompt_kept(seed: int) -> None:
    draw = random.Random(seed)
    size, spec = draw.randint(2, 4), random_spec(draw, seed)
    prompts = [whole_prompt(size, draw.randint(12, 90), seed + 20 * number) for number in range(1 + seed % 2)]
    per_head = spec.num_kv_heads if seed % 4 > 1 else 0
    setting = random_setting(draw, prompts[0].num_tokens, size, drops=True, per_head=per_head)
    check(setting._replace(drop_in_decode=True), prompts, spec, owner=draw.randrange(size))


@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_members_without_kept_keys_are_not_asked(heads: tuple[int, int]) -> None:
    """Level 3 drops all tokens of the first KV head, and level 2 all tokens of the last one."""
    by_head = [(0.0, 1.0), *[(0.25, 0.5)] * (heads[1] - 2), (1.0, 1.0)]
    setting = SparseSetting(partition=8, segments=(1, 2), drop=(tuple(by_head),), mode="kv", drop_in_decode=True)
    check(setting, [whole_prompt(4, 32, 5)], spec_of(heads), owner=3)


def test_the_share_of_reads_is_that_of_the_counts() -> None:
    """Of four partitions, the last is read. Its neighbour has the ratio of level 2, the first two that of level 3."""
    setting = SparseSetting(
        partition=16, segments=(1, 2), drop=((ratios_by_rule(0.25, 3),),), mode="kv", drop_in_decode=True
    )
    inner = (16 + 12 + 2 * 6) / 64
    assert decode_share(setting, 64, 4, 8) == pytest.approx((6 * inner + 2) / 8)
    later = decode_share(setting, 64 + 32, 4, 8) * (64 + 32) - decode_share(setting, 64, 4, 8) * 64
    assert later == pytest.approx(32), "the output is read as the last partition"
    assert decode_share(setting._replace(drop_in_decode=False), 64, 4, 8) == 1
