"""An engine core that computes nothing. The first token of a prompt chooses its reaction.

The model of its `EngineSetup` is a file, to which it appends a line of JSON per event. Tests read the events, and each
process counts the earlier ones. It starts fast, since it imports neither torch nor longspan.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import zmq

SAY = 1  # As many tokens as `max_tokens` at once.
SILENT = 2  # Accepted, and nothing follows.
UNACCEPTED = 3  # No answer at all.
BEGIN = 4  # One token, and no more.
DIE = 5  # Accepted, and the process ends.
DIE_ONCE = 6  # The same in the first process, as SAY in later processes.
SAY_AND_DIE_ONCE = 7  # One token before it ends.
FLOOD = 8  # Tokens with a text of 1,000 characters each.
PACED = 9  # Tokens that are 20 ms apart.
STUCK = 10  # One token, after which its grammar cannot go on.

NEVER_STARTS, STARTS_LATE, WRONG, ENDS_AT_ONCE = "never-starts", "starts-late", "wrong", "ends-at-once"
NEVER_QUITS, IS_KILLED = "never-quits", "is-killed"
"""Start as the name of the file demands."""

_SETTINGS: dict[str, Any] = {
    "name": "fake",
    "options": {"rate": 0.5, "cut": True, "sizes": "1,2"},
    "changeable": ["rate", "cut"],
}
_STARTED = {
    "type": "Started",
    "name": "fake",
    "tokenizer_dir": None,
    "trust_remote_code": False,
    "vocab_size": 1000,
    "max_model_len": 100_000,
    "max_num_seqs": 2,
    "parallel": "1",
    "cache_config": {"block_size": 16, "cache_dtype": "float32", "enable_prefix_caching": True},
    "policy": _SETTINGS,
    "stats": {"num_kv_blocks": 8, "used_blocks": [0], "busy_s": [0.0]},
}


class FakeEngine:
    """Serves until told to quit."""

    def __init__(self, folder: str, events: Path) -> None:
        self._events, self._given = events, dict[str, str]()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.connect(f"ipc://{folder}/engine.sock")
        self._note("start")
        lines = events.read_text(encoding="utf-8").splitlines()
        self._is_first = sum(json.loads(line)["event"] == "start" for line in lines) == 1

    def run(self) -> None:
        self._send(_STARTED)
        while True:
            while not self._socket.poll(100):
                self._send({"type": "StepOutputs"})  # it lives
            command = msgspec.msgpack.decode(self._socket.recv())
            kind = command["type"]
            more = {name: command[name] for name in ("options", "parallel") if name in command}
            self._note(kind, id=command.get("id"), is_accepted=command.get("is_accepted"), **more)
            if kind == "Quit" and self._events.name != NEVER_QUITS:
                return
            if kind == "SetPolicy":
                self._set_policy(command["id"], command["options"])
            if kind == "SetParallel" and command["parallel"] != "die":
                spec = command["parallel"]
                self._send({"type": "ParallelSet", "parallel": spec, "policy": _SETTINGS, "id": command["id"]})
            elif kind == "SetParallel":
                self._die()
            if kind == "Add":
                request = command["engine_request"]
                self._add(command["id"], request["token_ids"][0], request["params"]["max_tokens"])

    def refuse(self) -> None:
        self._send({"type": "NotStarted", "reason": "a wrong setup", "is_mistake": True})
        time.sleep(1)

    def _add(self, number: int, what: int, max_tokens: int) -> None:
        if what == UNACCEPTED:
            return
        self._send({"type": "Accepted", "id": number})
        if what == DIE or (what == DIE_ONCE and self._is_first):
            self._die()
        if what == SAY_AND_DIE_ONCE and self._is_first:
            self._tell(number, finished=False)
            self._die()
        if what in {BEGIN, STUCK}:
            self._tell(number, finished=False)
            if what == STUCK:
                self._send({"type": "Failed", "id": number, "reason": "too many items", "param": "structured_outputs"})
        elif what != SILENT:
            for index in range(max_tokens):
                self._tell(number, finished=index == max_tokens - 1, text="x" * 1000 if what == FLOOD else "")
                time.sleep(0.02 if what == PACED else 0)

    def _set_policy(self, number: int, options: dict[str, str]) -> None:
        if options.get("rate") == "die":
            self._die()
        rate = options.get("rate")
        if rate == "refuse" or (rate == "once" and not self._is_first):
            self._send({"type": "Failed", "id": number, "reason": f"rate {rate} is not possible"})
            return
        self._given |= {name: value for name, value in options.items() if value is not None}
        settings = {**_SETTINGS, "options": {**_SETTINGS["options"], **self._given}, "given": self._given}
        self._send({"type": "PolicySet", "settings": settings, "id": number})

    def _die(self) -> NoReturn:
        """End at once, after the sent messages."""
        self._socket.close(linger=5000)
        self._context.term()
        os._exit(9)

    def _tell(self, number: int, *, finished: bool, text: str = "") -> None:
        delta = {
            "id": number,
            "choice": 0,
            "text": text,
            "token_ids": [7],
            "logprobs": None,
            "finish_reason": "length" if finished else None,
            "stop_reason": None,
        }
        self._send({"type": "StepOutputs", "deltas": [delta]})

    def _send(self, report: dict[str, Any]) -> None:
        self._socket.send(msgspec.msgpack.encode(report))

    def _note(self, event: str, **more: object) -> None:
        with self._events.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **more}) + "\n")


def _end_with_server() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    events = Path(json.loads(sys.stdin.buffer.readline())["engine"]["model"])
    threading.Thread(target=_end_with_server, daemon=True).start()
    if events.name == ENDS_AT_ONCE:
        sys.exit(3)
    if events.name == IS_KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    if events.name == NEVER_STARTS:
        time.sleep(600)
    if events.name == STARTS_LATE:
        time.sleep(2.5)
    engine = FakeEngine(sys.argv[1], events)
    if events.name == WRONG:
        engine.refuse()
    else:
        engine.run()
    os._exit(0)  # without waiting for messages to a server that has gone


if __name__ == "__main__":
    main()
