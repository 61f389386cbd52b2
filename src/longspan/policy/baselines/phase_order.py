"""Steps of prompts or of decodes, never of both, in the two orders that Seesaw compares with its own (section 2.2).

`prefill-first` is vLLM's continuous batching before chunked prefill: whoever fits is prefilled before anybody decodes,
and who ends makes room at once. `decode-first` is the static batching of FasterTransformer: requests are admitted until
no more fit, and the next ones when all of these have been decoded to the end. Each request is on one instance, and each
instance is in a phase of its own.
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
        """Goes on with prompts and admits others; then decodes where there is nothing to prefill.

        Who comes back with all of its KV has nothing to prefill, and is admitted to a step of decodes.
        """
        open_instances = self._open(view)
        prompts, prefilling = Batch(view, frozenset(self.instances)), set[int]()
        for request in prompts.running():
            if not is_decode(request, request.num_scheduled):
                prefilling.add(request.group[0])
                prompts.add(_next_part(request, prompts.budget))
        self._admit(view.startable, prompts, open_instances, decode=False)
        if prompts.loads:
            return prompts.plan()  # what they take is known when decodes are planned

        decodes = Batch(view, prompts.instances.difference(prefilling, *(part.group for part in prompts.parts)))
        for request in decodes.running():
            decodes.add(_next_part(request, decodes.budget))
        num_admitted = sum(part.hit is not None for part in prompts.parts)
        self._admit(islice(view.startable, num_admitted, None), decodes, open_instances, decode=True)
        first, then = prompts.plan(), decodes.plan()
        return Plan(preempted=first.preempted + then.preempted, batches=first.batches + then.batches)

    def _open(self, view: ClusterView) -> tuple[int, ...]:
        """Returns the instances that take new requests."""
        if not (self._is_static and view.startable):
            return self.instances
        return tuple(i for i in self.instances if not any(map(_has_decoded, view.running.on(i))))

    def _admit(
        self, line: Iterable[RequestView], batch: Batch, open_instances: tuple[int, ...], *, decode: bool
    ) -> None:
        """Admits those to a batch that only `decode`, or those that do not or have to be loaded, until one has to wait.

        One that gave way has been in a batch before, and comes back as soon as it fits anywhere.
        """
        for request in batch.waiting(line):
            part = admit_alone(request, batch.budget, self.instances if request.was_admitted else open_instances)
            if part is not None and (part.stop > part.start and is_decode(request, part.start)) == decode:
                batch.add(part)


def _next_part(request: RequestView, budget: Budget) -> ScheduledPart | None:
    return single_part(request, request.group[0], request.num_scheduled, budget)


def _has_decoded(request: RequestView) -> bool:
    """Tells whether a request has had a token scheduled behind its first one, perhaps before it gave way."""
    return max(request.num_scheduled, request.num_known - 1) > request.num_prompt


class DecodeFirst(PrefillFirst, name="decode-first"):
    """Admits a request for the first time only on an instance where no request decodes."""

    _is_static = True
