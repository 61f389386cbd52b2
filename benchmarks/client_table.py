"""Runs unmodified clients of OpenAI's and Anthropic's APIs against one longspan server, and prints a Markdown table.

The server has the default model in bfloat16, and a chat template with tools. A grammar makes its calls valid, so the
table shows whether requests are accepted and answers are understood, and not the quality of answers. Each client runs
in a process of its own, with the packages of `make clients`. A client that is not installed is a row with the reason.
The exit code is 1 if a task fails.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from client_recorder import Exchange, Recorder, distinct, recording
from served import served

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = REPOSITORY / "benchmarks" / "clients"
RECORDINGS = REPOSITORY / "tests" / "serve" / "client_requests"
FLAGS = (
    *("--dtype", "bfloat16", "--threads-per-rank", "1", "--max-model-len", "4096"),
    *("--chat-template", str(FOLDER / "chat_template.jinja")),
)
_TIMEOUT_S = 600.0
_MAX_CHARS = 400
"""Characters of a text in a recorded request."""


@dataclass(frozen=True, kw_only=True)
class Client:
    """A client of the table. Its script is in `clients/python` or `clients/npm`.

    Attributes:
        package: the folder of its package, among the installed packages.
        venv: folder of its environment below that of all clients. Some clients need an older `openai`.
        is_recorded: whether `--record` writes its requests. Requests with many schemas are too long for that.
    """

    name: str
    script: str
    package: str
    venv: str = "."
    is_recorded: bool = True

    @property
    def is_npm(self) -> bool:
        """Whether the client is a package of npm."""
        return self.script.endswith(".mjs")

    @property
    def path(self) -> Path:
        """The file of the script."""
        return FOLDER / ("npm" if self.is_npm else "python") / self.script

    def command(self, venv: Path) -> list[str] | str:
        """Return the command that runs the script, or the reason why it cannot run."""
        if not self.is_npm:
            folder = venv.absolute() / self.venv
            installed = next(iter(folder.glob(f"lib/*/site-packages/{self.package}")), None)
            python = folder / "bin" / "python"
            return [str(python), str(self.path)] if installed else f"{self.package} is not installed: make clients"
        folder = venv.absolute() / "npm"  # imports of a script are searched from its own folder
        if (node := shutil.which("node")) is None:
            return "there is no node"
        if not (folder / "node_modules" / self.package).is_dir():
            return f"{self.package} is not installed: make clients, with npm"
        for script in self.path.parent.glob("*.mjs"):
            shutil.copy(script, folder)
        return [node, str(folder / self.script)]


CLIENTS = (
    Client(name="openai (Python)", script="openai_client.py", package="openai"),
    Client(name="openai (npm)", script="openai.mjs", package="openai"),
    Client(name="AI SDK, default", script="ai_sdk_default.mjs", package="ai"),
    Client(name="AI SDK, chat", script="ai_sdk_chat.mjs", package="ai"),
    Client(name="openai-agents", script="openai_agents_client.py", package="agents"),
    Client(name="langchain-openai", script="langchain_client.py", package="langchain_openai"),
    Client(name="llama-index-llms-openai-like", script="llama_index_client.py", package="llama_index", venv="openai-2"),
    Client(name="pydantic-ai", script="pydantic_ai_client.py", package="pydantic_ai"),
    Client(name="instructor", script="instructor_client.py", package="instructor", venv="openai-2"),
    Client(name="litellm", script="litellm_client.py", package="litellm", venv="openai-2"),
    Client(name="smolagents", script="smolagents_client.py", package="smolagents"),
    Client(name="Anthropic SDK (Python)", script="anthropic_client.py", package="anthropic"),
    Client(name="Anthropic SDK (npm)", script="anthropic.mjs", package="@anthropic-ai/sdk"),
    Client(name="Open WebUI's calls", script="open_webui_client.py", package="pydantic"),
    Client(name="types of pydantic as tools", script="pydantic_types_client.py", package="pydantic", is_recorded=False),
    Client(name="types of Zod 4 as tools", script="zod_types.mjs", package="zod", is_recorded=False),
)


@dataclass(kw_only=True)
class Row:
    """The outcome of a client."""

    client: Client
    version: str = ""
    passed: list[str]
    failures: list[str]
    skipped: str = ""

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        passed = ", ".join(self.passed) or "-"
        failures = f"skipped: {self.skipped}" if self.skipped else ("; ".join(self.failures) or "none")
        return [self.client.name, self.version or "-", passed, failures]


def main() -> int:
    """Run the clients, and return the exit code: 0 if no task fails."""
    options = _options()
    clients = [client for client in CLIENTS if not options.only or client.script in options.only]
    rows = []
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), *FLAGS) as url, recording(url) as recorder:
        for client in clients:
            row = _run(client, options.clients_venv, recorder)
            rows.append(row)
            print(f"{client.name}: {len(row.passed)} passed, {len(row.failures)} failed {row.skipped}", flush=True)
            for failure in row.failures:
                print(f"  {failure}", flush=True)
            exchanges = recorder.take()
            for exchange in exchanges:
                if exchange.status >= 400:
                    print(f"  {exchange.status} {exchange.path}: {exchange.error}")
            if options.record and client.is_recorded and not row.skipped:
                _write(client, row.version, exchanges)
        if options.verbose:
            print(Path(folder, "server.log").read_text())
    print(f"\n{dt.datetime.now(dt.UTC).date()}\n")
    print(_table(rows))
    return 1 if any(row.failures for row in rows) else 0


def _run(client: Client, venv: Path, recorder: Recorder) -> Row:
    """Run the script of a client, and read its lines."""
    row = Row(client=client, passed=[], failures=[])
    command = client.command(venv)
    if isinstance(command, str):
        row.skipped = command
        return row
    environment = os.environ | {"LONGSPAN_URL": recorder.url, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        row.failures.append(f"no end after {_TIMEOUT_S:g} s")
        return row
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith(('{"task"', '{"version"'))]
    for line in lines:
        if "version" in line:
            row.version = line["version"]
        elif line["error"] is None:
            row.passed.append(line["task"])
        else:
            row.failures.append(f"{line['task']}: {_one_line(line['error'])}")
    if ended.returncode:
        row.failures.append(f"exit code {ended.returncode}: {_one_line(ended.stderr[-300:])}")
    return row


def _one_line(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:300]


def _write(client: Client, version: str, exchanges: Sequence[Exchange]) -> None:
    """Write the requests of a client for `make test`."""
    requests: list[Any] = [_short(exchange.as_json()) for exchange in distinct(list(exchanges))]
    RECORDINGS.mkdir(exist_ok=True)
    recorded = {"client": client.name, "version": version, "requests": requests}
    path = RECORDINGS / f"{client.path.stem.removesuffix('_client')}{'_npm' if client.is_npm else ''}.json"
    path.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _short(value: Any) -> Any:  # noqa: ANN401 - JSON
    """Return JSON whose long texts, such as prompts of agents, are cut."""
    match value:
        case dict():
            return {name: _short(item) for name, item in value.items()}
        case list():
            return [_short(item) for item in value]
        case str() if len(value) > _MAX_CHARS:
            return value[:_MAX_CHARS] + "..."
    return value


def _table(rows: Sequence[Row]) -> str:
    head = ["client", "version", "passed", "failures"]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * 4, *(row.cells() for row in rows)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--clients-venv", type=Path, default=REPOSITORY / ".venv-clients", help="environment of clients"
    )
    parser.add_argument("--only", nargs="+", help="scripts of the clients to run, such as openai.mjs")
    parser.add_argument(
        "--record", action="store_true", help=f"write the requests to {RECORDINGS.relative_to(REPOSITORY)}"
    )
    parser.add_argument("--verbose", action="store_true", help="print the log of the server at the end")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
