"""The work of an engine core in addition to requests: it keeps the traffic, and measures partitions while idle."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import msgspec

from longspan.core.fleets import fleet_text
from longspan.model.files import ModelError

if TYPE_CHECKING:
    from longspan.cost.profile_key import ProfileKey
    from longspan.policy.traffic import Traffic
    from longspan.profiling.idle import IdleTuner
    from longspan.service import Service

_log = logging.getLogger("longspan")


class Upkeep:
    """Saves the traffic of a policy next to the profile, and the partitions of `--tune-idle`.

    Args:
        tune_idle: whether partitions of chains are measured while no request runs.
    """

    def __init__(self, service: Service, *, tune_idle: bool) -> None:
        self._service, self._tune_idle = service, tune_idle
        self._traffic: Traffic | None = service.setup.facts.traffic
        self._tuner: IdleTuner | None = None

    @property
    def _key(self) -> ProfileKey:
        """The key of files about the present prefill instances."""
        setup = self._service.setup
        return msgspec.structs.replace(setup.profile_key, tp=setup.config.cluster.spec.tp)

    def keep_traffic(self) -> None:
        """Save the traffic if it has changed. The policy of a later server starts from it."""
        setup, before = self._service.setup, self._traffic
        traffic: Traffic | None = setup.policy.traffic
        if traffic is None or traffic is before:
            return
        self._traffic = traffic
        if traffic.improvement_rates != ("" if before is None else before.improvement_rates):
            rates, number = traffic.improvement_rates, len(traffic.lengths)
            _log.info("improvement rates by requests per second, for the last %d prompts: %s", number, rates)
        from longspan.profiling.store import save_traffic  # noqa: PLC0415 - loads torch

        try:
            save_traffic(self._key, fleet_text(setup.config.fleet), traffic)
        except ModelError as error:
            _log.warning("the next server starts without the requests of this one: %s", error)

    def tune(self) -> bool:
        """Begin to time a prompt for the partitions of chains, on an idle engine. Return False without one."""
        if not self._tune_idle:
            return False
        from longspan.policy.runahead import Runahead  # noqa: PLC0415 - few servers are tuned

        service, now_s = self._service, time.monotonic()
        policy = service.setup.policy
        if not isinstance(policy, Runahead) or not policy.cuts.is_tunable:
            return False  # the fleet has one instance now
        if self._tuner is None or self._tuner.cuts is not policy.cuts:
            from longspan.profiling.idle import tuner_of  # noqa: PLC0415

            key, vocab_size = self._key, service.info.vocab_size
            try:
                self._tuner = tuner_of(service.engine, policy, key, service.max_model_len, vocab_size)
            except ModelError as error:
                return self._end_tuning(error)
            self._tuner.stop(now_s)  # it waits for a quiet time
        try:
            return self._tuner.begin(now_s)
        except ModelError as error:
            return self._end_tuning(error)

    def stop_tuning(self, *, worker_lost: bool = False) -> None:
        """End a prompt that is timed. After the loss of a worker during one, no further prompt is timed."""
        if self._tuner is not None and self._tuner.stop(time.monotonic()) and worker_lost:
            self._end_tuning("a worker was lost during a prompt")

    def _end_tuning(self, cause: ModelError | str) -> bool:
        self._tune_idle = False
        _log.warning("partitions are not measured any more: %s", cause)
        return False
