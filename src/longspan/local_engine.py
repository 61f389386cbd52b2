"""A model with its engine in this process: what `LLM` and `AsyncLLM` have in common."""

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
    """Owns a model's workers and its engine; methods may be called from any thread of this process.

    Closed by `shutdown`, by `with`, when it is collected, and when the interpreter exits.

    Args:
        given: what `EngineArgs` has, `model` first and the others by name.

    Raises:
        ValueError: for a wrong argument, an unknown or unsupported model, or too little memory.
        WorkerLostError: when a worker does not start.
    """

    make_service: ClassVar[Callable[[EngineArgs], Service]] = Service
    """A subclass may start the workers in another way."""

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
        """The facts of the model, the hardware and the cluster, which policies go by."""
        return self.service.facts

    @property
    def profile_key(self) -> ProfileKey:
        """The key of profiles of the model on this machine."""
        return self.service.profile_key

    @property
    def max_model_len(self) -> int:
        """The longest request to come, see `Service.max_model_len`."""
        return self.service.max_model_len

    @property
    def engine(self) -> Engine:
        """The engine, at rest unless calls are under way: until the next call, this thread may use it."""
        self._driver.check_process()
        self._driver.settle()
        return self.service.engine

    def with_engine(self, function: Callable[[Engine], ResultT]) -> ResultT:
        """Call a function with the engine between two steps, while calls are under way, and return its result."""
        return self._driver.run(partial(function, self.service.engine))

    def check(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> None:
        """Raise the ValueError that `generate` would raise for this prompt and policy, and generates nothing."""
        engine_request = self.input_processor.process(prompt, sampling_params or SamplingParams())
        self.service.engine.check(len(engine_request.token_ids))

    def render_chat(self, messages: Sequence[Message], **template: Unpack[TemplateOptions]) -> str:
        """Format a chat by the model's template, see `InputProcessor.render_chat`."""
        return self.input_processor.render_chat(messages, **template)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, see `InputProcessor.tokenize`."""
        return self.input_processor.tokenize(text, add_special_tokens=add_special_tokens)

    def set_policy(self, policy: str, options: Mapping[str, str]) -> None:
        """Change the policy between calls, see `Service.set_policy`; cached KV stays."""
        self._driver.run(partial(self.service.set_policy, policy, options))

    def reshard(self, parallel: str) -> None:
        """Let the workers take another parallel spec, with as many ranks, fewer or more, while calls go on.

        The spec of a fleet with roles or phases is `A prefill + B decode`.

        Returns when that is done, or at once if calls are under way, whose steps make the change.
        They keep their processes and the mapped weights. Further workers start for a spec that takes more, and ranks
        that it does not take stay idle. KV on devices is computed anew, unless there is a pool on the host
        (`host_kv_gib`).

        Raises:
            ValueError: for a spec that model, policy or hosts cannot do with.
            RuntimeError: while another change is under way.
        """
        self._driver.run(partial(self.service.reshard, parallel))

    def reset_prefix_cache(self) -> None:
        """Forget the KV of finished requests, also on hosts and disks, so that no prompt starts from any of it.

        Raises:
            RuntimeError: when requests are unfinished.
        """
        self._driver.run(self.service.reset_prefix_cache)

    @property
    def bytes_exchanged(self) -> dict[str, int]:
        """Payload bytes sent by all ranks so far, per exchange and in `total`."""
        return self._bytes_over(get_args(Link))

    @property
    def bytes_between_hosts(self) -> dict[str, int]:
        """The part of `bytes_exchanged` that went from one host to another."""
        return self._bytes_over(("other_host",))

    def _bytes_over(self, links: Collection[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for (exchange, link), num_bytes in dict(self.service.engine.counts.bytes_sent).items():
            found[exchange] = found.get(exchange, 0) + (num_bytes if link in links else 0)
        return {**found, "total": sum(found.values())}

    def sparse_savings(self, output: RequestOutput) -> Savings | None:
        """Return what sparse attention saved a request; None when it was computed exactly."""
        if not output.metrics.sparse_parts:
            return None
        from longspan.core.sparse_plan import savings  # noqa: PLC0415 - exact attention does not need it

        layers = [(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in self.info.specs]
        cluster = self.service.engine.config.cluster
        stages = [cluster.layers(0, stage) for stage in range(cluster.pp(0))]
        return savings(output.metrics.sparse_parts, layers, stages, DTYPES[self.service.files.dtype].itemsize)

    def worker_times(self) -> list[dict[str, float]]:
        """Return seconds by rank: attention, linear layers, waiting for messages and for the controller, and the rest.

        They count from the start to the latest step; empty without `record_times`. What computes on a CPU counts the
        seconds that it had a core, and waiting counts seconds of the clock.
        """
        return [dict(times) for times in self.service.executor.worker_times]

    def shutdown(self) -> None:
        """Stop the workers, and ends calls under way with an error; can be called again."""
        self._finalizer()
