"""The answer of a search: candidates in order, their front, why each lost, and a comparison with the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from longspan.cost import catalog
from longspan.planner.candidates import Candidate
from longspan.planner.ranking import Scored, interval, order_key
from longspan.planner.values import Interval, ModelError, Question, Ranked

_NO_BASELINE = "No static layout with chunked was simulated, so the winner has no baseline"


def ranked_of(
    ordered: Sequence[Scored], question: Question, command: Callable[[Candidate], str]
) -> tuple[tuple[Ranked, ...], Ranked | None, Ranked | None, tuple[str, ...]]:
    """Return all simulated candidates, the winner, the baseline, and sentences about the choice.

    The winner and the baseline have at most the devices of the question. The current layout may have more.

    Args:
        ordered: candidates with the longest samples first, best first.
    """
    able = [scored for scored in ordered if scored.problem is None]
    eligible = [scored for scored in able if scored.candidate.num_gpus <= question.num_gpus]
    if not eligible:
        problems = [scored for scored in ordered if scored.problem is not None]
        return (), None, None, tuple(f"{one.candidate} cannot run: {one.problem}" for one in problems[:1])
    longest = max(scored.num_requests for scored in eligible)
    final = [scored for scored in eligible if scored.num_requests == longest]
    best = min(final, key=lambda one: order_key(one, question.level, question.attainment))
    front = _front(final)
    rows = {
        scored.candidate: _ranked(scored, question, command(scored.candidate), on_front=scored in front)
        for scored in [best, *(one for one in able if one is not best)]
    }
    winner = rows[best.candidate]
    rows = {
        candidate: row if row is winner else replace(row, lost_because=_why_lost(row, winner, question))
        for candidate, row in rows.items()
    }
    static = [scored for scored in eligible if scored.candidate.is_static]
    baseline = min(
        static, key=lambda one: (-one.num_requests, order_key(one, question.level, question.attainment)), default=None
    )
    verdict = _NO_BASELINE if baseline is None else _verdict(best, baseline, question)
    return tuple(rows.values()), winner, None if baseline is None else rows[baseline.candidate], (verdict,)


def errors_of(candidate: Candidate, attention: str) -> tuple[ModelError, ...]:
    """Return the recorded errors of computed times on the candidate's kind of device, with its policy first.

    Policies without a comparison of their own run the same kernels, so all comparisons of the device count. A user's
    own device has none.
    """
    if candidate.hardware not in catalog.names("hardware"):
        return ()
    kind = candidate.hardware.partition("-")[0]
    computed, _ = catalog.errors()
    matching = [error for error in computed if (error.hardware, error.attention) == (kind, attention)]
    matching.sort(key=lambda error: candidate.policy not in error.policies)
    return tuple(ModelError(what=error.what, mean=error.mean, worst=error.worst) for error in matching)


# ---------------------------------------------------------------- rows


def _ranked(scored: Scored, question: Question, command: str, *, on_front: bool) -> Ranked:
    candidate, outcomes = scored.candidate, scored.outcomes
    price = question.prices.get(candidate.hardware)
    num_gpus = candidate.num_gpus
    return Ranked(
        candidate=candidate,
        num_gpus=num_gpus,
        price_per_hour=None if price is None else price * num_gpus,
        goodput_per_s=interval([outcome.goodput_per_s for outcome in outcomes], low=0.0),
        tokens_per_s_per_gpu=interval([outcome.tokens_per_s / num_gpus for outcome in outcomes], low=0.0),
        ttft_p99_s=_interval_of([outcome.ttft_p99_s for outcome in outcomes]),
        tbt_p99_s=_interval_of([outcome.tbt_p99_s for outcome in outcomes]),
        bound_ratios=scored.bound_ratios,
        attainment=interval([outcome.attainment for outcome in outcomes], low=0.0, high=1.0),
        meets=scored.attainment >= question.attainment,
        on_front=on_front,
        command=command,
        lost_because="",
        num_requests=scored.num_requests,
    )


def _interval_of(values: Sequence[float | None]) -> Interval | None:
    present = [value for value in values if value is not None]
    return interval(present, low=0.0) if present and len(present) == len(values) else None


def _front(final: Sequence[Scored]) -> list[Scored]:
    """Return the candidates that no other is at least as good as in cost, goodput and latencies."""

    def numbers(scored: Scored) -> tuple[float, ...]:
        times = (scored.mean_p99_s("ttft_p99_s"), scored.mean_p99_s("tbt_p99_s"))
        return (scored.cost, -scored.goodput_per_s, *(float("inf") if time is None else time for time in times))

    def dominates(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
        return one != other and all(first <= second for first, second in zip(one, other, strict=True))

    values = [numbers(scored) for scored in final]
    return [scored for scored, own in zip(final, values, strict=True) if not any(dominates(one, own) for one in values)]


# ---------------------------------------------------------------- words


def _why_lost(row: Ranked, winner: Ranked, question: Question) -> str:
    """Return one clause with a number."""
    if row.num_gpus > question.num_gpus:
        return f"takes {row.num_gpus} devices, more than the {question.num_gpus} of the question"
    if winner.meets and not row.meets:
        return _missed(row)
    cost, least = question.cost(row.candidate), question.cost(winner.candidate)
    if winner.meets and cost > least:
        return f"takes {cost:.4g} {'per hour' if question.prices else 'devices'} instead of {least:.4g}"
    mine, best = row.goodput_per_s.mean, winner.goodput_per_s.mean
    if mine < 0.995 * best:
        return f"{mine:.3g} good requests/s instead of {best:.3g}"
    times = (("TTFT", row.ttft_p99_s, winner.ttft_p99_s), ("TBT", row.tbt_p99_s, winner.tbt_p99_s))
    late = [
        f"P99 {name} of {own.mean:.3g} s instead of {other.mean:.3g} s, at equal goodput"
        for name, own, other in times
        if own is not None and other is not None and own.mean > other.mean
    ]
    if row.num_requests < winner.num_requests:
        late.append(
            f"behind others after {row.num_requests:,} requests, with an attainment of {row.attainment.mean:.1%}"
        )
    return late[0] if late else f"equal within {abs(best - mine) / best if best else 0:.1%} of goodput"


def _missed(row: Ranked) -> str:
    """Return the attainment, and the P99 that exceeds its bound the most."""
    text = f"{row.attainment.mean:.1%} of requests meet the level"
    ratio, name = max(((ratio, name) for name, ratio in row.bound_ratios.items()), default=(0.0, ""))
    return f"{text}, with a P99 {name} at {ratio:.3g} times its bound" if ratio > 1 else text


def _verdict(winner: Scored, baseline: Scored, question: Question) -> str:
    """Return a sentence on whether the winner beats the best static layout with policy `chunked`."""
    name = f"the best static layout with chunked, {baseline.candidate}"
    if winner.candidate == baseline.candidate:
        return f"The winner is {name}, so no other policy beats it"
    meets = [one.attainment >= question.attainment for one in (winner, baseline)]
    gained = f"{winner.goodput_per_s:.3g} against {baseline.goodput_per_s:.3g} good requests/s"
    if meets == [True, False]:
        shares = f"{winner.attainment:.1%} against {baseline.attainment:.1%}"
        return f"The winner beats {name}: {shares} of requests meet the level"
    if all(meets) and winner.cost < baseline.cost:
        unit = "per hour" if question.prices else "devices"
        return f"The winner beats {name}: {winner.cost:.4g} instead of {baseline.cost:.4g} {unit}"
    is_better = winner.goodput_per_s > baseline.goodput_per_s
    if len(winner.outcomes) == len(baseline.outcomes) and winner.num_requests == baseline.num_requests:
        pairs = zip(winner.outcomes, baseline.outcomes, strict=True)
        gain = interval([one.goodput_per_s - other.goodput_per_s for one, other in pairs])
        gained = f"{gain.mean:+.3g} good requests/s ({gain.low:+.3g} to {gain.high:+.3g})"
        is_better = gain.low > 0
    if is_better:
        return f"The winner beats {name}: {gained}"
    times = " against ".join(map(_p99, (winner, baseline)))
    return f"The winner does not beat {name} in goodput: {gained}. P99 TTFT is {times}"


def _p99(scored: Scored) -> str:
    values = [outcome.ttft_p99_s for outcome in scored.outcomes if outcome.ttft_p99_s is not None]
    return f"{fmean(values):.3g} s" if values else "unknown"
