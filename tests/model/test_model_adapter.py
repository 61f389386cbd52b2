"""Model.forward on packed requests equals the unmodified transformers model on each of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from tiny_models import SWITCH_LENGTH, TINY, WINDOW, make_tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from longspan.attn.spec import AttnSpec
from longspan.model.adapter import Model
from longspan.model.source import prepare
from longspan.model.step import Rows

CPU = torch.device("cpu")
LENGTHS = (5, 100, 40, 70)  # on both sides of the sliding window and of longrope's switch


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LONGSPAN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=TINY)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp("tiny") / request.param)


@dataclass
class ReferenceAttend:
    """Eager attention over everything seen so far, one request apart from the other."""

    specs: Sequence[AttnSpec]
    requests: Tensor
    positions: Tensor
    sinks: Mapping[int, Tensor]
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec = self.specs[layer]
        assert q.shape[0] == spec.num_heads
        assert k.shape == v.shape == (spec.num_kv_heads, q.shape[1], spec.head_dim)
        k = self.keys[layer] = torch.cat((self.keys.get(layer, k[:, :0]), k), dim=1)
        v = self.values[layer] = torch.cat((self.values.get(layer, v[:, :0]), v), dim=1)
        group = spec.num_heads // spec.num_kv_heads
        scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        hidden = ~self._visible(spec, num_queries=q.shape[1], num_keys=k.shape[1])
        scores = scores.masked_fill(hidden, -torch.inf)
        if layer in self.sinks:
            scores = torch.cat([scores, self.sinks[layer][:, None, None].expand(-1, q.shape[1], 1)], dim=-1)
        return scores.softmax(-1)[..., : k.shape[1]].to(q.dtype) @ v.repeat_interleave(group, 0)

    def _visible(self, spec: AttnSpec, num_queries: int, num_keys: int) -> Tensor:
        """Queries are the last of the keys."""
        requests, positions = self.requests[:num_keys], self.positions[:num_keys]
        first = num_keys - num_queries
        distance = positions[first:, None] - positions
        same = requests[first:, None] == requests
        size = spec.chunk or int(self.positions.max()) + 1
        chunk = positions // size
        in_chunk = chunk[first:, None] == chunk
        return same & in_chunk & (distance >= 0) & (distance < (spec.window or num_keys))


@dataclass
class Pack:
    """Random requests and the row they make."""

    lengths: Sequence[int]
    seed: int = 1

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.prompts = [torch.randint(3, 199, (n,), generator=generator) for n in self.lengths]
        self.tokens = torch.cat(self.prompts)
        self.positions = torch.cat([torch.arange(n) for n in self.lengths])
        self.requests = torch.repeat_interleave(torch.arange(len(self.lengths)), torch.tensor(self.lengths))
        self.rope_lengths = torch.tensor(self.lengths)[self.requests]

    def attend(self, model: Model) -> ReferenceAttend:
        return ReferenceAttend(model.info.specs, self.requests, self.positions, model.sinks)

    def forward(self, model: Model) -> Tensor:
        everything = torch.arange(len(self.tokens))
        return model.trunk.run(self.rows(everything), self.attend(model)).result

    def rows(self, keep: Tensor, part: slice = slice(None)) -> Rows:
        numbers = {"tokens": self.tokens[part], "positions": self.positions[part]}
        return Rows(**numbers, keep=keep, rope_lengths=self.rope_lengths[part])


def load(folder: Path, dtype: str = "float32") -> Model:
    return Model(prepare(str(folder), dtype=dtype), CPU)


def oracle_logits(folder: Path, prompts: Sequence[Tensor]) -> Tensor:
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return torch.cat([oracle(input_ids=prompt[None]).logits[0] for prompt in prompts])


def test_packed_requests_equal_the_oracle(tiny: Path) -> None:
    pack = Pack(LENGTHS)
    logits = pack.forward(load(tiny))
    expected = oracle_logits(tiny, pack.prompts)
    assert expected.std() > 0.5
    assert expected.argmax(-1).unique().numel() > 20
    torch.testing.assert_close(logits, expected, rtol=0, atol=3e-5)


def test_two_chunks_equal_one_call(tiny: Path) -> None:
    model, pack = load(tiny), Pack((90,))
    attend = pack.attend(model)
    chunks = [
        model.trunk.run(pack.rows(torch.arange(n), part), attend).result
        for part, n in ((slice(0, 50), 50), (slice(50, 90), 40))
    ]
    torch.testing.assert_close(torch.cat(chunks), pack.forward(model), rtol=0, atol=3e-5)


def test_keep_chooses_the_logits(tiny: Path) -> None:
    model, pack = load(tiny), Pack((20,))
    chosen = torch.tensor([19, 3])
    logits = model.trunk.run(pack.rows(chosen), pack.attend(model)).result
    torch.testing.assert_close(logits, pack.forward(model)[chosen], rtol=0, atol=3e-5)
    nothing = model.trunk.run(pack.rows(chosen[:0]), pack.attend(model)).result
    assert nothing.shape == (0, model.info.vocab_size)


def test_bfloat16_state_is_that_of_from_pretrained(tiny: Path) -> None:
    model = load(tiny, "bfloat16")
    oracle = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    ours = dict(model.module.named_parameters()) | dict(model.module.named_buffers())
    for name, tensor in [*oracle.named_parameters(), *oracle.named_buffers()]:
        mine = ours[name.replace("rotary_emb.", "rotary_emb.inner.") if model.info.rope_switch_length else name]
        assert mine.dtype == tensor.dtype, name
        assert torch.equal(mine, tensor), name
    logits = Pack((9,)).forward(model)
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


def test_info(tmp_path: Path) -> None:
    gemma = load(make_tiny("gemma2", tmp_path / "gemma2")).info
    assert (gemma.num_layers, gemma.vocab_size, gemma.context_length) == (4, 199, 4096)
    assert gemma.eos_token_ids == (2,)
    assert [spec.window for spec in gemma.specs] == [WINDOW, None, WINDOW, None]
    assert {(spec.softcap, spec.scale, spec.head_dim) for spec in gemma.specs} == {(20.0, 24**-0.5, 16)}
    assert gemma.rope_switch_length is None
    phi = load(make_tiny("phi3-longrope", tmp_path / "phi3")).info
    assert phi.rope_switch_length == SWITCH_LENGTH


def test_longrope_ignores_its_neighbours_and_keeps_its_pinned_length(tmp_path: Path) -> None:
    """The first 30 tokens of a request differ by its pinned length, and by nothing else in the call."""
    model = load(make_tiny("phi3-longrope", tmp_path / "phi3"))
    alone = {}
    for pinned in (SWITCH_LENGTH, SWITCH_LENGTH + 1):
        pack = Pack((30,))
        pack.rope_lengths = torch.full((30,), pinned)
        alone[pinned] = pack.forward(model)
    assert not torch.allclose(*alone.values(), atol=1e-2)
    both = Pack((30, 30))
    both.prompts[1] = both.prompts[0]
    both.tokens = torch.cat(both.prompts)
    both.rope_lengths = torch.repeat_interleave(torch.tensor(list(alone)), 30)
    torch.testing.assert_close(both.forward(model), torch.cat(list(alone.values())), rtol=0, atol=3e-5)


def test_rotary_factors_of_a_token_go_by_the_length_pinned_for_it(tmp_path: Path) -> None:
    model = load(make_tiny("llama-longrope", tmp_path / "llama"))
    positions = torch.tensor([0, 3, 40, 60, 63])
    short, long = (model.rotary(positions, torch.full((5,), length)) for length in (SWITCH_LENGTH, SWITCH_LENGTH + 1))
    mixed = model.rotary(positions, torch.tensor([64, 65, 64, 65, 64]))
    for part, one, other in zip(mixed, short, long, strict=True):
        assert not torch.allclose(one[:, 1:], other[:, 1:], atol=1e-2)
        assert torch.equal(part[:, 0::2], one[:, 0::2])
        assert torch.equal(part[:, 1::2], other[:, 1::2])


@pytest.mark.parametrize("start", [SWITCH_LENGTH - 2, SWITCH_LENGTH, SWITCH_LENGTH + 1])
def test_longrope_switches_where_transformers_generate_does(tmp_path: Path, start: int) -> None:
    """generate() on Phi3 recomputes everything when the sequence first exceeds the switch length."""
    folder = make_tiny("phi3-longrope", tmp_path / "phi3")
    model, prompt = load(folder), Pack((start,)).tokens
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generated = oracle.generate(
        prompt[None],
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    for num_new, expected in enumerate(generated.logits):
        pack = Pack((start + num_new,))
        pack.tokens = generated.sequences[0, : start + num_new]
        torch.testing.assert_close(pack.forward(model)[-1:], expected, rtol=0, atol=3e-5)


def test_the_head_can_be_asked_again(tiny: Path) -> None:
    """More logits of the latest forward, tile by tile, are those of asking for all at once."""
    model, pack = load(tiny), Pack((20, 7))
    everything = pack.forward(model)
    output = model.trunk.run(pack.rows(torch.tensor([26])), pack.attend(model))
    pack.forward(model)  # another step does not change the output of an earlier one
    tiles = [output.logits(rows) for rows in (range(10), range(10, 26), [26])]
    torch.testing.assert_close(torch.cat(tiles), everything, rtol=0, atol=3e-5)
