"""Some 50 workloads and their recorded steps. `python tests/test_golden.py` records them again.

A change of the scheduling code that is meant to change no decision leaves every stream as it is.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from cluster import Cluster, Setup
from cluster_setup import Roles
from forced_plans import PLANS, Wandering, forced
from workloads import MACHINES, TABLE, Job, play

from longspan.core.options import SchedulingArgs
from longspan.core.steps import Forward, Free, MoveKV, Part, Step
from longspan.policy.facts import Facts
from longspan.sim.executor import SimExecutor
from longspan.sim.spec import ClusterSpec, Faults
from longspan.simulation import simulate
from longspan.workload.spec import WorkloadSpec

RECORDED = Path(__file__).parents[1] / "golden" / "streams.json"
_STEPS_PER_HASH = 25


def line(step: Step) -> str:
    """A step as text that does not depend on how its values are represented in the code."""
    if isinstance(step, Free):
        return f"{step.number} free {step.request_ids}"
    if isinstance(step, MoveKV):
        return _move(step)
    moves = [_move(move) for move in (*step.rebalances, *step.streams)]
    return f"{step.number} forward {[_part(part) for part in step.parts]} {moves}"


def _move(move: MoveKV) -> str:
    copies = [(tuple(source), tuple(target)) for source, target in move.copies]
    return f"{move.number} move {move.request_id} {copies}"


def _part(part: Part) -> str:
    runs = [[(run.start, run.stop, run.step) for run in member] for member in part.runs]
    sample = None if part.sample is None else (part.sample.instance, part.sample.position, part.sample.below_minimum)
    rotation = None if part.rotation is None else (part.rotation.start, part.rotation.held)
    blocks = [tuple(ref) for ref in part.blocks]
    told = (part.sampling is not None, part.first_output, part.new_output, part.unknown_on, part.rope_length)
    span = (part.request_id, part.start, part.stop, part.group)
    return f"{span} {runs} {part.exchange} {part.first_block} {blocks} {sample} {rotation} {told}"


def hashes(steps: Iterable[Step]) -> list[str]:
    """A short hash of every few steps, so that a difference tells where it begins."""
    texts = list(map(line, steps))
    groups = ("\n".join(texts[i : i + _STEPS_PER_HASH]) for i in range(0, len(texts), _STEPS_PER_HASH))
    return [hashlib.sha256(group.encode()).hexdigest()[:12] for group in groups]


# ---------------------------------------------------------------- small clusters, every step of which is checked


def _jobs(name: str, num: int = 24) -> list[Job]:
    draw = random.Random(name)
    found = []
    for _ in range(num):
        turn = draw.randint(0, 40)
        found.append(
            Job(
                turn=turn,
                family=draw.randint(0, 1),
                num_shared=draw.choice((0, 0, 20, 60)),
                num_own=draw.randint(1, 90),
                max_tokens=draw.randint(1, 25),
                min_tokens=0,
                ignore_eos=draw.random() < 0.5,
                after=draw.choice((None, None, draw.randint(0, 8))),
                abort_turn=turn + draw.randint(1, 30) if draw.random() < 0.15 else None,
            )
        )
    return found


def _small(name: str, num_instances: int, policy: str, *, in_flight: int = 2, **others: object) -> tuple[str, Setup]:
    given: dict[str, object] = {
        "num_blocks": 40,
        "block_size": 4,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 8,
        "eos_token_ids": (1, 2),
        "uneven": 1,
    }
    options = {key: value for key, value in others.items() if key not in Setup.__dataclass_fields__}
    given |= {key: value for key, value in others.items() if key in Setup.__dataclass_fields__}
    setup = Setup(
        num_instances=num_instances,
        policy=policy,
        options={key: str(value) for key, value in options.items()},
        max_steps_in_flight=in_flight,
        **given,  # type: ignore[arg-type]
    )
    return name, setup


def _facts(num_instances: int) -> Facts:
    return Facts(profile=MACHINES[num_instances], partitions=TABLE, model="m")


_ROLES = {
    "num_blocks": 60,
    "decode_blocks": 80,
    "roles": Roles(num_prefill=2, num_decode=2, backends=2),
    "facts": Facts(profile=MACHINES[4]),
}
SMALL = dict(
    [
        _small("chunked 1", 1, "chunked"),
        _small("chunked 1, one step in flight", 1, "chunked", in_flight=1),
        _small("chunked 1, preempting", 1, "chunked", num_blocks=30, max_num_batched_tokens=20),
        _small("chunked 3", 3, "chunked"),
        _small("chunked 3, no prefix cache", 3, "chunked", prefix_caching=False, in_flight=1),
        _small("prefill-first 2, preempting", 2, "prefill-first", num_blocks=30),
        _small("prefill-first 1, three stages", 1, "prefill-first", pp=3, num_blocks=30),
        _small("decode-first 2, preempting", 2, "decode-first", num_blocks=30),
        _small("decode-first 1, three stages", 1, "decode-first", pp=3, num_blocks=30),
        _small("context 2, one step in flight", 2, "context", in_flight=1),
        _small("context 3", 3, "context"),
        _small("context 4 by a profile", 4, "context", facts=_facts(4)),
        _small("context 4 by a profile, preempting", 4, "context", facts=_facts(4), num_blocks=12),
        _small("context 3, rotary length", 3, "context", rope_switch_length=60),
        _small("context 3, ring_q striped", 3, "context", exchange="ring_q", layout="striped", threshold=10),
        _small("context 3, alltoall", 3, "context", exchange="alltoall", decode="alltoall", threshold=1),
        _small("context 3, dense", 3, "context", exchange="gather_kv", dense="true", threshold=1),
        _small("context 2, gather_hidden", 2, "context", exchange="gather_hidden", threshold=1),
        _small("context 3, chain", 3, "context", exchange="chain", threshold=1),
        _small("context 3, chain where computed", 3, "context", exchange="chain", home="computed", threshold=1),
        _small("context 2, fractions", 2, "context", exchange="ring_kv", fractions="0.7,0.3", threshold=1),
        _small("context 3, rotating by token", 3, "context", rotate="token", threshold=1),
        _small("context 3, rotating by token, preempting", 3, "context", rotate="token", threshold=1, num_blocks=14),
        _small("runahead 2", 2, "runahead", facts=_facts(2)),
        _small("runahead 4, one step in flight", 4, "runahead", facts=_facts(4), in_flight=1),
        _small("tetris 4", 4, "tetris", facts=_facts(4), min_chunk=4),
        _small("tetris 4, preempting", 4, "tetris", facts=_facts(4), min_chunk=4, num_blocks=14),
        _small("tetris 4, one step in flight", 4, "tetris", facts=_facts(4), min_chunk=4, in_flight=1),
        _small("tetris 4, no chunking", 4, "tetris", facts=_facts(4), chunking="false"),
        _small("tetris 2 + 2", 4, "tetris", min_chunk=4, **_ROLES),
        _small("fixed-sp 4", 4, "fixed-sp", sp=2, facts=_facts(4)),
        _small("fixed-sp 2 + 2", 4, "fixed-sp", sp=2, **_ROLES),
        _small("loongserve 4", 4, "loongserve", facts=_facts(4)),
        _small("loongserve 4, preempting", 4, "loongserve", facts=_facts(4), num_blocks=14),
        _small("loongserve-disagg 2 + 2", 4, "loongserve-disagg", **_ROLES),
    ]
)
"""By name."""


def _stream(name: str) -> list[Step]:
    return list(play(SMALL[name], _jobs(name), random.Random(name)).executor.steps)


def _grown(name: str, balance: bool) -> list[Step]:
    """Groups that grow by a fixed plan, also while other requests run."""
    cluster = Cluster(Setup(num_instances=4, block_size=8, max_num_batched_tokens=64, uneven=2))
    cluster.engine.set_policy(forced(PLANS[name], 4, balance=balance))
    for length in (300, 200, 300, 40):
        cluster.add([(length * 7 + i) % 50 for i in range(length)], max_tokens=12, ignore_eos=True)
        cluster.step()
    cluster.run()
    return list(cluster.executor.steps)


def _wandering() -> list[Step]:
    """Any group at any step, and workers that are lost on the way."""
    cluster = Cluster(Setup(num_instances=3, block_size=4, num_blocks=60, max_num_batched_tokens=40, uneven=3))
    cluster.engine.set_policy(Wandering(3, seed=5))
    for number in range(8):
        cluster.add([number, *range(30 + number)], max_tokens=10, presence_penalty=0.5)
    for _ in range(12):
        cluster.step()
    cluster.restart()
    cluster.run()
    return list(cluster.executor.steps)


# ---------------------------------------------------------------- clusters of devices by their data sheets

_A100 = ClusterSpec(hardware="a100-sxm-80g", hosts=2, gpus_per_host=4)
_SPLIT = ClusterSpec(hardware="a100-sxm-80g", hosts=2, gpus_per_host=8, prefill_parallel="8", decode_parallel="tp8")
_TP2 = ClusterSpec(hardware="h100-sxm-80g", hosts=1, gpus_per_host=8, parallel="4xtp2")
_MEDIUM = WorkloadSpec(workload="medium", rate=2.0, num_requests=40, output_len=20, seed=3)
_TURNS = WorkloadSpec(workload="short", rate=8.0, num_requests=60, output_len=10, turns=3, prefix_len=600, seed=4)
SIMULATED: dict[str, tuple[ClusterSpec, str, WorkloadSpec, Faults]] = {
    "A100 chunked": (_A100, "chunked", _TURNS, Faults()),
    "A100 context": (_A100, "context", _MEDIUM, Faults()),
    "A100 context, turns, a lost worker": (_A100, "context", _TURNS, Faults(lost_at_s=(3.0,), restart_s=1.0)),
    "A100 tetris": (_A100, "tetris", _MEDIUM, Faults()),
    "A100 tetris, turns": (_A100, "tetris", _TURNS, Faults()),
    "A100 fixed-sp": (_A100, "fixed-sp", _MEDIUM, Faults()),
    "A100 loongserve": (_A100, "loongserve", _MEDIUM, Faults()),
    "A100 tetris, roles": (_SPLIT, "tetris", _MEDIUM, Faults(slow={1: 2.0})),
    "A100 loongserve-disagg": (_SPLIT, "loongserve-disagg", _MEDIUM, Faults()),
    "H100 context tp2": (_TP2, "context", _MEDIUM, Faults()),
}


def _simulated(name: str) -> list[Step]:
    cluster, policy, workload, faults = SIMULATED[name]
    steps: list[Step] = []
    submit = SimExecutor.submit

    def recorded(self: SimExecutor, step: Step) -> None:
        steps.append(step)
        submit(self, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimExecutor, "submit", recorded)
        options = {"sp": "1"} if policy == "fixed-sp" else None
        scheduling = SchedulingArgs(policy=policy, policy_options=options, max_num_batched_tokens=2048)
        simulate("llama-3-8b", cluster, workload, scheduling=scheduling, faults=faults)
    return steps


STREAMS: dict[str, Callable[[], list[Step]]] = {
    **{name: lambda name=name: _stream(name) for name in SMALL},  # type: ignore[misc]
    **{f"growing {name}": lambda name=name: _grown(name, balance=True) for name in PLANS},  # type: ignore[misc]
    "growing, not rebalanced": lambda: _grown("2 then 4", balance=False),
    "wandering": _wandering,
    **{name: lambda name=name: _simulated(name) for name in SIMULATED},  # type: ignore[misc]
}
"""The function that runs each workload."""


def main() -> None:
    """Record all streams, and print the number of steps of each."""
    found = {}
    for name, steps in STREAMS.items():
        taken = steps()
        assert any(isinstance(step, Forward) for step in taken)
        found[name] = {"num_steps": len(taken), "hashes": hashes(taken)}
        sys.stdout.write(f"{name}: {len(taken)} steps\n")
    RECORDED.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
