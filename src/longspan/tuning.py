"""Measurements for `longspan tune csa`: loss and time of sparse attention in random configurations (CSPS §3.2.6).

A point has several prompts of one length, with a pass key hidden in each. The answer is forced to measure the key's
probability, which changes before a greedy answer does. The likelihood of the prompt's tokens is measured, too. Points
are saved one by one. They depend on their numbers only, so a stopped run can continue.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from longspan import evals
from longspan.core.link_classes import slowest_link
from longspan.core.locations import Location, hosts_of
from longspan.core.sampling import SamplingParams, StructuredOutputsParams
from longspan.core.sparse import DropMode
from longspan.core.sparse_plan import segments_of
from longspan.cost.csa_pipeline import LinkSpeed, Rates
from longspan.cost.profile import Prefill, Profile
from longspan.errors import ParameterError
from longspan.file_errors import unread
from longspan.limits import read_text
from longspan.policy.csps.search import STEP, Configuration, Group
from longspan.policy.csps.tuned import Point
from longspan.profiling import plan
from longspan.profiling.links import time_links

if TYPE_CHECKING:
    from longspan.llm import LLM
    from longspan.model.files import ModelFiles
    from longspan.outputs import RequestOutput

LENGTHS = (1024, 1536, 2048, 3072, 4096)
DEPTHS = (0.1, 0.5, 0.9)
MIN_POINTS = 10
"""Minimum number of sparse points for a fit. A fit to few points has a large margin, so few tokens are dropped."""
_DEVIATION_TOKENS = 1024
"""Tokens of the window whose attention scores give the ratios of layers and KV heads. Time is proportional to its
square."""
_DIGITS = 3
"""Significant digits of a deviation, so that runs of one machine agree."""
_MAX_LEVELS = 3
_MAX_DROP = 0.6
_TIMED_EVERY = 3
_MAX_DRAWS = 10_000
"""Number of draws, of which the last ones are hardly ever new."""
_ANSWER_TOKENS = 24
"""Tokens of a forced answer with its end."""
_WARM_UP_TOKENS = 256
"""Tokens of the prompt whose speed predicts the time of points. Longer prompts predict better."""


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The conditions of all points of a journal.

    Attributes:
        weights: the key of the contents of the weights, since the files of a model may change.
    """

    model: str
    dtype: str
    hosts: tuple[int, ...]
    text: str
    lengths: tuple[int, ...]
    depths: tuple[float, ...] = DEPTHS
    revision: int = 3
    weights: str = ""


class Journal:
    """A file of a header and one point per line, to which measured points are appended.

    Raises:
        ValueError: the file is no journal, or has other measurements.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._path = path
        self.points: list[Point] = []
        remedy = "remove it, or give another `out`"
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} cannot be read ({error}): {remedy}") from None
        if lines and not lines[-1].endswith("\n"):
            lines.pop()  # an incomplete line of a stopped run
        try:
            first = msgspec.json.decode(lines[0], type=Header) if lines else header
            self.points += [msgspec.json.decode(line, type=Point) for line in lines[1:]]
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is no journal of longspan tune csa ({error}): {remedy}") from None
        if first != header:
            given = msgspec.structs.asdict(first).items()
            differences = ", ".join(f"{name} {value}" for name, value in given if value != getattr(header, name))
            raise ValueError(f"{path} has points of other measurements ({differences}): {remedy}")
        kept = "".join(lines) or msgspec.json.encode(header).decode() + "\n"
        path.write_text(kept, encoding="utf-8")

    def add(self, point: Point) -> None:
        self.points.append(point)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(msgspec.json.encode(point).decode() + "\n")


def text_of(llm: LLM, data: Path | None) -> evals.Text:
    """Return the text of a file, or Python's manual. Raise ValueError if the file cannot be read."""
    if data is None:
        return evals.Text.of(llm)
    try:
        return evals.Text.of(llm, read_text(data))
    except OSError as error:
        raise ParameterError("data", unread(data, error), data) from None


