"""The steps of the image, without Docker: the installed server answers offline, without root, from a read-only root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import network_hosts, why_not

DEPLOY = Path(__file__).parents[2] / "deploy"
NOBODY = 65534
AS_NOBODY = ("setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "--no-new-privs")
START = """
mount -t tmpfs -o mode=1777 none "$2"
mount -t tmpfs -o mode=0700,uid=65534,gid=65534 none "$3"
mount -o remount,bind,ro /
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
if touch "$1/written" 2>/dev/null; then exit 99; fi
writable="TMPDIR=$2 LONGSPAN_CACHE=$3" start=$1/start.sh
shift 3
exec "$@" env -i PATH=/usr/bin:/bin HOME=/ $writable OMP_NUM_THREADS=1 "$start" serve --port 8000
"""
"""Arguments: the folder of `install.sh`, two folders that become writable, and the command that changes the user."""
ASK = """
import json, urllib.request
body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", data, headers)
print(json.load(urllib.request.urlopen(request, timeout=100))["choices"][0]["text"])
"""
START_TIMEOUT_S = 240.0


def shared_interpreter() -> str:
    """Return an interpreter that other users can run, and that can make environments. Without one, skip the test."""
    for path in (getattr(sys, "_base_executable", sys.executable), "/usr/bin/python3"):
        check = ("-c", "import ensurepip, sys; sys.exit(sys.version_info < (3, 11))")
        command = [*AS_NOBODY, "sh", "-c", 'exec "$0" "$@"', path, *check]  # setpriv itself may start every file
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return path
    pytest.skip("other users can run no Python of version 3.11 or newer with venv")


def wait_until_it_serves(server: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while "serving smollm2-135m" not in (text := log.read_text(encoding="utf-8")):
        assert server.poll() is None and time.monotonic() < deadline_s, text
        time.sleep(0.2)


@pytest.fixture
def installed() -> Iterator[Path]:
    """A fresh environment with the default model, in a folder that every user can read."""
    folder = Path(tempfile.mkdtemp(prefix="ls-installed-"))
    folder.chmod(0o755)
    hidden = ("LONGSPAN_", "PYTHON", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    try:
        command = [DEPLOY / "install.sh", folder / "longspan"]
        environment["PYTHON"] = shared_interpreter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.mark.full
@pytest.mark.timeout(1800)  # it downloads and installs PyTorch
def test_an_installed_server_answers_offline_without_root_from_a_read_only_root(installed: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    writable = [installed / "tmp", installed / "cache"]
    for folder in writable:
        folder.mkdir()
    log = installed / "log"
    with network_hosts(1) as [host], log.open("wb") as output:
        command = ("unshare", "--mount", "sh", "-ec", START, "sh", installed / "longspan", *writable, *AS_NOBODY)
        server = host.popen(*command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        wait_until_it_serves(server, log)
        assert "Paris" in host.run(sys.executable, "-SEc", ASK, timeout_s=120).stdout
        assert f"Uid:\t{NOBODY}\t" in Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
        server.terminate()
        assert server.wait(60) == 0, log.read_text(encoding="utf-8")
    text = log.read_text(encoding="utf-8")
    assert "writing the" not in text, "the weights were converted by install.sh"
    assert "Traceback" not in text
