"""The real server that several files of tests share. Tests must not end it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_server import client_of, make_server
from server_process import KEY, MAX_MODEL_LEN, MODEL, OTHER_NAME, ServerProcess, running
from starlette.testclient import TestClient
from tiny_models import make_speaking
from tool_models import save_tokenizer

from longspan.serve.server import Server


@pytest.fixture(autouse=True)
def every_exception_is_retrieved() -> Iterator[None]:
    """Fails a test in which asyncio finds an exception of a task or a future that nothing has retrieved."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("asyncio")
    log.addHandler(handler)
    yield
    log.removeHandler(handler)
    assert not [message for message in found if "never retrieved" in message]


@pytest.fixture(scope="session")
def calling_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can be talked to, and whose template knows tools."""
    folder = make_speaking(tmp_path_factory.mktemp("calling"))
    save_tokenizer(folder, "hermes", with_markers=True)
    return folder


@pytest.fixture(scope="session")
def tetris_server(calling_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a tiny model on two instances under policy `tetris`. It replaces lost processes."""
    policy = ("--policy", "tetris", "-o", "improvement_rate=0.1", "--parallel", "2", "--block-size", "16")
    limits = ("--max-model-len", str(MAX_MODEL_LEN), "--max-body-bytes", "200000", "--threads-per-rank", "1")
    names = ("--served-model-name", MODEL, "--served-model-name", OTHER_NAME)
    log = tmp_path_factory.mktemp("tetris") / "log"
    with running(
        str(calling_model), *policy, *limits, *names, log=log, environment={"LONGSPAN_API_KEY": KEY}
    ) as server:
        yield server


@pytest.fixture
def server() -> Server:
    """An API server with a key, in front of a fake engine."""
    return make_server(api_keys=("sesame",))


@pytest.fixture
def client(server: Server) -> TestClient:
    """Asks it, with the key."""
    client = client_of(server)
    client.headers.update({"authorization": "Bearer sesame"})
    return client
