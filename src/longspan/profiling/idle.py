"""Partitions of chains, searched while a server has no requests (`longspan serve --tune-idle`).

Prompts with the partition to try run like requests. A client's request ends such a prompt, which is timed again later.
The search itself restarts after every time, with all times so far, so it has no state but these.
"""

from __future__ import annotations

import logging
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from longspan.core.group_links import links_by_size
from longspan.core.link_classes import LinkClass
from longspan.core.sampling import SamplingParams
from longspan.cost.partition_table import Entry
from longspan.cost.partitions import Partition, even, search
from longspan.policy.chain_cuts import ChainCuts
from longspan.profiling.plan import default_lengths
from longspan.profiling.store import load_partitions, save_partitions

if TYPE_CHECKING:
    from longspan.core.engine import Engine
    from longspan.core.request import Request
    from longspan.cost.profile_key import ProfileKey
    from longspan.policy.runahead import Runahead

_QUIET_S = 10.0
"""Seconds without a request before a measurement. With fewer, more requests come during one."""
_MAX_PROMPT_S = 0.5
"""Seconds of the longest prompts to time. A step is not interrupted, so a request may wait for all of it."""
_GROWTH = 3
"""Factor of the time by which a prompt of twice the length may take longer."""
_REPEATS = 3
_ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
_log = logging.getLogger("longspan")


class _UntimedError(Exception):
    def __init__(self, partition: Partition) -> None:
        super().__init__(partition)
        self.partition = partition


