"""A model with its engine in this process: the common base of `LLM` and `AsyncLLM`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar, Unpack, get_args

from longspan.args import EngineArgs, unpacked
from longspan.core.engine import Engine
from longspan.core.sampling import SamplingParams
from longspan.core.steps import Link
from longspan.driver import Driver
from longspan.model.store import DTYPES
from longspan.outputs import RequestOutput
from longspan.runtime.child import unless_forked
from longspan.service import Service
from longspan.text.input_processor import Message, Prompt, TemplateOptions

if TYPE_CHECKING:
    from longspan.core.sparse_plan import Savings
    from longspan.cost.profile_key import ProfileKey
    from longspan.policy.facts import Facts

ResultT = TypeVar("ResultT")


class LocalEngine:
    """Owns a model's workers and its engine. Methods may be called from any thread of this process.

    Closed by `shutdown`, by `with`, when it is collected, and when the interpreter exits. The arguments are the fields
    of `EngineArgs`, `model` first and the rest by name. For errors see `LLM`.
    """

    make_service: ClassVar[Callable[[EngineArgs], Service]] = Service
    """A subclass may replace it to start the workers in another way."""

    @unpacked(EngineArgs)
    def __init__(self, given: EngineArgs) -> None:
        self.service = service = type(self).make_service(given)
        self.input_processor, self.info = service.input_processor, service.info
        self._driver = Driver(service)
        self._finalizer = weakref.finalize(self, unless_forked(self._driver.close))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def facts(self) -> Facts:
        """The facts of the model, the hardware and the cluster that policies use."""
        return self.service.setup.facts

    @property
    def profile_key(self) -> ProfileKey:
        """The key of profiles of the model on this machine."""
        return self.service.setup.profile_key

    @property
    def max_model_len(self) -> int:
        """The longest new request in tokens, see `Service.max_model_len`."""
        return self.service.max_model_len

    @property
    def engine(self) -> Engine:
        """The engine. Unless calls run, the calling thread may use it until the next call."""
        self._driver.check_process()
        self._driver.settle()
        return self.service.engine

    def with_engine(self, function: Callable[[Engine], ResultT]) -> ResultT:
        """Call a function with the engine between two steps, even while calls run, and return its result."""
        return self._driver.run(partial(function, self.service.engine))

    def check(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> None:
        """Raise the ValueError that `generate` would raise for this prompt, without generating."""
        engine_request = self.input_processor.process(prompt, sampling_params or SamplingParams())
        self.service.engine.check(len(engine_request.token_ids))

    def render_chat(self, messages: Sequence[Message], **template: Unpack[TemplateOptions]) -> str:
        """Format a chat by the model's template, see `InputProcessor.render_chat`."""
        return self.input_processor.render_chat(messages, **template)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, see `InputProcessor.tokenize`."""
        return self.input_processor.tokenize(text, add_special_tokens=add_special_tokens)

    def set_policy(self, policy: str, options: Mapping[str, str]) -> None:
        """Change the policy between calls, see `Service.set_policy`. Cached KV stays."""
        self._driver.run(partial(self.service.set_policy, policy, options))

    def reshard(self, parallel: str) -> None:
        """Change the parallel spec of the workers, with the same number of ranks, fewer or more, while calls run.

        The spec of a fleet with roles or phases is `A prefill + B decode`. This returns when the change is done, or at
        once if calls run, whose steps make the change. Workers keep their processes and the mapped weights. Missing
        workers start, and unused workers stay idle. KV on devices is recomputed, unless there is a pool on the host
        (`host_kv_gib`).

        Raises:
            ValueError: the model, the policy or the hosts do not support the spec.
            RuntimeError: another change is under way.
        """
        self._driver.run(partial(self.service.reshard, parallel))

    def reset_prefix_cache(self) -> None:
        """Remove the KV of finished requests, also from hosts and disks. Raise RuntimeError if requests run."""
        self._driver.run(self.service.reset_prefix_cache)

    @property
    def bytes_exchanged(self) -> dict[str, int]:
        """Payload bytes sent by all ranks so far, per exchange and in `total`."""
        return self._bytes_over(get_args(Link))

    @property
    def bytes_between_hosts(self) -> dict[str, int]:
        """The part of `bytes_exchanged` that was sent between hosts."""
        return self._bytes_over(("other_host",))

    def _bytes_over(self, links: Collection[str]) -> dict[str, int]:
        sums: dict[str, int] = {}
        for (exchange, link), num_bytes in dict(self.service.engine.counts.bytes_sent).items():
            sums[exchange] = sums.get(exchange, 0) + (num_bytes if link in links else 0)
        return {**sums, "total": sum(sums.values())}

    def sparse_savings(self, output: RequestOutput) -> Savings | None:
        """Return the savings by sparse attention for a request. None if it was computed exactly."""
        if not output.metrics.sparse_parts:
            return None
        from longspan.core.sparse_plan import savings  # noqa: PLC0415 - exact attention does not need it

        layers = [(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in self.info.specs]
        cluster = self.service.engine.config.cluster
        stages = [cluster.layers(0, stage) for stage in range(cluster.pp(0))]
        return savings(output.metrics.sparse_parts, layers, stages, DTYPES[self.service.files.dtype].itemsize)

    def worker_times(self) -> list[dict[str, float]]:
        """Return seconds by rank: attention, linear layers, waiting for messages and for the controller, and the rest.

        They sum from the start to the latest step, and are empty without `record_times`. Computing on a CPU is measured
        in CPU time, waiting in wall-clock time.
        """
        return [dict(times) for times in self.service.executor.worker_times]

    def shutdown(self) -> None:
        """Stop the workers, and end running calls with an error. Can be called again."""
        self._finalizer()
