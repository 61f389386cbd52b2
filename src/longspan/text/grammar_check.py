"""Trial compilation of grammars in a child process, which a hostile grammar may crash.

llguidance bounds most of its own work (see `LIMITS`). Two cases remain: a long chain of references overflows the
stack, and an intersection of many patterns takes exponential time.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from collections.abc import Sequence
from functools import lru_cache

from llguidance import LLMatcher, LLParserLimits

LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""Limits of every matcher, here and on ranks. A lexer state takes 1 to 2 kB."""

_MAX_CPU_S = 6
"""CPU seconds of one child process. The schemas of 200 tools of 2 kB each take 0.7 to 1.2 s on one core of a server."""
_MAX_WALL_S = 60.0
_MAX_CRASHES = 3
"""Child processes for one list of grammars. Each crash costs up to `_MAX_CPU_S`."""
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


@lru_cache(maxsize=64)  # of at most 1 MiB each
def _fault(grammar: str) -> str:
    """Return why the grammar cannot be used, or an empty text.

    Raises:
        ValueError: the trial got too little CPU time to decide. This result is not cached.
    """
    return faults([grammar])[0]


def faults(grammars: Sequence[str]) -> list[str]:
    """Compile grammars in one child process. Return why each cannot be used, or an empty text.

    A grammar that ends the process is too much, and so are the grammars after the third of these.

    Raises:
        ValueError: the trial got too little CPU time to decide.
    """
    reasons = list[str]()
    for _ in range(_MAX_CRASHES):
        if len(reasons) < len(grammars):
            reasons += _tried(grammars[len(reasons) :])
    return reasons + [_TOO_MUCH] * (len(grammars) - len(reasons))


def _tried(grammars: Sequence[str]) -> list[str]:
    """Return the faults of the first grammars, up to the grammar that ends the child process."""
    try:
        tried = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=json.dumps(grammars).encode(),
            capture_output=True,
            timeout=_MAX_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(_TOO_MUCH) from None
    reasons = [first_line(reason) or reason for reason in map(json.loads, tried.stdout.splitlines())]
    return reasons if len(reasons) == len(grammars) else [*reasons, _TOO_MUCH]


def first_line(reason: str) -> str:
    """Return the beginning of llguidance's message on one line."""
    words = " ".join(reason.replace("<non-verbose/>", "").split())[:300]
    return "no text has this form: change it" if words in {"NoExtension", "NoExtensionBias"} else words


def main() -> None:
    """Read a JSON list of grammars from stdin. Write to stdout why each cannot be used, as a JSON string per line.

    A too large grammar ends the process.
    """
    grammars = json.loads(sys.stdin.buffer.read())
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    trial = threading.Thread(target=_write_faults, args=(grammars,))
    trial.start()
    trial.join()


def _write_faults(grammars: Sequence[str]) -> None:
    for grammar in grammars:
        reason = LLMatcher.validate_grammar(grammar.encode(errors="replace").decode(), limits=LIMITS)
        sys.stdout.write(json.dumps(reason) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
