"""Models of the hub, which a server of this machine plays: fetched files, the cached copy, and each failure."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import huggingface_hub.constants
import pytest
from fake_hub import MODEL, Hub, serve_hub
from fake_llm import run
from tiny_models import make_tiny

from longspan.model import hub as hub_module
from longspan.model.files import ModelError
from longspan.model.source import local_folder, prepare

TOKEN = "hf_thisIsASecret"


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def hub(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a tiny model, and an empty cache."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serve_hub(tiny_folder) as served:
        constants = {
            "ENDPOINT": served.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": served.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_ETAG_TIMEOUT": 30,
        }
        for name, value in constants.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        yield served


def refusal(model: str = MODEL) -> str:
    with pytest.raises(ModelError) as error:
        prepare(model, dtype="float32")
    text = str(error.value)
    assert "\n" not in text and model in text and ": " in text and TOKEN not in text
    return text


def test_a_model_is_fetched_once_and_serves_later_starts(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    first = prepare(MODEL, dtype="float32")
    assert hub.fetched() == ["config.json", "generation_config.json", "model.safetensors"]
    assert prepare(MODEL, dtype="float32").weights == first.weights
    assert len(hub.fetched()) == 3
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("published", "with_weights", "fetched"),
    [
        (["model.safetensors"], False, []),
        (["model.safetensors", "pytorch_model.bin"], True, ["model.safetensors"]),
        (["pytorch_model.bin"], True, ["pytorch_model.bin"]),
        (["other.safetensors", "pytorch_model.bin"], True, ["other.safetensors"]),
        (
            [f"{name}.safetensors" for name in ("model-1-of-2", "model-2-of-2", "consolidated", "original/model")],
            True,
            ["model-1-of-2.safetensors", "model-2-of-2.safetensors"],
        ),
    ],
)
def test_only_needed_files_are_fetched(published: list[str], with_weights: bool, fetched: list[str], hub: Hub) -> None:
    """No weights for dummy models, and no copies of the weights in other formats or folders."""
    hub.files = {"config.json": b"{}", **{name: name.encode() for name in published}}
    for _ in range(2):
        folder = local_folder(MODEL, with_weights=with_weights)
        assert sorted(file.name for file in folder.iterdir() if file.is_file()) == sorted(["config.json", *fetched])
    assert hub.fetched() == sorted(["config.json", *fetched])


GATED, MISSING = {"X-Error-Code": "GatedRepo"}, {"X-Error-Code": "RepoNotFound"}
INVALID = {"X-Error-Message": "Invalid credentials in Authorization header"}
FAILURES: dict[str, tuple[tuple[int, dict[str, str]], bool, tuple[str, ...]]] = {
    "gated, no token": ((401, GATED), False, ("is gated", "accept its terms at", "HF_TOKEN")),
    "gated, no access": ((403, GATED), True, ("is gated", "request access", "fine-grained")),
    "missing or private": (
        (401, {}),
        False,
        ("no path on this machine", "no repository of this name", "needs a token: set HF_TOKEN"),
    ),
    "missing, with a token": ((404, MISSING), True, ("no path on this machine", "your token may read it")),
    "invalid token": ((401, INVALID), True, ("does not accept the token", "make a new one at", "/settings/tokens")),
    "denied": ((403, {}), True, ("denies access", "rights")),
    "no branch": ((404, {"X-Error-Code": "RevisionNotFound"}), False, ("has no branch main",)),
    "disabled": ((403, {"X-Error-Message": "Access to this resource is disabled."}), False, ("has disabled model",)),
    "too many": ((429, {}), False, ("limits requests", "wait some minutes")),
    "out of order": ((503, {}), False, ("failed to answer", "(503)", "try again later")),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_each_refusal_of_the_hub_has_its_own_remedy(kind: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.failure, has_token, parts = FAILURES[kind]
    if has_token:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
    text = refusal()
    assert all(part in text for part in parts), text
    assert hub.tokens == ({f"Bearer {TOKEN}"} if has_token else {None}), "the server got it"


def test_all_refusals_differ(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for hub.failure, has_token, _ in FAILURES.values():
        with monkeypatch.context() as patch:
            if has_token:
                patch.setenv("HF_TOKEN", TOKEN)
            texts.append(refusal())
    assert len(set(texts)) == len(FAILURES)


@pytest.mark.parametrize("model", ["a/b/c", "two words", "owner/-", "--"])
def test_a_name_that_no_repository_can_have_is_told_apart(model: str, hub: Hub) -> None:
    assert "neither an existing path nor a hub id" in refusal(model)
    assert not hub.tokens, "no request for a model"


def goes_away(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    del hub
    patch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")


def goes_offline(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    del hub
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def falls_silent(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(huggingface_hub.constants, "HF_HUB_ETAG_TIMEOUT", 0.3)
    hub.silent = True


def fails(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    del patch
    hub.failure = (502, {})


def shows_a_page(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    del patch
    hub.page = b"<html>log in to this network</html>"


UNREACHABLE: dict[Callable[[Hub, pytest.MonkeyPatch], None], tuple[str, str]] = {
    goes_away: ("no connection to http://127.0.0.1:9", "check the network"),
    goes_offline: ("HF_HUB_OFFLINE is set", "unset it"),
    falls_silent: ("did not answer in time", "HF_HUB_ETAG_TIMEOUT"),
    fails: ("failed to answer", "try again later"),
    shows_a_page: ("does not answer as a hub", "check HF_ENDPOINT"),
}


@pytest.mark.parametrize("happens", UNREACHABLE)
def test_a_whole_cached_copy_is_used_with_a_warning_if_the_hub_cannot_be_reached(
    happens: Callable[[Hub, pytest.MonkeyPatch], None],
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    problem, remedy = UNREACHABLE[happens]
    with monkeypatch.context() as patch:
        happens(hub, patch)
        text = refusal()
        assert problem in text and remedy in text, "there is no copy yet"
    hub.silent, hub.failure, hub.page = False, None, None
    local_folder(MODEL, with_weights=False)
    with monkeypatch.context() as patch:
        happens(hub, patch)
        text = refusal()
        assert problem in text and "cached copy lacks files" in text, "it has no weights yet"
        local_folder(MODEL, with_weights=False)
    hub.silent, hub.failure, hub.page = False, None, None
    files = prepare(MODEL, dtype="float32")
    happens(hub, monkeypatch)
    caplog.clear()
    assert prepare(MODEL, dtype="float32") == files
    [warning] = [record.getMessage() for record in caplog.records]
    assert problem in warning and "cached copy" in warning and "not compared with the hub" in warning


def test_a_lost_connection_is_told_apart_and_the_next_start_fetches_the_rest(hub: Hub) -> None:
    hub.lost = {"model.safetensors"}
    text = refusal()
    assert "connection was lost" in text and "start again" in text
    hub.lost = set()
    prepare(MODEL, dtype="float32")


@pytest.mark.parametrize(
    ("number", "part"),
    [
        (errno.ENOSPC, "has no space"),
        (errno.EDQUOT, "has no space"),
        (errno.EACCES, "cannot be written to"),
        (errno.EROFS, "cannot be written to"),
        (errno.EIO, "could not be fetched"),
    ],
)
def test_a_disk_that_takes_no_files_is_told_apart(
    number: int, part: str, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hub.url

    def download(*_: object, **__: object) -> str:
        raise OSError(number, os.strerror(number), "file")

    monkeypatch.setattr(hub_module, "snapshot_download", download)
    text = refusal()
    assert part in text and ("HF_HOME" in text or number == errno.EIO)


def test_a_token_that_cannot_be_sent_is_not_shown(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}é")
    assert "check" in refusal() and "HF_TOKEN" in refusal()
    assert not hub.tokens, "no request for a model"


def test_a_repository_of_gguf_files_names_one(hub: Hub) -> None:
    hub.files = {"README.md": b"", "model-q4_0.gguf": b"GGUF", "model-q8_0.gguf": b"GGUF"}
    assert f"hf download {MODEL} model-q4_0.gguf" in refusal()
    hub.files = {"README.md": b""}
    assert "has no config.json" in refusal()


def test_planning_explains_the_hub_as_the_engine_does(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.failure = (403, GATED)
    assert run("estimate", MODEL, "--hardware", "a10", "--context", "1K") == 2
    assert "is gated" in capsys.readouterr().err
    hub.failure = (401, {})
    assert run("estimate", MODEL, "--hardware", "a10", "--context", "1K") == 2
    assert "no repository of this name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "part"), [((401, INVALID), "does not accept the token"), ((404, MISSING), "no path")]
)
def test_the_command_line_ends_with_one_line(failure: tuple[int, dict[str, str]], part: str, tmp_path: Path) -> None:
    """A process with `HF_ENDPOINT` and a token in its environment."""
    with serve_hub() as hub:
        hub.failure = failure
        given = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path), "LONGSPAN_CACHE": str(tmp_path)}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | given
        done = subprocess.run(
            [sys.executable, "-m", "longspan", "serve", MODEL, "--port", "0"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert f"Bearer {TOKEN}" in hub.tokens
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if line.startswith("longspan: ")]
    assert part in line and MODEL in line
    assert "Traceback" not in done.stderr and TOKEN not in done.stderr + done.stdout
