"""Files of settings of sparse attention: YAML for users, JSON for the policy; and tuned files, which are JSON."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import yaml

from longspan.core.sparse import is_tuned
from longspan.errors import ParameterError
from longspan.limits import read_bytes

AUTO = "auto"
"""Stands for the tuned file of the model that comes with the package."""
_FORMS = "is off, auto, or a file of settings"


def csa_settings(name: str, model: str) -> str:
    """Returns what a file says as JSON; `off`, and JSON itself, as they are. Of a tuned file points are left out.

    Raises:
        ParameterError: when it cannot be read, or is neither YAML with names and values nor a tuned file; for `auto`
            when none comes with the package.
    """
    if name == "off" or name.lstrip().startswith("{"):
        return name
    content = _tuned_for(model) if name == AUTO else _content(name)
    if is_tuned(content):
        from longspan.policy.csps.tuned import Tuned  # noqa: PLC0415 - numpy, which the command line needs only here

        try:
            return Tuned.from_json(content).brief.to_json(indent=0)
        except ValueError as error:
            raise ParameterError("csa", f"{_FORMS}, but {name} is {error}", name) from None
    try:
        settings = yaml.safe_load(content)
    except yaml.YAMLError as error:
        problem = f"{_FORMS}, but {name} is no YAML: {' '.join(str(error).split())}"
        raise ParameterError("csa", problem, name) from None
    if not isinstance(settings, dict):
        raise ParameterError("csa", f"{name} has no settings, such as levels: 3 and drop: 0.2", name)
    try:
        return json.dumps(settings)
    except (TypeError, ValueError) as error:  # YAML has dates, and values that contain themselves
        problem = f"{_FORMS}, but {name} has values that are none of settings: {error}"
        raise ParameterError("csa", problem, name) from None


def _content(name: str) -> str:
    try:
        return read_bytes(Path(name)).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        words = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ParameterError("csa", f"{_FORMS}, but {name} cannot be read: {words}", name) from None


def _tuned_for(model: str) -> str:
    """Reads the tuned file of a model, by the last part of its name."""
    name = Path(model).name.lower().removesuffix("-instruct")
    file = files("longspan.policy.csps") / "data" / f"{name}.json"
    if not file.is_file():
        problem = (
            f"auto has no tuned file for {model}: make one with longspan tune csa {model} --max-minutes 30 --out "
            f"{name}.json, and give that by csa"
        )
        raise ParameterError("csa", problem, AUTO)
    return file.read_text(encoding="utf-8")
