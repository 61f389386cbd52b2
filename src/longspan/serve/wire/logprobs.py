"""Logprobs as OpenAI's two interfaces and vLLM write them, and where tokens begin in a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from longspan.outputs import Logprob, LogprobsOfToken
from longspan.text.input_processor import EngineRequest
from longspan.text.tokenizer import Detokenizer, token_text

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""

_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
"""How SentencePiece's vocabularies write bytes."""


class Names:
    """Texts and bytes of single tokens; without a tokenizer, a token's text is `token_id:` and its id, as in vLLM."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int, entry: Logprob | None = None) -> str:
        """Return a token's text; `entry` may know it already."""
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return f"token_id:{token}" if self._tokenizer is None else token_text(self._tokenizer, token)

    def bytes(self, token: int, text: str) -> list[int] | None:
        """Return the bytes of a token, even if it is only a part of a character; None if they are not known."""
        if self._tokenizer is None:
            return None
        piece = str(self._tokenizer.convert_ids_to_tokens(token))
        if text != piece and (byte := _BYTE_PIECE.fullmatch(piece)):
            return [int(byte[1], 16)]
        if _UNDECODED not in text:
            return list(text.encode())
        stand_ins = _stand_ins()
        return [stand_ins[letter] for letter in piece] if stand_ins.keys() >= set(piece) else None


def completion_logprobs(
    tokens: Sequence[tuple[int, LogprobsOfToken | None]], offsets: Sequence[int], num_top: int, names: Names
) -> dict[str, list[Any]]:
    """Return four lists of one length; `offsets` is where tokens begin in the text."""
    texts, logprobs, tops = [], [], []
    for token, entries in tokens:
        chosen = None if entries is None else entries[token]
        texts.append(names.text(token, chosen))
        logprobs.append(None if chosen is None else _finite(chosen))
        tops.append(None if entries is None else _best_by_text(token, entries, num_top, names))
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": list(offsets)}


def chat_logprobs(token: int, entries: LogprobsOfToken, num_top: int, names: Names) -> dict[str, Any]:
    """Return the logprobs of one token of a chat."""
    tops = [_chat_entry(other, entry, names) for other, entry in _best(entries, num_top)]
    return {**_chat_entry(token, entries[token], names), "top_logprobs": tops}


def prompt_logprobs(
    scores: Sequence[LogprobsOfToken | None], num_top: int
) -> list[dict[str, dict[str, float | int | str | None]] | None]:
    """Return the logprobs of prompt tokens, as vLLM writes them."""
    return [None if entries is None else _prompt_entry(entries, num_top) for entries in scores]


def _prompt_entry(entries: LogprobsOfToken, num_top: int) -> dict[str, dict[str, float | int | str | None]]:
    return {
        str(token): {"logprob": _finite(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token, entry in _token_and_best(next(iter(entries)), entries, num_top)
    }


def _best_by_text(token: int, entries: LogprobsOfToken, num_top: int, names: Names) -> dict[str, float]:
    """Return the token and the best ones by text; of tokens with one text, the best counts."""
    best: dict[str, float] = {}
    for other, entry in _token_and_best(token, entries, num_top):
        text, logprob = names.text(other, entry), _finite(entry)
        best[text] = max(logprob, best.get(text, logprob))
    return best


def _chat_entry(token: int, entry: Logprob, names: Names) -> dict[str, Any]:
    text = names.text(token, entry)
    return {"token": text, "logprob": _finite(entry), "bytes": names.bytes(token, text)}


def _token_and_best(token: int, entries: LogprobsOfToken, num_top: int) -> Iterable[tuple[int, Logprob]]:
    return ({token: entries[token]} | dict(_best(entries, num_top))).items()


def _best(entries: LogprobsOfToken, num_top: int) -> list[tuple[int, Logprob]]:
    """Return the most likely entries; another part of the answer may have asked for more."""
    return sorted(entries.items(), key=lambda item: -item[1].logprob)[:num_top]


def _finite(entry: Logprob) -> float:
    return max(entry.logprob, LEAST)


@lru_cache(maxsize=1)
def _stand_ins() -> dict[str, int]:
    """Return the letters that byte-level vocabularies write for bytes: themselves if printable, others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(rest)}


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
    """Return the echo of a prompt; a prompt of token ids shows special tokens by their names.

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
    """Return what each token adds to the text; a character of several tokens comes with the last of them."""
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
    """Return where tokens begin. Some tokenizers leave out the space before a word: it belongs to it, too."""
    spans = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)["offset_mapping"]
    offsets, end = [], 0
    for start, stop in spans:
        offsets.append(min(start, end) if stop else end)
        end = max(end, stop)
    return offsets
