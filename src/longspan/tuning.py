"""Measurements for `longspan tune csa`: what sparse attention loses and takes, by random configurations (CSPS §3.2.6).

A point has some prompts of one length, with a pass key hidden in each. Its answer is forced, so that the model says how
likely the key is: that changes before a greedy answer does. The likelihood of the prompt's tokens is measured beside.
Points are written down one by one. They depend on their numbers only, so whoever was stopped goes on.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from longspan import evals
from longspan.core.cluster import hosts_of
from longspan.core.sampling import SamplingParams, StructuredOutputsParams
from longspan.core.sparse import DropMode
from longspan.core.sparse_plan import segments_of
from longspan.cost.csa_pipeline import LinkSpeed, Rates
from longspan.cost.profile import Profile
from longspan.errors import ParameterError
from longspan.limits import read_bytes
from longspan.policy.csps.search import STEP, Configuration, Group
from longspan.policy.csps.tuned import Point
from longspan.profiling.links import time_links

if TYPE_CHECKING:
    from longspan.llm import LLM
    from longspan.outputs import RequestOutput

LENGTHS = (1024, 1536, 2048, 3072, 4096)
DEPTHS = (0.1, 0.5, 0.9)
FEWEST_POINTS = 20
"""Points that make a fit, exact ones not counted."""
_MOST_LEVELS = 3
_MOST_DROP = 0.6
_TIMED_EVERY = 3
_MOST_DRAWS = 10_000
"""The draws that are tried: in the end hardly any is new."""
_MORE_TOKENS = 24
"""Room for the tokens of an answer that is forced, and its end."""


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The circumstances that all points of a journal have in common.

    Attributes:
        weights: the key of their contents: the model's folder may hold others later.
    """

    model: str
    dtype: str
    hosts: tuple[int, ...]
    text: str
    lengths: tuple[int, ...]
    depths: tuple[float, ...] = DEPTHS
    revision: int = 2
    weights: str = ""


class Journal:
    """A file with a header and a point in each line, that grows as points are measured.

    Raises:
        ValueError: for a file that is none, or of other measurements.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self.points: list[Point] = []
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read ({error}): remove it, or give another --out") from None
        if lines and not lines[-1].endswith("\n"):
            lines.pop()  # it was stopped while it wrote this one
        remedy = "remove it, or give another --out"
        try:
            first = msgspec.json.decode(lines[0], type=Header) if lines else header
            self.points += [msgspec.json.decode(line, type=Point) for line in lines[1:]]
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is no journal of longspan tune csa ({error}): {remedy}") from None
        if first != header:
            of = [
                f"{name} {one}" for name, one in msgspec.structs.asdict(first).items() if one != getattr(header, name)
            ]
            raise ValueError(f"{path} has points of other measurements ({', '.join(of)}): {remedy}")
        kept = "".join(lines) or msgspec.json.encode(header).decode() + "\n"
        path.write_text(kept, encoding="utf-8")

    def add(self, point: Point) -> None:
        self.points.append(point)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(msgspec.json.encode(point).decode() + "\n")


def text_of(llm: LLM, data: Path | None) -> evals.Text:
    """Returns the text that prompts are made of: a file's, or Python's manual.

    Raises:
        ValueError: when the file cannot be read.
    """
    begin = llm.tokenize("")
    if data is None:
        return evals.Text.of(lambda text: llm.tokenize(text, add_special_tokens=False), begin=begin)
    try:
        content = read_bytes(data).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        words = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(f"--data {str(data)!r} cannot be read: {words}") from None
    return evals.Text(token_ids=llm.tokenize(content, add_special_tokens=False), begin=begin)


def header_of(llm: LLM, model: str, text: evals.Text) -> Header:
    """Describes what is measured; raises ValueError where no prompt is shared, or text or model are too short."""
    facts = llm.facts
    assert facts.cluster is not None, "an engine has one"
    locations = [facts.location(instance) for instance in sorted(facts.cluster.instances, key=facts.location)]
    if len(locations) == 1:
        raise ParameterError("parallel", "must have 2 instances or more, since one shares no prompt, but 1 given", 1)
    return Header(
        model=model,
        dtype=llm.profile_key.dtype,
        hosts=hosts_of(locations),
        text=digest(text),
        lengths=lengths_for(text, llm.max_model_len, LENGTHS),
        weights=llm.service.files.weights.parent.name,
    )


def group_of(llm: LLM, hosts: tuple[int, ...], block_size: int) -> Group:
    """Makes a group whose speeds of links are measured, and the others unknown.

    Raises:
        WorkerLostError: when the processes between which links are measured do not start.
    """
    found = Profile(profile_key=llm.profile_key)
    for transfer in time_links(len(hosts), llm.profile_key.device):
        found = found.with_transfer(transfer)
    fit = found.link("alltoall", len(hosts))
    assert llm.facts.shape is not None and llm.facts.hardware is not None, "an engine knows its model and device"
    speed = LinkSpeed(llm.facts.hardware.bytes_per_s)
    if fit is not None:
        speed = LinkSpeed(fit.bytes_per_s, max(0.0, fit.start_s) / (len(hosts) - 1))
    rates = Rates(inside=speed, between=speed, pairs_per_s=1.0)
    return Group(shape=llm.facts.shape, hosts=hosts, rates=rates, block_size=block_size)


def check_enough(points: Sequence[Point], lengths: Sequence[int], journal: Path) -> None:
    """Raises ParameterError unless there are points enough for fits."""
    exact, sparse = ([one for one in points if (one.levels == 1) == is_exact] for is_exact in (True, False))
    if len(exact) < len(lengths) or len(sparse) < FEWEST_POINTS:
        problem = (
            f"is too short: {len(exact)} of {len(lengths)} exact points and {len(sparse)} of {FEWEST_POINTS} sparse "
            f"ones are in {journal}; run it again to go on from there, with more minutes"
        )
        raise ParameterError("max_minutes", problem, len(sparse))


def digest(text: evals.Text) -> str:
    return hashlib.sha256(json.dumps(text.token_ids).encode()).hexdigest()[:16]


def lengths_for(text: evals.Text, max_model_len: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Returns the lengths of prompts that model and text allow.

    Raises:
        ValueError: when there is none.
    """
    longest = min(max_model_len - _MORE_TOKENS, len(text.token_ids))
    found = tuple(length for length in lengths if length <= longest)
    if not found:
        raise ValueError(
            f"prompts are {min(lengths)} tokens or more, but the text has {len(text.token_ids)} and the model takes "
            f"{max_model_len}: give a longer text by --data, or another model"
        )
    return found


