"""Numbers of tokens as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

_LENGTH = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kmgtKMGT])?")
_MOST = 2**40
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def length(flag: str, text: str) -> int:
    """Reads `8192`, `8K` (8 * 1,024), `8k` (8 * 1,000), `1M` and `25.6k`, as vLLM does.

    Raises:
        ValueError: for anything else, such as a fraction of a token or of a binary unit, and for more than 2^40.
    """
    match = _LENGTH.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{flag} must be a number of tokens such as 8192, 8K (8192) or 8k (8000), but {text!r} given")
    number, unit = match[1], match[2] or ""
    factor = (1024 if unit.isupper() else 1000) ** _POWERS[unit.lower()] if unit else 1
    tokens = Fraction(number) * factor
    if ("." in number and not unit.islower()) or tokens.denominator != 1:
        raise ValueError(f"{flag} must be a whole number of tokens, but {text!r} given: 25.6k works, 25.6K does not")
    if tokens > _MOST:
        raise ValueError(f"{flag} can be at most {_MOST} tokens (1T), but {text!r} given")
    return int(tokens)
