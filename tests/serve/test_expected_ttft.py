"""The header `x-expected-ttft`, and comments with the progress of prompts in streams."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from invented_profiles import measure
from thread_server import ThreadServer, thread_server

from longspan.args import EngineArgs
from longspan.serve import engine_loop

TOKEN_S = 0.01
PROMPT = [3 + place % 180 for place in range(300)]


def args(tiny: Path, **given: Any) -> EngineArgs:
    sizes = {"block_size": 16, "max_num_batched_tokens": 32, "threads_per_rank": 1}
    return EngineArgs(model=str(tiny), dtype="float32", skip_tokenizer_init=True, **{**sizes, **given})


def expected_s(server: ThreadServer, prompt: list[int] | list[list[int]], **fields: Any) -> float:
    return float(server.complete(prompt=prompt, max_tokens=1, **fields).headers["x-expected-ttft"])


@pytest.mark.parametrize(("parallel", "policy"), [("1", "chunked"), ("2", "chunked"), ("2", "context")])
def test_the_expected_ttft_is_that_of_the_profile_without_cached_tokens(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: str, policy: str
) -> None:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    measure(tiny, tp=1, token_s=TOKEN_S, decode_s=0.01, exchanges=("ring_kv", "alltoall_sparse"))
    with thread_server(args(tiny, parallel=parallel, policy=policy)) as server:
        seconds = expected_s(server, PROMPT)
        alone_s = TOKEN_S * len(PROMPT) / (2 if policy == "context" else 1)
        assert seconds == pytest.approx(alone_s, rel=0.05)
        assert expected_s(server, PROMPT) < seconds / 4, "most of it is cached"
        other = [list(range(5 + at, 105 + at)) for at in (0, 1)]
        both = expected_s(server, other, stream=True)
        one = TOKEN_S * 100
        if parallel == "1":
            assert 0.95 * one <= both <= 2.1 * one, "the uncomputed part of the first prompt delays the second"
        else:
            assert both == pytest.approx(one, rel=0.05), "prompts on different instances do not wait for each other"


def test_there_is_no_expected_ttft_without_a_profile(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    with thread_server(args(tiny)) as server:
        for stream in (False, True):
            reply = server.complete(prompt=PROMPT, max_tokens=1, stream=stream)
            assert reply.status == 200 and "x-expected-ttft" not in reply.headers


def test_a_stream_has_the_progress_of_a_long_prompt_as_comments(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "_PROGRESS_INTERVAL_S", 0.0)
    with thread_server(args(tiny)) as server:
        reply = server.complete(prompt=PROMPT, max_tokens=2, stream=True, ignore_eos=True, return_token_ids=True)
        seen = [
            (int(done), int(total)) for done, total in re.findall(rb"^: prefill (\d+)/(\d+)$", reply.data, re.MULTILINE)
        ]
        computed = [done for done, _ in seen]
        assert len(seen) >= 2 and {total for _, total in seen} == {300}
        assert computed == sorted(set(computed)) and computed[-1] < 300
        assert reply.data.rindex(b": prefill") < reply.data.index(b"data: ")
        assert len(reply.token_ids) == 2


def test_a_prompt_shorter_than_the_interval_has_no_comments(tiny: Path) -> None:
    with thread_server(args(tiny)) as server:
        reply = server.complete(prompt=PROMPT[:40], max_tokens=2, stream=True)
        assert b"\n: " not in reply.data and not reply.data.startswith(b":")
