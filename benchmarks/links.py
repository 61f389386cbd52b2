"""Measure and predict the time that links of limited rate add to the first token, for each exchange.

    python benchmarks/links.py [--gigabits 1 0.2 0.05] [--prompt 4096] [--rounds 2] [--hidden] [--json FILE] [--require]

Two ranks of one thread are in network namespaces (`tools/hosts.py`), and `tbf` limits the link between them. That needs
root on Linux, with `ip` and `tc`. Otherwise the script prints the reason and exits with 0.

A prompt is computed in one step by each exchange, and on one instance. So are the last 2 % of a prompt whose other
tokens are cached on both instances, by `ring_q` and by `ring_kv`. Links without a limit and with each rate alternate.
The added time is the TTFT over a limited link minus the TTFT over the link without a limit. The cost model of `longspan
estimate` predicts both (`cost/forward.py`). Each case over the link without a limit gives its speeds of attention and
of all other work. A plain TCP stream gives the speed of each link.

The times of the first round are a profile of each link, by which policy `context` chooses among these exchanges.
With `--hidden`, the exchanges are `gather_hidden` with and without micro-partitions, and nothing is chosen.
With `--require`, the exit code is 1 for a prediction that is off by more than 15 %. So it is for a chosen exchange that
takes 5 % longer than the quickest. Differences within the spread of the measurements do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import sub
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from host_ranks import llm_on
from hosts import Host, burst_bytes, network_hosts, why_not

from longspan import LLM, RequestOutput, SamplingParams
from longspan.core.exchange import exchange_named
from longspan.core.layouts import shard_span
from longspan.core.runs import SpanShards
from longspan.cost import catalog
from longspan.cost.architecture import Architecture, from_config
from longspan.cost.catalog import Attention, Device, Efficiency, LinearCurve, Link, StreamCurve
from longspan.cost.channels import Channel, Shares, shares_of
from longspan.cost.csa_pipeline import Members
from longspan.cost.csa_price import time_share
from longspan.cost.forward import Breakdown, Roofline
from longspan.cost.profile import Prefill, Profile
from longspan.cost.roofline import Layer
from longspan.cost.step_cost import rates_of_roofline
from longspan.cost.topology import Topology

MODEL, BLOCK = "smollm2-135m", 16
_MISS = 0.02
"""The share of a partial prompt that is not cached."""
_SHORT = 512
"""Tokens of a second prompt of each profile. A fit needs two lengths."""
_MAX_ERROR, _NEAR = 0.15, 0.05
_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
_LATENCY_S = 100e-6
"""Seconds of the smallest message between two namespaces. It hardly changes the added time."""
_ENDLESS = 1e15
"""Bytes per second or per clock of memory that no operator waits for."""
_STREAM_S, _UNLIMITED = 0.3, 10.0
"""Seconds of the TCP stream that measures a link, and Gb/s for its size without a limit."""
RECEIVE = """
import socket, sys, time
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    peer, _ = server.accept()
    num_bytes, start_s = len(peer.recv(1 << 16)), time.monotonic()
    while data := peer.recv(1 << 16):
        num_bytes += len(data)
    print(num_bytes / (time.monotonic() - start_s))
"""
SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), timeout=30) as peer:
    peer.sendall(bytes(int(sys.argv[2])))
"""
Rate = float | None
"""Gb/s of each host's link, or None without a limit."""


@dataclass(frozen=True)
class Case:
    """A prompt whose time to the first token is measured.

    Attributes:
        exchange: without one, one instance computes it.
        partial: all but the last 2 % of its tokens are cached.
        micro_partitions: of `gather_hidden`.
    """

    exchange: str = ""
    partial: bool = False
    micro_partitions: int = 1

    @property
    def name(self) -> str:
        pieces = f", {self.micro_partitions} pieces" if self.micro_partitions > 1 else ""
        return f"{self.exchange or 'one instance'}{pieces}{', 2 % new' if self.partial else ''}"

    @property
    def options(self) -> dict[str, str]:
        """The options of policy `context`."""
        if not self.exchange:
            return {"threshold": "1000000"}
        return {"exchange": self.exchange, "threshold": "0", "micro_partitions": str(self.micro_partitions)}


CASES = (
    Case(),
    *map(Case, ("ring_kv", "chain", "gather_kv", "alltoall")),
    *(Case(x, True) for x in ("ring_q", "ring_kv")),
)
HIDDEN = tuple(Case("gather_hidden", micro_partitions=pieces) for pieces in (1, 4, 8))
"""The cases of `--hidden`: SP-TP with and without its pipeline. No policy chooses `gather_hidden`."""
KINDS = (False, True)
"""Whole and partial prompts."""
Samples = dict[tuple[Case, Rate], list[float]]


