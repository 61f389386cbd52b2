"""Where tokens begin in the text of an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from transformers import PreTrainedTokenizerBase

from longspan.text.input_processor import EngineRequest
from longspan.text.tokenizer import Detokenizer, token_text

_UNDECODED = "\N{REPLACEMENT CHARACTER}"

NameOf = Callable[[int], str]


@dataclass(frozen=True, kw_only=True)
class Echo:
    """The text of a prompt, and where its tokens begin in it, in characters; without offsets if none are asked for."""

    text: str
    offsets: list[int]


def echo_of(
    engine_request: EngineRequest,
    tokenizer: PreTrainedTokenizerBase | None,
    add_special_tokens: bool,
    *,
    with_offsets: bool,
) -> Echo:
    """What a request that echoes its prompt gets of it. Prompts of token ids show special tokens by their names.

    Tokens that are parts of one character all begin where it begins.
    """
    if tokenizer is None:
        return Echo(text="", offsets=[0] * len(engine_request.token_ids))
    if engine_request.text is None:
        pieces = pieces_of(engine_request.token_ids, tokenizer)
        return Echo(text="".join(pieces), offsets=_begins(pieces) if with_offsets else [])
    if not with_offsets:
        return Echo(text=engine_request.text, offsets=[])
    if tokenizer.is_fast:
        return Echo(text=engine_request.text, offsets=_offsets_in(engine_request.text, tokenizer, add_special_tokens))
    return Echo(text=engine_request.text, offsets=_begins(pieces_of(engine_request.token_ids, tokenizer)))


def pieces_of(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What each token adds to the text; a character of several tokens comes with the last of them."""
    texts = {token: token_text(tokenizer, token) for token in set(token_ids)}
    pieces: list[str] = []
    for undecoded, run in groupby(token_ids, key=lambda token: _UNDECODED in texts[token]):
        if undecoded:
            detokenizer = Detokenizer(tokenizer)
            part = [detokenizer.add([token]) for token in run]
            part[-1] += detokenizer.add((), finished=True)
            pieces += part
        else:
            pieces += [texts[token] for token in run]
    return pieces


def _begins(pieces: Sequence[str]) -> list[int]:
    return list(accumulate(map(len, pieces), initial=0))[: len(pieces)]


def _offsets_in(text: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool) -> list[int]:
    """Tokenizers tell where tokens stand in the text, some without the space before a word: that belongs to it, too."""
    spans = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)["offset_mapping"]
    offsets, end = [], 0
    for start, stop in spans:
        offsets.append(min(start, end) if stop else end)
        end = max(end, stop)
    return offsets
