"""Files of `longspan batch`: requests of token ids, and the answers to them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

COMPLETIONS = "/v1/completions"


def write_requests(path: Path, prompts: Iterable[Sequence[int]], max_tokens: int, **more: Any) -> None:
    """Writes greedy requests r0, r1 and so on, whose answers have token ids."""
    body = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, "return_token_ids": True, **more}
    lines = [
        {"custom_id": f"r{index}", "method": "POST", "url": COMPLETIONS, "body": {**body, "prompt": list(prompt)}}
        for index, prompt in enumerate(prompts)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))


def answers_in(path: Path) -> dict[str, list[int]]:
    """Return the output of each request by its name. All lines must be complete, with one line per request."""
    text = path.read_bytes()
    assert text.endswith(b"\n"), "the last line is whole"
    lines = [json.loads(line) for line in text.splitlines()]
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["token_ids"] for line in lines}
    assert len(found) == len(lines)
    return found
