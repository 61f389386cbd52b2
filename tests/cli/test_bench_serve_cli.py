"""`longspan bench serve` over real sockets: options to requests, results to tables, files and exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_llm import run
from fake_openai import DONE, chunk, event, usage

pytestmark = pytest.mark.usefixtures("fake_llm")  # restores signal handlers
Capture = pytest.CaptureFixture[str]


class SocketServer:
    """Speaks HTTP/1.1 in a thread. A prompt of 13 tokens gets no end, one of 14 a 503; others a token per chunk."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.models = {"object": "list", "data": [{"id": "served"}, {"id": "other"}]}
        self.gap_s = 0.001
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has left
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        request = json.loads(body) if body else None
        self.requests.append((first, headers, request))
        if request is None:
            _plain(writer, 200, self.models)
            return True
        if len(request.get("prompt", ())) == 14:
            _plain(writer, 503, {"error": {"message": "no room"}})
            return True
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in answer(request):
            for half in (piece[: len(piece) // 2], piece[len(piece) // 2 :]):
                writer.write(f"{len(half):x}\r\n".encode() + half + b"\r\n")
                await writer.drain()
            await asyncio.sleep(self.gap_s)
            if len(request.get("prompt", ())) == 13:
                return False
        writer.write(b"0\r\n\r\n")
        return True


def _plain(writer: asyncio.StreamWriter, status: int, found: object) -> None:
    body = json.dumps(found).encode()
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)


def answer(request: dict[str, Any]) -> Iterator[bytes]:
    if "messages" in request:
        num, num_prompt = request["max_completion_tokens"], len(request["messages"][0]["content"].split())
        yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None})
        for _ in range(num):
            yield event({"choices": [{"delta": {"content": "w"}, "finish_reason": None}], "usage": None})
        yield event({"choices": [{"delta": {}, "finish_reason": "length"}], "usage": None})
    else:
        num, num_prompt = request["max_tokens"], len(request["prompt"])
        for index in range(num):
            yield chunk("w", "length" if index == num - 1 else None, index + 1)
    yield usage(num, num_prompt) + DONE


@pytest.fixture
def server() -> Iterator[SocketServer]:
    server = SocketServer()
    yield server
    server.stop()


def bench(server: SocketServer, *arguments: str) -> int:
    return run("bench", "serve", "--base-url", server.url, *arguments)


