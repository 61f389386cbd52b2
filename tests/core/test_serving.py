"""The engine on real workers: further turns, few blocks, shared weights, and the same steps as in the simulator."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from engines import Engines, ThreadLLM, num_free_blocks
from linear_cost import LinearCost
from oracle import Expected, Oracle, assert_exact
from texts import topic_tokens

from longspan import LLM, SamplingParams
from longspan.args import EngineArgs
from longspan.core.config import EngineConfig
from longspan.core.engine import Engine
from longspan.core.steps import Completion, Executor, Forward, Free, MoveKV, Step
from longspan.cost.memory import with_tiers
from longspan.policy.registry import make_policy
from longspan.sim.executor import SimExecutor, VirtualClock


@pytest.mark.parametrize("instances", [1, 2])
def test_a_second_turn_computes_only_its_new_tokens(
    engines: Engines, tiny: Path, oracle: Oracle, instances: int
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, output_logits=True)
    rng = random.Random(5)
    first = [rng.randrange(3, 199) for _ in range(400)]
    llm = engines(tiny, instances=instances, max_num_batched_tokens=2048)
    llm.set_policy("auto", {})
    [answer] = llm.generate([first], greedy)
    second = first + answer.outputs[0].token_ids + [rng.randrange(3, 199) for _ in range(60)]
    [output] = llm.generate([second], greedy)
    # The last token of the first answer was never fed to the model, so its KV is new too.
    assert output.metrics.num_cached_tokens == len(first) + 24 - 1
    assert output.metrics.num_computed_tokens == len(second) - output.metrics.num_cached_tokens + 24 - 1
    assert_exact(output, oracle.complete(second, 24))


Job = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """12 requests of 10 to 300 tokens."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 199) for _ in range(rng.randint(10, 300))] for _ in range(12)]
    lengths = [rng.choice([8, 40, 60]) for _ in prompts]  # the long ones run out of blocks
    return [
        (prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, output_logits=True))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]


@pytest.fixture(scope="module")
def alone(tiny: Path, jobs: list[Job]) -> list[Expected]:
    """Each request served alone, with enough blocks."""
    with ThreadLLM(str(tiny), skip_tokenizer_init=True) as llm:
        outputs = [llm.generate([prompt], params)[0].outputs[0] for prompt, params in jobs]
    return [Expected(token_ids=output.token_ids, logits=output.logits or []) for output in outputs]


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.timeout(600)
def test_many_requests_in_little_memory_equal_their_solo_runs(
    tiny: Path, jobs: list[Job], alone: list[Expected], instances: int
) -> None:
    needed = sum(len(prompt) + (params.max_tokens or 0) for prompt, params in jobs)
    num_blocks = needed // 5 // 16 // instances
    with ThreadLLM(
        str(tiny), instances=instances, skip_tokenizer_init=True, block_size=16, num_gpu_blocks_override=num_blocks
    ) as llm:
        outputs = llm.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
        assert num_free_blocks(llm) == [num_blocks] * instances
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for output, expected in zip(outputs, alone, strict=True):
        assert output.outputs[0].finish_reason == "length"
        assert_exact(output, expected)


def test_weights_are_in_memory_once() -> None:
    """All workers map the same pages of the same file, and change none."""
    with LLM(dtype="float32", instances=2) as llm:
        tokens = list(topic_tokens()[:60])
        llm.generate([tokens[place::2] for place in range(2)], SamplingParams(temperature=0, max_tokens=2))
        mapped = [_mapped_weights(pid) for pid in llm.service.executor.pids]
    assert {path for maps in mapped for path in maps} == set(mapped[0])
    for maps in mapped:
        # 135 M parameters in float32, nearly all of which a forward touches
        assert sum(entry.rss for entry in maps.values()) > 300 * 2**20
        assert sum(entry.private_dirty for entry in maps.values()) == 0
        assert sum(entry.anonymous for entry in maps.values()) == 0


def _mapped_weights(pid: int) -> dict[str, Any]:
    """Return the mappings of a process from the weight store, by file."""
    maps = psutil.Process(pid).memory_maps(grouped=True)
    return {entry.path: entry for entry in maps if entry.path.endswith(".safetensors")}


