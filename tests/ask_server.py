"""A server process for tests that ask it odd things: a tiny model that speaks, and a log that must stay quiet."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tiny_models import TINY, write_checkpoint
from transformers import AutoTokenizer

from longspan.model.smollm2 import smollm2_folder

_START_TIMEOUT_S = 120
_STOP_TIMEOUT_S = 60
_ADDRESS = re.compile(r"serving \S+ on http://([\d.]+):(\d+)")


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server listens, and the name of its model."""

    host: str
    port: int
    model: str = "tiny"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, timeout_s: float = 60) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer; `body` is sent as JSON."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {} if data is None else {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def good_answer(self) -> list[int]:
        """Token ids of the answer to a request that is always the same."""
        status, _, body = self.ask(
            "POST",
            "/v1/completions",
            {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 4, "return_token_ids": True},
        )
        assert status == 200, body
        ids = json.loads(body)["choices"][0]["token_ids"]
        assert len(ids) == 4
        return list(ids)

    def metric(self, name: str, label: str = "") -> float:
        """A metric's value, of all its labels together that have `label` in them."""
        _, _, body = self.ask("GET", "/metrics")
        found = re.findall(rf"^longspan:{name}(?:{{.*{label}.*}})? (\S+)$", body.decode(), re.MULTILINE)
        assert found, name
        return sum(map(float, found))

    def wait_for(self, name: str, value: float, label: str = "", timeout_s: float = 20) -> None:
        """Until a metric has a value; fails if that takes too long."""
        end_s = time.monotonic() + timeout_s
        while (found := self.metric(name, label)) != value:
            assert time.monotonic() < end_s, f"{name} {label} is {found}, not {value}"
            time.sleep(0.1)

    def wait_until_idle(self) -> None:
        """Until nothing runs and nothing waits; fails if that takes too long."""
        self.wait_for("num_requests_running", 0)
        self.wait_for("num_requests_waiting", 0)


def speaking_model(folder: Path) -> Path:
    """A tiny random model with the tokenizer and the chat template of SmolLM2: fast nonsense, in all of Unicode."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder())
    config = TINY["llama"]()
    config.vocab_size, config.eos_token_id, config.bos_token_id = len(tokenizer), tokenizer.eos_token_id, None
    write_checkpoint(config, folder)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def serving(model: Path, log: Path, *flags: str) -> Iterator[Address]:
    """A server of `model` that is up; it must end well, and must have written no traceback to its log by then."""
    command = [sys.executable, "-m", "longspan", "serve", str(model), "--port", "0", "--served-model-name", "tiny"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *flags], stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=_environment()
        )
    try:
        yield _address(process, log)
        assert process.poll() is None, f"the server has ended:\n{log.read_text()}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(_STOP_TIMEOUT_S) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    text = log.read_text(errors="replace")
    assert "Traceback" not in text, text
    assert "new workers" not in text and "another engine process" not in text, text


def _address(process: subprocess.Popen[bytes], log: Path) -> Address:
    end_s = time.monotonic() + _START_TIMEOUT_S
    while (found := _ADDRESS.search(log.read_text())) is None:
        assert process.poll() is None and time.monotonic() < end_s, f"it does not start:\n{log.read_text()}"
        time.sleep(0.1)
    return Address(host=found[1], port=int(found[2]))


@cache
def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}