def header_of(llm: LLM, model: str, text: evals.Text) -> Header:
    """Return the conditions of a run. Raise ValueError if instances share no prompt, or text or model are too short."""
    facts = llm.facts
    assert facts.cluster is not None, "an engine has one"
    locations = [facts.location(instance) for instance in sorted(facts.cluster.instances, key=facts.location)]
    if len(locations) == 1:
        raise ParameterError("parallel", "must have at least 2 instances, which share prompts, but 1 given", 1)
    return Header(
        model=model,
        dtype=llm.profile_key.dtype,
        hosts=hosts_of(locations),
        text=hashlib.sha256(json.dumps(text.token_ids).encode()).hexdigest()[:16],
        lengths=lengths_for(text, llm.max_model_len),
        weights=llm.service.files.weights.parent.name,
    )


def group_of(llm: LLM, hosts: tuple[int, ...], block_size: int) -> Group:
    """Return a group with measured speeds of links, and without deviations. Other speeds are unknown.

    Raises:
        WorkerLostError: the processes that measure links do not start.
    """
    profile = Profile(profile_key=llm.profile_key)
    locations = [Location(host=host, device=rank) for rank, host in enumerate(hosts)]
    for transfer in time_links(locations, llm.profile_key.device):
        profile = profile.with_transfer(transfer)
    fit = profile.link("alltoall", len(hosts), slowest_link(locations))
    assert llm.facts.shape is not None and llm.facts.hardware is not None, "an engine knows its model and device"
    speed = LinkSpeed(llm.facts.hardware.bytes_per_s)
    if fit is not None:
        speed = LinkSpeed(fit.bytes_per_s, max(0.0, fit.start_s) / (len(hosts) - 1))
    rates = Rates(inside=speed, between=speed, pairs_per_s=1.0)
    return Group(shape=llm.facts.shape, hosts=hosts, rates=rates, block_size=block_size)


def deviations(files: ModelFiles, text: evals.Text) -> tuple[tuple[float, ...], ...]:
    """Return the standard deviation of attention scores by layer and KV head, over the keys that a query sees.

    This process computes a window of the text with the model. On CPUs it maps the weights that workers map.
    """
    import torch  # noqa: PLC0415 - tests of the journal need none
    from torch import Tensor  # noqa: PLC0415

    from longspan.attn.backends import lse_with_sinks  # noqa: PLC0415
    from longspan.model.adapter import Model  # noqa: PLC0415
    from longspan.model.step import Rows  # noqa: PLC0415
    from longspan.runtime.prompt_attention import hidden_keys, scores_by_kv_head  # noqa: PLC0415

    window = text.window(min(_DEVIATION_TOKENS, len(text.token_ids)), 0, 1)
    tokens = torch.tensor([*text.begin, *window])
    positions = torch.arange(len(tokens))
    model, found = Model(files, torch.device("cpu")), list[tuple[float, ...]]()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spec, out, of_layer = model.specs[layer], torch.empty_like(q), list[float]()
        hidden = hidden_keys(positions, positions, spec.visibility)
        num_seen = (~hidden).sum(dim=1)
        for kv_head, (heads, scores) in enumerate(scores_by_kv_head(q, k, hidden, spec)):
            sinks = model.sinks[layer][heads] if spec.has_sinks else None
            weights = (scores - lse_with_sinks(scores.logsumexp(dim=-1), sinks)[..., None]).exp()
            out[heads] = (weights @ v[kv_head].float()).to(q.dtype)
            variance = weights.square().sum(dim=-1) / num_seen - (weights.sum(dim=-1) / num_seen).square()
            of_layer.append(float(f"{variance.clamp_min(0).mean().sqrt().item():.{_DIGITS}g}"))
        found.append(tuple(of_layer))
        return out

    none = torch.empty(0, dtype=torch.int64)
    model.trunk.run(Rows(tokens=tokens, positions=positions, keep=none, rope_lengths=positions + 1), attend)
    return tuple(found)


