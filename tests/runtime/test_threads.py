"""One engine used from many threads and tasks: calls share steps, and no call waits for another's caller."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engines import InOrderLauncher, ThreadLLM, num_free_blocks

from longspan import LLM, AsyncLLM, RequestOutput, SamplingParams
from longspan.args import EngineArgs
from longspan.core.steps import Forward, Step
from longspan.errors import WorkerLostError
from longspan.service import Service

LENGTHS = (3, 90, 17, 140, 8, 61, 33, 120)
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 16,
    "max_num_batched_tokens": 48,
    "threads_per_rank": 1,
}


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


ENDLESS = greedy(3000)


class ThreadAsyncLLM(AsyncLLM):
    """An `AsyncLLM` whose workers run in this process."""

    make_service = partial(Service, launcher=InOrderLauncher)


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[ThreadLLM]:
    with ThreadLLM(str(tiny), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def async_llm(tiny: Path) -> Iterator[ThreadAsyncLLM]:
    with ThreadAsyncLLM(str(tiny), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(3, 199) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(llm: ThreadLLM, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens of each prompt when all run one after the other."""
    return [tokens_of(llm.generate(prompt, greedy(24), use_tqdm=False)[0]) for prompt in prompts]


def tokens_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


async def last_of(llm: AsyncLLM, prompt: Sequence[int], params: SamplingParams, request_id: str) -> RequestOutput:
    outputs = [output async for output in llm.generate(prompt, params, request_id)]
    assert [len(tokens_of(output)) for output in outputs] == [*range(1, len(outputs) + 1)]
    return outputs[-1]


