"""The work of an engine core in addition to requests: it keeps the traffic."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from longspan.core.fleets import fleet_text
from longspan.model.files import ModelError

if TYPE_CHECKING:
    from longspan.cost.profile_key import ProfileKey
    from longspan.policy.traffic import Traffic
    from longspan.service import Service

_log = logging.getLogger("longspan")


class Upkeep:
    """Saves the traffic of a policy next to the profile."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._traffic: Traffic | None = service.setup.facts.traffic

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
