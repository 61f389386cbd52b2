"""The HTML page of simulated or recorded runs: the verdict, latencies, charts over time, and tables.

Importing this package needs plotly, which is optional and slow to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from longspan.errors import ParameterError

try:
    import plotly.graph_objects  # noqa: F401 - the modules below need it
except ImportError:
    raise ParameterError("report", "needs plotly: pip install 'longspan[report]'") from None

from longspan.cost.catalog import Kernels
from longspan.extras.report.latency import latencies
from longspan.extras.report.over_time import over_time
from longspan.extras.report.page import page, policy_legend, section
from longspan.extras.report.tables import accuracy, compared, settings_table, slowest
from longspan.extras.report.verdict import verdict
from longspan.extras.timeline import Record
from longspan.sim.spec import ServiceLevel


def html_report(
    records: Sequence[Record],
    numbers: Sequence[Mapping[str, float | None]],
    settings: Mapping[str, object],
    *,
    level: ServiceLevel = ServiceLevel(),
    hardware: str | None = None,
    attention: Kernels = "flash",
) -> str:
    """Return the page.

    Args:
        records: one for each policy, or for each run.
        numbers: the printed metrics of each record.
        settings: the settings of the runs, by name.
        level: the service level by which policies are compared.
        hardware: the device whose data sheet gives the times of simulated steps. None for measured times.
        attention: the attention kernels of the cost model.
    """
    policies = [record.policy for record in records]
    simulated = [record.policy for record in records if not record.is_recorded]
    title = f"longspan {'simulate' if simulated else 'recording'}: {settings['model']}, {', '.join(policies)}"
    return page(
        title,
        [
            verdict(records, level),
            policy_legend(policies),
            latencies(records, level),
            over_time(records, level),
            slowest(records),
            *([accuracy(hardware, attention, simulated)] if simulated else []),
            section("All numbers", "", compared(policies, numbers), settings_table(settings)),
        ],
    )