def point_seconds(llm: LLM, text: evals.Text, lengths: Sequence[int]) -> dict[int, float]:
    """Predict the seconds of a point by length, from the speed of a short prompt and its answer."""
    members = llm.engine.config.cluster.num_instances

    def work(num_tokens: int) -> float:
        shared = members if num_tokens >= min(lengths) else 1
        task = Prefill(members=shared, exchange="alltoall", new_tokens=num_tokens, cached_tokens=0, seconds=())
        return plan.work(task, llm.info.hidden_size)

    prompt = [*text.begin, *text.window(min(_WARM_UP_TOKENS, len(text.token_ids)), 0, 1)]
    params = SamplingParams(temperature=0.0, max_tokens=_ANSWER_TOKENS, ignore_eos=True)
    for _ in range(2):  # first calls are slower
        begin = time.monotonic()
        [output] = llm.generate([prompt], params, use_tqdm=False)
        total_s = time.monotonic() - begin
    assert output.metrics.ttft_s is not None, "the request has output"
    token_s = output.metrics.ttft_s / work(len(prompt))
    answer_s = total_s - output.metrics.ttft_s
    return {length: (len(DEPTHS) + 1 / _TIMED_EVERY) * work(length) * token_s + answer_s for length in lengths}


def affordable(seconds: Mapping[int, float], budget_s: float) -> tuple[int, ...]:
    """Return the lengths whose exact points take at most half of a budget, and at least the shortest length.

    Args:
        seconds: of a point, by length, ascending.
    """
    sums = accumulate(seconds.values())
    return tuple(
        length
        for index, (length, sum_s) in enumerate(zip(seconds, sums, strict=True))
        if index == 0 or sum_s <= budget_s / 2
    )


def least_s(seconds: Mapping[int, float], lengths: Sequence[int]) -> float:
    """Predict the seconds of the fewest points for a fit, with these lengths."""
    shares = [1 / length for length in lengths]
    mean_s = sum(seconds[length] * share for length, share in zip(lengths, shares, strict=True)) / sum(shares)
    return sum(seconds[length] for length in lengths) + MIN_POINTS * mean_s


def check_enough(points: Sequence[Point], journal: Path) -> None:
    """Raise ParameterError if there are too few points for fits."""
    exact = {point.num_tokens for point in points if point.levels == 1}
    num_sparse = sum(point.levels > 1 for point in points)
    if num_sparse < MIN_POINTS:
        state = f"{len(exact)} exact points and {num_sparse} of {MIN_POINTS} sparse points"
        problem = f"is too short: {journal} has {state}: run the command again, with more minutes, to continue"
        raise ParameterError("max_minutes", problem, num_sparse)


def lengths_for(text: evals.Text, max_model_len: int) -> tuple[int, ...]:
    """Return the lengths of prompts that model and text allow. Raise ValueError if there is none."""
    longest = min(max_model_len - _ANSWER_TOKENS, len(text.token_ids))
    if longest < min(LENGTHS):
        raise ValueError(
            f"prompts have at least {min(LENGTHS)} tokens, but the text has {len(text.token_ids)} and the model takes "
            f"{max_model_len}: give a longer text by --data, or another model"
        )
    return tuple(length for length in LENGTHS if length <= longest)


def measure(
    llm: LLM,
    text: evals.Text,
    header: Header,
    points: Sequence[Point],
    group: Group,
    lengths: Sequence[int],
    *,
    continues: Callable[[], bool],
) -> Iterator[Point]:
    """Measure exact points of some lengths, then random points, without `points`, while `continues` returns True.

    Random points of lengths without an exact point are left out.

    Args:
        group: has the deviations of scores, which give the ratios.
    """
    exact = {point.num_tokens for point in points if point.levels == 1}
    for length in lengths:
        if length not in exact and continues():
            yield _point(llm, text, group, length, Configuration(1), "kv", timed=True)
            exact.add(length)
    measured = {(point.num_tokens, point.configuration, point.mode) for point in points}
    for number in range(_MAX_DRAWS):
        setting = drawn(number, header.lengths, header.hosts)
        if setting in measured or setting[0] not in exact:
            continue
        if not continues():
            return
        yield _point(llm, text, group, *setting, timed=number % _TIMED_EVERY == 0)
        measured.add(setting)


