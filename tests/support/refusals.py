"""The law of errors about arguments: each names its parameter and a remedy. No test compares whole sentences."""

from __future__ import annotations

import re

import pytest

_ACTIONS = (
    "add|allow|ask|call|change|check|choose|describe|do|drop|enable|flatten|free|give|increase|install|join|keep|leave|lower|make"
    "|measure|name|pass|put|raise|reduce|remove|replace|restart|run|select|send|set|shorten|split|start|stop|train|use|wait|write"
)
_BOUNDS = (
    r"must(?: not)? \w+|(?:can|may) (?:only )?be|at (?:most|least)|(?:more|less) than|needs?|(?:options|known) are"
    r"|look like|exceeds|is an? (?:whole number|number|text)|one of|neither|either|available|instead of|such as"
)
REMEDY = re.compile(rf"(?:^|[:;,.(] ?|\b(?:or|and|then) )(?:{_ACTIONS})\b|\b(?:{_BOUNDS})\b")
"""An action in the place of an imperative: at the beginning, behind a punctuation mark or behind "or". Else bounds."""

LACKING = re.compile(r"cannot be (?:used|written as JSON): |is not UTF-8: ")
"""Errors that end with a library's message about a form or a file. Errors may leave the list, and none may join it."""


def refused(*parameters: str) -> pytest.RaisesExc[ValueError]:
    """Expect an error about a parameter, or option of a policy, that states a remedy. Possible values are one, too."""

    def is_lawful(error: ValueError) -> bool:
        named = getattr(error, "parameter", None)
        assert named in {None, "policy_options", *parameters}, f"{error} is about another parameter"
        assert any(name in str(error) for name in parameters), f"{error} does not name {parameters}"
        assert REMEDY.search(str(error)) or LACKING.search(str(error)), f"no remedy in: {error}"
        return True

    return pytest.raises(ValueError, check=is_lawful)
