"""Prefill steps of Seesaw copy each layer's KV to the host on real ranks. Outputs stay those of Hugging Face."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from engines import Engines
from oracle import Oracle
from test_exact import assert_all_exact, prompts_of
from test_seesaw import LENGTHS, LONG, SPECS, assert_all_free, turning

from longspan.core.request import FinishReason, Request
from longspan.core.steps import Completion, Forward, MoveKV, Reshard
from longspan.local_engine import LocalEngine
from longspan.serve.engine_loop import stats_of


class Watch:
    """Counts the blocks that steps and separate moves copy to hosts, by request and by phase."""

    def __init__(self, prefill: object) -> None:
        self._prefill = self._phase = prefill
        self.streamed, self.late = Counter[int](), Counter[int]()
        self.in_flight: dict[int, MoveKV] = {}

    def sent(self, step: Forward | MoveKV | Reshard) -> None:
        if isinstance(step, Reshard):
            self._phase = step.cluster.spec
        elif isinstance(step, Forward):
            self.in_flight.update({move.number: move for move in step.streams})
            for move in step.streams:
                self.streamed[move.request_id] += len(move.copies)
        elif step.way == "out" and self._phase == self._prefill:
            self.late[step.request_id] += len(step.copies)

    def completed(self, done: Completion) -> None:
        self.in_flight.pop(done.number, None)

    def arrived(self, request: Request) -> None: ...

    def ended(self, request: Request, reason: FinishReason) -> None: ...

    def lost(self) -> None:
        self.in_flight.clear()


def watch(llm: LocalEngine) -> Watch:
    found = Watch(llm.engine.config.phases[0].spec)
    llm.engine.observe(found)
    return found


@pytest.mark.parametrize("spec", SPECS)
def test_steps_copy_all_blocks_of_prompts_through_several_transitions(
    engines: Engines, odd: Path, odd_oracle: Oracle, spec: str
) -> None:
    llm = turning(engines, odd, spec)
    found, num_before = watch(llm), len(llm.engine.transitions)
    try:
        assert_all_exact(llm, odd_oracle, prompts_of(*LENGTHS), LONG)
    finally:
        llm.engine.observe(None)
    assert len(llm.engine.transitions) - num_before >= 5
    assert sorted(found.streamed.values()) == sorted(-(-length // 16) for length in LENGTHS)
    assert not found.late, "no KV is left to copy after the prefill of a request"
    assert_all_free(llm)


@pytest.mark.parametrize("spec", ["pp2 tp2", "2 2xtp2"])
@pytest.mark.parametrize("count", [1, 4])
def test_an_abort_while_blocks_are_copied_leaves_other_requests_exact(
    engines: Engines, odd: Path, odd_oracle: Oracle, spec: str, count: int
) -> None:
    """Prompts of several steps. The `count`-th request with a copy in flight is aborted between two steps."""
    llm = turning(engines, odd, spec, host_kv_gib=0.0004)
    engine, found, prompts = llm.engine, watch(llm), prompts_of(150, 40, 130, 90, 160, 25)
    try:
        requests = [engine.add(prompt, LONG) for prompt in prompts]
        aborted: Request | None = None
        seen = dict[int, None]()
        while engine.has_unfinished:
            engine.step(0.0)
            for move in list(found.in_flight.values()):
                seen[move.request_id] = None
            if aborted is None and len(seen) >= count:
                aborted = next(request for request in requests if request.id == list(seen)[count - 1])
                engine.finish(aborted, "abort")
    finally:
        engine.observe(None)
    assert aborted is not None and aborted.finish_reason == "abort"
    for request in requests:
        if request is not aborted:
            assert request.output == odd_oracle.complete(request.prompt, len(request.output)).token_ids
            assert len(request.output) == LONG.max_tokens
    assert_all_free(llm)


def test_metrics_have_the_transitions_and_their_exposed_seconds(
    engines: Engines, odd: Path, odd_oracle: Oracle
) -> None:
    llm = turning(engines, odd, "pp2 tp2")
    assert_all_exact(llm, odd_oracle, prompts_of(*LENGTHS[:8]), LONG)
    stats, transitions = stats_of(llm.service, 0), llm.engine.transitions
    assert stats.num_transitions == len(transitions) > 0
    exposed_s = sum(transition.exposed_s for transition in transitions)
    assert stats.transition_swap_s + stats.transition_reshard_s == pytest.approx(exposed_s)
    assert 0 <= stats.transition_swap_s < exposed_s
