"""The law of errors about arguments: each names its parameter and a remedy. No test compares whole sentences."""

from __future__ import annotations

import re

import pytest

REMEDY = re.compile(
    r"\b(must|can be|is (one of|for|off)|exceeds|there (is|are)|known are|needs?|use|choose|give|allow|leave|make|run"
    r"|measure|remove|shorten|set|put|start|ask|add|wait|keep|train|install|join|call)\b"
)


def refused(*parameters: str) -> pytest.RaisesExc[ValueError]:
    """Expect an error about one of these parameters, with a remedy. The empty name is for errors about none."""

    def is_lawful(error: ValueError) -> bool:
        parameter = getattr(error, "parameter", None) or ""
        assert parameter in parameters, f"{error} is about {parameter or 'no parameter'}"
        assert parameter in str(error) and REMEDY.search(str(error)), f"no remedy in: {error}"
        return True

    return pytest.raises(ValueError, check=is_lawful)
