"""A trial of grammars in a process of its own, which a hostile one may bring down.

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
"""The limit of every matcher, here and on ranks. A state of the lexer takes 1 to 2 kB."""

_MAX_CPU_S = 3
_MAX_WALL_S = 60.0
_MAX_BYTES = 1 << 30
_TOO_MUCH = "it takes too much time, memory or stack to be understood: make it smaller or less nested"
_STACK_BYTES = 2 << 20
"""Ranks and servers have four times as much."""


def check(grammar: str) -> None:
    """Tries to make a parser of a grammar in llguidance's serialised form, once as long as the outcome is remembered.

    Raises:
        ValueError: when that fails or takes too much time, memory or stack; one line that says why.
    """
    if reason := _fault(grammar):
        raise ValueError(reason)


@lru_cache(maxsize=256)
def _fault(grammar: str) -> str:
    """Returns why the grammar cannot be used; empty if it can.

    Raises:
        ValueError: when the trial got too little of the CPU to tell, which is not remembered.
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
        raise ValueError(_TOO_MUCH) from None
    said = tried.stdout.decode(errors="replace")
    return _TOO_MUCH if tried.returncode else first_line(said) or said


def first_line(reason: str) -> str:
    """Returns the beginning of llguidance's message, without the line breaks of its pictures."""
    words = " ".join(reason.replace("<non-verbose/>", "").split())[:300]
    return "no text has this form: change it" if words in {"NoExtension", "NoExtensionBias"} else words


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
