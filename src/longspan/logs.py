"""The log of the command line and of the engine core, as lines of text or of JSON."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Literal

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]


def configure(level: str, form: str) -> None:
    """Log to stderr: longspan from this level, other packages from warnings.

    A process whose root logger has handlers keeps them.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if form == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("longspan").setLevel(level.upper())


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: timestamp (UTC), level, logger, message, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line. A stack trace is the field `exception`."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "timestamp": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)