def measure(
    llm: LLM, text: evals.Text, header: Header, points: Sequence[Point], *, goes_on: Callable[[], bool]
) -> Iterator[Point]:
    """Measures exact points of all lengths, then random ones, while `goes_on` says so; none of those that there are."""
    known = {one.num_tokens for one in points if one.levels == 1}
    for length in header.lengths:
        if length not in known and goes_on():
            yield _point(llm, text, length, Configuration(1), "kv", timed=True)
    measured = {(one.num_tokens, one.configuration, one.mode) for one in points}
    for number in range(_MOST_DRAWS):
        what = drawn(number, header.lengths, header.hosts)
        if what in measured:
            continue
        if not goes_on():
            return
        yield _point(llm, text, *what, timed=number % _TIMED_EVERY == 0)
        measured.add(what)


def drawn(number: int, lengths: Sequence[int], hosts: Sequence[int]) -> tuple[int, Configuration, DropMode]:
    """Draws the length and configuration of a point; short prompts and few drops more often than others.

    Only keys and values are dropped: dropped queries spare less for the same loss (`benchmarks/csa.py quality`).
    """
    rng = random.Random(f"csa {number}")
    [length] = rng.choices(lengths, [1 / length for length in lengths])
    most = min(_MOST_LEVELS, len(segments_of(len(hosts), hosts, _MOST_LEVELS)) + 1)
    levels = rng.randint(2, most)
    drop = round(round(_MOST_DROP * rng.random() ** 1.5 / STEP) * STEP, 2)
    return length, Configuration(levels, drop), "kv"


def hidden_keys(llm: LLM, text: evals.Text, length: int) -> list[evals.Needle]:
    """Hides a key at each depth, each in another window of the text."""
    tokenize, count = partial(llm.tokenize, add_special_tokens=False), len(DEPTHS)
    every = evals.needles(text, tokenize, length, depths=DEPTHS, num_samples=count, seed=0)
    return every[:: count + 1]


def _point(
    llm: LLM, text: evals.Text, length: int, configuration: Configuration, mode: DropMode, *, timed: bool
) -> Point:
    settings = {"levels": configuration.levels, "drop": configuration.drop, "drop_mode": mode}
    llm.service.update_policy({"csa": json.dumps(settings) if configuration.levels > 1 else "off"})
    hidden = hidden_keys(llm, text, length)
    outputs = llm.generate([one.prompt for one in hidden], [_forced(one.key) for one in hidden], use_tqdm=False)
    answers = [_answer(llm, one.key, output) for one, output in zip(hidden, outputs, strict=True)]
    ttft_s, attention_s = _times(llm, hidden[0].prompt) if timed else (None, None)
    return Point(
        num_tokens=length,
        levels=configuration.levels,
        drop=configuration.drop,
        mode=mode,
        scores=tuple(score for score, _ in answers),
        num_found=sum(found for _, found in answers),
        nll=tuple(_nll(output) for output in outputs),
        ttft_s=ttft_s,
        attention_s=attention_s,
    )


def _times(llm: LLM, prompt: list[int]) -> tuple[float | None, float]:
    """Returns the time to the first token, and the seconds of attention of all ranks together."""
    before = _attention_s(llm)
    [output] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    return output.metrics.ttft_s, _attention_s(llm) - before


def _attention_s(llm: LLM) -> float:
    return math.fsum(times.get("attention", 0.0) for times in llm.worker_times())


def _forced(key: str) -> SamplingParams:
    form = StructuredOutputsParams(choice=[f" {key}"])
    return SamplingParams(
        temperature=0.0, max_tokens=_MORE_TOKENS, logprobs=0, prompt_logprobs=0, structured_outputs=form
    )


def _answer(llm: LLM, key: str, output: RequestOutput) -> tuple[float, bool]:
    """Returns the probability of a key behind a blank, whatever follows it, and whether each token is the likeliest.

    A model may be in doubt about the blank: that says nothing of whether it has found the key.
    """
    [answer], num_tokens = output.outputs, len(llm.tokenize(f" {key}", add_special_tokens=False))
    assert answer.logprobs is not None, "they were asked for"
    reports = [by_token[token] for token, by_token in zip(answer.token_ids, answer.logprobs, strict=True)][:num_tokens]
    of_key = (one.logprob for one in reports if (one.decoded_token or "").strip())
    return math.exp(math.fsum(of_key)), all(one.rank == 1 for one in reports)


def _nll(output: RequestOutput) -> float:
    """Returns the mean negative log-likelihood of all tokens of the prompt but the first."""
    [*likelihoods] = evals.scored(len(output.prompt_token_ids) + 1, output).negative_log_likelihoods()
    return statistics.fmean(likelihoods)
