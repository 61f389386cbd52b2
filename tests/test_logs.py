"""The log of the command line: lines of text or JSON, and the level of each process."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from longspan.logs import JsonFormatter

LOG = """
import logging, sys
from longspan import logs
logs.configure(*sys.argv[1:])
logging.getLogger("longspan").info("a fact")
logging.getLogger("longspan.worker").warning("a problem\\nin two lines")
logging.getLogger("other").info("noise")
"""


def lines_of(level: str, form: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", LOG, level, form], capture_output=True, text=True, check=True)
    return done.stderr.splitlines()


def test_json_log_has_one_object_per_line() -> None:
    fact, problem = (json.loads(line) for line in lines_of("info", "json"))
    assert {name: fact[name] for name in ("level", "logger", "message")} == {
        "level": "info",
        "logger": "longspan",
        "message": "a fact",
    }
    assert problem["message"] == "a problem\nin two lines" and problem["timestamp"].endswith("Z")


@pytest.mark.parametrize(("level", "num_lines"), {"info": 3, "warning": 2, "error": 0}.items())
def test_text_log_starts_at_its_level(level: str, num_lines: int) -> None:
    assert len(lines_of(level, "text")) == num_lines


def test_stack_trace_and_fields_are_keys_of_the_object() -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        record = logging.LogRecord("longspan", logging.ERROR, __file__, 1, "failed: %s", ("x",), sys.exc_info())
    record.fields = {"status": 500}
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["status"]) == ("failed: x", 500)
    assert line["exception"].endswith("ValueError: wrong")
