"""Recent prompts and answers, from which `auto` expects the next ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median

import msgspec

from longspan.policy.traffic import NUM_LENGTHS, Traffic

_NUM_PROMPTS = 128
"""Rates are means over this many prompts. More give steadier rates, which follow a change of the load later. The error
of a rate is about a tenth.
"""
_PROMPTS_PER_RECORD = 64
"""The record of traffic is renewed after this many further prompts."""
_PROMPTS_PER_MEDIAN = 8
"""Medians are computed after this many further prompts, since sorting takes time."""
_FIRST_ANSWER, _NUM_ANSWERS = 200.0, 20
"""Expected tokens of an answer before any has ended, and the number of answers in the moving average."""
_LONG = 4.0
"""The mean prompt takes more than this multiple of the median if a few long prompts take most of the time."""
MAX_BUSY = 0.9
"""Upper bound for the busy fraction of instances: expected waits grow with 1 / (1 - fraction)."""


class History:
    """Statistics of the last prompts and answers.

    Attributes:
        usual_s, usual_fastest_s: median seconds of recent prompts on one instance, and on their fastest groups.
        answer_tokens: expected tokens of an answer.
        traffic: a record of the requests, renewed from time to time. The first one is that of an earlier server.

    Args:
        token_s: seconds of a decode step with a single request.
    """

    def __init__(self, token_s: float, traffic: Traffic | None = None) -> None:
        self._token_s = self.usual_s = self.usual_fastest_s = token_s
        self.answer_tokens = _FIRST_ANSWER
        self._prompts: deque[tuple[float, float, float]] = deque(maxlen=_NUM_PROMPTS)
        self._total_s, self._num_added, self._num_answers = 0.0, 0, 1
        self.traffic = traffic
        self._lengths = deque(() if traffic is None else traffic.lengths, maxlen=NUM_LENGTHS)
        if traffic is not None and traffic.answer_tokens is not None:
            self.answer_tokens, self._num_answers = traffic.answer_tokens, _NUM_ANSWERS

    @property
    def answer_s(self) -> float:
        """Seconds of an expected answer that decodes alone."""
        return self.answer_tokens * self._token_s

    @property
    def has_long_prompts(self) -> bool:
        """Whether most of the work is in prompts that are much longer than the usual one."""
        return self._total_s > _LONG * self.usual_s * len(self._prompts)

    def expect(self, seconds: Callable[[int], tuple[float, float]]) -> None:
        """Expect prompts as before a restart. `seconds` returns those of one instance and of the fastest group."""
        if self._lengths:
            singles, fastest = zip(*map(seconds, self._lengths), strict=True)
            self.usual_s, self.usual_fastest_s = median(singles), median(fastest)

    def add_prompt(self, arrival_s: float, single_s: float, fastest_s: float, num_tokens: int) -> None:
        """Count a prompt with this number of tokens to compute, by its seconds as in `expect`."""
        prompts = self._prompts
        self._lengths.append(num_tokens)
        if len(prompts) == _NUM_PROMPTS:
            self._total_s -= prompts[0][1]
        prompts.append((arrival_s, single_s, fastest_s))
        self._total_s += single_s
        self._num_added += 1
        if self._num_added % _PROMPTS_PER_RECORD == 0:
            kept = {"lengths": tuple(self._lengths), "answer_tokens": self.answer_tokens}
            self.traffic = msgspec.structs.replace(self.traffic or Traffic(), **kept)
        if self._num_added < _PROMPTS_PER_MEDIAN or self._num_added % _PROMPTS_PER_MEDIAN == 0:
            self.usual_s = median([single for _, single, _ in prompts])
            self.usual_fastest_s = median([fastest for _, _, fastest in prompts])

    def add_answer(self, num_tokens: int) -> None:
        self._num_answers = min(self._num_answers + 1, _NUM_ANSWERS)
        self.answer_tokens += (num_tokens - self.answer_tokens) / self._num_answers

    def rates(self, now_s: float) -> tuple[float, float]:
        """Return prompts per second, and the seconds of one instance that they take per second.

        The last prompt is left out. It is usually the one to place, and at the first prompt the rate is 0.
        The span of the mean is at least a usual prefill on its fastest group.
        """
        if len(self._prompts) < 2:
            return 0.0, 0.0
        span_s = max(self.usual_fastest_s, now_s - self._prompts[0][0])
        earlier_s = max(0.0, self._total_s - self._prompts[-1][1])
        return (len(self._prompts) - 1) / span_s, earlier_s / span_s
