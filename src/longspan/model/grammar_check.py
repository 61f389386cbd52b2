"""Whether a grammar can be taken on. It is tried out in a process of its own, which a hostile one may bring down.

llguidance bounds most of what it does by itself (see `LIMITS`), but not all: references that form a long chain overflow
the stack, and many patterns that must hold together take exponential time.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits

LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""For every matcher, here and on ranks. A state of the lexer takes 1 to 2 kB."""

_MAX_CPU_S = 3
_MAX_WALL_S = 60.0
_MAX_BYTES = 1 << 30
_STACK_BYTES = 2 << 20
"""Ranks and servers have four times as much."""


@lru_cache(maxsize=256)
def check(grammar: str) -> None:
    """Tries to make a parser of a grammar in llguidance's serialised form.

    Raises:
        ValueError: when that fails or takes too much time, memory or stack; one line that says why.
    """
    try:
        tried = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=grammar.encode(errors="surrogatepass"),
            capture_output=True,
            timeout=_MAX_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        tried = None
    if tried is None or tried.returncode:
        raise ValueError("it takes too much time, memory or stack to be understood: make it smaller or less nested")
    if reason := tried.stdout.decode(errors="replace"):
        raise ValueError(one_line(reason))


def one_line(reason: str) -> str:
    """The beginning of what llguidance says, without the line breaks of its pictures."""
    return " ".join(reason.replace("<non-verbose/>", "").split())[:300]


def main() -> None:
    """Reads a grammar from stdin and writes why it cannot be used, if so, to stdout; dies of one that is too much."""
    grammar = sys.stdin.buffer.read().decode(errors="replace")
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    trial = threading.Thread(
        target=lambda: sys.stdout.buffer.write(LLMatcher.validate_grammar(grammar, limits=LIMITS).encode())
    )
    trial.start()
    trial.join()


if __name__ == "__main__":
    main()
