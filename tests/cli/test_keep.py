"""`--keep` and `longspan cache`, with a real engine in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from engines import ThreadLLM
from fake_llm import run
from filelock import FileLock

import longspan
from longspan.model.files import lock_folder

Capture = pytest.CaptureFixture[str]
Type = Callable[[str], None]
TEXT = "The sea is blue and the key is 42. " * 12


@pytest.fixture
def ask(
    speaking_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> Callable[..., dict[str, Any]]:
    """Runs `longspan ask --json` with a cache of its own and returns the object, with the notes as `notes`."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(vars(longspan), "LLM", ThreadLLM)
    monkeypatch.setattr("longspan.cli.options.start_server", lambda: None)
    (tmp_path / "a.txt").write_text(TEXT)

    def asked(*arguments: str) -> dict[str, Any]:
        flags = ("--model", str(speaking_model), "--max-tokens", "3", "--block-size", "16", "--json")
        tiers = ("--host-kv-gib", "0.01", "--disk-kv-gib", "0.01")
        assert run("ask", *arguments, *flags, *tiers) == 0
        out, err = capsys.readouterr()
        return {**json.loads(out.splitlines()[-1]), "notes": err}

    return asked


def test_the_second_question_needs_no_file_and_computes_no_document(ask: Callable[..., dict[str, Any]]) -> None:
    first = ask("a.txt", "Which colour?", "--keep", "sea")
    assert first["cached_tokens"] == 0
    assert "kept sea" in first["notes"]
    second = ask("What is the key?", "--keep", "sea")
    assert second["cached_tokens"] > 0.8 * second["prompt_tokens"]
    assert "kept" not in second["notes"]
    plain = ask("a.txt", "What is the key?")
    assert (second["text"], second["prompt_tokens"]) == (plain["text"], plain["prompt_tokens"])


def test_a_changed_file_replaces_the_document(ask: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    ask("a.txt", "Which colour?", "--keep", "sea")
    (tmp_path / "a.txt").write_text("Something else. " * 20)
    changed = ask("a.txt", "Which colour?", "--keep", "sea")
    assert "has changed" in changed["notes"]
    assert ask("a.txt", "What?", "--keep", "sea")["cached_tokens"] > 0.8 * changed["prompt_tokens"] - 16


def test_documents_take_at_most_as_much_disk_as_stays_free(
    ask: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document beyond that is answered, and its text stored. Earlier documents stay, and are not evicted."""
    ask("a.txt", "Which colour?", "--keep", "sea")
    documents = tmp_path / "cache/documents"
    kept_bytes = sum(path.stat().st_size for path in (documents / "sea").rglob("*") if path.is_file())
    free = SimpleNamespace(free=kept_bytes * 3 // 2)
    monkeypatch.setattr("longspan.cli.keep.disk_usage", lambda _: free)
    first = ask("a.txt", "Which colour?", "--keep", "other", "--disk-kv-gib", "1")
    assert "longspan cache drop documents" in first["notes"]
    assert not [*(documents / "other").rglob("*.kv")]
    again = ask("Which colour?", "--keep", "other")
    assert (again["text"], again["cached_tokens"]) == (first["text"], 0)
    assert ask("What is the key?", "--keep", "sea")["cached_tokens"] > 0
    free.free = kept_bytes * 3
    assert "kept other" in ask("Which colour?", "--keep", "other", "--disk-kv-gib", "1")["notes"]


def test_a_refused_command_keeps_the_document(
    ask: Callable[..., dict[str, Any]], tmp_path: Path, capsys: Capture
) -> None:
    ask("a.txt", "Which colour?", "--keep", "sea")
    (tmp_path / "b.txt").write_text("Something else.")
    assert run("ask", "b.txt", "What?", "--keep", "sea", "--disk-kv-dir", "elsewhere") == 2
    capsys.readouterr()
    assert ask("What is the key?", "--keep", "sea")["cached_tokens"] > 0


def test_a_failed_start_or_answer_keeps_the_document(
    ask: Callable[..., dict[str, Any]],
    speaking_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    ask("a.txt", "Which colour?", "--keep", "sea")
    (tmp_path / "b.txt").write_text("Something else.")
    command = ("ask", "b.txt", "What?", "--keep", "sea", "--block-size", "16")
    assert run(*command, "--model", str(tmp_path / "none")) == 2
    with monkeypatch.context() as patch:
        patch.setattr("longspan.cli.ask.stream_to_stdout", mock.Mock(side_effect=ValueError("no answer")))
        assert run(*command, "--model", str(speaking_model)) == 2
    assert "has changed" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "cache/documents").iterdir()] == ["sea"]
    assert ask("What is the key?", "--keep", "sea")["cached_tokens"] > 0
    assert ask("b.txt", "What?", "--keep", "sea")["cached_tokens"] == 0
    assert [path.name for path in (tmp_path / "cache/documents").iterdir()] == ["sea"]


def test_a_document_kept_under_another_root_key_is_noted(ask: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Sparse attention, for example, changes the root key."""
    ask("a.txt", "Which colour?", "--keep", "sea")
    [mark] = (tmp_path / "cache/documents/sea").glob("*/kept.json")
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "root": "00"}))
    assert "other settings of sparse attention" in ask("What is the key?", "--keep", "sea")["notes"]


