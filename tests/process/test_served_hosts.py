"""A server whose two instances are on two Ray hosts: OpenAI's client gets the tokens of the oracle.

Prompts are longer than all device pools, so the memory of both hosts holds their KV.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hosts import why_not
from hosts_server import HostsServer, serving
from openai import OpenAI
from oracle import Oracle
from ray_nodes import why_no_ray
from server_client import Metrics
from texts import topic_tokens
from tiny_models import ODD, make_speaking
from transformers import AutoConfig, AutoTokenizer, LlamaConfig

from longspan.model.source import smollm2_folder

pytestmark = pytest.mark.hosts
MAX_TOKENS, DEVICE_TOKENS, PROMPT_TOKENS = 12, 2 * 10 * 16, 400
REPORT_S = 1.5
SENT = 'exchanged_bytes_total{exchange="ring_kv",link="other_host"}'
EXTRA = {"ignore_eos": True, "return_token_ids": True}


@dataclass(frozen=True)
class Served:
    """A running server, its model's folder, and the reference for the model."""

    server: HostsServer
    folder: Path
    oracle: Oracle

    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)

    def openai(self, ask: Callable[[OpenAI, str], Any]) -> Any:
        """Let OpenAI's client ask on the host of the server, with the name of the model."""
        with self.server.hosts[0].inside(), self.server.client.openai("none") as client:
            return ask(client, client.models.list().data[0].id)

    def settled_metrics(self) -> Metrics:
        """Return the metrics once no byte was counted for some time. The engine reports them twice a second."""
        before: Metrics = {}
        with self.server.hosts[0].inside():
            while bytes_sent(metrics := self.server.client.wait_until_idle()) != bytes_sent(before):
                before = metrics
                time.sleep(REPORT_S)
        return metrics


@pytest.fixture(scope="module", params=["odd", "smollm2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if (reason := why_not() or why_no_ray()) is not None:
        pytest.skip(reason)
    scratch = tmp_path_factory.mktemp(request.param)
    if request.param == "odd":
        folder, host_gib = make_speaking(scratch / "model", LlamaConfig(**ODD)), "0.02"
    else:
        folder, host_gib = smollm2_folder(), "0.25"
    options = {
        "--parallel": "2",
        "--policy": "context",
        "--exchange": "ring_kv",
        "-o": "threshold=0",
        "--num-gpu-blocks-override": str(DEVICE_TOKENS // 2 // 16),
        "--host-kv-gib": host_gib,
        "--max-model-len": "1024",
    }

    def start(hosts: Any, nodes: Any) -> HostsServer:
        return HostsServer(hosts, nodes, folder, scratch / "log", options)

    with serving(2, 1, start) as server:
        yield Served(server, folder, Oracle(folder))


def bytes_sent(metrics: Metrics) -> Counter[str]:
    """Return the bytes of each exchange over each class of link, without copies to and from hosts."""
    return Counter(
        {
            name: round(value)
            for name, value in metrics.items()
            if name.startswith("exchanged_bytes_total{") and "_copy" not in name
        }
    )


def check(served: Served, prompt: list[int], answers: list[Any]) -> None:
    """Check tokens and text of an answer, or of the chunks of a stream."""
    expected = served.oracle.complete(prompt, MAX_TOKENS).token_ids
    choices = [choice for answer in answers for choice in answer.choices]
    # the first chunk of a chat has a role only
    assert [token for choice in choices for token in getattr(choice, "token_ids", [])] == expected
    texts = [text_of(choice) for choice in choices]
    assert "".join(texts) == served.tokenizer().decode(expected, skip_special_tokens=True)


def text_of(choice: Any) -> str:
    """Return the text of a choice of a completion, a chat, or a chunk of one."""
    for name in ("message", "delta"):
        if hasattr(choice, name):
            return getattr(choice, name).content or ""
    return str(choice.text)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_have_the_tokens_of_the_oracle(served: Served, *, stream: bool) -> None:
    prompt = [*topic_tokens()[2000 * stream :][:PROMPT_TOKENS]]
    assert len(prompt) > DEVICE_TOKENS

    def ask(client: OpenAI, model: str) -> list[Any]:
        answer = client.completions.create(
            model=model, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, stream=stream, extra_body=EXTRA
        )
        return [*answer] if stream else [answer]

    check(served, prompt, served.openai(ask))


@pytest.mark.parametrize("stream", [False, True])
def test_chats_have_the_tokens_of_the_oracle(served: Served, *, stream: bool) -> None:
    text = served.tokenizer().decode(topic_tokens()[4000 + 2000 * stream :][:PROMPT_TOKENS])
    messages: Any = [{"role": "user", "content": text}]
    template = served.tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    prompt = [*template["input_ids"]]
    assert len(prompt) > DEVICE_TOKENS

    def ask(client: OpenAI, model: str) -> list[Any]:
        answer = client.chat.completions.create(
            model=model, messages=messages, max_tokens=MAX_TOKENS, temperature=0, stream=stream, extra_body=EXTRA
        )
        return [*answer] if stream else [answer]

    check(served, prompt, served.openai(ask))


def test_the_metrics_count_the_bytes_between_hosts_and_the_kv_of_hosts(served: Served) -> None:
    """A prompt of one step sends the bytes of the formula over the link, and none inside a host."""
    config = AutoConfig.from_pretrained(served.folder)
    prompt = [*topic_tokens()[9000:9100]]
    before = served.settled_metrics()

    def ask(client: OpenAI, model: str) -> Any:
        return client.completions.create(model=model, prompt=prompt, max_tokens=1, temperature=0, extra_body=EXTRA)

    assert served.openai(ask).choices[0].token_ids == served.oracle.complete(prompt, 1).token_ids
    with served.server.hosts[0].inside():
        served.server.client.wait_for_more(SENT, before)
    after = served.settled_metrics()
    per_token = 2 * config.num_key_value_heads * config.head_dim * 4 * config.num_hidden_layers
    sent = bytes_sent(after) - bytes_sent(before)
    assert sent == {SENT: len(prompt) * per_token}
    assert after['tier_kv_blocks{tier="host"}'] * 16 > PROMPT_TOKENS - DEVICE_TOKENS
