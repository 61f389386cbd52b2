"""`--input-file`: one line out per line in, in order, whatever is wrong with some of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_llm import WORDS, FakeLLM, run

from longspan.cli.jsonl import parse_line
from longspan.core.sampling import SamplingParams, StructuredOutputsParams
from longspan.errors import WorkerLostError

pytestmark = pytest.mark.usefixtures("fake_llm")

FLAGS = SamplingParams(temperature=0.0, max_tokens=128)


def serve(tmp_path: Path, *lines: object, arguments: tuple[str, ...] = ()) -> tuple[int, list[dict[str, Any]]]:
    """The exit code and the output lines for these input lines, which are JSON unless they are texts."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    code = run("generate", "--input-file", str(source), "--output-file", str(target), *arguments)
    return code, [json.loads(line) for line in target.read_text().splitlines()]


def test_lines_are_served_in_order_with_their_ids(tmp_path: Path) -> None:
    code, out = serve(tmp_path, {"prompt": "a b"}, "", {"id": "x", "token_ids": [4, 5, 6]}, {"id": 9, "prompt": "c"})
    assert code == 0
    assert [line["id"] for line in out] == [0, "x", 9]
    assert [line["prompt_tokens"] for line in out] == [2, 3, 1]
    assert out[1] == {
        "id": "x",
        "text": "".join(WORDS),
        "token_ids": [0, 1, 2, 3, 4],
        "finish_reason": "stop",
        "stop_reason": None,
        "prompt_tokens": 3,
    }


def test_messages_become_the_tokens_of_the_chat_template(tmp_path: Path) -> None:
    code, _ = serve(tmp_path, {"messages": [{"role": "user", "content": "hi"}]})
    assert code == 0
    assert FakeLLM.last.asked == [(list(map(ord, "<user>hi</>\n<assistant>")), FLAGS)]


def test_sampling_parameters_of_a_line_count_before_the_flags(tmp_path: Path) -> None:
    own = {
        "max_tokens": 5,
        "stop": "x",
        "logit_bias": {"7": 1},
        "n": 2,
        "temperature": 1,
        "seed": 4,
        "stop_token_ids": [3],
        "structured_outputs": {"json": {"type": "array"}},
    }
    code, out = serve(
        tmp_path, {"prompt": "a", **own}, {"prompt": "b"}, arguments=("--top-k", "6", "--max-tokens", "9")
    )
    assert code == 0
    first, second = (params for _, params in FakeLLM.last.asked)
    assert second == SamplingParams(temperature=0.0, top_k=6, max_tokens=9)
    assert first == SamplingParams(
        temperature=1.0,
        top_k=6,
        max_tokens=5,
        stop="x",
        logit_bias={7: 1.0},
        n=2,
        seed=4,
        stop_token_ids=[3],
        structured_outputs=StructuredOutputsParams(json='{"type": "array"}'),
    )
    assert [len(line.get("outputs", [])) for line in out] == [2, 0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "truncated"),
        ('"text"', "Expected `object`"),
        ({"id": "me", "prompt": "x", "temprature": 1}, "unknown field `temprature`"),
        ({"id": "me", "prompt": "x", "max_tokens": "many"}, "`$.max_tokens`"),
        ({"id": "me", "prompt": "x", "top_p": 7}, "top_p must be above 0"),
        ({"id": "me", "prompt": "x", "token_ids": [1]}, "but 2 given"),
        ({"id": "me"}, "but 0 given"),
        ({"id": "me", "prompt": ""}, "empty"),
        ({"id": "me", "prompt": "!"}, "shouts"),
    ],
)
def test_a_bad_line_has_an_error_and_stops_nobody(
    line: object, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = serve(tmp_path, {"prompt": "a"}, line, {"prompt": "b"})
    assert code == 2
    assert [list(line) == ["id", "error"] for line in out] == [False, True, False]
    assert out[1]["id"] == ("me" if isinstance(line, dict) else 1)
    assert words in out[1]["error"]
    assert "1 of 3 lines could not be served" in capsys.readouterr().err


def test_stdin_and_stdout_are_files_too(type_in: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    type_in('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert run("generate", "--input-file", "-") == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["id"] for line in out.splitlines()] == [0, 1]
    assert err == ""
    assert FakeLLM.last.use_tqdm


@pytest.mark.parametrize(("failure", "code"), [(KeyboardInterrupt(), 130), (WorkerLostError(0, "gone"), 1)])
def test_what_was_finished_before_the_end_is_in_the_file(
    failure: BaseException, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = FakeLLM.generate_each

    def interrupted(*arguments: Any, **options: Any) -> Any:
        yield next(whole(*arguments, **options))
        assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1, "written as soon as its turn has come"
        raise failure

    monkeypatch.setattr(FakeLLM, "generate_each", interrupted)
    got, out = serve(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    assert (got, [line["id"] for line in out]) == (code, [0])
    assert FakeLLM.last.closed


def test_the_input_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "both.jsonl"
    path.write_text('{"prompt": "a"}')
    assert run("generate", "--input-file", str(path), "--output-file", str(path)) == 2
    assert path.read_text() == '{"prompt": "a"}'
    assert "is the input file" in capsys.readouterr().err


def test_every_sampling_parameter_can_be_in_a_line() -> None:
    values: dict[str, object] = {
        "temperature": 0.5, "top_k": 2, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": 1,
        "frequency_penalty": -1, "logit_bias": {3: 1.0}, "seed": 1, "n": 2, "stop": ("a", "b"), "stop_token_ids": [1],
        "min_tokens": 1, "max_tokens": 3, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 2,
    }  # fmt: skip
    line = parse_line(json.dumps({"prompt": "x", **values}), 0, FLAGS)
    assert line.error is None
    assert line.params == SamplingParams(**values)  # type: ignore[arg-type]