class IdleTuner:
    """Searches the partitions of chains over all instances, one length after another.

    Args:
        lengths: prompt lengths, ascending.
        link_class: the slowest class of link between the instances.
        save: gets each partition when its search has ended.

    Attributes:
        cuts: the pieces of chains of the policy. They use each partition at once.
    """

    def __init__(
        self,
        engine: Engine,
        cuts: ChainCuts,
        lengths: Sequence[int],
        *,
        link_class: LinkClass,
        vocab_size: int,
        save: Callable[[Entry], None],
    ) -> None:
        self._engine, self.cuts, self._lengths = engine, cuts, list(lengths)
        self._link_class, self._vocab_size, self._save = link_class, vocab_size, save
        self._times: dict[Partition, list[float]] = {}
        self._request: Request | None = None
        self._partition: Partition = ()
        self._num_prompts, self._quiet_until_s, self._is_full = 0, 0.0, False
        self._expected_s = self._longest_s = 0.0
        """Seconds of prompts of the present length: by the length before, and by the slowest partition so far."""
        listed = ", ".join(map(str, lengths)) or "no further length"
        _log.info("while no request runs, partitions are measured for prompts of these tokens: %s", listed)

    def begin(self, now_s: float) -> bool:
        """Start the next prompt on an idle engine. Return False if none is left, or a request came just now."""
        self._take()
        while self._lengths and now_s >= self._quiet_until_s:
            length = self._lengths[0]
            if max(self._longest_s, self._expected_s) > _MAX_PROMPT_S:
                _log.info("partitions from %d tokens on are not measured: such a prompt takes too long", length)
                self._lengths.clear()
                break
            try:
                best = self._search(length)
            except _UntimedError as untimed:
                return self._start(untimed.partition)
            self._finish(length, best)
        return False

    def stop(self, now_s: float) -> bool:
        """End the prompt that runs, since there is work for clients. The next one waits. Return whether one ran."""
        self._quiet_until_s, request = now_s + _QUIET_S, self._request
        if request is None:
            return False
        self._take()
        if request.finish_reason is None:
            self._engine.finish(request, "abort")
            _log.info("measuring partitions stopped for a while: there is a command, or a worker was lost")
        return True

    def _search(self, length: int) -> Partition:
        """Return the best partition by the times so far, or raise _UntimedError with the partition to time next."""
        taken, max_piece = Counter[Partition](), self._engine.config.max_num_batched_tokens

        def ttft_s(partition: Partition) -> float:
            if max(partition) > max_piece:
                return math.inf
            times = self._times.get(partition, [])[taken[partition] :][:_REPEATS]
            if len(times) < _REPEATS:
                raise _UntimedError(partition)
            taken[partition] += _REPEATS
            return statistics.median(times)

        return search(ttft_s, length, self.cuts.members, self._engine.config.block_size, noisy=True)

    def _start(self, partition: Partition) -> bool:
        """Start a prompt with a partition. Return False without enough blank blocks: no cached block is evicted."""
        engine, length = self._engine, sum(partition)
        num_blocks = -(-(length + 1) // engine.config.block_size)
        pools = [engine.kv.account.pool(instance) for instance in engine.config.cluster.prefill]
        was_full, self._is_full = self._is_full, any(pool.num_free - pool.num_cached < num_blocks for pool in pools)
        if self._is_full and not was_full:
            _log.info("partitions of %d tokens are not measured while cached KV leaves too few blocks", length)
        if self._is_full:
            return False
        self._num_prompts += 1
        prompt = random.Random(self._num_prompts).choices(range(self._vocab_size), k=length)
        self.cuts.try_out(self._entry(partition))
        self._partition = partition
        self._request = engine.add(prompt, _ONE_TOKEN, enable_prefix_caching=False)
        return True

    def _take(self) -> None:
        """Take the time of a prompt that has ended, and use the table again."""
        if self._request is None:
            return
        request, self._request = self._request, None
        self.cuts.try_out(None)
        if request.finish_reason == "length" and request.metrics.ttft_s is not None:
            times = self._times.setdefault(self._partition, [])
            times.append(request.metrics.ttft_s)
            if len(times) > 1:  # the first prompt of a length may be slower
                self._longest_s = max(self._longest_s, min(times))
        elif request.finish_reason is not None:
            _log.warning("measuring partitions ends: a prompt failed (%s)", request.stop_reason)
            self._lengths.clear()

    def _finish(self, length: int, best: Partition) -> None:
        """Use and save the partition of a length, and go on with the next length."""
        seconds = {partition: statistics.median(times) for partition, times in self._times.items()}
        pieces = even(length, self.cuts.members, self._engine.config.block_size)
        doublings = max(1.0, math.log2(self._lengths[1] / length)) if len(self._lengths) > 1 else 1.0
        self._expected_s, self._longest_s = _GROWTH**doublings * self._longest_s, 0.0
        if seconds:
            _log.info(
                "partition of %d tokens: %s in %.3g s; even pieces take %.3g s",
                *(length, ", ".join(map(str, best)), seconds[best], seconds.get(pieces, math.nan)),
            )
            self._save(self._entry(best))
        self._times.clear()
        self._lengths.pop(0)

    def _entry(self, partition: Partition) -> Entry:
        length = sum(partition)
        return Entry(
            model=self.cuts.model,
            members=self.cuts.members,
            length=length,
            fractions=tuple(piece / length for piece in partition),
            link_class=self._link_class,
        )


def tuner_of(
    engine: Engine, policy: Runahead, profile_key: ProfileKey, max_model_len: int, vocab_size: int
) -> IdleTuner:
    """Return a tuner for the prompt lengths that all instances share in one step and that have no partition yet.

    Partitions are saved in this machine's table.

    Raises:
        ModelError: the table cannot be read.
    """
    config, cuts = engine.config, policy.cuts
    members, block_size = cuts.members, config.block_size
    link_class = links_by_size(config.cluster)[members]
    stored = load_partitions(profile_key, block_size)
    known = stored.of_sizes({members: link_class}).lengths(cuts.model, members)
    room = block_size * min(config.cluster.num_blocks[instance] for instance in config.cluster.prefill)
    sizes = range(members * block_size, min(members * config.max_num_batched_tokens + 1, room))
    lengths = [length for length in default_lengths(max_model_len) if length in sizes and policy.shares(length)]

    def save(entry: Entry) -> None:
        cuts.add(entry)
        latest = load_partitions(profile_key, block_size)  # other processes may have saved some
        save_partitions(profile_key, block_size, latest.with_entry(entry))

    missing = [length for length in lengths if length not in known]
    if missing and missing[0] != lengths[0]:
        missing.insert(0, lengths[0])  # its time bounds the next times
    return IdleTuner(engine, cuts, missing, link_class=link_class, vocab_size=vocab_size, save=save)