def main() -> int:
    """Measure and predict, and print both."""
    options = _options()
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    with network_hosts(2) as hosts:
        return _compare(hosts, options)


def _compare(hosts: Sequence[Host], options: argparse.Namespace) -> int:
    rates: list[Rate] = [None, *options.gigabits]
    load = os.getloadavg()[0]
    speeds = {rate: _bytes_per_s(hosts, rate) for rate in rates}
    profiled: Samples = {}
    samples: Samples = defaultdict(list)
    attention_s: dict[Case, list[float]] = defaultdict(list)
    with llm_on(hosts)(
        MODEL,
        dtype="bfloat16",
        parallel="2",
        policy="context",
        threads_per_rank=1,
        block_size=BLOCK,
        max_num_batched_tokens=options.prompt,
        record_times=True,
    ) as llm:
        runner = Runner(llm, hosts, options.prompt)
        for case in options.cases:  # first times are slower
            runner.times(case, None)
        for number in track(range(options.rounds), "measuring", console=Console(stderr=True)):
            for case in options.cases:
                first = number % len(rates)  # each round begins with another rate
                for rate in [*rates[first:], *rates[:first]] if case.exchange else rates[:1]:
                    seconds, attended_s = runner.times(case, rate)
                    if rate is None:
                        attention_s[case].append(attended_s)
                    if number == 0:
                        profiled[case, rate] = [seconds, runner.times(case, rate, _SHORT)[0]]
                    samples[case, rate].append(seconds)
        chosen = {}
        if not options.hidden:
            chosen = {
                (rate, partial): runner.chosen(profiled, rate, partial=partial) for rate in rates for partial in KINDS
            }
    predictions = {}
    for case in options.cases:
        if case.exchange:
            whole = replace(case, micro_partitions=1)
            predictions[case] = Prediction.of(options.prompt, case, samples[whole, None], attention_s[whole], speeds)
    streams = ", ".join(f"{speed * 8 / 1e9:.3g} Gb/s at {rate or 'no limit'}" for rate, speed in speeds.items())
    print(f"load {load:.1f} before and {os.getloadavg()[0]:.1f} after, TCP streams: {streams}")
    is_good = _report_added(samples, predictions, options)
    is_good &= _report_chosen(samples, chosen)
    if options.json:
        rows = [{"case": case.name, "gigabits": rate, "ttft_s": times} for (case, rate), times in samples.items()]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(options.require and not is_good)


def _report_added(samples: Samples, predictions: dict[Case, Prediction], options: argparse.Namespace) -> bool:
    """Print the added times. Return True if each prediction is near."""
    title = f"seconds that a limited link adds to the first token, {options.prompt} tokens, {options.rounds} rounds"
    table = Table(title=title, title_justify="left")
    for column in ("", "Gb/s", "TTFT", "added", "spread", "predicted", "error", ""):
        table.add_column(column, justify="left" if not column else "right")
    is_good = True
    for case in options.cases:
        unlimited = samples[case, None]
        table.add_row(case.name, "no limit", f"{statistics.median(unlimited):.2f}", "", f"{_spread(unlimited):.2f}")
        for rate in options.gigabits if case.exchange else ():
            limited = samples[case, rate]
            ttft_s, spread_s = statistics.median(limited), _spread(limited) + _spread(unlimited)
            added_s, predicted_s = ttft_s - statistics.median(unlimited), predictions[case].added_s(rate)
            off_s = predicted_s - added_s
            verdict = _verdict(abs(off_s), _MAX_ERROR * abs(added_s), spread_s)
            is_good &= verdict != "FAIL"
            cells = (
                f"{ttft_s:.2f}",
                f"{added_s:.2f}",
                f"{spread_s:.2f}",
                f"{predicted_s:.2f}",
                f"{off_s / added_s:+.0%}",
            )
            table.add_row("", f"{rate:g}", *cells, verdict)
    Console(width=100).print(table)
    return is_good


def _report_chosen(samples: Samples, chosen: dict[tuple[Rate, bool], str]) -> bool:
    """Print the choices of `context` next to the quickest cases. Return True if each choice is about as quick."""
    is_good = True
    for (rate, partial), exchange in chosen.items():
        times = {case: samples.get((case, rate)) or samples[case, None] for case in CASES if case.partial == partial}
        best = min(times, key=lambda case: statistics.median(times[case]))
        own = next((case for case in times if (case.exchange or "local") == exchange), None)
        kind = f"{rate or 'no limit'} Gb/s, {'partial' if partial else 'whole'} prompt"
        if own is None:
            verdict = "FAIL: not measured"
        else:
            behind_s = statistics.median(times[own]) - statistics.median(times[best])
            verdict = _verdict(
                behind_s, _NEAR * statistics.median(times[best]), _spread(times[own]) + _spread(times[best])
            )
        is_good &= not verdict.startswith("FAIL")
        print(f"{kind}: {exchange} chosen, {best.name} quickest: {verdict}")
    return is_good