def test_a_name_in_use_is_named(
    ask: Callable[..., dict[str, Any]], speaking_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    ask("a.txt", "Which colour?", "--keep", "sea")
    [host] = (tmp_path / "cache/documents/sea").glob("*/host-0")
    (tmp_path / "b.txt").write_text("Something else.")
    with closing(lock_folder(host)):
        for file in ("a.txt", "b.txt"):
            options = ("--model", str(speaking_model), "--block-size", "16", "--disk-kv-gib", "0.01")
            assert run("ask", file, "What?", "--keep", "sea", *options) == 2
            error = capsys.readouterr().err
            assert "--keep 'sea'" in error and "another" in error and "--disk-kv-dir" not in error


def test_a_replacement_in_use_is_not_removed(
    ask: Callable[..., dict[str, Any]], speaking_model: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Another process computes the new content of the name. This one is refused before or after its engine starts."""
    ask("a.txt", "Which colour?", "--keep", "sea")
    (tmp_path / "b.txt").write_text("Something else.")
    [host] = (tmp_path / "cache/documents/sea").glob("*/host-0")
    other = tmp_path / "cache/documents/.sea.unfinished" / host.relative_to(tmp_path / "cache/documents/sea")
    command = ("ask", "b.txt", "What?", "--keep", "sea", "--model", str(speaking_model), "--block-size", "16")
    other.mkdir(parents=True)
    with closing(lock_folder(other)):
        assert run(*command, "--disk-kv-gib", "0.01") == 2
        assert "--keep 'sea'" in capsys.readouterr().err
        with mock.patch("longspan.cli.keep.Kept._prepare_replacement"):  # the other process has begun meanwhile
            assert run(*command, "--disk-kv-gib", "0.01") == 2
        assert (other / "lock").exists()


def test_dropped_weights_of_an_installation_are_only_unlinked(
    ask: Callable[..., dict[str, Any]], tmp_path: Path, capsys: Capture
) -> None:
    """`deploy/start.sh` links them into the cache."""
    ask("a.txt", "Which colour?")
    [entry] = listed(capsys, "weights")
    link = tmp_path / "cache/weights" / entry["name"]
    installed = link.rename(tmp_path / "installed")
    link.symlink_to(installed)
    assert run("cache", "drop", "weights") == 0
    assert (installed / "weights.json").is_file() and not link.is_symlink()


def test_weights_that_are_being_converted_are_not_dropped(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache/weights/abc.unfinished"
    folder.mkdir(parents=True)
    with FileLock(folder.with_name("abc.lock")):
        assert run("cache", "drop", "weights", folder.name) == 2
    assert "being converted" in capsys.readouterr().err and folder.is_dir()
    assert run("cache", "drop", "weights", folder.name) == 0


def test_a_model_of_any_configuration_is_listed(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    for name, config in (("a", '{"text_config": null}'), ("b", "[]"), ("c", '{"architectures": 7}')):
        folder = tmp_path / "cache/weights" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(config)
        (folder / "weights.json").write_text('{"dtype": "bfloat16"}')
    assert [entry["model"] for entry in listed(capsys, "weights")] == ["unknown, ? layers, bfloat16", *["unknown"] * 2]


def test_weights_in_use_are_not_dropped(
    ask: Callable[..., dict[str, Any]], speaking_model: Path, capsys: Capture
) -> None:
    ask("a.txt", "Which colour?")
    with ThreadLLM(str(speaking_model)):
        assert run("cache", "drop", "weights") == 2
        assert "running engine" in capsys.readouterr().err
        [entry] = listed(capsys, "weights")
    assert run("cache", "drop", "weights", entry["name"]) == 0
    assert not listed(capsys, "weights")


def test_a_damaged_record_is_replaced_with_its_document(ask: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    ask("a.txt", "Which colour?", "--keep", "sea")
    (tmp_path / "cache/documents/sea/document.json").write_text('{"docu')
    again = ask("a.txt", "Which colour?", "--keep", "sea")
    assert again["cached_tokens"] == 0 and "kept sea" in again["notes"]
    assert ask("What is the key?", "--keep", "sea")["cached_tokens"] > 0


@pytest.mark.parametrize("verb", [["ask", "What?"], ["chat"]], ids=str)
def test_options_of_the_stored_content_are_not_ignored(
    ask: Callable[..., dict[str, Any]], capsys: Capture, verb: list[str]
) -> None:
    ask("a.txt", "Which colour?", "--keep", "sea")
    assert run(*verb, "--keep", "sea", "--system", "Answer in French") == 2
    assert "--system needs the files" in capsys.readouterr().err


def test_chat_keeps_its_files(
    ask: Callable[..., dict[str, Any]], speaking_model: Path, type_in: Type, capsys: Capture
) -> None:
    type_in("Which colour?\n")
    flags = ("--max-tokens", "3", "--block-size", "16", "--host-kv-gib", "0.01", "--disk-kv-gib", "0.01")
    assert run("chat", str(speaking_model), "--file", "a.txt", "--keep", "sea", *flags) == 0
    assert "kept sea" in capsys.readouterr().err
    second = ask("What is the key?", "--keep", "sea")
    assert second["cached_tokens"] > 0.8 * second["prompt_tokens"]


def test_chat_keeps_its_files_after_ctrl_c(
    ask: Callable[..., dict[str, Any]], speaking_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def lines() -> Iterator[str]:
        yield "Which colour?"
        raise KeyboardInterrupt

    monkeypatch.setattr("longspan.cli.chat._lines", lines)
    flags = ("--max-tokens", "3", "--block-size", "16", "--host-kv-gib", "0.01", "--disk-kv-gib", "0.01")
    assert run("chat", str(speaking_model), "--file", "a.txt", "--keep", "sea", *flags) == 130
    assert "kept sea" in capsys.readouterr().err
    assert ask("What is the key?", "--keep", "sea")["cached_tokens"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["What?", "--keep", "unknown"], "--keep 'unknown' is not stored"),
        (["a.txt", "What?", "--keep", "../up"], "--keep must be"),
        (["a.txt", "What?", "--keep", "x", "--disk-kv-dir", "y"], "--disk-kv-dir"),
        (["What?", "--keep", "x", "--system", "y"], "--system"),
    ],
)
@pytest.mark.usefixtures("ask")
def test_a_mistake_is_one_line_and_code_2(arguments: list[str], words: str, capsys: Capture) -> None:
    assert run("ask", *arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def listed(capsys: Capture, *arguments: str) -> list[dict[str, Any]]:
    assert run("cache", "list", *arguments, "--json") == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_cache_is_listed_and_dropped_by_kind_and_name(
    ask: Callable[..., dict[str, Any]], tmp_path: Path, speaking_model: Path, capsys: Capture
) -> None:
    tokens = ask("a.txt", "Which colour?", "--keep", "sea")["prompt_tokens"]
    ask("a.txt", "Which colour?", "--keep", "other")
    ask("a.txt", "Which colour?")
    assert {entry["kind"] for entry in listed(capsys)} == {"weights", "kv", "documents"}
    other, sea = listed(capsys, "documents")
    assert (other["name"], sea["name"]) == ("other", "sea")
    assert str(speaking_model) in sea["model"]
    folder = tmp_path / "cache/documents/sea"
    assert sea["bytes"] == sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) > tokens
    assert run("cache", "list") == 0
    assert "sea" in capsys.readouterr().out
    for kind, name in (("documents", "sea"), ("weights", None), ("kv", None)):
        assert run("cache", "drop", kind, *filter(None, [name])) == 0
        assert name in {None, "sea"}
    assert [(entry["kind"], entry["name"]) for entry in listed(capsys)] == [("documents", "other")]
    assert run("cache", "drop", "documents") == 0
    assert not listed(capsys)


def test_a_document_in_use_is_not_dropped(ask: Callable[..., dict[str, Any]], tmp_path: Path, capsys: Capture) -> None:
    ask("a.txt", "Which colour?", "--keep", "sea")
    [host] = (tmp_path / "cache/documents/sea").glob("*/host-0")
    with lock_folder(host, shared=True):
        assert run("cache", "drop", "documents") == 2
        assert "another process" in capsys.readouterr().err
        assert ask("What is the key?", "--keep", "sea")["cached_tokens"] > 0
    assert run("cache", "drop", "documents", "sea") == 0


@pytest.mark.usefixtures("ask")
@pytest.mark.parametrize(("arguments", "words"), [(["drop"], "kind"), (["list", "kv", "nix"], "nix")])
def test_a_wrong_entry_is_named(arguments: list[str], words: str, capsys: Capture) -> None:
    assert run("cache", *arguments) == 2
    assert words in capsys.readouterr().err
