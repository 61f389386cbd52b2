"""The steps of the image, without Docker: the installed server answers offline, without root, from a read-only root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import network_hosts, why_not

DEPLOY = Path(__file__).parents[2] / "deploy"
NOBODY = 65534
START = """
mount -t tmpfs -o mode=1777 none "$2"
mount -t tmpfs -o mode=0700,uid=65534,gid=65534 none "$3"
mount -o remount,bind,ro /
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
if touch "$1/written" 2>/dev/null; then exit 99; fi
exec setpriv --reuid 65534 --regid 65534 --clear-groups --no-new-privs \
    env -i PATH=/usr/bin:/bin HOME=/ TMPDIR="$2" LONGSPAN_CACHE="$3" OMP_NUM_THREADS=1 "$1/start.sh" serve --port 8000
"""
"""Arguments: the folder of `install.sh`, and two folders that become writable."""
ASK = """
import json, time, urllib.error, urllib.request
url, deadline = "http://127.0.0.1:8000", time.monotonic() + 240
while True:
    try:
        urllib.request.urlopen(url + "/health", timeout=5)
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.5)
body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
data, headers = json.dumps(body).encode(), {"content-type": "application/json"}
request = urllib.request.Request(url + "/v1/completions", data, headers)
print(json.load(urllib.request.urlopen(request, timeout=100))["choices"][0]["text"])
"""


@pytest.fixture
def installed() -> Iterator[Path]:
    """A fresh environment with the default model, in a folder that every user can read."""
    folder = Path(tempfile.mkdtemp(prefix="ls-installed-"))
    folder.chmod(0o755)
    hidden = ("LONGSPAN_", "PYTHON", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    try:
        command = [DEPLOY / "install.sh", folder / "longspan"]
        environment["PYTHON"] = getattr(sys, "_base_executable", sys.executable)
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
        command = ("unshare", "--mount", "sh", "-ec", START, "sh", installed / "longspan", *writable)
        server = host.popen(*command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            answer = host.run(sys.executable, "-SEc", ASK, timeout_s=400)
        except subprocess.CalledProcessError as error:
            pytest.fail(f"{error.stderr}\n{log.read_text(encoding='utf-8')}")
        assert "Paris" in answer.stdout
        assert f"Uid:\t{NOBODY}\t" in Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
        server.terminate()
        assert server.wait(60) == 0, log.read_text(encoding="utf-8")
    text = log.read_text(encoding="utf-8")
    assert "writing the" not in text, "the weights were converted by install.sh"
    assert "Traceback" not in text
