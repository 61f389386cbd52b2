"""Measure how micro-partitions hide the time of a slow link, with two real ranks in network namespaces.

    python benchmarks/slow_link.py [--gigabits 1] [--pieces 1 2 4 8] [--rounds 3] [--trace FILE] [--require]

Each rank is in its own network namespace. A pair of virtual interfaces with limited speed connects them. That needs
root on Linux, with `ip` and `tc`. Otherwise the script prints a message and exits with 0. It measures the TTFT of one
prompt, alternately with exact attention and with sparse attention in each number of micro-partitions. It compares these
times with the predictions of the pipeline simulator of Eq. 6 and 7 (`cost/csa_pipeline.py`). The simulator's speeds are
measured by exact runs over the unlimited link, and the slow link has its nominal speed. `--trace` writes a timeline for
https://ui.perfetto.dev. With `--require`, the exit code is 1 if a prediction is off by more than 15 %.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table
from traced_rank import Slice

from longspan import LLM, SamplingParams, evals
from longspan.cost.architecture import ModelShape
from longspan.cost.csa_pipeline import LinkSpeed, Rates, member_works
from longspan.policy.csps.search import Configuration, Group
from longspan.runtime.executor.forkserver import StartWorker
from longspan.runtime.executor.processes import ProcessLauncher
from longspan.service import Service

_IP = shutil.which("ip") or ""
_LINK = "link0"
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
    with _namespaces(2) as names:
        if not names:
            print("skipped: network namespaces and their links need root on Linux, with ip and tc")
            return 0
        return _measure(args, names)


# ---------------------------------------------------------------- namespaces


@contextmanager
def _namespaces(number: int) -> Iterator[list[str]]:
    """Create network namespaces, and connect the first two. Yield their names, or none without permission."""
    names = [f"longspan-{os.getpid()}-{index}" for index in range(number)]
    made, is_able = [], bool(_IP) and shutil.which("tc") is not None and os.geteuid() == 0
    try:
        for name in names:
            is_able = is_able and _run("ip", "netns", "add", name)
            made += [name] if is_able else []
        is_able = is_able and _run(
            *f"ip link add {_LINK} netns {names[0]} type veth peer {_LINK} netns {names[1]}".split()
        )
        for index, name in enumerate(names):
            commands = (f"addr add 10.99.0.{index + 1}/24 dev {_LINK}", f"link set {_LINK} up", "link set lo up")
            is_able = is_able and all(_run("ip", "-n", name, *command.split()) for command in commands)
        yield names if is_able else []
    finally:
        for name in made:
            _run("ip", "netns", "del", name)


def _slow_down(names: Sequence[str], gigabits: float | None) -> None:
    """Limit the speed of both ends of the link, or remove the limit if `gigabits` is None."""
    for name in names:
        _run("tc", "-n", name, "qdisc", "del", "dev", _LINK, "root")
        limit = f"tc -n {name} qdisc add dev {_LINK} root tbf rate {gigabits}gbit burst 256kb latency 100ms"
        if gigabits is not None and not _run(*limit.split()):
            raise OSError("tc cannot slow the link down")


def _run(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class _Worker:
    """A rank's process in its namespace, with the interface that the controller uses."""

    def __init__(self, command: StartWorker, namespace: str) -> None:
        end, self._lifeline = os.pipe()
        with command.log.open("wb") as log:
            self._process = subprocess.Popen(
                (_IP, "netns", "exec", namespace, sys.executable, str(_RANK), str(end)),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(end,),
                env={**os.environ, "GLOO_SOCKET_IFNAME": _LINK, "OMP_NUM_THREADS": "1"},
            )
        os.close(end)
        assert self._process.stdin is not None, "asked for a pipe"
        self._process.stdin.write(msgspec.json.encode(command, enc_hook=os.fspath))
        self._process.stdin.close()
        self.pid, self._lock = self._process.pid, threading.Lock()

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(str(error)) from error

    def kill(self) -> None:
        self._process.kill()

    def destroy(self) -> None:
        self._process.kill()
        self._process.wait()


class _Launcher(ProcessLauncher):
    """Starts each rank in a namespace of its own."""

    names: Sequence[str] = ()

    def start(self, rank: int) -> _Worker:  # type: ignore[override]  # not forked, but with the same interface
        return _Worker(StartWorker(self._config, rank, self._run_dir, self._log(rank)), self.names[rank])


class _NamespaceLLM(LLM):
    make_service = partial(Service, launcher=_Launcher)


# ---------------------------------------------------------------- measurement


def _measure(args: argparse.Namespace, names: Sequence[str]) -> int:
    _Launcher.names = names
    os.environ["LONGSPAN_HOSTS"] = "2"
    if args.trace:
        os.environ["LONGSPAN_TRACE"] = str(args.trace.absolute())
    pieces = {f"{number} pieces": number for number in args.pieces}
    with _NamespaceLLM(
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
        _slow_down(names, args.gigabits)
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
        _join(args.trace, len(names))
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
    works = member_works(None, args.prompt, partition, hosts, shape)
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