def test_a_run_from_options_to_json(server: SocketServer, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "out.json"
    code = bench(
        server, "--num-prompts", "12", "--request-rate", "200", "--random-input-len", "20", "--random-output-len", "5",
        "--random-range-ratio", "0.2", "--random-prefix-len", "8", "--random-vocab-size", "90", "--seed", "3",
        "--ignore-eos", "--api-key", "secret", "--extra-body", '{"temperature": 0}', "--slo-ttft", "60000",
        "--output-json", str(path), "--plot", str(tmp_path / "a.png"),
    )  # fmt: skip
    out = capsys.readouterr().out
    assert code == 0
    found = json.loads(path.read_text())
    assert (found["completed"], found["failed"], found["model_id"], found["backend"]) == (12, 0, "served", "openai")
    (first, headers, _), *sent = server.requests
    assert first == "GET /v1/models HTTP/1.1"
    assert headers["authorization"] == "Bearer secret"
    assert "secret" not in out + path.read_text()
    bodies = [body for _, _, body in sent]
    assert all(headers["authorization"] == "Bearer secret" for _, headers, _ in sent)
    assert {body["model"] for body in bodies} == {"served"}
    assert {(body["temperature"], body["ignore_eos"], body["stream"]) for body in bodies} == {(0, True, True)}
    assert bodies[0]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert {tuple(body["prompt"][:8]) for body in bodies} == {tuple(bodies[0]["prompt"][:8])}
    assert all(24 <= len(body["prompt"]) <= 32 and max(body["prompt"]) < 90 for body in bodies)
    assert found["total_input_tokens"] == sum(len(body["prompt"]) for body in bodies) == found["input_tokens_asked"]
    assert found["total_output_tokens"] == sum(body["max_tokens"] for body in bodies) == found["output_tokens_asked"]
    assert found["request_goodput"] == pytest.approx(12 / found["duration"])
    assert 0 < found["p50_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
    assert found["due_times"][-1] == pytest.approx(12 / 200)
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert "goodput (TTFT ≤ 60000 ms)" in out


def test_chat_sends_words(server: SocketServer, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    code = bench(
        server, "--endpoint", "/v1/chat/completions", "--model", "mine", "--num-prompts", "3",
        "--random-input-len", "9",
        "--random-output-len", "4", "--no-continuous-usage-stats", "--max-concurrency", "1", "--output-json", str(path),
    )  # fmt: skip
    assert code == 0
    assert [first for first, _, _ in server.requests] == ["POST /v1/chat/completions HTTP/1.1"] * 3
    [(_, _, body), *_] = server.requests
    assert len(body["messages"][0]["content"].split()) == 9
    assert (body["model"], body["max_completion_tokens"]) == ("mine", 4)
    assert body["stream_options"] == {"include_usage": True}
    found = json.loads(path.read_text())
    assert [len(times) for times in found["itls"]] == [3, 3, 3]
    assert (found["max_concurrent_requests"], found["total_output_tokens"]) == (1, 12)


def test_a_trace_says_when_and_how_long_and_failures_are_listed(
    server: SocketServer, tmp_path: Path, capsys: Capture
) -> None:
    trace, path = tmp_path / "t.csv", tmp_path / "out.json"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n1,12,2\n2,13,3\n3,14,2\n4,15,2\n")
    code = bench(server, "--trace", str(trace), "--trace-speed", "50", "--output-json", str(path))
    assert code == 0
    found = json.loads(path.read_text())
    assert found["due_times"] == pytest.approx([0.0, 0.02, 0.04, 0.06])
    assert [len(body["prompt"]) for _, _, body in server.requests[1:]] == [12, 13, 14, 15]
    assert (found["completed"], found["failed"], found["request_rate"]) == (2, 2, "trace")
    assert found["failures"] == {"RemoteProtocolError": 1, "HTTP 503": 1}
    assert found["errors"][2] == "HTTP 503: no room"
    assert "no room" in capsys.readouterr().out


def test_exit_code_1_when_nothing_succeeded(server: SocketServer, capsys: Capture) -> None:
    assert bench(server, "--num-prompts", "2", "--random-input-len", "14") == 1
    assert "HTTP 503" in capsys.readouterr().out


LENGTHS = "num_prefill_tokens,num_decode_tokens\n3,2\n4,2\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--base-url", "localhost:8000"], "--base-url must be like http://127.0.0.1:8000, but 'localhost:8000' given"),
        (["--endpoint", "/v1/embeddings"], "--endpoint must be a path that ends in"),
        (["--extra-body", "[1]"], "--extra-body must be a JSON object, but '[1]' given"),
        (["--extra-body", "{"], "--extra-body is no JSON"),
        (["--request-timeout", "0"], "--request-timeout must be above 0"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1, but 0 given"),
        (["--seed", "-1"], "--seed must be at least 0, but -1 given"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--random-vocab-size", "0"], "--random-vocab-size must be at least 1"),
        (["--slo-ttft", "0"], "--slo-ttft must be above 0"),
        (["--trace-speed", "2"], "--trace-speed 2.0 needs --trace"),
        (["--trace", "T", "--random-input-len", "5"], "--random-input-len 5 contradicts --trace"),
        (["--trace", "T", "--trace-speed", "2"], "give --request-rate instead"),
        (["--trace", "M", "--request-rate", "2"], "--request-rate 2.0 contradicts --trace"),
        (["--output-json", "/nowhere/x.json"], "--output-json: the folder '/nowhere' is not there"),
        (["--plot", "/nowhere/x.png"], "the folder '/nowhere' is not there"),
    ],
)
def test_mistakes_are_told_before_anything_is_sent(
    server: SocketServer, arguments: list[str], words: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "T.csv").write_text(LENGTHS)
    (tmp_path / "M.csv").write_text("arrived_at," + LENGTHS.replace("\n3", "\n0,3").replace("\n4", "\n1,4"))
    named = [str(tmp_path / f"{one}.csv") if one in ("T", "M") else one for one in arguments]
    assert bench(server, *named) == 2
    assert words in capsys.readouterr().err
    assert server.requests == []


def test_a_server_that_is_not_there_or_lists_no_models(server: SocketServer, capsys: Capture) -> None:
    assert run("bench", "serve", "--base-url", "http://127.0.0.1:9") == 2
    assert "no server answers at http://127.0.0.1:9/v1/models" in capsys.readouterr().err
    server.models = {"error": {"message": "who are you?"}}
    assert bench(server) == 2
    assert "lists no models (HTTP 200: who are you?)" in capsys.readouterr().err


def test_ctrl_c_reports_what_there_is(server: SocketServer, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "longspan", "bench", "serve", "--base-url", server.url, "--num-prompts", "500"]
    command += ["--request-rate", "20", "--random-input-len", "3", "--random-output-len", "2"]
    process = subprocess.Popen(
        [*command, "--output-json", str(path)], stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "120"}
    )
    while len(server.requests) < 4:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "unfinished when interrupted" in out
    found = json.loads(path.read_text())
    assert found["completed"] >= 1
    assert found["completed"] + found["num_unfinished"] == 500
