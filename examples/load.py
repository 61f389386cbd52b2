"""A small load for a server: questions about texts of several lengths, at random times or by a number of clients.

Real measurements use guidellm, aiperf or `vllm bench serve`, see docs/benchmarking.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pydoc_data.topics import topics

MANUAL = "\n\n".join(topics.values())
"""The manual that ships with Python."""


def main() -> None:
    """Send the requests, and print the seconds of each answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--num-requests", type=int, default=12)
    parser.add_argument("--rate", type=float, default=0.5, help="requests per second")
    parser.add_argument("--concurrency", type=int, help="instead: clients, each with one request at a time")
    parser.add_argument("--lengths", type=int, nargs="+", default=(1_000, 4_000, 16_000), help="in characters")
    options = parser.parse_args()
    draw = random.Random(0)
    answers = []
    with ThreadPoolExecutor(options.concurrency or options.num_requests) as clients:
        for number in range(options.num_requests):
            start = draw.randrange(len(MANUAL) - max(options.lengths))
            text = MANUAL[start : start + draw.choice(options.lengths)]
            answers.append(clients.submit(ask, options.url, number, text))
            if options.concurrency is None:
                time.sleep(draw.expovariate(options.rate))
    for answer in answers:
        answer.result()  # raises the request's error


def ask(url: str, number: int, text: str) -> None:
    """Send one request and print its time."""
    message = {"role": "user", "content": f"{text}\n\nWhat is this text about?"}
    headers = {"content-type": "application/json"}
    if key := os.environ.get("LONGSPAN_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    body = json.dumps({"messages": [message], "max_tokens": 32}).encode()
    start_s = time.monotonic()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, headers)  # noqa: S310 - the user gives the URL
    with urllib.request.urlopen(request) as reply:  # noqa: S310 - as above
        usage = json.load(reply)["usage"]
    print(f"request {number}: {usage['prompt_tokens']} tokens, answered in {time.monotonic() - start_s:.1f} s")


if __name__ == "__main__":
    main()
