"""Trials of model splits: a small copy of the model runs each split and must agree with transformers.

A trial takes about a second, mostly for imports. The cache folder keeps its result, keyed by configuration, split,
versions and the sharding code.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from longspan.core.cluster import Cluster
from longspan.core.exchange import ALLTOALL, GATHER_HIDDEN, LOCAL, RING_KV, Exchange, WeightSource
from longspan.core.splits import ParallelSpec
from longspan.errors import ParameterError
from longspan.model.files import ModelError, ModelFiles, cache_root, write_file
from longspan.model.info import ModelInfo

if TYPE_CHECKING:
    from longspan.runtime.dry_run import DryRuns

_log = logging.getLogger("longspan")
_CODE = ("attn", "core", "model", "runtime")
"""The packages whose code can change the result of a trial."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A split to try, and the exchange by which its instances share a prompt."""

    spec: ParallelSpec
    exchange: Exchange = LOCAL

    def __str__(self) -> str:
        return f"{self.spec} {self.exchange}"

    def refusal(self, reason: str) -> ValueError:
        """Return the error that names the parameter to change."""
        spec = self.spec
        if self.exchange == GATHER_HIDDEN or self.exchange.weights is not None:
            name = self.exchange.kind
            how = "" if self.exchange.weights is None else f" with unsharded weights ({self.exchange.weights})"
            problem = f"{name}{how} does not work for this model ({reason}): choose exchange ring_kv"
            return ParameterError("exchange", problem, name)
        if spec.tp > 1 and spec.pp > 1:
            return ParameterError("parallel", f"{spec} does not work for this model ({reason}): use tp 1 or pp 1", spec)
        if spec.tp > 1:
            problem = f"{spec.tp} does not work for this model ({reason}): use pp, or more instances with tp 1"
            return ParameterError("tp", problem, spec.tp)
        if spec.pp > 1:
            problem = f"{spec.pp} does not work for this model ({reason}): use tp, or more instances with pp 1"
            return ParameterError("pp", problem, spec.pp)
        return ModelError(f"this model is not supported: longspan failed on a small copy of it ({reason})")


def check_splits(
    files: ModelFiles,
    info: ModelInfo,
    cluster: Cluster,
    *,
    gathers_hidden: bool = False,
    weights: Sequence[WeightSource] = (),
) -> None:
    """Try the splits of a cluster that were not tried before.

    Args:
        gathers_hidden: whether instances may share prompts by `gather_hidden`.
        weights: the sources from which `alltoall` may take unsharded weights.

    Raises:
        ValueError: for a split that gives wrong results or raises.
    """
    results = _Results(files, info, cluster)
    try:
        for trial in _trials(cluster, gathers_hidden=gathers_hidden, weights=weights):
            if reason := results.reason(trial):
                for part in _parts(trial):
                    if simpler := results.reason(part):
                        raise part.refusal(simpler)
                raise trial.refusal(reason)
    finally:
        results.free()


def _trials(cluster: Cluster, *, gathers_hidden: bool, weights: Sequence[WeightSource]) -> Iterator[Trial]:
    """Yield splits that together cover all shards, stages and exchanges of a cluster."""
    num_members = len(cluster.prefill)
    splits = {instance: (cluster.tp(instance), cluster.pp(instance)) for instance in cluster.instances}
    sharing = {splits[instance] for instance in cluster.prefill}
    for tp, pp in sorted(sharing):
        if num_members == 1:
            yield Trial(spec=ParallelSpec(tp=tp, pp=pp))
            continue
        exchange, sizes = (GATHER_HIDDEN, {2, num_members}) if gathers_hidden else (RING_KV, {2})
        for size in sorted(sizes):
            yield Trial(spec=ParallelSpec(instances=size, tp=tp, pp=pp), exchange=exchange)
        for source in weights if tp > 1 else ():
            yield Trial(spec=ParallelSpec(instances=2, tp=tp, pp=pp), exchange=ALLTOALL._replace(weights=source))
    for tp, pp in sorted({*splits.values()} - sharing):
        yield Trial(spec=ParallelSpec(tp=tp, pp=pp))


def _parts(trial: Trial) -> Iterator[Trial]:
    """Yield simpler splits than a failed one, so that the error names the failing part."""
    tp, pp = trial.spec.tp, trial.spec.pp
    specs = (ParallelSpec(), ParallelSpec(tp=tp), ParallelSpec(pp=pp), ParallelSpec(tp=tp, pp=pp))
    yield from (part for spec in dict.fromkeys(specs) if (part := Trial(spec=spec)) != trial)


class _Results:
    """The results of trials, read from the cache folder or computed once."""

    def __init__(self, files: ModelFiles, info: ModelInfo, cluster: Cluster) -> None:
        self._files, self._info = files, info
        self._tp = max(cluster.tp(instance) for instance in cluster.instances)

    @cached_property
    def _dry_runs(self) -> DryRuns:
        from longspan.runtime.dry_run import DryRuns  # noqa: PLC0415 - importing transformers' models takes seconds

        return DryRuns(self._files, self._info, tp=self._tp)

    def free(self) -> None:
        """Return the memory of small copies, which are in reference cycles, and of ended threads to the system."""
        if vars(self).pop("_dry_runs", None) is not None:
            gc.collect()
            if hasattr(library := ctypes.CDLL(None), "malloc_trim"):  # glibc keeps the arenas of ended threads
                library.malloc_trim(0)

    def reason(self, trial: Trial) -> str:
        """Return why a split fails, or an empty string if it works."""
        path = cache_root() / "splits" / f"{_key(self._files, self._info, trial)}.txt"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        _log.info("trying split %s on a small copy of the model, once", trial)
        cluster = Cluster.of(str(trial.spec)).with_layers(self._info.num_layers, self._info.head_layers)
        reason = self._dry_runs.problem(cluster, trial.exchange)
        try:
            write_file(path, reason)
        except (ModelError, OSError) as error:
            _log.info("the result cannot be stored, so every start tries this split again: %s", error)
        return reason


def _key(files: ModelFiles, info: ModelInfo, trial: Trial) -> str:
    config_files = [file for pattern in ("config.json", "*.py") for file in sorted(files.config_dir.rglob(pattern))]
    inputs = [
        str(trial),
        files.dtype,
        files.trust_remote_code,
        info.to_json(),
        _code_key(),
        *(_digest([file]) for file in config_files),
    ]
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:32]


@cache
def _code_key() -> str:
    """Identify the computing code: longspan's by its text, other libraries by their versions."""
    package = Path(__file__).parents[1]
    code = _digest(file for folder in _CODE for file in sorted((package / folder).rglob("*.py")))
    return " ".join((code, *(version(name) for name in ("transformers", "torch"))))


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