def drawn(number: int, lengths: Sequence[int], hosts: Sequence[int]) -> tuple[int, Configuration, DropMode]:
    """Draw the length and configuration of a point, with a bias to short prompts and low drop ratios.

    Only keys and values are dropped: dropped queries save less for the same loss (`benchmarks/csa.py quality`).
    """
    rng = random.Random(f"csa {number}")
    [length] = rng.choices(lengths, [1 / length for length in lengths])
    max_levels = min(_MAX_LEVELS, len(segments_of(len(hosts), hosts, _MAX_LEVELS)) + 1)
    levels = rng.randint(2, max_levels)
    drop = round(round(_MAX_DROP * rng.random() ** 1.5 / STEP) * STEP, 2)
    return length, Configuration(levels, drop), "kv"


def settings_of(group: Group, configuration: Configuration, mode: DropMode) -> str:
    """Return the settings of a configuration as JSON for the policy."""
    if configuration.levels == 1:
        return "off"
    table = group.table(configuration)
    by_level = {
        level: [[ratios[level - 2] for ratios in heads] for heads in table]
        for level in range(2, configuration.levels + 1)
    }
    return json.dumps({"levels": configuration.levels, "drop": by_level, "drop_mode": mode})


def _point(
    llm: LLM, text: evals.Text, group: Group, length: int, configuration: Configuration, mode: DropMode, *, timed: bool
) -> Point:
    llm.service.update_policy({"csa": settings_of(group, configuration, mode)})
    needles = evals.needles(llm, text, length, depths=DEPTHS, num_samples=len(DEPTHS), seed=0)
    needles = needles[:: len(DEPTHS) + 1]  # one at each depth, each in another window of the text
    params = [_forced(needle.key) for needle in needles]
    outputs = llm.generate([needle.prompt for needle in needles], params, use_tqdm=False)
    answers = [_answer(llm, needle.key, output) for needle, output in zip(needles, outputs, strict=True)]
    windows = [evals.scored(len(output.prompt_token_ids) + 1, output) for output in outputs]
    likelihoods = [window.negative_log_likelihoods() for window in windows]
    ttft_s, attention_s = _times(llm, needles[0].prompt) if timed else (None, None)
    return Point(
        num_tokens=length,
        levels=configuration.levels,
        drop=configuration.drop,
        mode=mode,
        scores=tuple(score for score, _ in answers),
        num_found=sum(is_found for _, is_found in answers),
        nll=tuple(map(statistics.fmean, likelihoods)),
        ttft_s=ttft_s,
        attention_s=attention_s,
    )


def _times(llm: LLM, prompt: list[int]) -> tuple[float | None, float]:
    """Return the time to first token, and the sum of the attention seconds of all ranks."""
    before = _attention_s(llm)
    [output] = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
    return output.metrics.ttft_s, _attention_s(llm) - before


def _attention_s(llm: LLM) -> float:
    return math.fsum(times.get("attention", 0.0) for times in llm.worker_times())


def _forced(key: str) -> SamplingParams:
    form = StructuredOutputsParams(choice=[f" {key}"])
    return SamplingParams(
        temperature=0.0, max_tokens=_ANSWER_TOKENS, logprobs=0, prompt_logprobs=0, structured_outputs=form
    )


def _answer(llm: LLM, key: str, output: RequestOutput) -> tuple[float, bool]:
    """Return the probability of a key after a blank, and whether each of its tokens is the most likely token.

    The probability of the blank itself is ignored, since it is independent of the key.
    """
    [answer], num_tokens = output.outputs, len(llm.tokenize(f" {key}", add_special_tokens=False))
    assert answer.logprobs is not None, "they were requested"
    entries = [by_token[token] for token, by_token in zip(answer.token_ids, answer.logprobs, strict=True)][:num_tokens]
    of_key = (entry.logprob for entry in entries if (entry.decoded_token or "").strip())
    return math.exp(math.fsum(of_key)), all(entry.rank == 1 for entry in entries)
