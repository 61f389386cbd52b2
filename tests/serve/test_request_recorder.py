"""`longspan serve --record`: the requests of a server, without text, for simulations of the same load."""

from __future__ import annotations

import errno
import gzip
import io
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_llm import run
from server_process import running

from longspan import SamplingParams
from longspan.args import EngineArgs
from longspan.core.options import PolicySettings
from longspan.errors import ParameterError
from longspan.serve import messages
from longspan.serve.request_recorder import RequestRecorder, layout_of
from longspan.text.input_processor import EngineRequest
from longspan.workload.recorded import block_ids, recorded_layout
from longspan.workload.requests import make_workload
from longspan.workload.spec import BLOCK_LEN, WorkloadSpec
from longspan.workload.traces import RequestSpec, read_trace

SHARED = [7 + place % 90 for place in range(1030)]
REQUESTS: list[dict[str, Any]] = [
    {"prompt": SHARED, "max_tokens": 3},
    {"prompt": [*SHARED, 5, 6], "max_tokens": 4},
    {"prompt": [1, 2, 3], "max_tokens": 5},
    {"prompt": SHARED[:600], "max_tokens": 2, "n": 2},
    {"prompt": SHARED, "max_tokens": 1, "cache_salt": "other"},
]
POLICY = PolicySettings(name="chunked", options={})


def request(*token_ids: int, **params: Any) -> EngineRequest:
    return EngineRequest(text=None, token_ids=token_ids, params=SamplingParams(**params))


def end(number: int, num_tokens: int = 3, reason: Any = "length") -> messages.StepOutputs:
    """Return the report that a choice of a request has ended."""
    choice = messages.FinishedChoice(
        id=number,
        reason=reason,
        num_prompt_tokens=0,
        num_output_tokens=num_tokens,
        num_cached_tokens=0,
        n=1,
        max_tokens=num_tokens,
        is_first_choice=True,
        is_corrupted=False,
        queue_s=0.0,
        prefill_s=0.5,
        decode_s=1.0,
        ttft_s=0.5,
        e2e_s=1.5,
    )
    return messages.StepOutputs(finished=[choice])


def layout(parallel: str, policy: PolicySettings = POLICY) -> messages.ParallelSet:
    return messages.ParallelSet(parallel, policy, None)


def started() -> messages.Started:
    """Return the first report of an engine core."""
    cache = messages.CacheConfig(block_size=16, cache_dtype="float32", enable_prefix_caching=True)
    return messages.Started(
        name="m",
        tokenizer_dir=None,
        trust_remote_code=False,
        vocab_size=9,
        max_model_len=9,
        max_num_seqs=9,
        parallel="2",
        cache_config=cache,
        policy=POLICY,
        stats=messages.Stats(num_kv_blocks=1, used_blocks=[0], busy_s=[0.0]),
    )


