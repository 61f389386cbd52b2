"""The shapes of calls of cuDNN, which makes a plan for every shape. A plan takes 45 to 90 ms, longer than most calls.

Causal squares have up to 9 lengths. Rectangles have one of 5 numbers of rows, and one of 4 lengths of keys between two
powers of two. So few plans serve all prompts and cached prefixes, and an engine makes them when it starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

TOKENS = 1024
"""The lengths of squares and of keys are multiples. Smaller lengths have more plans and less for FlashAttention."""
MAX_SQUARE = 8192
"""Queries of a square, plus up to `TOKENS` keys before them. More queries are computed one square after the other."""
_MORE = 1.25
"""Maximum products of a padded square, as a multiple of the needed products.

cuDNN is 1.2 to 1.4 times as fast as FlashAttention.
"""
_MAX_PADDING = 1 / 8
"""Rows that may be added to a rectangle, as a share of its rows."""
_ROWS, _NUM_ROWS = 2**14, 5
"""Rows of the smallest rectangle, over all KV heads, and the number of sizes, each twice the one before.

A GPU with 132 multiprocessors needs 2^14 rows to be busy. The largest rectangle has 8,192 tokens of 32 query heads.
"""
_MIN_KEYS = 1 / 32
"""Remaining keys below this share of all keys are for FlashAttention. Another call would save less than its merge."""


class Plan(NamedTuple):
    """The shape of a call: queries per head and keys. Causal calls are square, and heads do not share rows."""

    num_queries: int
    num_keys: int
    causal: bool


class Piece(NamedTuple):
    """Rows or keys `[start, stop)`, padded to `length`."""

    start: int
    stop: int
    length: int


def cuts(num_queries: int, before: int) -> list[int]:
    """Cut queries behind `before` keys into squares of about the same size. Only the first has odd keys before it."""
    number = -(-num_queries // MAX_SQUARE)
    inner = [(before + num_queries * index // number) // TOKENS * TOKENS - before for index in range(1, number)]
    return [0, *inner, num_queries]


def square(num_queries: int, num_odd: int) -> tuple[int, int] | None:
    """Choose the square of queries and their own keys.

    Args:
        num_odd: keys before the queries, less than `TOKENS`, which the square may contain. Rows for them are added.

    Returns:
        the number of added keys, `num_odd` or 0, and the length. None if too much would be padding.
    """
    for added in (num_odd, 0):
        length = _rounded_up(num_queries + added, TOKENS)
        if length * length <= _MORE * num_queries * (num_queries + 2 * added):
            return added, length
    return None


def row_pieces(num_rows: int, num_heads: int) -> list[Piece]:
    """Cut the rows of each KV head into pieces. Rows that remain are too few for a call."""
    sizes, pieces, start = _row_sizes(num_heads), list[Piece](), 0
    while (num_left := num_rows - start) > 0:
        above = next((size for size in sizes if size >= num_left), sizes[-1])
        if above <= num_left * (1 + _MAX_PADDING):
            size = above
        elif num_left > sizes[0]:
            size = above // 2
        else:
            break
        pieces.append(Piece(start, min(start + size, num_rows), size))
        start += size
    return pieces


def key_pieces(num_keys: int) -> list[Piece]:
    """Cut keys into pieces. Keys that remain are few."""
    pieces, start = list[Piece](), 0
    while num_keys - start >= max(TOKENS, _MIN_KEYS * num_keys):
        size = _key_size(num_keys - start)
        pieces.append(Piece(start, start + size, size))
        start += size
    return pieces


def all_plans(num_heads: int, num_readers: int, max_queries: int, max_keys: int) -> Iterator[Plan]:
    """Yield the shapes of all calls for up to `max_queries` queries that see up to `max_keys` keys.

    Args:
        num_heads: KV heads.
        num_readers: query heads per KV head.
    """
    max_queries = min(max_queries, max_keys)
    longest = min(_rounded_up(max_queries, TOKENS), MAX_SQUARE) + TOKENS
    for length in range(TOKENS, min(longest, _rounded_up(max_keys, TOKENS)) + 1, TOKENS):
        yield Plan(length, length, causal=True)
    sizes = _row_sizes(num_heads)
    num_rows = num_readers * max_queries * (1 + _MAX_PADDING)
    for num_keys in range(TOKENS, max_keys + 1, TOKENS):
        if num_keys == _key_size(num_keys):
            yield from (Plan(size, num_keys, causal=False) for size in sizes if size <= num_rows)


def _row_sizes(num_heads: int) -> list[int]:
    smallest = 1 << max(TOKENS, _ROWS // num_heads).bit_length() - 1
    return [smallest << step for step in range(_NUM_ROWS)]


def _key_size(num_keys: int) -> int:
    """Return the largest length of keys up to `num_keys`."""
    units = num_keys // TOKENS
    step = max(1, (1 << units.bit_length()) // 8)
    return units // step * step * TOKENS


def _rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step
