"""Our own bfloat16 kernels for CPUs with AVX512_BF16, and PyTorch's wherever ours do not apply."""

from __future__ import annotations

from torch import Tensor

from longspan.attn import native
from longspan.attn.backends import Partial
from longspan.attn.backends.pytorch import TorchCpu
from longspan.attn.paged import PagedKv, PagedPlan
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Relation


class NativeCpu(TorchCpu):
    """The kernels of `attn.native`, which must be loaded."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, spec: AttnSpec, *, dense: bool = False
    ) -> Partial:
        """Implements `AttentionBackend` by our own kernel where it applies."""
        if not native.applies(q, spec):
            return super().attend(q, k, v, relation, spec, dense=dense)
        if dense:
            return native.attend(q, k, v, spec, lower=relation.lower, upper=relation.upper, dense=True)
        match relation.kind:
            case "full":
                return native.attend(q, k, v, spec)
            case "skip":
                return native.attend(q, k, v, spec, lower=k.shape[1], upper=-q.shape[1])
            case "diagonal":
                return native.attend(q, k, v, spec, upper=relation.upper)
            case "band":
                return native.attend(q, k, v, spec, lower=relation.lower, upper=relation.upper)

    def attend_paged(self, q: Tensor, kv: PagedKv, plan: PagedPlan, spec: AttnSpec) -> Partial:
        """Implements `AttentionBackend` by our own kernel where it applies."""
        if not native.applies_paged(q, spec):
            return super().attend_paged(q, kv, plan, spec)
        assert q.shape[1] == plan.num_queries, "the plan is for these queries"
        return native.attend_paged(q, kv.keys, kv.values, plan.items, spec)
