"""Input without end and output that cannot be written are one line and an exit code, for every verb."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_llm import run

from longspan.cli.batch import append, appended, read_batch
from longspan.limits import MAX_TEXT_BYTES

ESTIMATE = "estimate llama-3-8b --hardware h100-sxm-80g --context 8K"
SIMULATE = "simulate llama-3-8b --hardware h100-sxm-80g --rate 1 --num-requests 4"
PRINTING = [
    ("--version", False),
    (ESTIMATE, False),
    ("generate --prompt x", True),
    ("generate --prompt x --json", True),
    *(
        pytest.param(arguments, is_fake, marks=pytest.mark.full)
        for arguments, is_fake in [
            ("generate --help", False),
            (f"{ESTIMATE} --json", False),
            (SIMULATE, False),
            (f"{SIMULATE} --json", False),
            ("generate --prompt x --n 2 --temperature 1", True),
        ]
    ),
]
"""Commands that print, and whether they have the scripted engine."""
FAKE = """
import sys
import fake_llm, longspan, longspan.cli.options
longspan.LLM = fake_llm.FakeLLM
longspan.cli.options.start_server = lambda: None
from longspan.cli import app
app.main(sys.argv[1:])
"""


def command(arguments: str, *, is_fake: bool = False) -> list[str]:
    return [sys.executable, *(("-c", FAKE) if is_fake else ("-m", "longspan")), *arguments.split()]


@pytest.mark.parametrize(("arguments", "is_fake"), PRINTING)
def test_a_full_disk_is_one_line_and_code_1(arguments: str, is_fake: bool) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            command(arguments, is_fake=is_fake), stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert (done.returncode, done.stderr) == (1, "longspan: the output cannot be written: No space left on device\n")


@pytest.mark.parametrize(("arguments", "is_fake"), PRINTING)
def test_a_reader_that_has_left_is_code_1_without_a_word(arguments: str, is_fake: bool) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            command(arguments, is_fake=is_fake), stdout=pipe, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_an_error_that_cannot_be_printed_keeps_its_exit_code() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command("generate --no-such-flag"), stdout=full, stderr=full, check=False, timeout=60)
    assert done.returncode == 2


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_files_that_are_closed_are_as_good_as_the_null_device(closed: str) -> None:
    in_shell = ["sh", "-c", f'"$@" {closed}', "sh", *command("generate --prompt x", is_fake=True)]
    done = subprocess.run(in_shell, capture_output=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == (b"" if ">&-" in closed.replace("2>&-", "") else b"The key is 42.\n")


# ---------------------------------------------------------------- input


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Standard input has no end, and no line end."""
    with Path("/dev/zero").open("rb") as zeros:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(zeros))
        yield


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate",),
        ("generate", "--prompt", "-"),
        ("generate", "--prompt-file", "/dev/zero"),
        ("generate", "--prompt", "x", "--config", "/dev/zero"),
        ("generate", "--prompt", "x", "--csa", "/dev/zero"),
        ("chat",),
        ("chat", "--chat-template", "/dev/zero"),
        ("batch", "-i", "/dev/zero", "-o", "none"),
        ("eval", "--task", "perplexity", "--against", "/dev/zero"),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("fake_llm", "endless")
def test_input_without_end_is_one_line_and_code_2(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("longspan.cli.eval._MAX_SAVED_BYTES", MAX_TEXT_BYTES)
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "is longer than 64 MiB" in err or "must be an ordinary file" in err


@pytest.mark.usefixtures("fake_llm")
def test_a_line_of_a_batch_that_is_too_long_is_answered_with_an_error(tmp_path: Path) -> None:
    path, line = tmp_path / "in.jsonl", json.dumps({"custom_id": "b", "method": "POST", "url": "/v1/completions"})
    with path.open("wb") as file:
        file.truncate(3 * MAX_TEXT_BYTES)  # zeros without disk blocks
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + line[:-1].encode() + b', "body": {}}\n')
    long, good = read_batch(path)
    assert (long.number, long.custom_id, long.error) == (1, None, "line 1 is no request: it is longer than 64 MiB")
    assert (good.number, good.custom_id, good.error) == (2, "b", None)


@pytest.mark.usefixtures("fake_llm")
def test_answers_go_to_ordinary_files_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text("{}")
    assert run("batch", "-i", str(tmp_path / "in.jsonl"), "-o", "/dev/full") == 2
    assert "--output-file '/dev/full' must be an ordinary file" in capsys.readouterr().err


def test_an_answer_that_does_not_fit_on_the_disk_is_named_and_cut(tmp_path: Path) -> None:
    path, (soft, hard) = tmp_path / "out.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    with appended(path) as file:
        append(file, b"an answer\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (15, hard))
        try:
            with pytest.raises(ValueError, match=r"output_file '.*out.jsonl' cannot be written .File too large"):
                append(file, b"another answer\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"an answer\nanoth"


def test_a_full_stderr_hides_no_exit_code() -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run([sys.executable, "-m", "longspan", "generate", "--tp", "0"], stderr=full, check=False)
    assert ended.returncode == 2