@pytest.fixture
def steps(llm: LLM, async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> list[Forward]:
    """Every Forward that either engine submits to its executor."""
    log: list[Forward] = []

    def logging(submit: Callable[[Step], None], step: Step) -> None:
        if isinstance(step, Forward):
            log.append(step)
        submit(step)

    for executor in (llm.service.executor, async_llm.service.executor):
        monkeypatch.setattr(executor, "submit", partial(logging, executor.submit))
    return log


def in_threads(llm: ThreadLLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[RequestOutput]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        calls = [pool.submit(llm.generate, prompt, params, use_tqdm=False) for prompt in prompts]
        return [call.result(60)[0] for call in calls]


def streams_in_threads(llm: ThreadLLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[RequestOutput]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        calls = [pool.submit(lambda prompt: [*llm.stream(prompt, params)][-1], prompt) for prompt in prompts]
        return [call.result(60) for call in calls]


def by_to_thread(llm: ThreadLLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[RequestOutput]:
    async def main() -> list[RequestOutput]:
        calls = [asyncio.to_thread(llm.generate, prompt, params, use_tqdm=False) for prompt in prompts]
        return [output for [output] in await asyncio.gather(*calls)]

    return asyncio.run(main())


def in_tasks(llm: AsyncLLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[RequestOutput]:
    async def main() -> list[RequestOutput]:
        calls = [last_of(llm, prompt, params, str(number)) for number, prompt in enumerate(prompts)]
        return await asyncio.gather(*calls)

    return asyncio.run(main())


@pytest.mark.parametrize("way", [in_threads, streams_in_threads, by_to_thread, in_tasks])
def test_concurrent_calls_share_steps_and_get_the_tokens_of_calls_one_after_the_other(
    way: Callable[..., list[RequestOutput]],
    llm: ThreadLLM,
    async_llm: AsyncLLM,
    prompts: list[list[int]],
    expected: list[list[int]],
    steps: list[Forward],
) -> None:
    engine = async_llm if way is in_tasks else llm
    engine.reset_prefix_cache()
    outputs = way(engine, prompts, greedy(24))
    assert [tokens_of(output) for output in outputs] == expected
    assert all(output.finished for output in outputs)
    assert len(steps) < 24 * len(prompts) / 2, "one after the other they take a step per token"
    assert max(len(step.parts) for step in steps) >= 4, "a step has parts of requests of several callers"
    assert not engine.engine.has_unfinished


def test_calls_of_threads_preempt_one_another_and_stay_exact(
    tiny: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with ThreadLLM(str(tiny), num_gpu_blocks_override=14, max_model_len=200, **OPTIONS) as llm:
        outputs = in_threads(llm, prompts, greedy(24))
        assert [tokens_of(output) for output in outputs] == expected
        assert llm.engine.counts.num_preemptions > 0
        assert num_free_blocks(llm) == [14]


def test_violation_of_the_kv_account_is_logged_once(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadLLM(str(tiny), **OPTIONS) as llm:
        outputs = []
        for _ in range(3):
            outputs.append(llm.generate([[1, 2, 3]], greedy(5), use_tqdm=False)[0].outputs[0].token_ids)
            llm.engine.kv.pool(0).allocate(len(outputs) == 1)
        assert llm.engine.watch.num_violations == 1
    assert outputs[0] == outputs[1] == outputs[2]
    assert len([record for record in caplog.records if "violations" in record.message]) == 1


def test_an_unread_stream_delays_no_other_call(
    llm: ThreadLLM, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    slow = [llm.stream(prompt, greedy(40)) for prompt in prompts[:3]]
    for stream in slow:
        next(stream)
    assert [tokens_of(one) for one in llm.generate(prompts, greedy(24), use_tqdm=False)] == expected
    for stream, tokens in zip(slow, expected, strict=False):
        later = [tokens_of(output) for output in stream]
        assert [len(one) for one in later] == [*range(2, 41)], "no token is left out"
        assert later[22] == tokens


def test_a_generator_can_be_read_by_another_thread(llm: ThreadLLM, expected: list[list[int]], prompts: Any) -> None:
    stream = llm.stream(prompts[0], greedy(24))
    next(stream)
    with ThreadPoolExecutor(1) as pool:
        assert tokens_of(pool.submit(lambda: [*stream][-1]).result(60)) == expected[0]


@pytest.mark.parametrize("leave", ["close", "collect", "abort", "error"])
def test_a_request_that_is_left_frees_its_blocks(llm: ThreadLLM, leave: str) -> None:
    llm.reset_prefix_cache()
    free = num_free_blocks(llm)
    stream: Any = llm.stream([5, 6, 7], ENDLESS)
    next(stream)
    if leave == "close":
        stream.close()
    elif leave == "collect":
        del stream
        gc.collect()
    elif leave == "abort":
        llm.abort()
        assert [*stream][-1].outputs[0].finish_reason == "abort"
    else:
        with pytest.raises(ZeroDivisionError):
            stream.throw(ZeroDivisionError)
    assert num_free_blocks(llm) == free


def test_abort_ends_the_calls_of_all_threads(llm: ThreadLLM) -> None:
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(llm.generate, [[5, 6, number]] * 2, ENDLESS, use_tqdm=False) for number in range(4)]
        wait_for(lambda: llm.with_engine(lambda engine: engine.load().num_running) == 8)
        llm.abort()
        reasons = {output.outputs[0].finish_reason for call in calls for output in call.result(60)}
    assert reasons == {"abort"}
    assert not llm.engine.has_unfinished


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        threading.Event().wait(0.01)
    pytest.fail("it does not come about")


def test_a_call_that_fails_harms_no_other(speaking: ThreadLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = speaking.input_processor.tokenizer
    assert tokenizer is not None
    [whole] = speaking.generate("Once upon a time", greedy(60), use_tqdm=False)
    cursed, decode = speaking.tokenize("cursed"), tokenizer.decode

    def failing(ids: list[int], **options: Any) -> str:
        if ids[: len(cursed)] == cursed and len(ids) > len(cursed) + 3:
            raise OverflowError("no such character")
        return str(decode(ids, **options))

    monkeypatch.setattr(tokenizer, "decode", failing)
    with ThreadPoolExecutor(3) as pool:
        good = pool.submit(speaking.generate, "Once upon a time", greedy(60), use_tqdm=False)
        bad = [
            pool.submit(speaking.generate, [cursed, "fine"], greedy(2000), use_tqdm=False),
            pool.submit(speaking.generate, [[3, 10**9]], greedy(2), use_tqdm=False),
        ]
        with pytest.raises(OverflowError, match="no such character"):
            bad[0].result(60)
        with pytest.raises(ValueError, match="not in the vocabulary"):
            bad[1].result(60)
        assert good.result(60)[0].outputs[0].text == whole.outputs[0].text
    assert not speaking.engine.has_unfinished, "the other request of the call that failed has ended, too"


def test_a_refused_request_ends_its_own_call_only(llm: ThreadLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    add = llm.engine.add

    def adding(prompt: Sequence[int], *args: Any, **options: Any) -> Any:
        if tuple(prompt) == (9, 9):
            raise ValueError("not today")
        return add(prompt, *args, **options)

    monkeypatch.setattr(llm.engine, "add", adding)
    stream = llm.stream([5, 6], greedy(30))
    next(stream)
    with pytest.raises(ValueError, match="not today"):
        llm.generate([[7, 8], [9, 9]], ENDLESS, use_tqdm=False)
    assert len(tokens_of([*stream][-1])) == 30
    assert not llm.engine.has_unfinished


def test_changes_from_another_thread_are_made_between_steps(
    tiny: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with ThreadLLM(str(tiny), parallel="2", policy="chunked", **OPTIONS) as llm, ThreadPoolExecutor(8) as pool:
        held = llm.stream([5, 6, 7], ENDLESS)
        next(held)
        calls = [pool.submit(llm.generate, prompt, greedy(24), use_tqdm=False) for prompt in prompts[:7]]
        for refused in (partial(llm.set_policy, "auto", {}), llm.reset_prefix_cache):
            with pytest.raises(RuntimeError, match="unfinished"):
                refused()
        pool.submit(llm.reshard, "tp2").result(60)
        assert [tokens_of(call.result(60)[0]) for call in calls] == expected[:7]
        held.close()  # type: ignore[attr-defined]  # a generator
        pool.submit(llm.reshard, "2").result(60)
        assert str(llm.engine.config.cluster.spec) == "2"
        llm.set_policy("auto", {})
        llm.reset_prefix_cache()
        assert in_threads(llm, prompts, greedy(1))
        assert llm.worker_times() == [{}, {}]


def start_calls(llm: ThreadLLM, pool: ThreadPoolExecutor) -> list[Future[Any]]:
    """Starts endless calls of every kind and waits until all run."""
    group = [llm.input_processor.process([9, 9], ENDLESS)]
    calls = [pool.submit(llm.generate, [[5, 6, n], [7, n]], ENDLESS, use_tqdm=False) for n in range(3)]
    calls += [pool.submit(lambda n: [*llm.stream([8, n], ENDLESS)], n) for n in range(2)]
    calls.append(pool.submit(lambda: [*llm.finish_each([(0, group)], max_groups=1)]))
    wait_for(lambda: llm.with_engine(lambda engine: engine.load().num_running) == 9)
    return calls


def test_shutdown_ends_calls_of_all_threads_with_an_error(tiny: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        llm = ThreadLLM(str(tiny), **OPTIONS)
        calls = start_calls(llm, pool)
        unread = llm.stream([4, 4], ENDLESS)
        next(unread)
        for call in [pool.submit(llm.shutdown) for _ in range(2)]:
            call.result(60)
        for call in calls:
            with pytest.raises(RuntimeError, match="was shut down: make a new one"):
                call.result(60)
        with pytest.raises(RuntimeError, match="was shut down"):
            list(unread)
        with pytest.raises(RuntimeError, match="was shut down"):
            llm.generate([[1, 2]], greedy(1))


def test_a_lost_worker_ends_calls_of_all_threads_with_its_reason(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(8) as pool:
        llm = ThreadLLM(str(tiny), **OPTIONS)
        calls = start_calls(llm, pool)
        # Only a bug in the controller could name a block beyond the pool, and the worker must not survive it.
        pool_0 = llm.with_engine(lambda engine: engine.kv.pool(0))
        monkeypatch.setattr(pool_0, "allocate", lambda number: [10**6] * number)
        for call in calls:
            with pytest.raises(WorkerLostError, match=r"rank 0 .*IndexError"):
                call.result(60)
        errors = [call.exception(0) for call in calls]
        assert len({id(error) for error in errors}) == len(errors), "each caller has an error of its own"
        with pytest.raises(WorkerLostError, match="make a new one"):
            llm.generate([[1, 2]], greedy(1))
        llm.shutdown()


def test_an_error_in_the_engine_itself_ends_all_calls(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(8) as pool, ThreadLLM(str(tiny), **OPTIONS) as llm:
        calls = start_calls(llm, pool)
        monkeypatch.setattr(llm.service.engine, "emit", lambda: 1 / 0)
        for call in calls:
            with pytest.raises(RuntimeError, match="the engine failed") as failed:
                call.result(60)
            assert isinstance(failed.value.__cause__, ZeroDivisionError)


def test_an_engine_that_is_collected_leaves_no_thread(tiny: Path) -> None:
    def numbers() -> set[int | None]:
        return {thread.ident for thread in threading.enumerate() if "longspan" in thread.name}

    gc.collect()
    before = numbers()
    llm = ThreadLLM(str(tiny), **OPTIONS)
    llm.generate([[5, 6]], greedy(2), use_tqdm=False)
    stream = llm.stream([7, 8], ENDLESS)
    next(stream)
    assert len(numbers() - before) == 2, "a worker, and its driver"
    del llm, stream
    gc.collect()
    wait_for(lambda: numbers() <= before)


def whole(llm: ThreadLLM, prompt: list[int]) -> list[int]:
    return tokens_of(llm.generate([prompt, [5, 6]], greedy(24), use_tqdm=False)[0])


def streamed(llm: ThreadLLM, prompt: list[int]) -> list[int]:
    return tokens_of([*llm.stream(prompt, greedy(24))][-1])


def left(llm: ThreadLLM, prompt: list[int]) -> list[int]:
    return next(tokens for output in llm.stream(prompt, ENDLESS) if len(tokens := tokens_of(output)) == 5)


def in_groups(llm: ThreadLLM, prompt: list[int]) -> list[int]:
    made = [llm.input_processor.process(prompt, greedy(24))]
    return tokens_of(next(llm.finish_each([(0, made), (1, made)], max_groups=2))[1][0].output())


def refused(llm: ThreadLLM, prompt: list[int]) -> list[int]:
    with pytest.raises(ValueError, match="empty"):
        llm.generate([prompt, []], greedy(2), use_tqdm=False)
    return []


def looked_at(llm: ThreadLLM, prompt: list[int]) -> list[int]:
    del prompt
    assert llm.bytes_exchanged["total"] >= 0 <= llm.with_engine(lambda engine: engine.num_waiting)
    return []


@pytest.mark.parametrize("seed", range(2))
def test_any_mix_of_calls_from_threads_gives_right_tokens_and_frees_all_blocks(
    tiny: Path, seed: int, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    def caller(llm: ThreadLLM, rng: random.Random) -> None:
        for _ in range(6):
            number = rng.randrange(len(prompts))
            found = rng.choice([whole, streamed, left, in_groups, refused, looked_at])(llm, prompts[number])
            assert found == expected[number][: len(found)]

    rng = random.Random(seed)
    with ThreadLLM(str(tiny), num_gpu_blocks_override=40, max_model_len=400, **OPTIONS) as llm:
        with ThreadPoolExecutor(8) as pool:
            for call in [pool.submit(caller, llm, random.Random(rng.random())) for _ in range(8)]:
                call.result(120)
        assert num_free_blocks(llm) == [40]


# ---------------------------------------------------------------- AsyncLLM


def test_a_task_ends_its_request_by_abort_by_cancellation_or_by_leaving(async_llm: ThreadAsyncLLM) -> None:
    async def read(request_id: str, *, most: int = 10**6) -> RequestOutput:
        output: RequestOutput | None = None
        async for output in async_llm.generate([5, 6, 7], ENDLESS, request_id):
            started[request_id].set()
            if len(tokens_of(output)) == most:
                break
        assert output is not None
        return output

    async def main() -> None:
        tasks = {name: asyncio.create_task(read(name)) for name in ("abort", "many", "more", "cancel")}
        left = await read("leave", most=3)
        assert (left.finished, len(tokens_of(left))) == (False, 3)
        for name in tasks:
            await started[name].wait()
        await async_llm.abort("abort")
        await async_llm.abort(["many", "more", "unknown"])
        tasks["cancel"].cancel()
        for name in ("abort", "many", "more"):
            last = await tasks[name]
            assert (last.request_id, last.finished, last.outputs[0].finish_reason) == (name, True, "abort")
        with pytest.raises(asyncio.CancelledError):
            await tasks["cancel"]

    started = {name: asyncio.Event() for name in ("abort", "many", "more", "cancel", "leave")}
    asyncio.run(main())
    async_llm.reset_prefix_cache()
    assert async_llm.engine.load().used_blocks == [0]


def test_a_request_can_be_aborted_before_it_starts(async_llm: ThreadAsyncLLM) -> None:
    """Its prompt is long, so another thread looks at it first."""

    async def main() -> RequestOutput:
        task = asyncio.create_task(last_or_none())
        await asyncio.sleep(0)
        await async_llm.abort("early")
        return await task

    async def last_or_none() -> RequestOutput:
        return [output async for output in async_llm.generate([5] * 4000, greedy(5), "early")][-1]

    assert asyncio.run(main()).outputs[0].finish_reason == "abort"


def test_an_id_is_that_of_one_request_at_a_time(async_llm: ThreadAsyncLLM) -> None:
    async def main() -> None:
        first = async_llm.generate([5, 6], ENDLESS, "same")
        await anext(first)
        with pytest.raises(ValueError, match="request_id 'same' is the id of an unfinished request"):
            await anext(async_llm.generate([5, 6], ENDLESS, "same"))
        await anext(first)
        await first.aclose()
        with pytest.raises(ValueError, match="empty"):
            await anext(async_llm.generate([], greedy(2), "same"))
        with pytest.raises(ValueError, match="a prompt is a text or a list of token ids"):
            await anext(async_llm.generate(5, greedy(2), "same"))  # type: ignore[arg-type]
        salted: Any = {"prompt_token_ids": [5, 6], "cache_salt": "mine"}
        assert (await last_of(async_llm, salted, greedy(2), "same")).request_id == "same"

    asyncio.run(main())


def test_event_loops_of_several_threads_share_an_engine(
    async_llm: ThreadAsyncLLM, prompts: list[list[int]], expected: list[list[int]], steps: list[Forward]
) -> None:
    def loop(number: int) -> RequestOutput:
        return asyncio.run(last_of(async_llm, prompts[number], greedy(24), f"loop {number}"))

    with ThreadPoolExecutor(4) as pool:
        assert [tokens_of(output) for output in pool.map(loop, range(4))] == expected[:4]
    assert max(len(step.parts) for step in steps) > 1


def test_a_closed_event_loop_ends_only_its_own_requests(async_llm: ThreadAsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    abandoned = async_llm.generate([5, 6, 7], ENDLESS, "abandoned")
    loop.run_until_complete(anext(abandoned))
    loop.close()
    assert len(tokens_of(asyncio.run(last_of(async_llm, [5, 6], greedy(30), "other")))) == 30
    wait_for(lambda: not async_llm.engine.has_unfinished)


def test_errors_reach_every_task(tiny: Path) -> None:
    async def main(llm: AsyncLLM) -> None:
        streams = [llm.generate([5, 6, number], ENDLESS, str(number)) for number in range(3)]
        for stream in streams:
            await anext(stream)
        await asyncio.to_thread(llm.shutdown)
        for stream in streams:
            with pytest.raises(RuntimeError, match="was shut down"):
                async for _ in stream:
                    pass
        with pytest.raises(RuntimeError, match="was shut down"):
            await anext(llm.generate([5, 6], ENDLESS, "later"))

    asyncio.run(main(ThreadAsyncLLM.from_engine_args(EngineArgs(model=str(tiny), **OPTIONS))))


def test_the_thread_of_the_engine_does_not_wait_for_itself(tiny: Path) -> None:
    with ThreadLLM(str(tiny), skip_tokenizer_init=True) as llm:
        with pytest.raises(RuntimeError, match="cannot wait for itself"):
            llm.with_engine(lambda _: llm.generate([[5, 6]], SamplingParams(max_tokens=1)))
        [output] = llm.generate([[5, 6]], SamplingParams(max_tokens=1, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 1
