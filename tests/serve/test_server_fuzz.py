"""schemathesis over the server's own OpenAPI document, with requests that follow it and requests that do not.

Every answer must follow the document and is never a 5xx. After each answer, a good request is served as before.
`make fuzz` draws many more.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from chat_chunk import ChatCompletionChunk
from hypothesis import HealthCheck, given, settings
from pydantic import BaseModel
from schemathesis import Case, GenerationMode
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance
from server_client import Client
from server_process import KEY, running

from longspan.serve.schemas import CompletionResponse

LONG_RUN = "LONGSPAN_FUZZ_EXAMPLES" in os.environ
NUM_EXAMPLES = int(os.environ.get("LONGSPAN_FUZZ_EXAMPLES", "3"))
"""Per route and mode. Short runs use the same examples."""

CHUNKS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionResponse,
    "/v1/chat/completions": ChatCompletionChunk,
}
SMALL = (
    *("--policy", "tetris"),
    *("--max-model-len", "80", "--max-n", "2", "--max-prompts", "3", "--max-logprobs", "3"),
    *("--max-messages", "4", "--max-logit-bias", "4", "--max-stop-strings", "3", "--max-stop-token-ids", "3"),
)


@pytest.fixture(scope="module")
def client(speaking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    log = tmp_path_factory.mktemp("fuzz") / "log"
    with running(
        str(speaking_model), "--served-model-name", "tiny", *SMALL, log=log, environment={"LONGSPAN_API_KEY": KEY}
    ) as server:
        yield server.client


@pytest.fixture(scope="module")
def operations(client: Client) -> list[Any]:
    headers = {"authorization": f"Bearer {KEY}"}
    schema = schemathesis.openapi.from_url(f"{client.url}/openapi.json", headers=headers)
    schema.config.generation.update(with_security_parameters=False)  # wrong keys are in test_server_access.py
    found = [result.ok() for result in schema.get_all_operations()]
    assert len(found) >= 11
    return found


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.timeout(0 if LONG_RUN else 300)
def test_answers_to_random_requests_follow_the_document(
    client: Client, operations: list[Any], mode: GenerationMode
) -> None:
    usual = client.good_answer()
    assert client.ask("POST", "/admin/timeline", {"recording": True}).status == 200
    seen: dict[str, Counter[int]] = defaultdict(Counter)
    for operation in operations:
        if mode.is_negative and not operation.body:
            continue  # there is nothing in such a request that could be wrong

        @settings(
            max_examples=NUM_EXAMPLES, deadline=None, derandomize=not LONG_RUN, suppress_health_check=list(HealthCheck)
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Case) -> None:
            response = case.call(timeout=60, headers={"authorization": f"Bearer {KEY}"})
            seen[case.operation.label][response.status_code] += 1  # runs within the loop
            # Not every text is a grammar, and not every conversation fits the template: 400 may be right.
            case.validate_response(response, excluded_checks=[positive_data_acceptance, ignored_auth])
            check_stream(case.path, response)
            assert client.good_answer() == usual

        ask()
    print(mode.value, {label: dict(statuses) for label, statuses in seen.items()})
    client.wait_until_idle()
    if not mode.is_negative:
        # The document names neither options, which are the policy's, nor specs: no random request changes any.
        del seen["POST /admin/policy"], seen["POST /admin/parallel"]
        assert all(statuses[200] for statuses in seen.values()), "no route only ever refuses"


def check_stream(path: str, answer: Any) -> None:
    """Each event of a stream is a chunk and the last one is [DONE], or each has the name of its type."""
    if not answer.headers.get("content-type", [""])[0].startswith("text/event-stream"):
        return
    events = [part for part in answer.content.decode().split("\n\n") if part and not part.startswith(":")]
    if path not in CHUNKS:
        pairs = [event.split("\ndata: ") for event in events]
        assert pairs
        assert all(name == f"event: {json.loads(data)['type']}" for name, data in pairs)
        return
    assert events.pop() == "data: [DONE]"
    assert events
    for event in events:
        CHUNKS[path].model_validate_json(event.removeprefix("data: "))