def rows(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    return [json.loads(line) for line in text.splitlines()]


def shared_blocks(requests: list[RequestSpec]) -> list[list[int]]:
    """Return the number of leading blocks that each pair of requests shares."""
    return [
        [
            next(
                (place for place, (a, b) in enumerate(zip(one.block_ids, other.block_ids, strict=False)) if a != b),
                min(len(one.block_ids), len(other.block_ids)),
            )
            for other in requests
        ]
        for one in requests
    ]


def test_lengths_gaps_and_shared_prefixes_of_a_recording_are_those_of_the_requests(tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    sizes = ("--max-model-len", "1200", "--block-size", "16", "--num-gpu-blocks-override", "400")
    options = ("--skip-tokenizer-init", "--threads-per-rank", "1", "--policy", "chunked", *sizes)
    sent: list[tuple[float, float]] = []
    with running(str(tiny), *options, "--record", str(path), log=tmp_path / "log") as server:
        for fields in REQUESTS:
            begin_s = time.monotonic()
            assert server.client.complete(ignore_eos=True, **fields).status == 200
            sent.append((begin_s, time.monotonic()))
        assert server.client.complete(prompt=[5] * 2000).status == 400
    choices = [(place, fields) for place, fields in enumerate(REQUESTS) for _ in range(fields.get("n", 1))]
    recorded = read_trace(path)
    assert [(one.input_len, one.output_len) for one in recorded] == [
        (len(fields["prompt"]), fields["max_tokens"]) for _, fields in choices
    ]
    offsets = [
        (sent[place][0] - one.due_s, sent[place][1] - one.due_s)
        for (place, _), one in zip(choices, recorded, strict=True)
        if one.due_s is not None
    ]
    assert len(offsets) == 6
    assert max(low for low, _ in offsets) <= min(high for _, high in offsets), "one clock, within each request's time"
    assert shared_blocks(recorded) == [
        [3, 2, 0, 1, 1, 0],
        [2, 3, 0, 1, 1, 0],
        [0, 0, 1, 0, 0, 0],
        [1, 1, 0, 2, 2, 0],
        [1, 1, 0, 2, 2, 0],
        [0, 0, 0, 0, 0, 3],
    ]
    for (place, fields), one in zip(choices, recorded, strict=True):
        assert one.ttft_s is not None and 0 < one.ttft_s < sent[place][1] - sent[place][0]
        assert (one.tpot_s is None) == (fields["max_tokens"] == 1)
    header = recorded_layout(path)
    assert header is not None
    assert (header["model"], header["parallel"], header["policy"]) == (str(tiny), "1", "chunked")
    assert header["options"]["max_model_len"] == 1200 and "policy_options" in header
    arrivals = make_workload(WorkloadSpec(workload=str(path))).arrivals
    assert [len(one.prompt) for one in arrivals] == [len(fields["prompt"]) for _, fields in choices]
    assert list(arrivals[0].prompt[:1024]) == list(arrivals[1].prompt[:1024])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_later_server_continues_a_recording(name: str, tmp_path: Path) -> None:
    """Its times continue. Its ids are different, since a new engine caches no prefix of the one before."""
    path, tokens = tmp_path / name, tuple(range(600))
    for run_number in range(2):
        recorder = RequestRecorder(path, {"model": f"m{run_number}", "options": {}})
        recorder.received(started())
        for number in range(3):
            recorder.sent(messages.Add(id=number, engine_request=request(*tokens)))
            recorder.received(end(number))
        recorder.close()
    headers = [row["longspan"] for row in rows(path) if "longspan" in row]
    assert [header["model"] for header in headers] == ["m0", "m1"]
    assert headers[0]["start_s"] == headers[1]["start_s"]
    requests = read_trace(path)
    assert [one.block_ids for one in requests] == [(0, 1)] * 3 + [(2, 3)] * 3
    times = [one.due_s for one in requests]
    assert times == sorted(times, key=float)


def test_ids_cannot_be_compared_with_those_of_a_guessed_text(tmp_path: Path) -> None:
    """Equal prompts have equal ids in one recording, and other ids in another one."""
    token_ids, found = tuple(range(2 * BLOCK_LEN + 1)), []
    for name in ("a.jsonl", "b.jsonl"):
        recorder = RequestRecorder(tmp_path / name, {})
        for number in range(2):
            recorder.sent(messages.Add(id=number, engine_request=request(*token_ids)))
            recorder.received(end(number))
        recorder.close()
        first, second = (row["hash_ids"] for row in rows(tmp_path / name))
        assert first == second and len(first) == 3
        found.append(first)
    assert {*found[0]}.isdisjoint(found[1])
    assert {*found[0], *found[1]}.isdisjoint(block_ids(token_ids, b""))


def test_only_choices_with_an_answer_are_recorded(tmp_path: Path) -> None:
    recorder = RequestRecorder(tmp_path / "a.jsonl", {})
    for number in range(7):
        recorder.sent(messages.Add(id=number, engine_request=request(number, n=2 if number == 6 else 1)))
    recorder.received(end(0))
    recorder.received(end(1, num_tokens=2, reason="abort"))
    recorder.received(end(2, num_tokens=0, reason="abort"))
    recorder.received(end(3, reason="error"))
    recorder.received(messages.Failed(4, "reason"))
    recorder.received(end(4))
    recorder.received(started())
    recorder.sent(messages.Add(id=6, engine_request=request(6, n=2), is_accepted=True))
    for number in (5, 6, 6, 6, 99):
        recorder.received(end(number, num_tokens=4))
    recorder.close()
    assert [row["output_length"] for row in rows(tmp_path / "a.jsonl") if "output_length" in row] == [3, 2, 4, 4]


@pytest.mark.parametrize("num_ended", [0, 1, 2])
def test_each_choice_is_recorded_once_if_engines_are_lost(num_ended: int, tmp_path: Path) -> None:
    recorder = RequestRecorder(tmp_path / "a.jsonl", {})
    for _ in range(3):  # the last engine is not lost
        recorder.received(started())
        recorder.sent(messages.Add(id=1, engine_request=request(1, n=3)))
        for length in range(1, 1 + num_ended):
            recorder.received(end(1, num_tokens=length))
    for length in range(1 + num_ended, 4):
        recorder.received(end(1, num_tokens=length))
    recorder.close()
    assert [row["output_length"] for row in rows(tmp_path / "a.jsonl") if "output_length" in row] == [1, 2, 3]


def record(path: Path, *numbers: int) -> None:
    recorder = RequestRecorder(path, {"model": "m", "options": {}})
    recorder.received(started())
    for number in numbers:
        recorder.sent(messages.Add(id=number, engine_request=request(number)))
        recorder.received(end(number, num_tokens=number))
    recorder.close()


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_recording_continues_after_a_write_that_was_killed_at_any_byte(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    record(path, 1)
    first = path.read_bytes()
    record(path, 2)
    whole = path.read_bytes()
    for size in (*range(1, 40), *range(len(first), len(whole), 7), len(whole) - 1):
        path.write_bytes(whole[:size])
        record(path, 3)
        lengths = [row["output_length"] for row in rows(path) if "output_length" in row]
        assert lengths[0] == (1 if size >= len(first) else 3) and lengths[-1] == 3
        assert "longspan" in rows(path)[0] and all("longspan" in row or "hash_ids" in row for row in rows(path))


def test_two_servers_cannot_record_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    first = RequestRecorder(path, {})
    with pytest.raises(ParameterError, match="another server"):
        RequestRecorder(path, {})
    first.close()
    record(path, 1)


def test_a_change_of_layout_is_recorded_once(tmp_path: Path) -> None:
    recorder = RequestRecorder(tmp_path / "a.jsonl", layout_of(EngineArgs("m", trace="t.json", block_size=32)))
    tetris = PolicySettings(name="tetris", options={"sp": 2}, given={"sp": "2"})
    for parallel, policy in (("2", POLICY), ("2", POLICY), ("tp2", POLICY), ("tp2", tetris)):
        recorder.received(layout(parallel, policy))
    recorder.close()
    headers = [row["longspan"] for row in rows(tmp_path / "a.jsonl")]
    assert [(row["parallel"], row["policy"], row["policy_options"]) for row in headers] == [
        ("2", "chunked", {}),
        ("tp2", "chunked", {}),
        ("tp2", "tetris", {"sp": "2"}),
    ]
    assert all(row["options"] == {"block_size": 32} and row["model"] == "m" for row in headers)


class Disk(io.FileIO):
    """A file on a disk that is full after some bytes, or that waits for an event."""

    free = 10**9
    ready = threading.Event()

    def write(self, data: Any) -> int:
        assert self.ready.wait(30)
        if self.tell() + len(data) > self.free:
            part = max(0, self.free - self.tell())
            if not part:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(bytes(data)[:part])
        return super().write(data)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> type[Disk]:
    class OfTest(Disk):
        ready = threading.Event()

    monkeypatch.setattr(Path, "open", lambda path, mode, **_: OfTest(path, mode.replace("b", "")))
    OfTest.ready.set()
    return OfTest


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_full_disk_ends_a_recording_with_whole_lines_and_a_line_in_the_log(
    name: str, disk: type[Disk], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longspan.serve.request_recorder._FLUSH_S", 0.0)
    disk.free = 400
    path = tmp_path / name
    recorder = RequestRecorder(path, {})
    with caplog.at_level(logging.ERROR, logger="longspan"):
        for number in range(50):
            recorder.sent(messages.Add(id=number, engine_request=request(number)))
            recorder.received(end(number))
        deadline_s = time.monotonic() + 30
        while "free some space" not in caplog.text:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        recorder.sent(messages.Add(id=50, engine_request=request(50)))
        recorder.received(end(50))
        recorder.close()
    assert caplog.text.count("the recording ends") == 1 and name in caplog.text
    assert path.stat().st_size <= 400
    assert len(rows(path)) < 50


def test_a_slow_disk_delays_no_request_and_takes_no_memory_without_bound(
    disk: type[Disk], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longspan.serve.request_recorder._FLUSH_S", 0.0)
    monkeypatch.setattr("longspan.serve.request_recorder._MAX_LINES", 100)
    disk.ready.clear()
    recorder = RequestRecorder(tmp_path / "a.jsonl", {})
    for number in range(1000):  # the first lines wait for the disk, in the thread
        recorder.sent(messages.Add(id=number, engine_request=request(number)))
        recorder.received(end(number))
    disk.ready.set()
    recorder.close()
    num_lines = len(rows(tmp_path / "a.jsonl"))
    assert 100 <= num_lines < 1000
    assert "a.jsonl is written too slowly" in caplog.text
    assert f"{1000 - num_lines} requests are not in" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none/a.jsonl", None, "make its folder"),
        ("a.json", None, "must end in .jsonl or .jsonl.gz"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 2, "output_length": 3}', "exists and is no recording"),
        ("a.jsonl", "text", "exists and is no recording"),
        ("a.jsonl.gz", "text", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_recorded_to_is_an_early_error(
    name: str, content: str | None, words: str, tmp_path: Path, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    assert run("serve", str(tiny), "--port", "0", "--record", str(path)) == 2
    error = capsys.readouterr().err
    assert "--record" in error and words in error
    assert content is None or path.read_text() == content
