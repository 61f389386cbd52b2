"""Files of settings of sparse attention: YAML for users, JSON for the policy."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from longspan.errors import ParameterError


def csa_settings(name: str) -> str:
    """Returns what a file says as JSON; `off`, and JSON itself, as they are.

    Raises:
        ParameterError: when it cannot be read, or is no YAML with names and values.
    """
    if name == "off" or name.lstrip().startswith("{"):
        return name
    try:
        settings = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        words = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ParameterError("csa", f"is off or a file of settings, but {name} cannot be read: {words}", name) from None
    except yaml.YAMLError as error:
        problem = f"is off or a file of settings, but {name} is no YAML: {' '.join(str(error).split())}"
        raise ParameterError("csa", problem, name) from None
    if not isinstance(settings, dict):
        raise ParameterError("csa", f"{name} has no settings, such as levels: 3 and drop: 0.2", name)
    return json.dumps(settings)
