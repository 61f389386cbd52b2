"""The requests that Open WebUI sends, by its public source: models, streamed chats with tools, titles and tags.

Open WebUI is not installed. Its backend removes its own fields (`metadata`, `chat_id`, `features`) and sends the rest.
"""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from checks import BASE, KEY, MODEL, QUESTION, TOOLS, check_city, run

CHAT: dict[str, Any] = {
    "stream": True,
    "model": MODEL,
    "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": QUESTION}],
    "stream_options": {"include_usage": True},
    "temperature": 0.8,
    "top_p": 0.9,
    "max_tokens": 24,
    "frequency_penalty": 0.0,
    "seed": 1,
    "stop": ["</s>"],
    "user": {"name": "Ada", "id": "1", "email": "ada@example.com", "role": "admin"},
}
TASK = """### Task:
{task}
### Output:
JSON format: {form}
### Chat History:
<chat_history>
USER: Does it rain in Rome?
ASSISTANT: It rains all day.
</chat_history>"""


def ask(path: str, body: object = None) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{BASE}{path}", data, headers)) as answer:
        text = answer.read().decode()
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]
    return json.loads(text)


def models() -> None:
    assert [card["id"] for card in ask("/models")["data"]] == [MODEL]


def streamed_chat() -> None:
    chunks = ask("/chat/completions", CHAT)
    assert "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert chunks[-1]["usage"]["completion_tokens"] > 0


def tools() -> None:
    """Native function calling: the answer and the result of the call go back with `tools` again."""
    turn = {**CHAT, "tools": TOOLS, "max_tokens": 400}
    chunks = ask("/chat/completions", {**turn, "tool_choice": "required", "parallel_tool_calls": False})
    calls = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", ())]
    arguments = "".join(call["function"]["arguments"] for call in calls)
    check_city(arguments)
    call = {**calls[0], "function": {"name": "weather", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "It rains all day."}
    messages = [*CHAT["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}, result]
    assert ask("/chat/completions", {**turn, "messages": messages})


def title() -> None:
    task = TASK.format(task="Write a title of 3 to 5 words with an emoji.", form='{ "title": "your title" }')
    messages = [{"role": "user", "content": task}]
    body = {"model": MODEL, "messages": messages, "stream": False, "max_completion_tokens": 4000}
    assert ask("/chat/completions", {**body, "max_completion_tokens": 32})["choices"][0]["message"]["content"]


def tags() -> None:
    task = TASK.format(task="Write 1 to 3 tags.", form='{ "tags": ["tag1", "tag2"] }')
    messages = [{"role": "user", "content": task}]
    answer = ask("/chat/completions", {"model": MODEL, "messages": messages, "stream": False, "max_tokens": 32})
    assert answer["choices"][0]["message"]["content"]


run(None, [models, streamed_chat, tools, title, tags])
