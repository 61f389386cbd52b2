"""`longspan batch`, its files: a line out per line in, whatever is wrong, and going on after a stop at any byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_llm import run

from longspan.cli import batch as verb
from longspan.cli.batch import (
    Answers,
    BatchLine,
    appended,
    keys_in,
    parse_batch_line,
    read_batch,
    run_lines,
)

pytestmark = pytest.mark.usefixtures("fake_llm")
Answer = tuple[BatchLine, int, dict[str, Any]]
Capture = pytest.CaptureFixture[str]


def request(custom_id: str, **fields: Any) -> str:
    body = {"prompt": f"about {custom_id}"}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body} | fields)


LINES = [request(name) for name in "abcdef"]


class Scripted:
    """Answers in the order of swapped pairs (b, a, d, c, ...), some requests ahead. Can be stopped."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.asked: list[str] = []
        self._left = stop_after

    def __call__(self, requests: Iterator[tuple[BatchLine, str, bytes]]) -> Iterator[Answer]:
        held: list[BatchLine] = []
        for line, *_ in requests:
            self.asked.append(line.key)
            held.append(line)
            if len(held) == 2:
                yield from self._answers(held)
                held = []
        yield from self._answers(held)

    def _answers(self, held: list[BatchLine]) -> Iterator[Answer]:
        for line in reversed(held):
            if self._left == 0:
                raise KeyboardInterrupt
            self._left = None if self._left is None else self._left - 1
            prompt = json.loads(line.body)["prompt"]
            yield line, 200 if "!" not in prompt else 400, {"echo": prompt, "usage": {"total_tokens": 1}}


@pytest.fixture
def batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Scripted]]:
    """Run the verb on these lines. Return the exit code and the names of the answers."""

    def run_batch(*lines: str, stop_after: int | None = None) -> tuple[int, Scripted]:
        (tmp_path / "in.jsonl").write_text("\n".join(lines))
        scripted = Scripted(stop_after)

        def answers(*_: object) -> Answers:
            return scripted

        monkeypatch.setattr(verb, "_answers", answers)
        return run("batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")), scripted

    return run_batch


Batch = Callable[..., tuple[int, Scripted]]