def _verdict(off_s: float, limit_s: float, spread_s: float) -> str:
    if off_s <= limit_s:
        return "pass"
    return "within the spread" if off_s <= spread_s else "FAIL"


def _spread(times: Sequence[float]) -> float:
    """Return half of the range."""
    return (max(times) - min(times)) / 2


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The cost model with the speeds of this machine in one case.

    Attributes:
        speeds: payload bytes per second of each link.
    """

    num_tokens: int
    case: Case
    model: Architecture
    device: Device
    efficiency: Efficiency
    attention: Attention
    speeds: dict[Rate, float]

    @classmethod
    def of(
        cls,
        num_tokens: int,
        case: Case,
        ttft_s: Sequence[float],
        attention_s: Sequence[float],
        speeds: dict[Rate, float],
    ) -> Prediction:
        """Fit the speeds of attention and of all other work to a case over a link without a limit.

        All other operators, and overheads of GPUs, take no time.
        """
        zero = replace(catalog.efficiency().attention["flash"], attention=1.0, merge_bytes=0, hop_us=0, layer_us=0)
        prediction = cls(
            num_tokens=num_tokens,
            case=case,
            model=from_config(catalog.model_config(MODEL), name=MODEL),
            device=replace(catalog.device("cpu-epyc-9654"), units=1, bytes_per_s=_ENDLESS),
            efficiency=Efficiency(
                linear=LinearCurve(compute=1.0, half_wave=0, half_depth=0, memory=1.0, smooth=1, start_us=0),
                stream=StreamCurve(norm=_ENDLESS, rotary=_ENDLESS, activation=_ENDLESS, add=1.0, start_us=0),
                host_smooth=4,
                attention={"flash": zero, "eager": zero},
            ),
            attention=zero,
            speeds=speeds,
        )
        attended_s = statistics.median(attention_s)
        attention = replace(zero, attention=prediction.breakdown(None).attention_s / attended_s)
        prediction = replace(prediction, attention=attention)
        modelled = prediction.breakdown(None)
        rest_s = statistics.median(ttft_s) - attended_s - modelled.exchange_s
        linear = replace(prediction.efficiency.linear, compute=(modelled.linear_s + modelled.head_s) / rest_s)
        return replace(prediction, efficiency=replace(prediction.efficiency, linear=linear))

    def added_s(self, rate: Rate) -> float:
        return self._total_s(rate) - self._total_s(None)

    def _total_s(self, rate: Rate) -> float:
        """Return the slowest member's seconds. Micro-partitions take a share of the exchange without them."""
        case, total_s = self.case, self.breakdown(rate).total_s
        if case.micro_partitions == 1:
            return total_s
        exchange = exchange_named(case.exchange)._replace(micro_partitions=case.micro_partitions)
        members = Members((0, 1), self.model.attention, rates_of_roofline(self._line(rate), (0, 1)))
        return total_s * time_share(exchange, 0, self._runs(), members)

    def breakdown(self, rate: Rate) -> Breakdown:
        """Return the slowest member's seconds by kind of work."""
        exchange, line, runs = exchange_named(self.case.exchange), self._line(rate), self._runs()
        start = self._start
        shares = Shares.of(shares_of(exchange, runs, start, self.num_tokens))
        channel = Channel(exchange=exchange, group=(0, 1), shares=shares, keys=self.num_tokens, decode=False)
        tokens = dict(enumerate(shares.queries))
        return max(line.times([channel], tokens, {1: 1}).values(), key=lambda spent: spent.total_s)

    @property
    def _start(self) -> int:
        """The number of cached tokens."""
        return _cached(self.num_tokens) if self.case.partial else 0

    def _runs(self) -> SpanShards:
        layout = exchange_named(self.case.exchange).traits.layouts[0]
        return shard_span(layout, self._start, self.num_tokens, 2, align=BLOCK, head=0)

    def _line(self, rate: Rate) -> Roofline:
        """Return the cost model. A limited link sends the first bytes of each message at once."""
        speed = self.speeds[rate]
        latency_s = _LATENCY_S - (0 if rate is None else burst_bytes(rate) / speed)
        link = Link(
            where="between",
            nominal_bytes_per_s=speed,
            bytes_per_s=speed,
            ring_bytes_per_s=speed,
            shared=True,
            latency_s=latency_s,
            collective_s=latency_s,
        )
        topology = Topology(tp=1, gpus_per_host=1, inside=link, between=link, hosts=(0, 1))
        layer = Layer(model=self.model, device=self.device, efficiency=self.efficiency, attention=self.attention, tp=1)
        return Roofline(layer=layer, topology=topology, stages=(range(self.model.attention.num_layers),), hops=())


