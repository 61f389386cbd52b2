"""Settings of sparse attention: YAML files of users and tuned JSON files, converted to JSON for the policy."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import yaml

from longspan.core.sparse import is_tuned
from longspan.errors import ParameterError
from longspan.file_errors import unread
from longspan.limits import read_text

AUTO = "auto"
"""The setting that selects the tuned file of the model in this package."""
_FORMS = "is off, auto, or a file of settings"


def csa_settings(name: str, model: str) -> str:
    """Return the settings of a file as JSON. `off` and JSON are returned unchanged. A tuned file loses its points.

    Raises:
        ParameterError: the file cannot be read, or is neither a YAML mapping nor a tuned file, or the package has no
            tuned file for `auto`.
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
        problem = f"{_FORMS}, but {name} has values that settings cannot have: {error}"
        raise ParameterError("csa", problem, name) from None


def _content(name: str) -> str:
    try:
        return read_text(Path(name))
    except OSError as error:
        raise ParameterError("csa", f"{_FORMS}, but {unread(name, error)}", name) from None


def _tuned_for(model: str) -> str:
    """Return the tuned file of a model, by the last part of its name."""
    name = Path(model).name.lower().removesuffix("-instruct")
    file = files("longspan.policy.csps") / "data" / f"{name}.json"
    if not file.is_file():
        command = f"longspan tune csa {model} --max-minutes 30 --out {name}.json"
        problem = f"auto has no tuned file for {model}: make one with {command}, and give it by `csa`"
        raise ParameterError("csa", problem, AUTO)
    return file.read_text(encoding="utf-8")
