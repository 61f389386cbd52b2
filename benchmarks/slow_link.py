"""Measure how micro-partitions hide the time of a slow link, with two real ranks in network namespaces.

    python benchmarks/slow_link.py [--gigabits 1] [--pieces 1 2 4 8] [--rounds 3] [--trace FILE] [--require]

Each rank is in its own network namespace (`tools/hosts.py`). Links of limited speed connect them. That needs root on
Linux, with `ip` and `tc`. Otherwise the script prints the reason and exits with 0. It measures the TTFT of one prompt,
alternately with exact attention and with sparse attention in each number of micro-partitions. It compares these times
with the predictions of the pipeline simulator of Eq. 6 and 7 (`cost/csa_pipeline.py`). The simulator's speeds are
measured by exact runs over the unlimited link, and the slow link has its nominal speed. `--trace` writes a timeline for
https://ui.perfetto.dev. With `--require`, the exit code is 1 if a prediction is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table
from traced_rank import Slice

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from host_ranks import llm_on
from hosts import Host, network_hosts, why_not

from longspan import LLM, SamplingParams, evals
from longspan.cost.csa_pipeline import LinkSpeed, Rates, member_works, whole_prompt
from longspan.cost.shape import ModelShape
from longspan.policy.csps.search import Configuration, Group

_MAX_ERROR = 0.15
_RANK = Path(__file__).with_name("traced_rank.py")


def main() -> int:
    """Measure and predict times, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--gigabits", type=float, default=1.0)
    parser.add_argument("--pieces", type=int, nargs="+", default=(1, 2, 4, 8))
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--drop", type=float, default=0.3)
    parser.add_argument("--drop-mode", choices=("kv", "qkv"), default="kv")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--require", action="store_true")
    args = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    with network_hosts(2) as hosts:
        return _measure(args, hosts)


def _measure(args: argparse.Namespace, hosts: Sequence[Host]) -> int:
    if args.trace:
        os.environ["LONGSPAN_TRACE"] = str(args.trace.absolute())
    pieces = {f"{number} pieces": number for number in args.pieces}
    with llm_on(hosts, script=_RANK)(
        args.model,
        dtype="bfloat16",
        parallel="2",
        policy="csps",
        policy_options={"threshold": "512"},
        threads_per_rank=1,
        record_times=True,
        enable_prefix_caching=False,
    ) as llm:
        text = evals.Text.of(llm)
        prompt = text.window(args.prompt, 0, 1)
        ask = partial(_first_token_s, llm, prompt)
        quick, attention = [], []
        for number in range(args.rounds + 1):  # the first is a warm-up
            before = _seconds(llm, "attention")
            quick.append(ask("off"))
            attention.append([now - then for now, then in zip(_seconds(llm, "attention"), before, strict=True)])
            del quick[: number == 0], attention[: number == 0]
        for host in hosts:
            host.limit(args.gigabits)
        names_of = ["exact", *pieces]
        ttfts_s: dict[str, list[float]] = {name: [] for name in names_of}
        waits: dict[str, list[float]] = {name: [] for name in names_of}
        for number in track(range(args.rounds + 1), "measuring", console=Console(stderr=True)):
            for name in names_of:
                before = _seconds(llm, "messages")
                ttft_s = ask(_settings(args, pieces[name]) if name in pieces else "off")
                if number:
                    ttfts_s[name].append(ttft_s)
                    each = zip(_seconds(llm, "messages"), before, strict=True)
                    waits[name].append(statistics.mean(now - then for now, then in each))
        shape = llm.info.shape(2)
        block_size = llm.engine.config.block_size
    attention_s = [statistics.median(seconds) for seconds in zip(*attention, strict=True)]
    group = _group(shape, block_size, args, statistics.median(quick), attention_s)
    table = Table(title=f"{args.prompt} tokens on 2 ranks, {args.gigabits:g} Gb/s between them", title_justify="left")
    for column in ("", "TTFT over exact", "predicted", "off by", "waits, of TTFT"):
        table.add_column(column, justify="right")
    exact_s, worst = statistics.median(ttfts_s["exact"]), 0.0
    for name in names_of:
        levels = Configuration(2, args.drop, (pieces[name],)) if name in pieces else Configuration(1)
        ttft_s, predicted_s = statistics.median(ttfts_s[name]), group.ttft_s(args.prompt, levels)
        off = predicted_s / ttft_s - 1
        worst = max(worst, abs(off))
        waited = statistics.median(waits[name]) / ttft_s
        table.add_row(name, f"{ttft_s / exact_s:.3f}", f"{predicted_s / exact_s:.3f}", f"{off:+.1%}", f"{waited:.1%}")
    Console(width=100).print(table)
    if args.trace:
        _join(args.trace, len(hosts))
    return int(args.require and worst > _MAX_ERROR)


def _first_token_s(llm: LLM, prompt: list[int], csa: str) -> float:
    llm.service.update_policy({"csa": csa})
    [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert output.metrics.ttft_s is not None, "it has a token"
    return output.metrics.ttft_s


def _settings(args: argparse.Namespace, pieces: int) -> str:
    drop = {"levels": 2, "drop": args.drop, "drop_mode": args.drop_mode, "micro_partitions": pieces}
    return json.dumps(drop)


def _seconds(llm: LLM, category: str) -> list[float]:
    return [times.get(category, 0.0) for times in llm.worker_times()]


def _group(
    shape: ModelShape, block_size: int, args: argparse.Namespace, ttft_s: float, attention_s: Sequence[float]
) -> Group:
    """Return the simulator's settings. Attention's seconds give pairs per second, and all other seconds `rest_s`."""
    hosts, partition = (0, 1), -(-args.prompt // (2 * block_size)) * block_size
    runs = whole_prompt(args.prompt, partition, len(hosts))
    works = member_works(None, runs, runs, hosts, shape)
    pairs = sum(sum(work.by_piece.values()) for work in works) * shape.num_layers
    link = LinkSpeed(args.gigabits * 1e9 / 8, 1e-4)
    rest_s = (ttft_s - max(attention_s)) / args.prompt
    rates = Rates(inside=link, between=link, pairs_per_s=pairs / sum(attention_s), rest_s=rest_s)
    return Group(shape=shape, hosts=hosts, rates=rates, mode=args.drop_mode, block_size=block_size)


def _join(trace: Path, num_ranks: int) -> None:
    """Write the slices of all ranks as one timeline."""
    events: list[dict[str, object]] = []
    for rank in range(num_ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        file = Path(f"{trace}.rank{rank}")
        for number, part in enumerate(msgspec.json.decode(file.read_bytes(), type=list[Slice])):
            common = {"name": part.name, "cat": part.kind, "pid": rank, "tid": 0, "ts": part.start_s * 1e6}
            if part.kind == "work":
                events.append({**common, "ph": "X", "dur": (part.stop_s - part.start_s) * 1e6})
            else:  # transfers overlap each other
                events.append({**common, "ph": "b", "id": number})
                events.append({**common, "ph": "e", "id": number, "ts": part.stop_s * 1e6})
        file.unlink()
    trace.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
