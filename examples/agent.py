"""An agent with one tool: the model calls it, this program runs it, and the model answers with the result.

The server needs a chat template with tools. If that of the model has none, start it by `longspan serve --chat-template
examples/agent.jinja`. The client is `pip install openai`.
"""

from __future__ import annotations

import argparse
import json
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

CITY: dict[str, object] = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather in a city today.", "parameters": CITY},
}


def weather(city: str) -> str:
    """Return the result of the tool. A real agent would look it up."""
    return f"{city}: rain, {12 if city == 'Oslo' else 18} degrees"


def main() -> None:
    """Let the model call the tool once, and print its answer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    options = parser.parse_args()
    client = OpenAI(base_url=options.base_url, api_key=os.environ.get("LONGSPAN_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Do I need an umbrella in Rome today?"}]

    # Both choices help a small model: it calls the tool, and once. Leave them out if your model decides by itself.
    answer = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    )
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))  # type: ignore[arg-type]
    for call in message.tool_calls or []:
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        result = weather(**arguments)
        print(f"{call.function.name}({arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    answer = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], tool_choice="none", max_tokens=100, temperature=0
    )
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
