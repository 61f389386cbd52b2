"""An engine in Python whose process forks, is interrupted, or exits without a shutdown."""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import ThreadLLM, num_free_blocks
from forked import Forked
from leftovers import left_names, wait_until_gone

from longspan import LLM, AsyncLLM, SamplingParams

pytestmark = pytest.mark.usefixtures("own_folder")
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "threads_per_rank": 1, "block_size": 16}


def wait_for_lines(process: Forked, number: int) -> list[str]:
    deadline = time.monotonic() + 60
    while process.stdout.count("\n") < number:
        assert time.monotonic() < deadline, process.stdout
        time.sleep(0.02)
    return process.stdout.splitlines()


def use_in_child(llm: LLM, async_llm: AsyncLLM) -> None:
    """Uses the engines of the parent in every way, then one of its own, and ends as an interpreter does."""
    uses: list[Callable[[], object]] = [
        partial(llm.generate, [[3, 4, 5]], SHORT, use_tqdm=False),
        lambda: next(llm.stream([3, 4, 5], SHORT)),
        partial(llm.chat, [{"role": "user", "content": "Hello"}]),
        lambda: [*llm.finish_each([], max_groups=1)],
        partial(llm.reshard, "1"),
        partial(llm.set_policy, "chunked", {}),
        llm.reset_prefix_cache,
        lambda: llm.engine,
        lambda: asyncio.run(anext(async_llm.generate([3, 4, 5], SHORT, "child"))),  # type: ignore[arg-type]
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=f"belongs to process {os.getppid()}.*make an engine after the fork"):
            use()
    llm.abort()
    with llm:  # which shuts down at its end
        pass
    with LLM(llm.service.files.name, **OPTIONS) as own:
        assert len(own.generate([[3, 4, 5]], SHORT, use_tqdm=False)[0].outputs[0].token_ids) == 5


def fork_while_requests_run(model: str) -> None:
    llm, async_llm = LLM(model, instances=2, host_kv_gib=0.01, **OPTIONS), AsyncLLM(model, **OPTIONS)
    [before] = llm.generate([[3, 4, 5]], LONG, use_tqdm=False)
    stream = llm.stream([3, 4, 5], LONG)
    next(stream)
    if (child := os.fork()) == 0:
        code = 1
        try:
            use_in_child(llm, async_llm)
            del llm, async_llm, stream
            gc.collect()
            atexit._run_exitfuncs()
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [*stream][-1].outputs[0].token_ids == before.outputs[0].token_ids
    [after] = llm.generate([[3, 4, 5]], LONG, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids
    llm.shutdown()
    async_llm.shutdown()
    print("right")


def test_a_forked_child_gets_an_error_and_leaves_the_engine_of_its_parent_alone(tiny: Path) -> None:
    before = left_names()
    result = Forked(fork_while_requests_run, str(tiny)).wait(120)
    assert (result.returncode, result.stdout) == (0, "right\n"), result.stderr
    wait_until_gone([], before)


def fork_and_compute(model: str) -> None:
    llm = LLM(model, **OPTIONS)
    if (child := os.fork()) == 0:
        time.sleep(300)
        os._exit(0)
    print(child, *llm.service.executor.pids, flush=True)
    while True:
        llm.generate([[3, 4, 5]], LONG, use_tqdm=False)


def test_workers_end_with_a_killed_parent_though_its_child_lives(tiny: Path) -> None:
    before = left_names()
    parent = Forked(fork_and_compute, str(tiny))
    child, *workers = map(int, wait_for_lines(parent, 1)[0].split())
    family = [process.pid for process in psutil.Process(parent.pid).children(recursive=True) if process.pid != child]
    assert {*workers} < {*family}
    os.kill(parent.pid, signal.SIGKILL)
    wait_until_gone(family, before)
    assert psutil.pid_exists(child)
    os.kill(child, signal.SIGKILL)
    parent.wait(60)


def generate_until_interrupted(model: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
    with ThreadLLM(model, **OPTIONS) as llm:
        free = num_free_blocks(llm)
        calls: list[Callable[[], object]] = [
            partial(llm.generate, [[3, 4, 5], [6, 7]], ENDLESS, use_tqdm=False),
            lambda: [*llm.stream([3, 4, 5], ENDLESS)],
            lambda: [*llm.finish_each([(0, [llm.input_processor.process([8, 9], ENDLESS)])], max_groups=2)],
        ]
        for call in calls:
            llm.reset_prefix_cache()
            try:
                print("begins", flush=True)
                call()
            except KeyboardInterrupt:
                assert num_free_blocks(llm) == free
                print(len(llm.generate([3, 4, 5], SHORT, use_tqdm=False)[0].outputs[0].token_ids), flush=True)


def test_ctrl_c_ends_the_requests_of_the_call_and_the_engine_serves_the_next(tiny: Path) -> None:
    process = Forked(generate_until_interrupted, str(tiny))
    for number in (1, 3, 5):
        wait_for_lines(process, number)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGINT)
    result = process.wait(60)
    assert (result.returncode, result.stdout.split()) == (0, ["begins", "5"] * 3), result.stderr


UNFINISHED = """
import asyncio, sys, threading
from contextlib import suppress
from longspan import LLM, AsyncLLM, SamplingParams
options = dict(dtype="float32", skip_tokenizer_init=True, threads_per_rank=1, block_size=16)
endless = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
llm, other = LLM(sys.argv[1], host_kv_gib=0.01, **options), AsyncLLM(sys.argv[1], **options)
def generate():
    with suppress(RuntimeError):
        llm.generate([[3, 4], [5, 6]], endless)
threading.Thread(target=generate, daemon=True).start()
stream, requests = llm.stream([7, 8], endless), other.generate([3, 4], endless, "one")
next(stream)
loop = asyncio.new_event_loop()
loop.run_until_complete(anext(requests))
print(*llm.service.executor.pids, *other.service.executor.pids)
"""


def test_an_interpreter_exits_in_the_middle_of_calls_and_leaves_nothing_behind(tiny: Path) -> None:
    before = left_names()
    result = subprocess.run(
        [sys.executable, "-c", UNFINISHED, str(tiny)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    wait_until_gone([*map(int, result.stdout.split())], before)