def written(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def test_each_request_has_an_answer_in_openais_form(batch: Batch, tmp_path: Path) -> None:
    code, _ = batch(*LINES)
    assert code == 0
    out = written(tmp_path)
    assert [line["custom_id"] for line in out] == list("badcfe"), "as they get done"
    first = out[0]
    assert first.keys() == {"id", "custom_id", "response", "error"}
    assert first["id"] == "batch_req_2"
    assert first["error"] is None
    assert first["response"].keys() == {"status_code", "request_id", "body"}
    assert (first["response"]["status_code"], first["response"]["body"]["echo"]) == (200, "about b")
    assert len({line["response"]["request_id"] for line in out}) == 6


BAD = [
    ("{", "is no request: Input data was truncated"),
    ("[]", "Expected `object`"),
    ('{"custom_id": "x"}', "missing required field `method`"),
    ('{"custom_id": 4, "method": "POST", "url": "/v1/completions", "body": {}}', "`$.custom_id`"),
    (request("x", method="GET"), "method must be 'POST', but 'GET' given"),
    (request("x", url="/v1/embeddings"), "url must be /v1/completions or /v1/chat/completions, but '/v1/embeddings'"),
]


@pytest.mark.parametrize(("text", "words"), BAD)
def test_a_line_without_a_request_has_an_error_and_stops_no_other(
    text: str, words: str, batch: Batch, tmp_path: Path, capsys: Capture
) -> None:
    code, scripted = batch(LINES[0], text, LINES[1])
    assert code == 2
    assert scripted.asked == ["a", "b"]
    [error] = [line for line in written(tmp_path) if line["error"] is not None]
    assert (error["id"], error["response"], error["error"]["code"]) == ("batch_req_2", None, "invalid_request")
    assert error["custom_id"] == ("x" if '"x"' in text else None)
    assert words in error["error"]["message"]
    assert "1 of 3 requests could not be served" in capsys.readouterr().err
    code, scripted = batch(LINES[0], text, LINES[1])
    assert (code, scripted.asked) == (0, []), "its answer is that it is none"


def test_a_refused_request_makes_the_exit_code_2(batch: Batch, tmp_path: Path) -> None:
    code, _ = batch(LINES[0], request("x", body={"prompt": "!"}))
    assert code == 2
    assert sorted(line["response"]["status_code"] for line in written(tmp_path)) == [200, 400]


@pytest.mark.parametrize("stop_after", range(7))
def test_answered_requests_are_not_run_again(stop_after: int, batch: Batch, tmp_path: Path, capsys: Capture) -> None:
    code, _ = batch(*LINES, stop_after=stop_after)
    assert code == (0 if stop_after == 6 else 130)
    answered = [line["custom_id"] for line in written(tmp_path)]
    assert answered == list("badcfe")[:stop_after]
    before = (tmp_path / "out.jsonl").read_text()
    code, scripted = batch(*LINES)
    assert code == 0
    assert scripted.asked == [name for name in "abcdef" if name not in answered]
    assert (tmp_path / "out.jsonl").read_text().startswith(before)
    assert sorted(line["custom_id"] for line in written(tmp_path)) == list("abcdef")
    assert ("every request has an answer already" in capsys.readouterr().err) == (stop_after == 6)


def test_a_file_that_was_cut_at_any_byte_is_completed(batch: Batch, tmp_path: Path) -> None:
    batch(*LINES[:3])
    whole = (tmp_path / "out.jsonl").read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    near = {end + by for end in ends for by in (-2, -1, 0, 1)}
    for cut in sorted({*range(0, len(whole), 37), *near} - {len(whole) + 1}):
        (tmp_path / "out.jsonl").write_bytes(whole[:cut])
        code, scripted = batch(*LINES[:3])
        assert code == 0
        assert len(scripted.asked) == sum(end > cut for end in ends)
        assert sorted(line["custom_id"] for line in written(tmp_path)) == ["a", "b", "c"]


def test_more_requests_can_be_added_later(batch: Batch) -> None:
    batch(*LINES[:2])
    _, scripted = batch(request("new"), *LINES[:3])
    assert scripted.asked == ["new", "c"]


def test_few_lines_are_read_ahead(tmp_path: Path) -> None:
    """And an answer is in the file before the next request is asked for."""
    num_read = 0

    def lines() -> Iterator[BatchLine]:
        nonlocal num_read
        for number in range(1, 5001):
            num_read += 1
            yield parse_batch_line(request(str(number)).encode(), number)

    ahead: list[int] = []
    path = tmp_path / "out.jsonl"
    with appended(path) as out:
        num_done = 0

        def done(_: object) -> None:
            nonlocal num_done
            num_done += 1
            ahead.append(num_read - num_done)
            if num_done <= 20:
                assert path.read_bytes().count(b"\n") == num_done

        assert run_lines(lines(), out, Scripted(), done) == 0
    assert num_done == 5000
    assert max(ahead) <= 2


def test_mistakes_are_reported_before_the_engine_starts(batch: Batch, tmp_path: Path, capsys: Capture) -> None:
    assert batch(LINES[0], "", LINES[1], LINES[0])[0] == 2
    assert "lines 1 and 4" in (err := capsys.readouterr().err)
    assert "the same custom_id 'a' in lines 1 and 4: change one" in err
    (tmp_path / "out.jsonl").write_text('{"some": "file"}\n')
    assert batch(*LINES)[0] == 2
    assert "has no answer of a batch in line 1" in capsys.readouterr().err
    assert (tmp_path / "out.jsonl").read_text() == '{"some": "file"}\n'


def test_files_that_are_not_there_or_the_same(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "in.jsonl"
    assert run("batch", "-i", str(path), "-o", str(tmp_path / "out.jsonl")) == 2
    assert "cannot be read (No such file" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
    path.write_text(LINES[0])
    assert run("batch", "-i", str(path), "-o", str(path)) == 2
    assert "is the input file" in capsys.readouterr().err
    assert run("batch", "-i", str(path), "-o", str(tmp_path / "no" / "out.jsonl")) == 2
    assert "cannot be written (No such file" in capsys.readouterr().err
    assert run("batch", "-i", "/dev/null", "-o", str(tmp_path / "out.jsonl")) == 2
    assert "must be an ordinary file" in capsys.readouterr().err
    assert path.read_text() == LINES[0]


@pytest.mark.parametrize("before", [None, "an answer"])
def test_a_mistake_leaves_no_empty_file(tmp_path: Path, before: str | None) -> None:
    path = tmp_path / "out.jsonl"
    if before is not None:
        path.write_text(before)
    with pytest.raises(ValueError, match="a mistake"), appended(path):
        raise ValueError("a mistake")
    assert (path.read_text() if path.exists() else None) == before


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with appended(path), pytest.raises(ValueError, match="written by another process"), appended(path):
        pass
    with appended(path):
        pass


def test_keys_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(f"{LINES[0]}\n\n  \n{{\n{LINES[1]}")
    assert [(line.number, line.key) for line in read_batch(path)] == [(1, "a"), (4, "batch_req_4"), (5, "b")]
    assert keys_in(path) == {"a", "batch_req_4", "b"}


def test_an_unwritable_stats_file_is_reported_before_the_run(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "in.jsonl").write_text(LINES[0])
    command = ["batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"), "--json-stats"]
    assert run(*command, str(tmp_path / "no" / "s.json")) == 2
    assert "--json-stats" in capsys.readouterr().err
    assert run(*command, str(tmp_path)) == 2
    assert "cannot be written (Is a directory)" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
