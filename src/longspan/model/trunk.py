"""The ways to compute a step of a model: layer by layer as transformers does, or a step of single tokens as a whole.

`Model` chooses one of them at load. Fused layers and whole steps are used only after a dry run, at positions up to the
context length, agreed with the modules. A CUDA graph replays the operators of the plain forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.attn.paged import PagedKv, on_device
from longspan.model.skeleton import trunk_base, trunk_path
from longspan.model.step import Attend, CurrentStep, RecordedSums, Reduce, Rows, SingleTokens, StepState, put_sampled

if TYPE_CHECKING:
    from longspan.model.graph_step import GraphStep
    from longspan.model.stages import Stage
    from longspan.model.whole_step import WholeStep


@dataclass(frozen=True, kw_only=True)
class Output:
    """The output of one step.

    Attributes:
        result: float32 logits `[n, vocab]` of the tokens in `Rows.keep`. A stage before the last has the hidden states
            `[1, tokens, width]` for the next stage instead.
        last_hidden: the final hidden states `[tokens, hidden]`. This and `head` are None before the last stage, and in
            steps computed as a whole.
        head: computes float32 logits `[n, vocab]` of more tokens of the step from their indices `[n]`, n > 0.
    """

    result: Tensor
    last_hidden: Tensor | None = None
    head: Callable[[Tensor], Tensor] | None = None

    def logits(self, indices: Sequence[int]) -> Tensor:
        assert self.head is not None, "only the last stage computes logits, layer by layer"
        return self.head(torch.tensor(indices, device=self.result.device))


Hand = Callable[[Attend | None], Mapping[str, object]]
"""Returns the arguments that hand `Attend` to a model. None: no layer is called."""


def by_keyword(attend: Attend | None) -> Mapping[str, object]:
    """Hand `attend` as a keyword argument, which transformers' models hand down to the attention interface."""
    return {"attend": attend}


class LayerTrunk:
    """Calls the model of transformers, layer by layer: the plain forward, or the forward with fused layers."""

    def __init__(
        self, module: PreTrainedModel, stage: Stage | None, step: CurrentStep, device: torch.device, hand: Hand
    ) -> None:
        self._module, self._stage, self._current, self._device, self._hand = module, stage, step, device, hand
        self._path, self._base = trunk_path(module), trunk_base(module)
        module.get_submodule(self._path).register_forward_hook(self._keep_output)

    @torch.no_grad()
    def run(self, rows: Rows, attend: Attend, *, hidden: Tensor | None = None, reduce: Reduce | None = None) -> Output:
        """Compute one step: the layers of a rank, and the head if it has the last layer.

        Args:
            attend: is called once per layer, in order, with q, k and v after RoPE. They may be strided views, and
                `attend` may keep them.
            hidden: the hidden states from the stage before, `[1, tokens, width]`; None for the first stage.
            reduce: sums partial results over the ranks of tensor parallelism, which all call it in the same order.
        """
        stage, module = self._stage, self._module
        assert rows.tokens.shape == rows.positions.shape and rows.tokens.numel() > 0, rows
        assert (hidden is None) == (stage is None or stage.is_first), "all stages but the first continue another"
        row = rows.tokens, rows.positions, rows.keep, rows.rope_lengths
        tokens, positions, keep, rope_lengths = on_device(row, self._device)
        put_sampled(rows.sampled, tokens)
        arguments = {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False}
        arguments |= self._hand(attend)
        state = StepState(rope_lengths=rope_lengths, hidden=hidden, reduce=reduce)
        with self._current.during(state):
            if stage is not None and not stage.is_last:
                self._base(**arguments)
                assert state.passed is not None, "the model has called its last layer"
                return Output(result=state.passed)
            logits: Tensor = module(logits_to_keep=keep, **arguments).logits[0]
        head = partial(self._head, state.base_output, {**arguments, **self._hand(None)})
        return Output(result=logits.float(), last_hidden=state.base_output[0][0], head=head)

    def all_rows(
        self,
        tokens: Tensor,
        positions: Tensor,
        rope_lengths: Tensor,
        attend: Attend,
        hidden: Tensor | None = None,
        reduce: Reduce | None = None,
    ) -> Tensor:
        """Compute float32 logits `[tokens, vocab]` of all tokens, or in a stage before the last `[tokens, width]`."""
        keep = torch.arange(len(tokens), device=tokens.device)
        rows = Rows(tokens=tokens, positions=positions, keep=keep, rope_lengths=rope_lengths)
        result = self.run(rows, attend, hidden=hidden, reduce=reduce).result
        return result if self._is_last else result[0]

    @property
    def _is_last(self) -> bool:
        return self._stage is None or self._stage.is_last

    def output(self, rows: Tensor) -> Output:
        """Return the output of a step from the rows that `all_rows` computes."""
        return Output(result=rows.float() if self._is_last else rows[None])

    def prepare(self, *_sizes: object, **_others: object) -> Iterator[tuple[int, int]]:
        """Do nothing: only recorded steps are prepared."""
        return iter(())

    def release_pool(self) -> None:
        """Do nothing: this trunk reads KV through `attend` only."""

    @torch.no_grad()
    def _head(self, base_output: object, arguments: dict[str, Any], keep: Tensor) -> Tensor:
        """Compute logits from the output of the module below the head, which does not run."""
        below = self._module.get_submodule(self._path)
        self._module.set_submodule(self._path, _Replay(below, base_output))
        try:
            logits: Tensor = self._module(logits_to_keep=keep, **arguments).logits[0]
        finally:
            self._module.set_submodule(self._path, below)
        return logits.float()

    def _keep_output(self, _layers: nn.Module, _inputs: object, output: object) -> None:
        self._current.state.base_output = output


