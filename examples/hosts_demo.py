"""Run `demo.py` on two hosts: network namespaces of this machine, with one instance on each and a link between them.

It also prints the host that computed each range of the prompt, and the bytes that crossed the link. It needs root on
Linux, with `ip` and `tc`. Otherwise it prints the reason, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from demo import ask_for, print_statistics, report

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from host_ranks import llm_on
from hosts import Host, network_hosts, why_not

from longspan import LLM
from longspan.core.observer import Observer
from longspan.core.request import FinishReason, Request
from longspan.core.runs import Run, coalesce
from longspan.core.steps import Completion, Forward, MoveKV, Reshard

_NOT_PERMITTED = 2


def main() -> int:
    """Run the demo. Return 0 if the model found the key."""
    options = _options()
    if (reason := why_not()) is not None:
        print(f"The demo cannot make hosts on this machine: {reason}", file=sys.stderr)
        return _NOT_PERMITTED
    with network_hosts(2, gigabits=options.gigabits) as hosts:
        addresses = " and ".join(host.address for host in hosts)
        print(f"Starting an instance of smollm2-135m on each of the hosts {addresses} ...")
        with llm_on(hosts)(
            "smollm2-135m",
            dtype="float32",
            instances=2,
            threads_per_rank=1,
            policy="context",
            policy_options={"threshold": "0"},  # prompts of any length are sharded
        ) as llm:
            return _ask(llm, hosts, options.key)


def _ask(llm: LLM, hosts: Sequence[Host], key: int) -> int:
    places = Places()
    llm.engine.observe(places)
    before = [host.received_bytes() for host in hosts]
    answer = ask_for(key, llm, depth=0.5)
    received = [host.received_bytes() - start for host, start in zip(hosts, before, strict=True)]
    print_statistics(answer, llm)
    print("\ntokens of the prompt  computed by")
    for run, instance in places.of_prompt(len(answer.prompt_token_ids)):
        print(f"{run.start:>9,} to {run.stop - 1:>6,}  instance {instance} on host {hosts[instance].address}")
    print("\nover the link")
    for exchange, num_bytes in llm.bytes_between_hosts.items():
        if num_bytes and exchange != "total":
            print(f"{f'payload of {exchange}':28} {num_bytes:>12,} bytes")
    for host, num_bytes in zip(hosts, received, strict=True):
        print(f"received by {host.address:16} {num_bytes:>12,} bytes, with commands and headers")
    return report(answer, key)


class Places(Observer):
    """Observes steps, and keeps the runs of tokens that each instance has computed."""

    def __init__(self) -> None:
        self._runs = defaultdict[int, list[Run]](list)

    def of_prompt(self, num_tokens: int) -> list[tuple[Run, int]]:
        """Return the ranges of the first `num_tokens` tokens with their instances, in order."""
        places = [(run, instance) for instance, runs in self._runs.items() for run in coalesce(runs)]
        prompt = [(Run(run.start, min(run.stop, num_tokens)), instance) for run, instance in places]
        return sorted(((run, instance) for run, instance in prompt if len(run)), key=lambda place: place[0].start)

    def sent(self, step: Forward | MoveKV | Reshard) -> None:
        for part in step.parts if isinstance(step, Forward) else ():
            for instance, runs in zip(part.group, part.runs, strict=True):
                self._runs[instance] += runs

    def arrived(self, request: Request) -> None: ...

    def ended(self, request: Request, reason: FinishReason) -> None: ...

    def completed(self, done: Completion) -> None: ...

    def lost(self) -> None: ...


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabits", type=float, help="rate of each host's link in Gb/s (default: no limit)")
    parser.add_argument("--key", type=int, default=10_000 + secrets.randbelow(90_000), help="default: a random key")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
