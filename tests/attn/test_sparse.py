"""Sparse attention by levels equals full attention without drops, and drops the tokens that its definition names.

The reference is slow and knows no messages: it masks scores token by token. Members are threads with mailboxes.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transports import run_members

from longspan.attn.check import Request, attend, member_call, random_sinks
from longspan.attn.comm import Group, Transport
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import ALLTOALL
from longspan.core.layouts import shard_span
from longspan.core.runs import Run, SpanShards, coalesce, positions
from longspan.core.sparse import DropMode, SparseSetting
from longspan.core.sparse_plan import Heads, ratios_by_rule, segments_of, work_of_layer
from longspan.core.steps import Link

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS = 5
HEADS = ((4, 4), (6, 2), (9, 3), (5, 1), (8, 2))


def spec_of(heads: tuple[int, int], softcap: float | None = None, *, has_sinks: bool = False) -> AttnSpec:
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 16, "scale": 0.25}
    return AttnSpec(**sizes, window=None, softcap=softcap, has_sinks=has_sinks)


def random_spec(draw: random.Random, seed: int) -> AttnSpec:
    """Draw heads and a softcap. A third of the seeds have sinks."""
    return spec_of(draw.choice(HEADS), draw.choice((None, 5.0)), has_sinks=seed % 3 == 0)


def of_layer(request: Request, layer: int) -> Request:
    return replace(request, seed=request.seed + 1000 * layer)


def run_layers(
    setting: SparseSetting, batch: Sequence[Request], spec: AttnSpec
) -> tuple[list[list[Tensor]], Counter[tuple[str, Link]]]:
    """Outputs by layer and member, and the bytes sent. Queries, keys and values differ by layer."""
    size, counters = len(batch[0].q_runs), list[Counter[tuple[str, Link]]]()

    def member(rank: int, transport: Transport) -> list[Tensor]:
        memory: dict[object, object] = {}
        found = []
        counters.append(sent := Counter())
        for layer in range(LAYERS):
            tags = range(layer * 100, layer * 100 + 100)
            group = Group(transport, range(size), rank, tags=tags, name=f"{layer}", sent=sent)
            requests = [of_layer(one, layer) for one in batch]
            call = member_call(ALLTOALL.sparse_form(setting), group, requests, spec, seed=rank)
            call.parts.memory = memory
            found.append(attend(replace(call, layer=layer, num_layers=LAYERS, layers=range(LAYERS))))
        return found

    results = run_members(size, member)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return [list(outs) for outs in zip(*results, strict=True)], sum(counters, Counter())


class Reference:
    """The definition for one request in float64: the pairs of tokens that meet in each layer."""

    def __init__(self, setting: SparseSetting, request: Request, spec: AttnSpec) -> None:
        self.setting, self.request, self.spec = setting, request, spec
        self.readers = spec.num_heads // spec.num_kv_heads
        self.tokens = request.num_tokens
        self.span = sorted(position for runs in request.q_runs for position in positions(runs))
        self.ratings: Tensor | None = None

    def level(self, query: int, key: int) -> int:
        widths = [size * self.setting.partition for size in self.setting.segments]
        return next((level for level, width in enumerate(widths, 1) if query // width == key // width), len(widths) + 1)

    def kept(self, shards: SpanShards, layer: int, head: int, level: int) -> set[int]:
        """Return the best rated tokens of each member in each partition."""
        found = set(range(self.tokens))
        if self.ratings is None or layer in (0, LAYERS - 1) or level == 1:
            return found
        for runs in shards:
            for _, piece in itertools.groupby(positions(runs), key=lambda position: position // self.setting.partition):
                tokens = sorted(piece, key=lambda token: -self.ratings[head, token].item())
                ratio = self.setting.drop[layer % len(self.setting.drop)][head % len(self.setting.drop[0])][level - 2]
                found -= set(tokens[len(tokens) - int(ratio * len(tokens) + 1e-9) :])
        return found

    def visible(self, layer: int, head: int) -> Tensor:
        found = torch.zeros(self.tokens, self.tokens, dtype=torch.bool)
        levels = range(1, len(self.setting.segments) + 2)
        keys = {level: self.kept(self.request.kv_runs, layer, head, level) for level in levels}
        queries = {level: self.kept(self.request.q_runs, layer, head, level) for level in levels}
        for query in self.span:
            for key in range(query + 1):
                level = self.level(query, key)
                found[query, key] = key in keys[level] and (self.setting.mode == "kv" or query in queries[level])
        return found

    def layer(self, layer: int) -> Tensor:
        q, k, v = (tensor.double() for tensor in of_layer(self.request, layer).tensors(self.spec))
        keys, values = (tensor.repeat_interleave(self.readers, dim=0) for tensor in (k, v))
        scores = q @ keys.transpose(1, 2) * self.spec.scale
        if self.spec.softcap is not None:
            scores = torch.tanh(scores / self.spec.softcap) * self.spec.softcap
        visible = torch.stack([self.visible(layer, head // self.readers) for head in range(self.spec.num_heads)])
        assert all(visible[:, token, token].all() for token in self.span), "every row attends at least to itself"
        lse = torch.logsumexp(scores.masked_fill(~visible, -torch.inf), dim=-1)
        if self.spec.has_sinks:
            lse = torch.log(lse.exp() + random_sinks(self.spec).double().exp()[:, None])
        out = torch.exp(scores - lse[..., None]).masked_fill(~visible, 0) @ values
        causal = torch.ones(self.tokens, self.tokens, dtype=torch.bool).tril()
        sampled = []
        for runs in self.request.q_runs:
            asked, most = positions(runs), self.setting.samples
            sampled += asked if len(asked) <= most else [asked[(i + 1) * len(asked) // most - 1] for i in range(most)]
        got = torch.exp(scores - lse[..., None]).masked_fill(~causal, 0)[:, sampled].sum(dim=1)
        seen_by = causal[sampled].sum(dim=0).clamp_min(1)
        self.ratings = got.view(self.spec.num_kv_heads, self.readers, -1).sum(dim=1) / seen_by
        if self.setting.rate_by == "layer":
            self.ratings = self.ratings.sum(dim=0).expand_as(self.ratings)
        return out


def random_setting(draw: random.Random, tokens: int, size: int, *, drops: bool, per_head: int = 0) -> SparseSetting:
    num_levels = draw.randint(2, 4)
    segments = (1, 2, 4)[: num_levels - 1]
    rule = (
        ratios_by_rule(draw.choice((0.1, 0.3, 0.5)) if drops else 0.0, num_levels)
        if drops
        else (0.0,) * (num_levels - 1)
    )
    drop = ((rule,),)
    if per_head:
        drop = tuple(tuple(tuple(sorted(draw.random() for _ in rule)) for _ in range(per_head)) for _ in range(LAYERS))
    mode: DropMode = draw.choice(("qkv", "kv"))
    pieces = draw.choice(((), tuple(draw.randint(1, 5) for _ in rule)))
    partition = max(1, draw.choice((-(-tokens // size), 16, 10)))
    return SparseSetting(
        partition=partition,
        segments=segments,
        drop=drop,
        mode=mode,
        micro_partitions=pieces,
        samples=draw.choice((4, 16)),
        rate_by=draw.choice(("layer", "head")),
    )


def whole_prompt(size: int, tokens: int, seed: int) -> Request:
    runs = shard_span("contiguous", 0, tokens, size)
    return Request(q_runs=runs, kv_runs=runs, seed=seed)


def chunk(draw: random.Random, size: int, seed: int) -> Request:
    """A chunk behind tokens that members hold anyhow."""
    start, tokens = draw.randint(1, 70), draw.randint(size, 60)
    held: list[list[Run]] = [[] for _ in range(size)]
    cuts = sorted({0, start, *(draw.randint(0, start) for _ in range(4))})
    for first, last in itertools.pairwise(cuts):
        held[draw.randrange(size)].append(Run(first, last))
    new = shard_span("contiguous", start, start + tokens, size)
    kv_runs = tuple(coalesce([*old, *more]) for old, more in zip(held, new, strict=True))
    return Request(q_runs=new, kv_runs=kv_runs, seed=seed)


def check(setting: SparseSetting, batch: Sequence[Request], spec: AttnSpec) -> Counter[tuple[str, Link]]:
    found, sent = run_layers(setting, batch, spec)
    references = [Reference(setting, request, spec) for request in batch]
    for layer in range(LAYERS):
        wanted = [reference.layer(layer) for reference in references]
        for member, out in enumerate(found[layer]):
            of_member = [all_of[:, positions(one.q_runs[member])] for one, all_of in zip(batch, wanted, strict=True)]
            torch.testing.assert_close(out.double(), torch.cat(of_member, dim=1), atol=1e-5, rtol=0)
    return sent


@pytest.mark.parametrize("seed", range(12))
def test_nothing_dropped_is_full_attention(seed: int) -> None:
    draw = random.Random(seed)
    size, spec = draw.randint(2, 4), random_spec(draw, seed)
    batch = [whole_prompt(size, draw.randint(size, 90), seed), chunk(draw, size, seed + 50)]
    setting = random_setting(draw, batch[0].num_tokens, size, drops=False)
    found, _ = run_layers(setting, batch, spec)
    for layer, outs in enumerate(found):
        for member, out in enumerate(outs):
            wanted = torch.cat([of_layer(request, layer).wanted(member, spec) for request in batch], dim=1)
            torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("seed", range(16))
def test_dropped_tokens_follow_the_definition(seed: int) -> None:
    draw = random.Random(seed)
    size, spec = draw.randint(2, 4), random_spec(draw, seed)
    batch = [whole_prompt(size, draw.randint(size, 90), seed)]
    if seed % 2:
        batch.append(chunk(draw, size, seed + 50))
    per_head = spec.num_kv_heads if seed % 4 > 1 else 0
    check(random_setting(draw, batch[0].num_tokens, size, drops=True, per_head=per_head), batch, spec)


def test_ratios_follow_the_distance() -> None:
    """Level 3 keeps half of the tokens of level 2, level 4 a quarter."""
    assert ratios_by_rule(0.2, 4) == pytest.approx((0.2, 0.6, 0.8))


def test_segments_follow_links() -> None:
    assert segments_of(4, (0, 0, 1, 1), 3) == (1, 2)
    assert segments_of(16, (0,) * 8 + (1,) * 8, 3) == (1, 8)
    assert segments_of(4, (0, 0, 0, 0), 3) == (1, 2)
    assert segments_of(8, (0,) * 8, 2) == (1,)
    assert segments_of(8, (0,) * 8, 4) == (1, 2, 4)


def bytes_by_hand(setting: SparseSetting, tokens: int, heads: int, dim: int) -> int:
    """Of one layer, for four members with a partition each, of as many KV heads as query heads, float32.

    At level 2 neighbours share the heads, at level 3 all do. A member with a head at level 3 has it at level 2, too.
    """
    assert setting.segments == (1, 2)
    half, quarter = heads // 2, heads // 4
    share = {
        2: [range(half), range(half, heads), range(half), range(half, heads)],
        3: [range(first * quarter, (first + 1) * quarter) for first in (0, 2, 1, 3)],
    }
    kept = {level: setting.kept(tokens, 1, 0, level) for level in (2, 3)}
    asked = kept if setting.mode == "qkv" else {2: tokens, 3: tokens}
    level = [[1, 2, 3, 3], [2, 1, 3, 3], [3, 3, 1, 2], [3, 3, 2, 1]]
    vectors = lses = 0
    for source, target in itertools.permutations(range(4), 2):
        for head in range(heads):
            of_target = [one for one in (2, 3) if head in share[one][target]]
            in_segment = [one for one in of_target if level[source][target] <= one]
            queries = [asked[one] for one in in_segment if any(level[source][k] == one for k in range(source))]
            keys = [kept[one] for one in in_segment if any(level[source][q] == one for q in range(source + 1, 4))]
            vectors += max(queries, default=0) + 2 * max(keys, default=0)
            # back: results of the source for queries of the target
            for one in (2, 3):
                if head in share[one][source] and level[source][target] <= one:
                    found = asked[one] * any(level[target][k] == one for k in range(target))
                    vectors += found
                    lses += found
    return 4 * (dim * vectors + lses)


@pytest.mark.parametrize("pieces", [(), (4, 2)])
@pytest.mark.parametrize("mode", ["qkv", "kv"])
@pytest.mark.parametrize("drop", [0.0, 0.2, 0.5])
def test_bytes_fall_as_the_ratios_say(mode: DropMode, drop: float, pieces: tuple[int, ...]) -> None:
    tokens, heads, samples = 64, 4, 8
    setting = SparseSetting(
        partition=tokens,
        segments=(1, 2),
        drop=((ratios_by_rule(drop, 3),),),
        mode=mode,
        micro_partitions=pieces,
        samples=samples,
    )
    _, sent = run_layers(setting, [whole_prompt(4, 4 * tokens, 3)], spec_of((heads, heads)))
    exact = bytes_by_hand(setting._replace(drop=(((0.0, 0.0),),)), tokens, heads, 16)
    sparse = bytes_by_hand(setting, tokens, heads, 16)
    of_samples = 4 * 3 * heads * samples * (16 + 1) * 4
    by_layer = {int(name): number for (name, _), number in sent.items()}
    assert by_layer[0] == exact + of_samples, "queries are sampled for the next layer"
    assert by_layer[1] == by_layer[2] == sparse + of_samples
    assert by_layer[3] == sparse, "the last drops nothing, so no member samples for it"
    assert by_layer[4] == exact
    assert sparse < exact or not drop
    runs = shard_span("contiguous", 0, 4 * tokens, 4)
    what = [range(LAYERS)], Heads(heads, heads), 16, 4
    counted = [work_of_layer(setting, runs, runs, layer, *what) for layer in range(LAYERS)]
    assert [work.num_bytes for work in counted] == [by_layer[layer] for layer in range(LAYERS)]
    assert counted[0].num_pairs == heads * 4 * tokens * (4 * tokens + 1) // 2, "all that is causal"
    kept = {level: setting.kept(tokens, 1, 0, level) for level in (2, 3)}
    asked = kept if mode == "qkv" else {2: tokens, 3: tokens}
    far = 2 * asked[2] * kept[2] + 4 * asked[3] * kept[3]
    assert counted[1].num_pairs == heads * (4 * tokens * (tokens + 1) // 2 + far)
