"""Measure the quality loss and the time savings of sparse attention, compared with exact attention.

    python benchmarks/csa.py quality [--drops 0.1 0.3 ...] [--json FILE]     # some 40 minutes on two cores
    python benchmarks/csa.py speed [--drop 0.3 --drop-mode kv --equal] [--rounds 3]
    python benchmarks/csa.py decode [--drops 0.25 0.5] [--lengths 2048 4096] [--num-samples 2]

`quality` uses 4 instances on two emulated hosts. It varies the drop mode, the drop ratio of level 2, and the ratios of
further levels, which are the same or follow the rule. It measures the share of pass keys found at five depths of each
length, and perplexity and KL divergence of a window of each length. It prints the largest mean drop ratio with no key
lost and perplexity less than 1 % higher. `--json` stores each line, and skips stored ones.

`speed` measures the TTFT of a prompt of 8,000 tokens. It alternates between exact attention, levels that drop nothing,
and sparse attention. It prints the saved share of attention's seconds, divided by the saved share of its products.

`decode` decodes the tokens behind windows of a text, which are forced. It prints their perplexity relative to exact
attention, the share of the prompt's keys that a decode reads, and the time between tokens. The prompt drops tokens, and
its decodes read all of them or the kept ones (`drop_in_decode`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from longspan import LLM, RequestOutput, SamplingParams, StructuredOutputsParams, evals

_HOSTS = "2"
_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_PERPLEXITY_RATIO = 1.01
_PROMPT = 8000
_ANSWER = 64


def main() -> int:
    """Measure quality or speed, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("quality", "speed", "decode"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--parallel", default="4")
    parser.add_argument("--levels", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=(2048, 4096, 8000))
    parser.add_argument("--drops", type=float, nargs="+", default=(0.1, 0.3, 0.5, 0.7, 0.9))
    parser.add_argument("--modes", choices=("kv", "qkv"), nargs="+", default=("kv", "qkv"))
    parser.add_argument("--ratios", choices=("same", "rule"), nargs="+", default=("same", "rule"))
    parser.add_argument("--equal", action="store_true", help="drop the same ratio on all levels (speed)")
    parser.add_argument("--rate-by", choices=("layer", "head"), default="layer")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--drop", type=float, default=0.25)
    parser.add_argument("--drop-mode", choices=("qkv", "kv"), default="kv")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-samples", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["LONGSPAN_HOSTS"] = _HOSTS
    with LLM(
        args.model,
        dtype=args.dtype,
        parallel=args.parallel,
        policy="csps",
        policy_options={"threshold": "512"},
        threads_per_rank=1,
        record_times=True,
        enable_prefix_caching=False,
    ) as llm:
        return {"quality": _quality, "speed": _speed, "decode": _decode}[args.what](llm, args)


def _take(llm: LLM, args: argparse.Namespace, drop: float | dict[int, float], mode: str) -> None:
    settings = {"levels": args.levels, "drop": drop, "drop_mode": mode}
    settings |= {"rate_by": args.rate_by, "samples": args.samples}
    llm.service.update_policy({"csa": json.dumps(settings)})


def _ratios(args: argparse.Namespace, drop: float, *, is_equal: bool) -> float | dict[int, float]:
    return dict.fromkeys(range(2, args.levels + 1), drop) if is_equal else drop


# ---------------------------------------------------------------- quality


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table.

    Attributes:
        ratios: drop ratios of further levels: the `same` as level 2, or by the `rule`.
        drop: drop ratio of level 2.
    """

    mode: str
    ratios: str
    drop: float
    mean_drop_ratio: float
    attention_flops_saved_share: float
    bytes_saved_share: float
    needle: float
    perplexity_ratio: float
    kl: float


def _quality(llm: LLM, args: argparse.Namespace) -> int:
    text = evals.Text.of(llm)
    hide = partial(
        evals.needles,
        llm,
        text,
        depths=_DEPTHS,
        num_samples=args.num_samples,
        seed=0,
    )
    needles = [needle for length in args.lengths for needle in hide(length)]
    cut = partial(evals.perplexity_prompts, text, num_samples=1)
    windows = [(length, prompt) for length in args.lengths for prompt in cut(length)]
    rows = msgspec.json.decode(args.json.read_bytes(), type=list[Quality]) if _exists(args.json) else []
    exact = _score(llm, windows)
    settings = [("exact", "same", 0.0)]
    settings += list(product(args.modes, args.ratios, args.drops))
    stored = {(row.mode, row.ratios, row.drop) for row in rows}
    missing = [setting for setting in settings if setting not in stored]
    for setting in track(missing, "measuring", console=Console(stderr=True)):
        rows.append(_measured(llm, args, setting, needles, windows, exact))
        if args.json:
            args.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    rows.sort(key=lambda row: (row.mode, row.ratios, row.drop))  # exact attention first
    Console(width=120).print(_table(rows))
    for mode, ratios in product(args.modes, args.ratios):
        good = [row for row in rows if (row.mode, row.ratios) == (mode, ratios) and row.needle >= rows[0].needle]
        good = [row for row in good if row.perplexity_ratio < _PERPLEXITY_RATIO]
        best = max(good, key=lambda row: row.mean_drop_ratio, default=None)
        words = "none" if best is None else f"{best.mean_drop_ratio:.0%} of tokens (level 2: {best.drop:.0%})"
        print(
            f"{mode}, further levels by the {ratios}: the largest drop that loses no key, with perplexity less than "
            f"1 % higher: {words}; the paper has 22 %"
        )
    return 0


def _exists(path: Path | None) -> bool:
    return path is not None and path.exists()


def _measured(
    llm: LLM,
    args: argparse.Namespace,
    setting: tuple[str, str, float],
    needles: Sequence[evals.Needle],
    windows: Sequence[tuple[int, list[int]]],
    exact: Sequence[evals.ScoredWindow],
) -> Quality:
    mode, ratios, drop = setting
    if mode == "exact":
        llm.service.update_policy({"csa": "off"})
        shares, compared = (0.0, 0.0, 0.0), evals.compare(exact, exact)
    else:
        _take(llm, args, _ratios(args, drop, is_equal=ratios == "same"), mode)
        [output] = llm.generate([windows[-1][1]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        saved = llm.sparse_savings(output)
        assert saved is not None, "long prompts are shared"
        shares = saved.mean_drop_ratio, saved.attention_flops_saved_share, saved.bytes_saved_share
        compared = evals.compare(exact, _score(llm, windows))
    return Quality(
        mode=mode,
        ratios=ratios,
        drop=drop,
        mean_drop_ratio=shares[0],
        attention_flops_saved_share=shares[1],
        bytes_saved_share=shares[2],
        needle=_needle(llm, needles),
        perplexity_ratio=compared.perplexity_ratio,
        kl=compared.kl,
    )


def _needle(llm: LLM, needles: Sequence[evals.Needle]) -> float:
    outputs = llm.generate([needle.prompt for needle in needles], evals.NEEDLE_PARAMS, use_tqdm=False)
    are_found = [needle.found_in(output.outputs[0].text) for needle, output in zip(needles, outputs, strict=True)]
    return sum(are_found) / len(are_found)


def _score(llm: LLM, windows: Sequence[tuple[int, list[int]]]) -> list[evals.ScoredWindow]:
    params = evals.perplexity_params(num_top=evals.NUM_TOP)
    outputs = llm.generate([prompt for _, prompt in windows], params, use_tqdm=False)
    return [evals.scored(length, output) for (length, _), output in zip(windows, outputs, strict=True)]


def _table(rows: Sequence[Quality]) -> Table:
    table = Table(title="Quality by drop ratio", title_justify="left")
    for name in (
        *("mode", "further levels", "level 2", "mean"),
        *("products saved", "bytes saved", "keys found", "perplexity", "KL, nats"),
    ):
        table.add_column(name, justify="right")
    for row in rows:
        shares = (row.mean_drop_ratio, row.attention_flops_saved_share, row.bytes_saved_share, row.needle)
        cells = (row.mode, row.ratios, f"{row.drop:.0%}", *(f"{share:.0%}" for share in shares))
        table.add_row(*cells, f"{row.perplexity_ratio:.4f}", f"{row.kl:.2g}")
    return table


# ---------------------------------------------------------------- speed


def _speed(llm: LLM, args: argparse.Namespace) -> int:
    text = evals.Text.of(llm)
    prompt, params = text.window(_PROMPT, 0, 1), SamplingParams(temperature=0, max_tokens=1)
    names = ("exact", "nothing dropped", "sparse")
    ttft_s: dict[str, list[float]] = {name: [] for name in names}
    attention_s: dict[str, list[float]] = {name: [] for name in names}
    saved = None
    for number in track(range(args.rounds + 1), "measuring", console=Console(stderr=True)):
        for name in names:
            if name == "exact":
                llm.service.update_policy({"csa": "off"})
            else:
                ratios = _ratios(args, args.drop, is_equal=args.equal) if name == "sparse" else {}
                _take(llm, args, ratios, args.drop_mode)
            before = _attention_s(llm)
            [output] = llm.generate([prompt], params, use_tqdm=False)
            if number:  # the first prompt of each is a warm-up
                assert output.metrics.ttft_s is not None, "it has a token"
                ttft_s[name].append(output.metrics.ttft_s)
                attention_s[name].append(_attention_s(llm) - before)
            saved = llm.sparse_savings(output) if name == "sparse" else saved
    assert saved is not None, "the prompt is shared"
    print(f"{_PROMPT} tokens on {args.parallel}, {args.drop_mode}, level 2 drops {args.drop:.0%}: {saved}")
    for name in names[:2]:
        attended = statistics.median(attention_s["sparse"]) / statistics.median(attention_s[name])
        ratio = statistics.median(ttft_s["sparse"]) / statistics.median(ttft_s[name])
        share = (1 - attended) / saved.attention_flops_saved_share
        print(
            f"over {name}: time to the first token {ratio:.2f}; {1 - attended:.0%} of attention's seconds saved, "
            f"{share:.2f} of the saved share of its products"
        )
    return 0


# ---------------------------------------------------------------- decode


def _decode(llm: LLM, args: argparse.Namespace) -> int:
    text = evals.Text.of(llm)
    windows = [
        text.window(length, index, args.num_samples) for length in args.lengths for index in range(args.num_samples)
    ]
    kinds: list[tuple[float, bool]] = [(0.0, False), *product(args.drops, (False, True))]
    table = Table(title=f"{len(windows)} answers of {_ANSWER} tokens", title_justify="left")
    for name in ("level 2 drops", "decodes drop", "keys read", "perplexity", "bytes by queries", "ms per token"):
        table.add_column(name, justify="right")
    exact = None
    for drop, stays in track(kinds, "measuring", console=Console(stderr=True)):
        settings = {"levels": args.levels, "drop": _ratios(args, drop, is_equal=args.equal), "drop_mode": "kv"}
        csa = json.dumps(settings | {"drop_in_decode": stays}) if drop else "off"
        llm.service.update_policy({"csa": csa})
        before, scores, tbt_s, read = llm.bytes_exchanged, list[float](), list[float](), 1.0
        for window in windows:
            [output] = llm.generate([window[:-_ANSWER]], _forced(llm, window), use_tqdm=False)
            scores.append(_nll(output))
            tbt_s += output.metrics.tbt_s
            saved = llm.sparse_savings(output)
            read = 1.0 if saved is None else 1 - saved.decode_reads_saved_share
        perplexity = math.exp(statistics.fmean(scores))
        exact = exact or perplexity
        kind = "ring_q_sparse" if stays else "ring_q"
        sent = llm.bytes_exchanged.get(kind, 0) - before.get(kind, 0)
        cells = f"{drop:.0%}", str(stays).lower(), f"{read:.1%}", f"{perplexity / exact:.4f}", f"{sent:,}"
        table.add_row(*cells, f"{1000 * statistics.median(tbt_s):.1f}")
    Console(width=100).print(table)
    return 0


def _forced(llm: LLM, window: list[int]) -> SamplingParams:
    """Return parameters that force the last tokens of a window as the answer."""
    tokenizer = llm.input_processor.tokenizer
    assert tokenizer is not None, "the model has one"
    form = StructuredOutputsParams(choice=[tokenizer.decode(window[-_ANSWER:])])
    return SamplingParams(temperature=0, max_tokens=_ANSWER, structured_outputs=form, logprobs=0)


def _nll(output: RequestOutput) -> float:
    """Return the mean negative log-likelihood of the answer, by the model's own logits."""
    [answer] = output.outputs
    entries = zip(answer.token_ids, answer.logprobs or (), strict=True)
    return -statistics.fmean(logprobs[token].logprob for token, logprobs in entries)


def _attention_s(llm: LLM) -> float:
    """Return the seconds of attention of all ranks since the start, without messages."""
    return sum(times.get("attention", 0.0) for times in llm.worker_times())


if __name__ == "__main__":
    sys.exit(main())
