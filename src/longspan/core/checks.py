"""Checks of values that users give."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from longspan.errors import ParameterError

MAX_NUMBER = 1e15
"""Upper bound of options that are seconds, GiB or ratios. Larger values overflow timeouts and sizes, and JSON has no
infinity. A petabyte is 1e6 GiB, and 1e15 seconds are 32 million years.
"""


def check_number(name: str, value: object, *, may_be_infinite: bool = False) -> None:
    """Raise a ParameterError for a float that is NaN, infinite or beyond `MAX_NUMBER`. Ignore other types."""
    if isinstance(value, float) and not (abs(value) <= MAX_NUMBER or (may_be_infinite and abs(value) == math.inf)):
        raise ParameterError(name, f"must be a number of at most {MAX_NUMBER:g}, but {value:g} given", value)


def check_numbers(options: Any) -> None:  # noqa: ANN401 - any dataclass
    """Apply `check_number` to every field of a dataclass."""
    for field in fields(options):
        check_number(field.name, getattr(options, field.name))


def check_text(name: str, value: object) -> None:
    """Raise a ParameterError for a parallel spec that is neither a text nor None."""
    if not isinstance(value, str | None):
        raise ParameterError(name, f"must be a text such as '2' or 'tp2', but {value!r:.60} given", value)
