"""Pipeline stages equal one rank, on ranks that are threads, and fill up with steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Engines, ThreadLLM, num_free_blocks
from oracle import Oracle, assert_exact
from test_exact import GREEDY, assert_all_exact, prompts_of
from texts import topic_tokens

from longspan import LLM, SamplingParams
from longspan.core.sampling import StructuredOutputsParams
from longspan.core.steps import Completion, Forward, Step
from longspan.model.source import smollm2_folder

SPECS = ("pp2", "pp3", "pp5", "tp2pp2", "2xpp2", "3xtp2")


@pytest.mark.parametrize("spec", SPECS)
def test_an_odd_model(engines: Engines, odd: Path, odd_oracle: Oracle, spec: str) -> None:
    """Prompts of several chunks together with short ones, and then another turn."""
    llm = engines(odd, parallel=spec)
    prompts = prompts_of(1, 17, 40, 300, 90, 200, 33)
    outputs = assert_all_exact(llm, odd_oracle, prompts)
    turn = [*prompts[3], *outputs[3].outputs[0].token_ids, *prompts[2]]
    [output] = assert_all_exact(llm, odd_oracle, [turn])
    assert output.metrics.num_cached_tokens >= 300
    assert all(free == llm.engine.kv.account.num_blocks(i) for i, free in enumerate(num_free_blocks(llm)))


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("pp3", "prefill-first"),
        ("2xpp2", "decode-first"),
        pytest.param("pp3", "decode-first", marks=pytest.mark.full),
        pytest.param("2xpp2", "prefill-first", marks=pytest.mark.full),
    ],
)
def test_steps_of_prompts_or_of_decodes(
    engines: Engines, odd: Path, odd_oracle: Oracle, spec: str, policy: str
) -> None:
    """There are few blocks, so that requests are preempted and loaded from the host."""
    llm = engines(odd, parallel=spec, num_gpu_blocks_override=14, max_model_len=220, host_kv_gib=0.02)
    llm.set_policy(policy, {})
    num_host_hits = llm.engine.kv.counts.num_hits
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, output_logits=True)
    outputs = assert_all_exact(llm, odd_oracle, prompts_of(30, 17, 40, 190, 60, 31, 33, 60, 12), params)
    assert all(free == llm.engine.kv.account.num_blocks(i) for i, free in enumerate(num_free_blocks(llm)))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert llm.engine.kv.counts.num_hits > num_host_hits


@pytest.mark.full
@pytest.mark.parametrize("spec", ["pp2", "pp3", "tp2pp2", "2xpp2", "3xtp2"])
def test_smollm2(engines: Engines, smollm2_oracle: Oracle, spec: str) -> None:
    tokens = list(topic_tokens())
    llm = engines(smollm2_folder(), parallel=spec, num_gpu_blocks_override=100)
    assert_all_exact(llm, smollm2_oracle, [tokens[:300], tokens[50:60], tokens[100:220], tokens[40:41]])


WANTED: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 1.0, "n": 2, "seed": 5},
    {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 0.8, "presence_penalty": 0.7, "seed": 1, "min_tokens": 5},
]


def outputs_of(llm: LLM) -> list[object]:
    """Return the outputs of prompts of several lengths for each of some parameters, all at once."""
    prompts = prompts_of(150, 3, 60, 20)
    jobs = [
        (prompt, SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **one})) for one in WANTED for prompt in prompts
    ]
    outputs = llm.generate(*map(list, zip(*jobs, strict=True)), use_tqdm=False)
    return [([one.token_ids for one in output.outputs], _rounded(output)) for output in outputs]


@pytest.fixture(scope="module")
def of_one_rank(odd: Path) -> list[object]:
    with ThreadLLM(str(odd), skip_tokenizer_init=True, block_size=16, max_num_batched_tokens=48) as llm:
        return outputs_of(llm)


@pytest.mark.parametrize(
    "spec",
    [
        "pp3",
        "tp2pp2",
        "2xpp2",
        pytest.param("pp2", marks=pytest.mark.full),
        pytest.param("pp5", marks=pytest.mark.full),
    ],
)
def test_outputs_equal_one_rank(engines: Engines, odd: Path, of_one_rank: list[object], spec: str) -> None:
    assert outputs_of(engines(odd, parallel=spec)) == of_one_rank


def _rounded(output: Any) -> object:
    return [
        None if at is None else {token: round(one.logprob, 2) for token, one in at.items()}
        for at in output.prompt_logprobs or ()
    ]


@pytest.mark.parametrize("spec", ["pp2", "tp2pp3"])
def test_json_by_a_schema(engines: Engines, bytes_model: Path, spec: str) -> None:
    """The last stage alone follows the grammar."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    params = SamplingParams(
        temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(json=schema), ignore_eos=False
    )
    texts = []
    for parallel in ("1", spec):
        llm = engines(bytes_model, parallel=parallel, skip_tokenizer_init=False)
        outputs = llm.generate([[5, 6, 7], [8] * 40], params, use_tqdm=False)
        texts.append([output.outputs[0].text for output in outputs])
    assert texts[0] == texts[1]
    assert all(text.startswith("{") for text in texts[0])


