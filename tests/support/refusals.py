"""The law of errors about arguments: each names its parameter and a remedy. No test compares whole sentences."""

from __future__ import annotations

import re

import pytest

REMEDY = re.compile(
    r"\b(must|can be|is (one of|none of|an?|for|off)|is neither|options are|that may change|known are|look like|such as"
    r"|cannot be used|is needed|exceeds|contradicts|ascend|there (is|are)|are|needs?|use|choose|give|allow|leave"
    r"|instead of|make|run|measure|remove|shorten|set|put|start|ask|add|wait|keep|train|install|join|call|do|flatten"
    r"|change|describe|check|convert|correct|lower|free|send|see|restart)\b"
)


def refused(*parameters: str) -> pytest.RaisesExc[ValueError]:
    """Expect an error about one of these parameters that states a remedy, which may be the possible values."""

    def is_lawful(error: ValueError) -> bool:
        assert getattr(error, "parameter", None) in {None, *parameters}, f"{error} is about another parameter"
        assert any(name in str(error) for name in parameters), f"{error} does not name {parameters}"
        assert REMEDY.search(str(error)), f"no remedy in: {error}"
        return True

    return pytest.raises(ValueError, check=is_lawful)
