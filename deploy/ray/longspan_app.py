"""Ray Serve application that runs `longspan serve --executor ray` on the head of a Ray cluster.

Ray Serve starts the server, checks its health and replaces it. Clients send requests to the server's own port, not to
the port of Ray Serve. Options of the server are LONGSPAN_ variables of the head. See deploy/kubernetes/rayservice.yaml.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import ray
from ray import serve

_PORT = int(os.environ.get("LONGSPAN_PORT", "8000"))
_STOP_TIMEOUT_S = float(os.environ.get("LONGSPAN_SHUTDOWN_TIMEOUT", "30")) + 25.0
"""Seconds for open requests, and to end workers and close connections."""
_ANSWER_TIMEOUT_S = 5.0
_KEYS = ("RAY_AUTH_", "RAY_USE_TLS", "RAY_TLS_")
_WITH_US = ("setpriv", "--pdeathsig", "TERM")
"""A program of util-linux. By it, the server also gets SIGTERM when this process is killed."""
_HEAD = {"node:__internal_head__": 0.001}
"""A resource that only the head has."""


def _is_hidden(variable: str) -> bool:
    """Return True for variables of this actor. The server is a driver, with the devices and the keys of the head."""
    return variable == "CUDA_VISIBLE_DEVICES" or (variable.startswith("RAY_") and not variable.startswith(_KEYS))


class LongspanServer:
    """The process of the server. It ends with this deployment."""

    def __init__(self) -> None:
        inherited = {name: value for name, value in os.environ.items() if not _is_hidden(name)}
        command = [str(Path(sys.prefix).parent / "start.sh"), "serve", "--executor", "ray", "--port", str(_PORT)]
        self._server = subprocess.Popen(
            [*_WITH_US, *command],
            env={**inherited, "RAY_ADDRESS": ray.get_runtime_context().gcs_address},
            stdout=sys.stderr,
        )
        while self._server.poll() is None and self._status("/live") is None:
            time.sleep(0.2)  # it imports packages, and the first health check follows

    def check_health(self) -> None:
        """Raise an error if the server has ended or does not answer. A server that loads weights or drains answers."""
        if (code := self._server.poll()) is not None:
            raise RuntimeError(f"longspan serve has ended with code {code}")
        if self._status("/live") != 200:
            raise RuntimeError("longspan serve does not answer /live")

    def __call__(self, _: object) -> str:
        """Answer requests to the port of Ray Serve with the server's health."""
        return f"longspan serves on port {_PORT}: /health answers {self._status('/health')}"

    def __del__(self) -> None:
        self._server.terminate()
        try:
            self._server.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()

    @staticmethod
    def _status(path: str) -> int | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{_PORT}{path}", timeout=_ANSWER_TIMEOUT_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None


app = serve.deployment(
    LongspanServer,
    ray_actor_options={"num_cpus": 0, "resources": _HEAD},
    health_check_period_s=10,
    health_check_timeout_s=30,
    graceful_shutdown_timeout_s=_STOP_TIMEOUT_S,
).bind()
