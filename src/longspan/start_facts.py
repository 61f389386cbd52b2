"""The facts that an engine logs when it starts, and the change of options that would help most.

`facts_of` collects them. `StartFacts.block` and `advice` are pure functions of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspan import limits, native
from longspan.core.fleets import fleet_text

if TYPE_CHECKING:
    from longspan.policy.facts import Facts
    from longspan.resolve import ResolvedEngine


@dataclass(frozen=True, kw_only=True)
class StartFacts:
    """The model, the layout and the machine of a running engine.

    Attributes:
        dtype: the precision of weights and KV.
        parallel: the parallel spec, as `--parallel` or a change of the fleet takes it.
        kv_tokens: the tokens that the KV pools of all instances hold.
        request_tokens: the longest request, prompt and output together.
        context_tokens: the model's context, or `max_model_len` if it was given.
        has_kernels: longspan's own kernels are used. False on CUDA devices, whose kernels are PyTorch's and Triton's.
        kernels_reason: the reason why they are not used. Empty if they are.
        can_have_kernels: the processor has the instructions of longspan's kernels.
        fallbacks: sentences on parts of the model that the kernels do not compute.
        left_out: the modules of a multimodal model that text does not need.
        profile: `found`, with the group sizes whose times it lacks on these hosts. None without a profile.
        hint: a sentence of the policy about options that were not given.
    """

    model: str
    device: str
    dtype: str
    quantization: str | None
    parallel: str
    num_instances: int
    tp: int
    pp: int
    policy: str
    kv_tokens: int
    request_tokens: int
    context_tokens: int
    has_kernels: bool
    kernels_reason: str
    can_have_kernels: bool
    fallbacks: tuple[str, ...]
    threads: int
    cores: int
    profile: str | None
    left_out: tuple[str, ...] = ()
    hint: str | None = None

    def block(self) -> str:
        """Format the facts as one line per fact, with the advice last."""
        precision = self.dtype if self.quantization is None else f"{self.dtype}, weights in {self.quantization}"
        lines = [
            ("model", f"{self.model}, {precision}, on {self.device}"),
            *(
                (("left out", f"{', '.join(self.left_out)}: this model is served for text only"),)
                if self.left_out
                else ()
            ),
            ("layout", f"{self.parallel} (instances: {self.num_instances}, tp: {self.tp}, pp: {self.pp})"),
            ("policy", self.policy),
            ("KV", self._kv()),
            ("kernels", self._kernels()),
            *(("fallback", text) for text in self.fallbacks),
            ("threads", f"{self.threads} per rank; this process may use {self.cores} cores"),
            ("profile", self.profile or "none: policies use typical speeds of such a machine"),
        ]
        if self.hint is not None:
            lines.append(("hint", self.hint))
        if (change := advice(self)) is not None:
            lines.append(("advice", change))
        return "\n".join(["the engine has started", *(f"  {name:<9} {value}" for name, value in lines)])

    def _kv(self) -> str:
        fit = (
            f"{self.kv_tokens:,} tokens: {self.kv_tokens / self.context_tokens:.1f} requests of {self.context_tokens:,}"
        )
        if self.request_tokens < self.context_tokens:
            fit += f"; the longest request has {self.request_tokens:,}"
        return fit

    def _kernels(self) -> str:
        if self.device != "cpu":
            return "PyTorch's and Triton's"
        return "longspan's own" if self.has_kernels else f"PyTorch's: {self.kernels_reason}"


def advice(facts: StartFacts) -> str | None:
    """Return the one change that would help most, with its effect. None if no change is known."""
    return next(_changes(facts), None)


def _changes(facts: StartFacts) -> Iterator[str]:
    """Yield changes that help, by effect: memory for requests, kernels, layers without kernels, the profile."""
    if facts.request_tokens < facts.context_tokens:
        lengths = f"{facts.request_tokens:,} of {facts.context_tokens:,} tokens"
        yield f"give more KV memory (kv_cache_memory_bytes, host_kv_gib): the longest request has {lengths}"
    if facts.device == "cpu" and not facts.has_kernels:
        yield from _changes_of_kernels(facts)
    if facts.fallbacks:
        yield "choose a model whose layers the kernels compute (docs/models.md): a decode step can take half the time"
    if facts.profile is None and facts.num_instances > 1:
        yield f"run longspan profile {facts.model}, with these options: policies then use measured speeds"


def _changes_of_kernels(facts: StartFacts) -> Iterator[str]:
    if facts.dtype != "bfloat16" and facts.can_have_kernels:
        yield f"dtype bfloat16: longspan's own kernels compute it faster than {facts.dtype} on this processor"
    elif facts.kernels_reason.startswith("attention_backend"):
        if facts.can_have_kernels:
            yield "attention_backend auto: longspan's own kernels are faster on this processor"
    elif "FileNotFoundError" in facts.kernels_reason:
        yield "install g++, or name it in the variable CXX: longspan then compiles its own, faster kernels"
    elif facts.can_have_kernels:
        yield f"let longspan compile its own, faster kernels: {facts.kernels_reason}"
    if facts.dtype == "bfloat16" and not facts.can_have_kernels:
        yield "dtype float32: prefill can take less than half the time on this processor. It needs twice the memory"


def facts_of(setup: ResolvedEngine, fallbacks: Sequence[str]) -> StartFacts:
    """Return the facts of an engine whose workers have started."""
    config, model, given = setup.config, setup.model, setup.given
    spec, cluster, policy = config.cluster.spec, config.cluster, setup.policy.settings.name
    return StartFacts(
        model=model.files.name,
        device=given.device,
        dtype=model.files.dtype,
        quantization=model.files.quantization,
        parallel=fleet_text(config.fleet),
        num_instances=cluster.num_instances,
        tp=spec.tp,
        pp=spec.pp,
        policy=policy if given.policy == policy else f"{policy} (by {given.policy})",
        kv_tokens=sum(cluster.num_blocks) * config.block_size,
        request_tokens=config.longest(setup.policy),
        context_tokens=given.max_model_len or model.info.context_length,
        has_kernels=model.kernels is not None,
        kernels_reason=model.kernels_reason,
        can_have_kernels="avx512_bf16" in native.processor_flags(),
        fallbacks=tuple(fallbacks),
        threads=setup.threads,
        cores=limits.cores(),
        profile=_profile_text(setup.facts),
        left_out=model.info.left_out,
        hint=setup.policy.hint,
    )


def _profile_text(facts: Facts) -> str | None:
    if facts.profile is None:
        return None
    from longspan.policy.group_times import unmeasured_on_hosts  # noqa: PLC0415 - only on machines with a profile

    if not (sizes := unmeasured_on_hosts(facts)):
        return "found"
    text = ", ".join(map(str, sizes))
    return (
        f"found, without times of {text} instances on several hosts: policies go by rules and typical speeds for them"
    )