class _Recorder:
    """Records the steps that an executor is given, without their invented or computed tokens."""

    def __init__(self, executor: Executor) -> None:
        self._submit, self._poll = executor.submit, executor.poll
        executor.submit, executor.poll = self.submit, self.poll
        self.steps: list[Step] = []

    def submit(self, step: Step) -> None:
        if isinstance(step, Forward):
            parts = tuple(replace(part, tokens=()) for part in step.parts)
            self.steps.append(replace(step, parts=parts))
        else:
            self.steps.append(step)
        self._submit(step)

    def poll(self, timeout_s: float | None) -> list[Completion]:
        return self._poll(timeout_s)


class _InOrder(_Recorder):
    """Also return completions in the order of steps, since the times of copies vary."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self._awaited: list[int] = []
        self._done: dict[int, Completion] = {}

    def submit(self, step: Step) -> None:
        if not isinstance(step, Free):
            self._awaited.append(step.number)
        super().submit(step)

    def poll(self, timeout_s: float | None) -> list[Completion]:
        number = self._awaited.pop(0)
        while number not in self._done:
            self._done.update((done.number, done) for done in super().poll(timeout_s))
        return [self._done.pop(number)]


@pytest.mark.parametrize(
    ("spec", "host_kv_gib"), [("1", 0.0), ("pp2", 0.02), ("2", 0.02), ("2xtp2", 0.02), ("2xpp2", 0.0005)]
)
def test_real_and_simulated_execution_take_the_same_steps(tiny: Path, spec: str, host_kv_gib: float) -> None:
    """Completions of copies are taken in the order of steps. The smallest host cannot hold all waiting requests."""
    recorder = _InOrder if host_kv_gib else _Recorder
    rng = random.Random(3)
    jobs = [
        (
            tuple(rng.randrange(3, 199) for _ in range(rng.randint(1, 500))),
            SamplingParams(temperature=0, max_tokens=rng.randint(1, 60), ignore_eos=True),
        )
        for _ in range(16)
    ]
    with ThreadLLM(
        str(tiny),
        skip_tokenizer_init=True,
        policy="chunked",
        block_size=16,
        num_gpu_blocks_override=120 // (2 if spec.startswith("2") else 1),
        max_num_batched_tokens=256,
        max_num_seqs=12,
        host_kv_gib=host_kv_gib,
        parallel=spec,
    ) as llm:
        config = llm.engine.config
        real = recorder(llm.service.executor)
        outputs = llm.generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
    clock, cluster = VirtualClock(), EngineArgs(parallel=spec).resolve().cluster
    executor = SimExecutor(clock=clock, vocab_size=199, cost=LinearCost(num_stages=cluster.spec.pp))
    simulated = recorder(executor)
    policy = make_policy("chunked", num_instances=cluster.num_instances, options={})
    engine = Engine(policy=policy, executor=executor, clock=clock, config=config)
    for prompt, params in jobs:
        engine.add(prompt, params)
    while engine.has_unfinished:
        engine.step()
    num_blocks = [120 // cluster.num_instances] * cluster.num_instances
    cluster = cluster.with_blocks(num_blocks).with_layers(3, llm.info.head_layers)
    cluster = with_tiers(cluster, llm.service.block_bytes, host_kv_gib=host_kv_gib, disk_kv_gib=0.0)
    assert replace(config, swap=None) == EngineConfig(
        cluster=cluster,
        block_size=16,
        max_model_len=llm.info.context_length,
        eos_token_ids=(2,),
        max_num_batched_tokens=256,
        max_num_seqs=12,
    )
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert real.steps == simulated.steps
    ways = {step.way for step in real.steps if isinstance(step, MoveKV)}
    assert ways == ({"out", "in"} if host_kv_gib else set())


def test_a_sampled_request_is_the_same_alone_and_in_company(tiny: Path) -> None:
    rng = random.Random(11)
    prompts = [[rng.randrange(3, 199) for _ in range(rng.randint(5, 200))] for _ in range(6)]
    params = [SamplingParams(temperature=0.8, top_k=40, top_p=0.95, seed=i, max_tokens=20) for i in range(6)]
    with ThreadLLM(
        str(tiny),
        instances=2,
        skip_tokenizer_init=True,
        policy="context",
        policy_options={"threshold": "50"},
        block_size=16,
    ) as llm:
        together = llm.generate(prompts, params)
        alone = [llm.generate([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
    assert [o.outputs[0].token_ids for o in together] == [o.outputs[0].token_ids for o in alone]


def test_a_single_prompt_needs_no_list(speaking: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=3)
    ids = speaking.tokenize("good morning")
    singles = [speaking.generate(prompt, greedy) for prompt in ("good morning", ids, np.array(ids))]
    assert [len(single) for single in singles] == [1, 1, 1]
    texts = {output.outputs[0].text for output in speaking.generate(["good morning", ids, np.array(ids)], greedy)}
    assert texts == {single[0].outputs[0].text for single in singles}
    assert speaking.generate([], greedy) == []


def test_stop_strings_end_the_text_before_them(speaking: LLM) -> None:
    [free] = speaking.generate("One", SamplingParams(temperature=0, max_tokens=24))
    stop = free.outputs[0].text[10:16]  # parts of tokens, too
    [stopped] = speaking.generate("One", SamplingParams(temperature=0, max_tokens=24, stop=stop))
    assert stopped.outputs[0].text == free.outputs[0].text.split(stop)[0]
    assert stopped.outputs[0].finish_reason == "stop"


def test_a_stream_is_cumulative_and_can_be_left(speaking: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [whole] = speaking.generate(["The capital of France is"], params)
    seen = list(speaking.stream("The capital of France is", params))
    assert [len(output.outputs[0].token_ids) for output in seen] == list(range(1, 13))
    assert seen[-1].outputs[0].text == whole.outputs[0].text
    for output in speaking.stream("The capital of France is", params):
        if len(output.outputs[0].token_ids) == 3:
            break
    assert speaking.generate(["The capital of France is"], params)[0].outputs[0].text == whole.outputs[0].text
    assert num_free_blocks(speaking)[0] == speaking.engine.config.cluster.num_blocks[0]


def test_streams_can_be_read_between_other_calls(speaking: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    prompts = ["The capital of France is", "Once upon a time"]
    whole = [output.outputs[0].text for output in speaking.generate(prompts, params)]
    first, second = (speaking.stream(prompt, params) for prompt in prompts)
    next(first)
    next(second)
    assert speaking.generate(prompts[:1], params)[0].outputs[0].text == whole[0]
    assert [list(stream)[-1].outputs[0].text for stream in (first, second)] == whole


def test_a_stream_that_ends_in_anothers_turn_says_so(speaking: LLM) -> None:
    endless = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)
    first, second = (speaking.stream(prompt, endless) for prompt in ("One, two,", "Red, green,"))
    next(first)
    next(second)
    speaking.abort()
    for stream in (second, first):
        assert list(stream)[-1].outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("instances", [1, 2])
def test_penalties_count_every_token_so_far(tiny: Path, instances: int, async_scheduling: bool) -> None:
    params = SamplingParams(
        temperature=0, frequency_penalty=0.02, presence_penalty=0.01, max_tokens=60, ignore_eos=True, output_logits=True
    )
    rng = random.Random(4)
    prompts = [[rng.randrange(3, 199) for _ in range(length)] for length in (3, 30, 90)]
    with ThreadLLM(
        str(tiny),
        instances=instances,
        skip_tokenizer_init=True,
        block_size=16,
        async_scheduling=async_scheduling,
        policy="context" if instances > 1 else "chunked",
        policy_options={"threshold": "20"} if instances > 1 else {},
    ) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    for output in outputs:
        assert output.logits is not None
        counts = np.zeros(len(output.logits[0]), dtype=np.float32)
        for token, logits in zip(output.token_ids, output.logits, strict=True):
            assert token == int((logits - 0.02 * counts - 0.01 * (counts > 0)).argmax())
            counts[token] += 1
        assert counts.max() > 1, "some token comes again, or nothing is tested"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        ([1] * 4096, "length is 4096 tokens.*has 4096 tokens"),
        ([1, 49152], "49152 is not in the vocabulary"),
    ],
)
def test_a_bad_prompt_is_refused_and_harms_nothing(speaking: LLM, prompt: str | list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        speaking.generate(["good", prompt])
    assert speaking.generate(["good"], SamplingParams(temperature=0, max_tokens=1))[0].finished
