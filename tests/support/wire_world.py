"""What the tests of the server's JSON share: a served model without an engine, and an engine's updates, invented."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from longspan.model.source import smollm2_folder
from longspan.outputs import Logprob, LogprobsOfToken
from longspan.serve.messages import ChoiceDelta, Update
from longspan.serve.settings import RequestLimits
from longspan.serve.wire.answers import Assembler
from longspan.serve.wire.body import read_request
from longspan.text.input_processor import EngineRequest, InputProcessor
from longspan.text.tokenizer import Detokenizer, token_text

RequestT = TypeVar("RequestT", bound=BaseModel)
NAMES: dict[str, Any] = {"response_id": "cmpl-1", "model": "smollm2", "created": 1_700_000_000}


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_folder())


@dataclass(frozen=True)
class World:
    """A `Served`."""

    input_processor: InputProcessor
    limits: RequestLimits


def world(**limits: int) -> World:
    input_processor = InputProcessor(tokenizer=tokenizer(), vocab_size=len(tokenizer()), max_model_len=512)
    return World(input_processor, RequestLimits(**limits))


def read(model: type[RequestT], fields: dict[str, Any], limits: RequestLimits | None = None) -> RequestT:
    return read_request(model, json.dumps(fields).encode(), limits or RequestLimits())


def scores(token: int, num_top: int) -> LogprobsOfToken:
    """Made up from the token's id: it is the best one, or in no place of the list, or nearly impossible."""
    entries = {10 * rank + token % 7: Logprob(logprob=-float(rank), rank=rank) for rank in range(1, num_top + 1)}
    kind = token % 3
    own = entries.pop(token, None) or Logprob(logprob=(-0.5, -50.0, -float("inf"))[kind], rank=(1, 99, 40_000)[kind])
    found = {token: own, **entries}
    return {
        id_: Logprob(logprob=entry.logprob, rank=entry.rank, decoded_token=token_text(tokenizer(), id_))
        for id_, entry in found.items()
    }


def updates(
    engine_request: EngineRequest, outputs: Sequence[Sequence[int]], steps: Sequence[int] = (1,)
) -> Iterator[Update]:
    """What an engine tells of a job whose choices are these token ids; `steps` is how many tokens come at a time."""
    detokenizers = [
        Detokenizer(tokenizer(), engine_request.token_ids, engine_request.params.stop_strings) for _ in outputs
    ]
    done, turn = [0] * len(outputs), 0
    while any(count < len(output) for count, output in zip(done, outputs, strict=True)):
        changes = []
        for index, output in enumerate(outputs):
            new = list(output[done[index] : done[index] + steps[(turn + index) % len(steps)]])
            if new:
                done[index] += len(new)
                finished = done[index] == len(output)
                text = detokenizers[index].add(new, finished)
                changes.append(_change(index, text, new, engine_request, finished))
        prompt = [
            None,
            *(scores(token, engine_request.params.prompt_logprobs or 0) for token in engine_request.token_ids[1:]),
        ]
        yield Update(
            choices=changes,
            prompt_logprobs=prompt if turn == 0 and engine_request.params.prompt_logprobs is not None else None,
            num_cached_tokens=1,
            finished=all(count == len(output) for count, output in zip(done, outputs, strict=True)),
        )
        turn += 1


def _change(index: int, text: str, new: list[int], engine_request: EngineRequest, finished: bool) -> ChoiceDelta:
    num_top = engine_request.params.logprobs
    return ChoiceDelta(
        index=index,
        text=text,
        token_ids=new,
        logprobs=None if num_top is None else [scores(token, num_top) for token in new],
        finish_reason="length" if finished else None,
        stop_reason=None,
    )


def whole(assembler: Assembler, news: Sequence[Sequence[Update]]) -> dict[str, Any]:
    """The answer when these updates of jobs come."""
    for index, of_job in enumerate(news):
        for update in of_job:
            assembler.add(index, update)
    return assembler.whole()


def stream(assembler: Assembler, news: Sequence[Sequence[Update]]) -> list[dict[str, Any]]:
    """The chunks when these updates of jobs come, in turns."""
    chunks = []
    for turn in range(max(map(len, news))):
        for index, of_job in enumerate(news):
            if turn < len(of_job):
                chunks += assembler.chunks(index, of_job[turn])
    return chunks + assembler.last_chunks()
