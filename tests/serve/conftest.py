"""The real server that several files of tests ask; none of them may end it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import KEY, MAX_MODEL_LEN, MODEL, OTHER_NAME, ServerProcess, running


@pytest.fixture(scope="session")
def tetris_server(speaking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of a tiny model on two instances under policy `tetris`; it comes back when its processes are lost."""
    policy = ("--policy", "tetris", "-o", "improvement_rate=0.1", "--parallel", "2", "--block-size", "16")
    limits = ("--max-model-len", str(MAX_MODEL_LEN), "--max-body-bytes", "200000", "--threads-per-rank", "1")
    names = ("--served-model-name", MODEL, "--served-model-name", OTHER_NAME)
    log = tmp_path_factory.mktemp("tetris") / "log"
    with running(
        str(speaking_model), *policy, *limits, *names, log=log, environment={"LONGSPAN_API_KEY": KEY}
    ) as server:
        yield server
