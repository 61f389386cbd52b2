"""A served model without an engine, and invented deltas of an engine, for tests of the server's JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from longspan.core.request import FinishReason
from longspan.model.source import smollm2_folder
from longspan.outputs import Logprob, LogprobsOfToken
from longspan.serve.convert import ServedModel, read_request
from longspan.serve.messages import Delta
from longspan.serve.responses import Assembler
from longspan.serve.settings import RequestLimits, ServerSettings
from longspan.text.input_processor import EngineRequest, InputProcessor
from longspan.text.tokenizer import Detokenizer, token_text

RequestT = TypeVar("RequestT", bound=BaseModel)
NAMES: dict[str, Any] = {"id": "cmpl-1", "model": "smollm2", "created": 1_700_000_000}


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2_folder())


def world(**limits: int) -> ServedModel:
    input_processor = InputProcessor(tokenizer=tokenizer(), vocab_size=len(tokenizer()), max_model_len=512)
    return ServedModel(
        input_processor=input_processor,
        settings=ServerSettings(model_names=("smollm2",), limits=RequestLimits(**limits)),
    )


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


def deltas_of(
    engine_request: EngineRequest,
    outputs: Sequence[Sequence[int]],
    steps: Sequence[int] = (1,),
    *,
    finish_reason: FinishReason = "length",
    by: PreTrainedTokenizerBase | None = None,
) -> Iterator[Delta]:
    """Return deltas of an engine request whose choices are these token ids, `steps` tokens at a time."""
    params, shown = engine_request.params, engine_request.shown_token_ids
    detokenizers = [
        Detokenizer(by or tokenizer(), engine_request.token_ids, params.stop_strings, shown_token_ids=shown)
        for _ in outputs
    ]
    scored = [None, *(scores(token, params.prompt_logprobs or 0) for token in engine_request.token_ids[1:])]
    prompt_logprobs = None if params.prompt_logprobs is None else scored
    done, step = [0] * len(outputs), 0
    while any(count < len(output) for count, output in zip(done, outputs, strict=True)):
        for index, output in enumerate(outputs):
            new = list(output[done[index] : done[index] + steps[(step + index) % len(steps)]])
            if not new:
                continue
            done[index] += len(new)
            finished = done[index] == len(output)
            yield Delta(
                id=0,
                choice=index,
                text=detokenizers[index].add(new, finished),
                token_ids=new,
                logprobs=None if params.logprobs is None else [scores(token, params.logprobs) for token in new],
                finish_reason=finish_reason if finished else None,
                stop_reason=None,
                num_cached_tokens=1,
                prompt_logprobs=prompt_logprobs,
            )
            prompt_logprobs = None
        step += 1


def whole(assembler: Assembler, deltas: Sequence[Sequence[Delta]]) -> dict[str, Any]:
    """The answer when these deltas of engine requests come."""
    for index, of_request in enumerate(deltas):
        for delta in of_request:
            assembler.add(index, delta)
    return assembler.whole()


def stream(assembler: Assembler, deltas: Sequence[Sequence[Delta]]) -> list[dict[str, Any]]:
    """Return the chunks when these deltas of engine requests arrive alternately."""
    chunks = []
    for step in range(max(map(len, deltas))):
        for index, of_request in enumerate(deltas):
            if step < len(of_request):
                chunks += assembler.chunks(index, of_request[step])
    return chunks + assembler.last_chunks()
