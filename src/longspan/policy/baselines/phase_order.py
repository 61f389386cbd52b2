"""Steps of prompts or of decodes, never of both, in the two orders that Seesaw compares with its own (section 2.2).

`prefill-first` is vLLM's continuous batching before chunked prefill. All prompts that fit are prefilled before any
request decodes. A finished request frees its blocks at once. `decode-first` is the static batching of
FasterTransformer. Requests are admitted until no more fit, and the next requests after all of these have finished. Each
request is on one instance, and each instance has its own phase.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from longspan.core.policy import Policy
from longspan.core.view import ClusterView, Plan, RequestView, ScheduledPart
from longspan.policy.batching import Batch, Budget, is_decode, single_part
from longspan.policy.chunked import admit_alone


class PrefillFirst(Policy, name="prefill-first"):
    """Schedules prompts before decodes on each instance."""

    reads_hosts = True
    _is_static = False

    def plan(self, view: ClusterView) -> Plan:
        """Continue prompts and admit new ones. Then decode on the instances without prompts.

        A request that resumes with all of its KV has no prompt to compute, and is admitted to a step of decodes.
        """
        open_instances = self._open(view)
        prompts, prefilling = Batch(view, frozenset(self.instances)), set[int]()
        for request in prompts.running():
            if not is_decode(request, request.num_scheduled):
                prefilling.add(request.group[0])
                prompts.add(_next_part(request, prompts.budget))
        self._admit(view.startable, prompts, open_instances, decode=False)
        if prompts.loads:
            return prompts.plan()  # the next plan sees the blocks of the loads

        decodes = Batch(view, prompts.instances.difference(prefilling, *(part.group for part in prompts.parts)))
        for request in decodes.running():
            decodes.add(_next_part(request, decodes.budget))
        num_admitted = sum(part.hit is not None for part in prompts.parts)
        self._admit(islice(view.startable, num_admitted, None), decodes, open_instances, decode=True)
        prefill, decode = prompts.plan(), decodes.plan()
        return Plan(preempted=prefill.preempted + decode.preempted, batches=prefill.batches + decode.batches)

    def _open(self, view: ClusterView) -> tuple[int, ...]:
        """Return the instances that admit new requests."""
        if not (self._is_static and view.startable):
            return self.instances
        return tuple(i for i in self.instances if not any(map(_has_decoded, view.running.on(i))))

    def _admit(
        self, candidates: Iterable[RequestView], batch: Batch, open_instances: tuple[int, ...], *, decode: bool
    ) -> None:
        """Admit requests that `decode`, or requests with prompts or loads, until a request has to wait.

        A preempted request has been in a batch before, and resumes on any instance as soon as it fits.
        """
        for request in batch.waiting(candidates):
            part = admit_alone(request, batch.budget, self.instances if request.was_admitted else open_instances)
            if part is not None and (part.stop > part.start and is_decode(request, part.start)) == decode:
                batch.add(part)


def _next_part(request: RequestView, budget: Budget) -> ScheduledPart | None:
    return single_part(request, request.group[0], request.num_scheduled, budget)


def _has_decoded(request: RequestView) -> bool:
    """Return True if a token behind the first one was scheduled, perhaps before the request was preempted."""
    return max(request.num_scheduled, request.num_known - 1) > request.num_prompt


class DecodeFirst(PrefillFirst, name="decode-first"):
    """Admits a request for the first time only on an instance where no request decodes."""

    _is_static = True
