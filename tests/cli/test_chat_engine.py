"""Chats, several outputs and logprobs on a real engine. Needs an engine that knows `n`, logprobs and stop tokens."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from engines import num_free_blocks

from longspan import LLM, SamplingParams
from longspan.cli.chat import Conversation
from longspan.cli.documents import Content
from longspan.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=10)
QUESTIONS = ["Name three colours.", "Name three more.", "Which was the first?", "And the last?"]


@pytest.fixture(scope="module")
def llm(speaking: LLM) -> LLM:
    return speaking


def test_a_turn_computes_only_new_tokens(llm: LLM) -> None:
    """Whatever ended the answer before: its length, Ctrl-C, or an end-of-sequence token."""
    conversation = Conversation(llm, Content(system="Answer briefly."))
    force_end = SamplingParams(temperature=0, max_tokens=10, min_tokens=4, logit_bias={2: 100.0})
    long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    turns: list[RequestOutput] = []
    for question, params in zip(QUESTIONS, (GREEDY, long, force_end, GREEDY), strict=True):
        answer: RequestOutput | None = None
        for answer in llm.stream(conversation.prompt(question), params):
            if len(turns) == 1 and len(answer.outputs[0].token_ids) == 5:
                llm.abort()
        assert answer is not None
        conversation.add(question, answer)
        turns.append(answer)
    assert [turn.outputs[0].finish_reason for turn in turns[:3]] == ["length", "abort", "stop"]
    for before, after in pairwise(turns):
        # The last token of an answer was never fed to the model, so its keys are new too.
        known = before.prompt_token_ids + before.outputs[0].token_ids[:-1]
        assert after.prompt_token_ids[: len(known)] == known
        assert after.num_cached_tokens >= len(known)


def test_a_conversation_reads_as_the_template_renders_it(llm: LLM) -> None:
    conversation = Conversation(llm)
    [first] = llm.generate([conversation.prompt(QUESTIONS[0])], GREEDY)
    conversation.add(QUESTIONS[0], first)
    messages = [
        {"role": "user", "content": QUESTIONS[0]},
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": QUESTIONS[1]},
    ]
    assert llm.input_processor.tokenizer.decode(conversation.prompt(QUESTIONS[1])) == llm.render_chat(messages)


def test_chat_is_generate_on_the_rendered_text(llm: LLM) -> None:
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    answers = llm.chat([messages, messages], GREEDY)
    ids = llm.tokenize(llm.render_chat(messages), add_special_tokens=False)
    [expected] = llm.generate([ids], GREEDY)
    *_, streamed = llm.chat_stream(messages, GREEDY)
    for answer in (*answers, streamed):
        assert answer.prompt == llm.render_chat(messages)
        assert answer.prompt_token_ids == ids
        assert answer.outputs[0].text == expected.outputs[0].text


def test_n_outputs_are_reproducible_and_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=4, ignore_eos=True)
    [output] = llm.generate(["Once upon a time"], params)
    tokens = [tuple(completion.token_ids) for completion in output.outputs]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len(set(tokens)) == 3
    *_, streamed = llm.stream("Once upon a time", params)
    assert [tuple(completion.token_ids) for completion in streamed.outputs] == tokens
    assert num_free_blocks(llm)[0] == llm.engine.config.cluster.num_blocks[0]


def test_logprobs_are_dictionaries_by_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=2)
    [output] = llm.generate(["The capital of France is"], params)
    [completion] = output.outputs
    assert completion.logprobs is not None
    assert output.prompt_logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids)
    for token, found in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(found)) == token
        assert (len(found), found[token].rank) == (3, 1)
        assert found[token].decoded_token == llm.input_processor.tokenizer.decode([token])
    chosen = [found[token].logprob for token, found in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(math.fsum(chosen))
    assert output.prompt_logprobs[0] is None
    for token, scores in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert scores is not None
        assert next(iter(scores)) == token
        assert len(scores) in (2, 3)


def test_a_stop_token_ends_the_output_and_is_its_reason(llm: LLM) -> None:
    [free] = llm.generate(["The capital of France is"], GREEDY)
    third = free.outputs[0].token_ids[2]
    params = SamplingParams(temperature=0, max_tokens=10, stop_token_ids=[third])
    [stopped] = llm.generate(["The capital of France is"], params)
    completion = stopped.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", third)
    end = free.outputs[0].token_ids.index(third)
    assert completion.token_ids == free.outputs[0].token_ids[: end + 1]
    assert completion.text == llm.input_processor.tokenizer.decode(completion.token_ids[:-1])


def test_outputs_are_printed_in_order_without_delay(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for length in (4, 2, 200)]
    outputs = llm.generate_each(["a", "b", "c"], params)
    assert [len(next(outputs).outputs[0].token_ids) for _ in range(2)] == [4, 2]
    assert llm.service.engine.has_unfinished, "the last one still runs"
    assert len(next(outputs).outputs[0].token_ids) == 200
    assert list(outputs) == []


def test_an_abort_ends_the_call_and_not_the_next(llm: LLM) -> None:
    lengths = []
    for output in llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)):
        lengths.append(len(output.outputs[0].token_ids))
        if lengths[-1] == 3:
            llm.abort()
    assert (output.outputs[0].finish_reason, output.finished) == ("abort", True)
    assert lengths[-1] < 300
    llm.abort()  # nothing runs, so nothing is ended
    assert llm.generate(["a"], GREEDY)[0].outputs[0].finish_reason != "abort"