def _bytes_per_s(hosts: Sequence[Host], rate: Rate) -> float:
    """Measure a TCP stream of `_STREAM_S` seconds over a link."""
    first, second = hosts
    _limit(hosts, rate)
    num_bytes = round((rate or _UNLIMITED) * 1e9 / 8 * _STREAM_S)
    python = (sys.executable, "-SEc")
    with first.popen(*python, RECEIVE, first.address, stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None and receiver.stdout.readline() == b"listening\n"
        second.run(*python, SEND, first.address, str(num_bytes))
        return float(receiver.stdout.read())


def _limit(hosts: Sequence[Host], rate: Rate) -> None:
    for host in hosts:
        host.limit(rate)


class Runner:
    """Two ranks on two hosts, and random prompts for them."""

    def __init__(self, llm: LLM, hosts: Sequence[Host], num_tokens: int) -> None:
        self._llm, self._hosts, self._num_tokens, self._random = llm, hosts, num_tokens, random.Random(0)

    def times(self, case: Case, rate: Rate, num_tokens: int | None = None) -> tuple[float, float]:
        """Return the TTFT of a prompt, and the seconds of attention of the busiest rank."""
        prompt = self._prompt(case.partial, num_tokens or self._num_tokens)
        _limit(self._hosts, rate)
        self._llm.set_policy("context", case.options)
        before_s = self._attention_s()
        output = self._generate(prompt)
        assert output.metrics.num_cached_tokens == (_cached(len(prompt)) if case.partial else 0)
        assert output.metrics.ttft_s is not None, "it has a token"
        return output.metrics.ttft_s, max(map(sub, self._attention_s(), before_s))

    def _attention_s(self) -> list[float]:
        """Return the seconds of attention of each rank so far."""
        return [times.get("attention", 0.0) for times in self._llm.worker_times()]

    def chosen(self, profiled: Samples, rate: Rate, *, partial: bool) -> str:
        """Return the exchange that `context` chooses for a prompt by the profile of a link."""
        profile = Profile(profile_key=self._llm.profile_key)
        for case in CASES:
            times = profiled.get((case, rate)) or profiled[case, None]
            for size, seconds in zip((self._num_tokens, _SHORT), times, strict=True):
                cached = _cached(size) if case.partial else 0
                members, exchange = (2, case.exchange) if case.exchange else (1, "local")
                if case.partial == partial:
                    prefill = Prefill(
                        exchange=exchange,
                        seconds=(seconds,),
                        members=members,
                        new_tokens=size - cached,
                        cached_tokens=cached,
                        link_class="other_host" if members > 1 else "same_host",
                    )
                    profile = profile.with_measured(prefill)
        service = self._llm.service
        service.setup = replace(service.setup, facts=replace(service.setup.facts, profile=profile))
        prompt = self._prompt(partial, self._num_tokens)
        _limit(self._hosts, rate)
        self._llm.set_policy("context", {"threshold": "0"} if partial else {})
        exchanges = self._generate(prompt).metrics.exchanges
        return ", ".join(exchanges["partial_prefill" if partial else "prefill"])

    def _prompt(self, partial: bool, size: int) -> list[int]:
        """Return a random prompt. All but the last tokens of a partial one are cached, on both instances."""
        prompt = [self._random.randrange(10, 49_000) for _ in range(size)]
        if partial:
            _limit(self._hosts, None)
            self._llm.set_policy("context", {"exchange": "ring_kv", "threshold": "0"})
            self._generate(prompt[: _cached(size)])
        return prompt

    def _generate(self, prompt: list[int]) -> RequestOutput:
        [output] = self._llm.generate([prompt], _TOKEN, use_tqdm=False)
        return output


def _cached(size: int) -> int:
    """Return the cached tokens of a partial prompt, in whole blocks."""
    return round(size * (1 - _MISS) / BLOCK) * BLOCK


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabits", type=float, nargs="+", default=[1.0, 0.2, 0.05])
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    parser.add_argument("--require", action="store_true")
    parser.add_argument("--hidden", action="store_true", help="only gather_hidden, with and without micro-partitions")
    options = parser.parse_args()
    options.cases = HIDDEN if options.hidden else CASES
    return options


if __name__ == "__main__":
    sys.exit(main())