class SingleTokenTrunk:
    """Computes steps of single tokens by `step`, where that is possible, and all other steps by `layers`."""

    def __init__(self, step: WholeStep | GraphStep, layers: LayerTrunk) -> None:
        self.step, self._layers = step, layers

    @torch.no_grad()
    def run(self, rows: Rows, attend: Attend, *, hidden: Tensor | None = None, reduce: Reduce | None = None) -> Output:
        """Compute one step, see `LayerTrunk.run`."""
        single: SingleTokens | None = attend.single_tokens() if hasattr(attend, "single_tokens") else None
        if single is not None:
            assert len(rows.keep) == len(rows.tokens), "such a step samples after every token"
            row = rows.tokens, rows.positions, rows.rope_lengths
            result = self.step(*row, single, sampled=rows.sampled, attend=attend, hidden=hidden, reduce=reduce)
            if result is not None:
                return self._layers.output(result)
        return self._layers.run(rows, attend, hidden=hidden, reduce=reduce)

    def prepare(
        self,
        kv: Sequence[PagedKv],
        max_rows: int,
        max_context: int,
        *,
        sums: RecordedSums | None = None,
        by_pieces: bool = False,
    ) -> Iterator[tuple[int, int]]:
        """Prepare steps of up to `max_rows` single tokens, see `GraphStep.prepare`."""
        return self.step.prepare(kv, max_rows, max_context, sums=sums, by_pieces=by_pieces)

    def release_pool(self) -> None:
        """Release the KV pool that the latest step read in place."""
        self.step.release_pool()


class _Replay(nn.Module):
    """Replaces the module below the head, and returns its earlier output.

    It has the attributes of that module: multimodal models read the embeddings there.
    """

    def __init__(self, below: nn.Module, output: object) -> None:
        super().__init__()
        self._below, self._output = below, output

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - any attribute
        own = vars(self)["_modules"]
        return own[name] if name in own else getattr(own["_below"], name)

    def forward(self, *_: object, **__: object) -> object:
        return self._output
