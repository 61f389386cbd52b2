"""The verb `eval`: measures whether a model finds pass keys in long prompts, and how well it predicts their tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from longspan import evals
from longspan.args import EngineArgs
from longspan.cli.options import ModelArgument, start, verb
from longspan.cli.outputs import check_writable, note, note_progress, number_table, write_result
from longspan.core.exchange import LOCAL
from longspan.core.options import Option, length_list
from longspan.errors import ParameterError
from longspan.evals import Recording, Subject
from longspan.file_errors import unread
from longspan.limits import read_bytes
from longspan.policy.group_times import times_over
from longspan.progress import MinuteLines, duration

if TYPE_CHECKING:
    from longspan.core.sampling import SamplingParams
    from longspan.evals import NeedleResult, ScoredWindow
    from longspan.llm import LLM
    from longspan.outputs import RequestOutput

_LENGTHS = (1024, 2048, 4096, 8192)
_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_MAX_SAVED_BYTES = 2**30
"""Maximum size of a file for --against, in bytes: 500 bytes for each of 2 million tokens."""


def _depth_list(text: str) -> tuple[float, ...]:
    try:
        depths = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"must be numbers with commas between, but {text!r} given") from None
    for depth in depths:
        if not 0 <= depth <= 1:
            raise ValueError(f"must be from 0 to 1, but {depth:g} given")
    return depths


@verb
def eval(  # noqa: A001 - the verb's name
    model: ModelArgument = "smollm2-135m",
    *,
    task: Annotated[
        Literal["needle", "perplexity"], Option("needle finds a pass key, perplexity predicts each token.")
    ] = "needle",
    lengths: Annotated[
        tuple[int, ...],
        Option(
            "Tokens of prompt and answer together.", metavar="N,N,...", default="1024,2048,4096,8192", read=length_list
        ),
    ] = _LENGTHS,
    depths: Annotated[
        tuple[float, ...] | None,
        Option(
            "Parts of the text before the pass key.", metavar="F,F,...", default="0,0.25,0.5,0.75,1", read=_depth_list
        ),
    ] = None,
    num_samples: Annotated[
        int, Option("Pass keys of each length and depth, or windows of each length.", minimum=1)
    ] = 4,
    save: Annotated[
        Path | None, Option("File for the log-probabilities of each token, for --against.", metavar="FILE.json")
    ] = None,
    against: Annotated[
        Path | None, Option("File that an exact run has saved, to compare with.", metavar="FILE.json")
    ] = None,
    as_json: Annotated[bool, Option("Print one JSON object and no table.", name="json")] = False,
    seed: Annotated[int, Option("Seed of the pass keys, and of dummy weights.")] = 0,
    engine: EngineArgs = EngineArgs(),
) -> None:
    """Measure a model on long prompts, made of the manual that ships with Python.

    The task needle hides pass keys at several depths and counts the greedy answers that begin with the right digits.
    The task perplexity predicts each token of some windows of the text from the previous tokens.

    To compare an approximate run with an exact run, run the exact one with --save FILE, then the other with --against
    FILE. That adds the ratio of perplexities, and the mean KL divergence of the tokens' distributions.
    """
    _check(task, engine, depths, save, against)
    exact = None if against is None else _read(against)
    with start(model, engine, seed=seed) as llm:
        evals.check_lengths(lengths, llm.max_model_len)
        subject = Subject(model=model, parallel=str(llm.engine.config.cluster), policy=llm.service.policy_settings.name)
        if task == "needle":
            result, table = _needle(llm, lengths, depths or _DEPTHS, num_samples, seed)
        else:
            num_top = 0 if save is None and against is None else evals.NUM_TOP
            windows = _score(llm, lengths, num_samples, exact, num_top=num_top)
            if save is not None:
                recording = Recording(subject=subject, windows=windows)
                write_result("--save", save, msgspec.json.encode(recording).decode())
            result, table = _perplexity(windows, exact)
    if as_json:
        print(json.dumps({"task": task, **asdict(subject), "lengths": lengths, **result}))
    else:
        print(f"{model}, parallel {subject.parallel}, policy {subject.policy}")
        Console().print(table)


def _check(
    task: str, engine: EngineArgs, depths: tuple[float, ...] | None, save: Path | None, against: Path | None
) -> None:
    """Raise ValueError for flags that exclude each other."""
    other = {"save": save, "against": against} if task == "needle" else {"depths": depths}
    for name, value in other.items():
        if value is not None:
            raise ParameterError(name, f"does not apply to --task {task}: leave it out", value)
    if engine.skip_tokenizer_init:
        raise ParameterError(
            "skip_tokenizer_init", "excludes prompts, which need a tokenizer: leave it out", value=True
        )
    if save is not None:
        check_writable("--save", save)


def _needle(
    llm: LLM, lengths: Sequence[int], depths: Sequence[float], num_samples: int, seed: int
) -> tuple[dict[str, object], Table]:
    hide = partial(evals.needles, llm, evals.Text.of(llm), depths=depths, num_samples=num_samples, seed=seed)
    needles = [hide(length) for length in lengths]
    outputs = _outputs(llm, [[needle.prompt for needle in group] for group in needles], evals.NEEDLE_PARAMS)
    answers = [
        (needle, needle.found_in(output.outputs[0].text))
        for needle, output in zip(chain.from_iterable(needles), outputs, strict=True)
    ]
    results = evals.needle_results(answers)
    score = _share(results)
    table = number_table("Pass keys found", "tokens", *(f"depth {depth:g}" for depth in depths), "all")
    for length in lengths:
        row = [result for result in results if result.length == length]
        table.add_row(f"{length:,}", *(f"{result.score:.0%}" for result in row), f"{_share(row):.0%}")
    if len(lengths) > 1:
        columns = ([result for result in results if result.depth == depth] for depth in depths)
        table.add_row("all", *(f"{_share(column):.0%}" for column in columns), f"{score:.0%}")
    return {"results": [asdict(result) for result in results], "score": score}, table


def _share(results: Sequence[NeedleResult]) -> float:
    return sum(result.num_found for result in results) / sum(result.num_samples for result in results)


def _score(
    llm: LLM, lengths: Sequence[int], num_samples: int, exact: Recording | None, *, num_top: int
) -> list[ScoredWindow]:
    cut = partial(evals.perplexity_prompts, evals.Text.of(llm), num_samples=num_samples)
    prompts = [cut(length) for length in lengths]
    if exact is not None:
        evals.check_same_windows(exact, list(chain.from_iterable(prompts)))
    outputs = _outputs(llm, prompts, evals.perplexity_params(num_top=num_top))
    of_each = chain.from_iterable([length] * num_samples for length in lengths)
    return [evals.scored(length, output) for length, output in zip(of_each, outputs, strict=True)]


def _perplexity(windows: Sequence[ScoredWindow], exact: Recording | None) -> tuple[dict[str, object], Table]:
    lengths = dict.fromkeys(window.length for window in windows)
    of_each = {length: [window for window in windows if window.length == length] for length in lengths}
    results = [{"length": length, **_perplexity_of(group, exact)} for length, group in of_each.items()]
    result = _perplexity_of(windows, exact)
    compared = {} if exact is None else {"against": asdict(exact.subject)}
    columns = ("KL, nats", "to exact") if exact is not None else ()
    table = number_table("Perplexity", "tokens", "predicted", "perplexity", *columns)
    for length, row in [*((f"{row['length']:,}", row) for row in results), *([("all", result)] if results[1:] else [])]:
        compared_to = (f"{row['kl']:.3g}", f"{row['perplexity_ratio']:.6g}") if exact is not None else ()
        table.add_row(length, f"{row['num_tokens']:,}", f"{row['perplexity']:.6g}", *compared_to)
    return {"results": results, **result, **compared}, table


def _perplexity_of(windows: Sequence[ScoredWindow], exact: Recording | None) -> dict[str, float]:
    num_tokens = sum(len(window.logprobs) for window in windows)
    compared = {} if exact is None else asdict(evals.compare(exact.windows, windows))
    return {"num_tokens": num_tokens, "perplexity": evals.perplexity(windows), **compared}


# ---------------------------------------------------------------- engine and files


def _outputs(llm: LLM, groups: Sequence[Sequence[list[int]]], params: SamplingParams) -> Iterator[RequestOutput]:
    """Yield the outputs in order. Prompts of a group run together. A progress bar counts finished prompts."""
    for prompt in chain.from_iterable(groups):
        llm.check(prompt, params)
    total, num_done = sum(map(len, groups)), 0
    left = [len(prompt) for prompt in chain.from_iterable(groups)]
    note(f"{total} prompts with {sum(left):,} tokens{_expected(llm, left)}")
    lines = MinuteLines("eval", note_progress)
    with tqdm(total=total, desc="prompts", unit="prompt", dynamic_ncols=True, disable=None) as bar:
        for group in groups:
            for output in llm.generate_each(group, [params] * len(group), use_tqdm=False):
                bar.update()
                num_done += 1
                lines.update(sum(left[:num_done]) / sum(left), f"{num_done} of {total} prompts")
                yield output


def _expected(llm: LLM, lengths: Sequence[int]) -> str:
    """Return the expected time of prompts on single instances, in words, if the machine was profiled."""
    times = times_over(llm.facts, "same_host").get((1, LOCAL))
    if times is None:
        return ""
    expected_s = sum(times.seconds(length) for length in lengths) / llm.engine.config.cluster.num_instances
    return f", about {duration(expected_s)} by the profile"


def _read(path: Path) -> Recording:
    try:
        return msgspec.json.decode(read_bytes(path, _MAX_SAVED_BYTES), type=Recording)
    except OSError as error:
        raise ParameterError("against", unread(path, error), path) from None
    except msgspec.DecodeError as error:
        problem = f"{str(path)!r} must be a file that --save wrote, but {error}"
        raise ParameterError("against", problem, path) from None