@pytest.mark.parametrize("exchange", ["ring_kv", "ring_q", "chain", "alltoall", "gather_hidden"])
def test_two_instances_share_a_long_prompt(engines: Engines, odd: Path, odd_oracle: Oracle, exchange: str) -> None:
    llm = engines(odd, parallel="2xpp2")
    llm.set_policy("context", {"exchange": exchange, "threshold": "20"})
    outputs = assert_all_exact(llm, odd_oracle, prompts_of(300, 5, 120))
    assert outputs[0].metrics.exchanges["prefill"].keys() == {exchange}


def test_bytes_between_stages(engines: Engines, odd: Path) -> None:
    """The hidden states of every token once, and the tokens that were sampled."""
    llm = engines(odd, parallel="pp3")
    before = llm.bytes_exchanged
    llm.generate(prompts_of(100), SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    sent = {name: llm.bytes_exchanged[name] - before.get(name, 0) for name in ("hidden_states", "tokens")}
    assert sent["hidden_states"] == 2 * 103 * 80 * 4
    assert 3 * 8 <= sent["tokens"] <= 4 * 8


def test_stages_are_kept_busy(engines: Engines, odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes alternate, and prompts are chunked. Each request is in at most two decode steps."""
    llm = engines(odd, parallel="pp3")
    executor = llm.service.executor
    flying: dict[int, Forward] = {}
    most, sizes = [0], []

    def submit(step: Step) -> None:
        if isinstance(step, Forward):
            flying[step.number] = step
            most.append(len(flying))
            decodes = [part.request_id for part in step.parts if part.stop - part.start == 1]
            sizes.append(len(decodes))
            for request in decodes:
                assert sum(request in {part.request_id for part in one.parts} for one in flying.values()) <= 2
        real_submit(step)

    def poll(timeout_s: float | None) -> list[Completion]:
        done = real_poll(timeout_s)
        for one in done:
            flying.pop(one.number, None)
        return done

    real_submit, real_poll = executor.submit, executor.poll
    monkeypatch.setattr(executor, "submit", submit)
    monkeypatch.setattr(executor, "poll", poll)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm.generate([[3 + number] * 5 for number in range(9)], params, use_tqdm=False)
    assert max(most) == 4, "one for each stage, and one ahead"
    assert sizes.count(3) > len(sizes) / 2, "nine requests alternate on three stages"


def test_steps_of_a_lone_prompt(engines: Engines, odd: Path, odd_oracle: Oracle) -> None:
    """Steps are cut to a prompt that is alone, so that all stages compute at once."""
    llm = engines(odd, parallel="pp2", max_num_batched_tokens=2048)
    [prompt] = prompts_of(2000)
    [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert_exact(output, odd_oracle.complete(prompt, 6))
    steps = output.metrics.exchanges
    assert steps["prefill"]["local"] + steps["partial_prefill"]["local"] == 8
