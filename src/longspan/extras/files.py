"""Files of results: checks before a run that they can be written after it."""

from __future__ import annotations

from pathlib import Path

from longspan.errors import ParameterError
from longspan.file_errors import why_unwritable


def check_recording(trace: str | None, report: str | None) -> None:
    """Raise ParameterError for a file of a recording that cannot be written, or a report without plotly."""
    for name, path in (("trace", trace), ("report", report)):
        if path is not None and (reason := why_unwritable(Path(path))) is not None:
            raise ParameterError(name, reason, path)
    if report is not None:
        import longspan.extras.report  # noqa: F401, PLC0415 - raises ParameterError without plotly
