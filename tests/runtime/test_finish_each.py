"""`LLM.finish_each`: groups of jobs start when slots are free, and are yielded as they finish, on a tiny model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from engines import ThreadLLM, num_free_blocks
from tiny_models import make_tiny

from longspan import LLM, SamplingParams
from longspan.text.input_processor import EngineRequest
from longspan.text.output_processor import RequestState


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = make_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama")
    with ThreadLLM(str(folder), skip_tokenizer_init=True, threads_per_rank=1, block_size=16) as llm:
        yield llm


def engine_requests(llm: LLM, *max_tokens: int) -> list[EngineRequest]:
    params = (SamplingParams(temperature=0, max_tokens=most, ignore_eos=True) for most in max_tokens)
    return [llm.input_processor.process([5, 6, 7], one) for one in params]


def groups(llm: LLM, lengths: Sequence[int], taken: list[int]) -> Iterator[tuple[int, list[EngineRequest]]]:
    """Yield a group of one job per length, and an empty group for 0. Record the groups that are taken."""
    for tag, length in enumerate(lengths):
        taken.append(tag)
        yield tag, engine_requests(llm, length) if length else []


def reasons(tracked: Sequence[RequestState]) -> list[str | None]:
    return [choice.request.finish_reason for one in tracked for choice in one.choices]


def test_groups_are_yielded_as_they_finish_and_taken_below_the_limit(llm: LLM) -> None:
    order: list[int] = []
    taken: list[int] = []
    for tag, tracked in llm.finish_each(groups(llm, [200, 2, 2, 0, 2], taken), max_groups=2):
        order.append(tag)
        assert len(taken) - len(order) <= 1, "at most 2 at once, this one included"
        assert set(reasons(tracked)) <= {"length"}
    assert order == [1, 2, 3, 4, 0], "the long request delays no other"


def test_no_group_is_taken_while_a_prompt_waits(llm: LLM) -> None:
    taken: list[int] = []
    steps = llm.finish_each(groups(llm, [1, 1, 1, 1], taken), max_groups=9, max_waiting_tokens=1)
    assert next(steps)[0] == 0
    assert taken == [0, 1], "the second waits now, and keeps the third away"
    assert [tag for tag, _ in steps] == [1, 2, 3]


def test_a_group_can_be_delayed_until_another_has_tokens(llm: LLM) -> None:
    tokens = [0]

    def later() -> Iterator[tuple[str, list[EngineRequest]] | None]:
        yield "early", engine_requests(llm, 300)
        while tokens[-1] < 5:
            yield None
        yield "late", engine_requests(llm, 3)

    steps = llm.finish_each(later(), max_groups=2, stepped=lambda choices: tokens.append(choices[0].num_taken))
    found = {tag: state.output().metrics for tag, [state] in steps}
    early, late = found["early"], found["late"]
    assert [*found] == ["late", "early"]
    assert early.ttft_s is not None
    fifth_s = early.arrival_s + early.ttft_s + sum(early.tbt_s[:4])
    assert fifth_s <= late.arrival_s <= early.arrival_s + early.ttft_s + sum(early.tbt_s)


def test_groups_of_several_jobs_equal_generate(llm: LLM) -> None:
    prompts = [[7, 8, 9], [10, 11], [12, 13, 14, 15]]
    params = SamplingParams(temperature=0, max_tokens=5)
    made = [llm.input_processor.process(prompt, params) for prompt in prompts]
    found = dict(llm.finish_each([("pair", made[:2]), ("one", made[2:])], max_groups=2))
    outputs = [one.output().outputs[0].token_ids for tag in ("pair", "one") for one in found[tag]]
    assert outputs == [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def test_a_closed_iterator_frees_its_requests(llm: LLM) -> None:
    free = num_free_blocks(llm)
    steps = llm.finish_each(groups(llm, [1, 900, 900], []), max_groups=3)
    assert next(steps)[0] == 0
    steps.close()  # type: ignore[attr-defined]  # a generator
    assert num_free_blocks(llm) == free
    assert [tag for tag, _ in llm.finish_each(groups(llm, [1, 1], []), max_groups=3)] == [0, 1]


def test_abort_ends_the_groups_in_flight_and_takes_no_more(llm: LLM) -> None:
    taken: list[int] = []
    steps = llm.finish_each(groups(llm, [1, 900, 900, 900, 900, 900], taken), max_groups=3)
    assert next(steps)[0] == 0
    llm.abort()
    assert [(tag, reasons(tracked)) for tag, tracked in steps] == [(tag, ["abort"]) for tag in (1, 2, 3)]
    assert taken == [0, 1, 2, 3]


def test_a_stream_goes_on_meanwhile(llm: LLM) -> None:
    steps = llm.finish_each(groups(llm, [20, 20], []), max_groups=2)
    stream = llm.stream([9, 9], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    next(stream)
    assert [tag for tag, _ in steps] == [0, 1]
    [*_, last] = stream
    assert len(last.outputs[0].token_ids) == 30
