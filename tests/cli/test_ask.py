"""`longspan ask` and the files of `chat`, with a scripted engine."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_llm import WORDS, FakeLLM, run

from longspan.cli.documents import read_documents

pytestmark = pytest.mark.usefixtures("fake_llm")

Type = Callable[[str], None]
Capture = pytest.CaptureFixture[str]
ANSWER = "".join(WORDS)


def prompts() -> list[str]:
    return ["".join(map(chr, prompt)) for prompt, _ in FakeLLM.last.asked]  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Texts a.txt, b/a.txt and b/c.md, with hidden and binary files between."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("a.txt", "b/c.md", "b/a.txt", ".hidden", ".git/config"):
        (tmp_path / name).write_text(f"text of {name}", encoding="utf-8")
    (tmp_path / "b/image.png").write_bytes(b"\x89PNG\xff\0")
    (tmp_path / "zeros").write_bytes(b"\0\0 x")
    return tmp_path


def test_the_question_follows_the_file_in_one_turn(folder: Path, capsys: Capture) -> None:
    del folder
    assert run("ask", "a.txt", " Which file? ", "--system", "be kind") == 0
    [prompt] = prompts()
    content = "Document a.txt:\n\ntext of a.txt\n\nWhich file?"
    assert prompt == f"<system>be kind</>\n<user>{content}</>\n<assistant>"
    assert capsys.readouterr().out == f"{ANSWER}\n"


def test_folders_are_read_in_order_without_hidden_and_binary_files(folder: Path, capsys: Capture) -> None:
    assert run("ask", "b/c.md", str(folder), "Which?") == 0
    [prompt] = prompts()
    names = ["b/c.md", *(str(folder / name) for name in ("a.txt", "b/a.txt", "b/c.md"))]
    content = "".join(f"Document {name}:\n\ntext of {name.removeprefix(f'{folder}/')}\n\n" for name in names)
    assert prompt == f"<user>{content}Which?</>\n<assistant>"
    assert "2 files" in capsys.readouterr().err


def test_stdin_is_the_file_if_there_is_no_other(type_in: Type) -> None:
    type_in("piped\n")
    assert run("ask", "What?", "--model", "some/model") == 0
    assert prompts() == ["<user>Document stdin:\n\npiped\n\nWhat?</>\n<assistant>"]
    assert FakeLLM.last.model == "some/model"


def test_without_a_file_and_input_the_usage_is_an_error(type_in: Type, capsys: Capture) -> None:
    type_in("")
    assert run("ask", "What?") == 2
    assert "stdin has no text" in capsys.readouterr().err


def test_json_is_one_object(folder: Path, capsys: Capture) -> None:
    del folder
    assert run("ask", "a.txt", "What?", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["text"], shown["finish_reason"], shown["ttft_s"]) == (ANSWER, "stop", 0.5)
    assert (shown["prompt_tokens"], shown["cached_tokens"]) == (len(prompts()[0]), 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a.txt"], "no question"),
        (["a.txt", " "], "empty"),
        (["missing.txt", "What?"], "missing.txt"),
        (["b/image.png", "What?"], "UTF-8"),
        (["empty", "What?"], "empty has no text"),
        ([".git", "What?", "--n", "2", "--temperature", "1"], "--n"),
        (["long", "What?"], "fewer files"),
        (["only-binary", "What?"], "no text files"),
    ],
)
def test_a_mistake_is_one_line_and_code_2(folder: Path, arguments: list[str], words: str, capsys: Capture) -> None:
    (folder / "empty").write_text("\n")
    (folder / "long").write_text("x" * FakeLLM.max_model_len)
    (folder / "only-binary").mkdir()
    (folder / "only-binary/zero").write_bytes(b"\0")
    assert run("ask", *arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


@pytest.mark.parametrize(("name", "library"), [("a.pdf", "pypdf"), ("a.html", "html2text"), ("A.HTM", "html2text")])
def test_a_missing_library_is_named_with_its_extra(
    name: str, library: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    (folder / name).write_text("x")
    assert run("ask", name, "What?") == 2
    err = capsys.readouterr().err
    assert library in err
    assert "longspan[documents]" in err


def test_html_is_read_as_text(tmp_path: Path) -> None:
    pytest.importorskip("html2text")
    (tmp_path / "a.html").write_text("<title>t</title><script>x()</script><p>One <b>word</b> <a href='u'>more</a></p>")
    [document] = read_documents([tmp_path / "a.html"])
    assert "One **word** more" in document.text
    assert "x()" not in document.text


def test_pages_of_a_pdf_are_read(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    (tmp_path / "a.pdf").write_bytes(pdf("The key is 42"))
    [document] = read_documents([tmp_path / "a.pdf"])
    assert document.text.strip() == "The key is 42"
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4 damaged")
    with pytest.raises(ValueError, match=r"a\.pdf"):
        read_documents([tmp_path / "a.pdf"])


def pdf(text: str) -> bytes:
    """Return a PDF file of one page."""
    stream = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET"
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    page = "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 200 200] /Contents 4 0 R"
    bodies = (
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        f"{page} /Resources << /Font << /F1 {font} >> >> >>",
        f"<< /Length {len(stream)} >>\nstream\n{stream}\nendstream",
    )
    data, offsets = "%PDF-1.4\n", []
    for number, body in enumerate(bodies, start=1):
        offsets.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n"
    table = "".join(f"{offset:010d} 00000 n \n" for offset in offsets)
    trailer = f"trailer\n<< /Size 5 /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n"
    return f"{data}xref\n0 5\n0000000000 65535 f \n{table}{trailer}".encode()


# ---------------------------------------------------------------- chat


def test_files_of_chat_are_part_of_the_first_turn_only(folder: Path, type_in: Type) -> None:
    del folder
    type_in("one\ntwo\n/reset\nthree\n")
    assert run("chat", "--file", "a.txt", "--file", "b/a.txt") == 0
    documents = "Document a.txt:\n\ntext of a.txt\n\nDocument b/a.txt:\n\ntext of b/a.txt\n\n"
    first, second, third = prompts()
    assert first == f"<user>{documents}one</>\n<assistant>"
    assert second.startswith(first)
    assert second.endswith("<user>two</>\n<assistant>")
    assert third == f"<user>{documents}three</>\n<assistant>", "a reset keeps the files of --file"


def test_a_file_can_be_added_between_turns(folder: Path, type_in: Type, capsys: Capture) -> None:
    del folder
    type_in("one\n/file b/c.md\n/file missing\n/file\ntwo\nthree\n/file a.txt\n/reset\nfour\n")
    assert run("chat") == 0
    _, second, third, fourth = prompts()
    assert second.endswith("<user>Document b/c.md:\n\ntext of b/c.md\n\ntwo</>\n<assistant>")
    assert third.startswith(second)
    assert third.endswith("</>\n<user>three</>\n<assistant>")
    assert fourth == "<user>four</>\n<assistant>"
    err = capsys.readouterr().err
    assert "b/c.md: 14 characters" in err
    assert "missing" in err
    assert "/file PATH" in err
