"""Trial compilation of grammars in a child process, which a hostile grammar may crash.

llguidance bounds most of its own work (see `LIMITS`). Two cases remain: a long chain of references overflows the
stack, and an intersection of many patterns takes exponential time.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits

LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""Limits of every matcher, here and on ranks. A lexer state takes 1 to 2 kB."""

_MAX_CPU_S = 3
_MAX_WALL_S = 60.0
_MAX_BYTES = 1 << 30
_TOO_MUCH = "it takes too much time, memory or stack to be understood: make it smaller or less nested"
_STACK_BYTES = 2 << 20
"""Ranks and servers have four times as much."""


def check(grammar: str) -> None:
    """Compile a grammar in llguidance's serialised form. Results are cached.

    Raises:
        ValueError: compilation fails, or takes too much time, memory or stack. The message is one line.
    """
    if reason := _fault(grammar):
        raise ValueError(reason)


@lru_cache(maxsize=256)
def _fault(grammar: str) -> str:
    """Return why the grammar cannot be used, or an empty text.

    Raises:
        ValueError: the trial got too little CPU time to decide. This result is not cached.
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
    reason = tried.stdout.decode(errors="replace")
    return _TOO_MUCH if tried.returncode else first_line(reason) or reason


def first_line(reason: str) -> str:
    """Return the beginning of llguidance's message on one line."""
    words = " ".join(reason.replace("<non-verbose/>", "").split())[:300]
    return "no text has this form: change it" if words in {"NoExtension", "NoExtensionBias"} else words


def main() -> None:
    """Read a grammar from stdin and write to stdout why it cannot be used. A too large grammar ends the process."""
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
