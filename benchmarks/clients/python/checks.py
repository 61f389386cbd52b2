"""Runs the tasks of one client in this process, and prints a line of JSON for the client and for each task."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel

URL = os.environ.get("LONGSPAN_URL", "http://127.0.0.1:8000")
"""The address of the server, without `/v1`."""
BASE = f"{URL}/v1"
KEY = "none"
MODEL = "smollm2-135m"
QUESTION = "Does it rain in Rome?"
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
"""The arguments of the tool `weather`. An enum keeps the calls of a small model short."""
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}}]
"""The tool `weather` in the form of OpenAI's chats."""
FORECAST = "It rains all day."
MAX_TOKENS = 24


class Weather(BaseModel):
    """The form of structured answers: clients send its schema and parse the answer by it."""

    city: Literal["Rome", "Oslo"]
    rains: bool


def run(package: str | None, tasks: Sequence[Callable[[], None]]) -> None:
    """Run tasks one after another. A task fails by an exception. Without a package, there is no version."""
    print(json.dumps({"version": "" if package is None else version(package)}))
    for task in tasks:
        error = None
        try:
            task()
        except Exception as caught:  # noqa: BLE001 - a client may raise anything, and the table shows it
            traceback.print_exc(file=sys.stderr)
            error = f"{type(caught).__name__}: {caught}"
        print(json.dumps({"task": task.__name__.replace("_", " "), "error": error}), flush=True)


def check_city(arguments: str | dict[str, Any]) -> None:
    """Check the arguments of a call of `weather`."""
    city = (json.loads(arguments) if isinstance(arguments, str) else arguments)["city"]
    assert city in {"Rome", "Oslo"}, f"the city is {city!r}"
