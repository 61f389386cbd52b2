"""A client program of a server in a network namespace: sends requests at once, and prints their tokens as JSON.

    hosts_client.py PORT '[{"prompt": [5, 6], "max_tokens": 40}, ...]'

It prints `started` when every request has a token, and then a list with one list of tokens per request.
"""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

from server_client import completion

_TIMEOUT_S = 100.0


def stream(port: int, fields: dict[str, Any], started: threading.Barrier) -> list[int]:
    connection, tokens = HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S), list[int]()
    body, headers = json.dumps(completion(stream=True, **fields)).encode(), {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", body, headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            if not tokens:
                started.wait(_TIMEOUT_S)
            tokens += event["choices"][0]["token_ids"]
    return tokens


def main() -> None:
    port, requests = int(sys.argv[1]), json.loads(sys.argv[2])
    started = threading.Barrier(len(requests), action=lambda: print("started", flush=True))
    with ThreadPoolExecutor(len(requests)) as threads:
        print(json.dumps([*threads.map(lambda fields: stream(port, fields, started), requests)]))


if __name__ == "__main__":
    main()
