"""Loading tokenizers, and incremental conversion of tokens to text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from itertools import accumulate, groupby, product
from pathlib import Path
from typing import TYPE_CHECKING

from llguidance import LLTokenizer

from longspan.core.exports import uncollected
from longspan.model.contents import content_hash
from longspan.model.files import ModelError, ModelFiles, check_whole, one_line, read_json
from longspan.model.folder import PROCESSOR_TEMPLATE, tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# A space in SentencePiece's vocabularies.
_WORD_MARK = "\N{LOWER ONE EIGHTH BLOCK}"

# Output of a decoder for bytes that are not a complete character.
_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
"""A byte in SentencePiece's vocabularies."""
_LOAD_ERRORS = (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError)
_MAX_UNFINISHED = 3  # bytes, so tokens, of an unfinished character

# Tokens. A window grows to `_FULL` and is then cut to `_MIN`. Only undecodable bytes let it grow to `_MAX`.
_MIN_WINDOW, _FULL_WINDOW, _MAX_WINDOW = 12, 32, 256


def load_tokenizer(files: ModelFiles) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a prepared model. Raise ModelError if its files are missing or have changed."""
    if files.tokenizer_dir is None:
        raise ModelError(
            f"model {files.name!r} has no tokenizer files: add them, or use `skip_tokenizer_init` and token ids"
        )
    if files.tokenizer_hash not in {None, content_hash(tokenizer_files(files.tokenizer_dir))}:
        raise ModelError(f"the tokenizer files of {files.name!r} changed after the model was loaded: start again")
    return tokenizer_in(files.tokenizer_dir, files.name, trust_remote_code=files.trust_remote_code)


def tokenizer_in(folder: Path, name: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model `name` from a folder. Raise ModelError if that fails."""
    import_tokenizers()
    from transformers import AutoTokenizer  # noqa: PLC0415 - see `import_tokenizers`

    for path in tokenizer_files(folder).values():
        check_whole(path)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, config=_plain_config(folder), trust_remote_code=trust_remote_code
        )
        if not tokenizer.chat_template and (template := folder / PROCESSOR_TEMPLATE).is_file():
            tokenizer.chat_template = read_json(template)["chat_template"]
        return tokenizer
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, _LOAD_ERRORS):  # the tokenizers library raises that
            raise
        raise ModelError(f"the tokenizer of {name!r} cannot be loaded ({one_line(error)})") from error


def import_tokenizers() -> None:
    """Import transformers' tokenizers, which takes 1 to 2 s, so that they load quickly later."""
    with uncollected():
        import_module("transformers.models.auto.tokenization_auto")


def _plain_config(folder: Path) -> PreTrainedConfig | None:
    """Read the model's configuration without its class, whose import of transformers' models takes 1 s.

    The result suffices for transformers to choose the tokenizer class that the files name. None if they name no class,
    or if the model has code of its own.
    """
    from transformers import PreTrainedConfig  # noqa: PLC0415 - see `import_tokenizers`

    files = [folder / "config.json", folder / "tokenizer_config.json"]
    if not all(file.is_file() for file in files):
        return None
    model, tokenizer = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    if "auto_map" in {*model, *tokenizer} or not tokenizer.get("tokenizer_class"):
        return None
    return PreTrainedConfig.from_dict(model, name_or_path=str(folder))


def token_text(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    """Return the text of a single token: special tokens by name, parts of a character as a replacement character."""
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)
    # A decoder of SentencePiece drops a leading space.
    begins_word = str(tokenizer.convert_ids_to_tokens(token_id)).startswith(_WORD_MARK)
    return f" {text}" if begins_word and not text.startswith(" ") else text


def token_bytes(tokenizer: PreTrainedTokenizerBase | None, token: int, text: str) -> list[int] | None:
    """Return the bytes of a token, which may be a part of a character. None if they are not known."""
    if tokenizer is None:
        return None
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if text != piece and (byte := _BYTE_PIECE.fullmatch(piece)):
        return [int(byte[1], 16)]
    if _UNDECODED not in text:
        return list(text.encode())
    byte_of = _bytes_by_letter()
    return [byte_of[letter] for letter in piece] if byte_of.keys() >= set(piece) else None


@lru_cache(maxsize=1)
def _bytes_by_letter() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary represents."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: PLC0415 - see `import_tokenizers`

    return {letter: byte for byte, letter in bytes_to_unicode().items()}


class Detokenizer:
    """Decodes one sequence of output tokens and releases its text in pieces that never change.

    The pieces together are `tokenizer.decode(ids, skip_special_tokens=True)` as the continuation of the prompt's text.
    A space between prompt and output is kept, and special tokens of `shown_token_ids` are not skipped.
    Two endings are held back: an unfinished UTF-8 character, and a possible beginning of a stop string. Text from the
    first stop string on is never released. Stop strings that end within the first `min_tokens` tokens are ignored.

    A byte-fallback tokenizer that emits invalid UTF-8 may differ by replacement characters: one invalid byte changes
    how the tokenizer decodes valid bytes before it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int] = (),
        stop: tuple[str, ...] = (),
        *,
        min_tokens: int = 0,
        shown_token_ids: Sequence[int] = (),
    ) -> None:
        self.text = ""
        """The text released so far."""
        self.stopped_by: str | None = None
        """The stop string that ended the text, if one did."""
        self._stream = _TextStream(tokenizer, prompt_token_ids, shown_token_ids)
        self._stop = tuple(filter(None, stop))
        self._num_unchecked = min_tokens
        self._pending = ""  # decoded, not released
        self._min_end = 0  # stop strings end after this position in _pending

    def add(self, token_ids: Sequence[int], finished: bool = False) -> str:
        """Add the next output tokens and return the text that they release. `finished` releases the rest."""
        if self.stopped_by is not None:
            return ""
        if 0 < (num_unchecked := self._num_unchecked) < len(token_ids):
            return self.add(token_ids[:num_unchecked]) + self.add(token_ids[num_unchecked:], finished)
        self._pending += self._stream.add(token_ids, finished)
        if self._num_unchecked > 0:
            self._num_unchecked -= len(token_ids)
            self._min_end = len(self._pending)
        if first := self._first_stop():
            at, self.stopped_by = first
            return self._release(at)
        return self._release(len(self._pending) - (0 if finished else self._num_held()))

    def _first_stop(self) -> tuple[int, str] | None:
        """Return the position of the stop string that ends first, and the string."""
        begins = [(stop, max(0, self._min_end + 1 - len(stop))) for stop in self._stop]
        hits = [(at, stop) for stop, begin in begins if (at := self._pending.find(stop, begin)) >= 0]
        return min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]), default=None)

    def _num_held(self) -> int:
        longest = min(max(map(len, self._stop), default=0) - 1, len(self._pending))
        ends = (self._pending[-length:] for length in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stop)), 0)

    def _release(self, length: int) -> str:
        piece, self._pending = self._pending[:length], self._pending[length:]
        self._min_end = max(0, self._min_end - length)
        self.text += piece
        return piece


class _TextStream:
    """Decodes a growing token sequence through a window of its last tokens, so that each token is decoded a few times.

    All replacement characters at the end are held back, since they may be the beginning of a character. A byte-fallback
    decoder shows every byte of a run as undecoded while one of its characters is unfinished.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt_token_ids: Sequence[int], shown_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._num_known = len(tokenizer)
        special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special, self._shows_some = special.difference(shown_token_ids), bool(shown_token_ids)
        self._window, self._num_taken = self._begin(self._plain(prompt_token_ids[-2 * _FULL_WINDOW :])[-_FULL_WINDOW:])

    def add(self, token_ids: Sequence[int], finished: bool) -> str:
        """Return the text that these tokens decide, or all remaining text if finished."""
        self._window += self._plain(token_ids)
        text = self._decode(self._window)
        num_decided = len(text) if finished else self._num_decided(text)
        new = text[self._num_taken : num_decided]
        self._num_taken = max(self._num_taken, num_decided)
        if len(self._window) > _FULL_WINDOW:
            self._shorten(text)
        return new

    def _num_decided(self, text: str) -> int:
        num_held = len(text) - len(text.rstrip(_UNDECODED))
        return len(text) - (num_held if len(self._window) <= _MAX_WINDOW else min(num_held, _MAX_UNFINISHED))

    def _shorten(self, text: str) -> None:
        """Cut the window at the beginning of a character, which is at one of any four tokens.

        A window beyond `_MAX_WINDOW` is cut at any token.
        """
        num_held = len(text) - self._num_taken
        for length in range(_MIN_WINDOW, _MIN_WINDOW + _MAX_UNFINISHED + 1):
            tail = self._decode(self._window[-length:])
            if len(self._window) > _MAX_WINDOW or (num_held == 0 and text.endswith(tail)):
                self._window = self._window[-length:]
                self._num_taken = len(tail) - num_held
                return

    def _begin(self, prompt: list[int]) -> tuple[list[int], int]:
        """Return the first window, which begins with a whole character, and the length of the prompt's text in it.

        A character that the prompt leaves unfinished belongs to the output, which finishes it.
        """
        few = range(_MAX_UNFINISHED + 1)
        for num_unfinished, skip in product(few, few if len(prompt) == _FULL_WINDOW else (0,)):
            text = self._decode(prompt[skip : len(prompt) - num_unfinished])
            if text == text.strip(_UNDECODED):
                return prompt[skip:], len(text)
        return prompt, len(self._decode(prompt))

    def _plain(self, token_ids: Sequence[int]) -> list[int]:
        # Special and unknown tokens have no text. A window could consist of nothing else.
        return [id_ for id_ in token_ids if id_ < self._num_known and id_ not in self._special]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=not self._shows_some)
        return text


def echo_of(
    text: str | None,
    token_ids: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
    add_special_tokens: bool,
    *,
    with_offsets: bool,
) -> tuple[str, list[int]]:
    """Return the text of a prompt and, with `with_offsets`, the positions of its tokens in it, in characters.

    A prompt without `text` shows special tokens by name. Tokens that are parts of a character have its position.
    """
    if tokenizer is None:
        return "", [0] * len(token_ids)
    if text is not None and not with_offsets:
        return text, []
    if text is not None and tokenizer.is_fast:
        return text, _offsets_in(text, tokenizer, add_special_tokens)
    pieces = pieces_of(token_ids, tokenizer)
    return "".join(pieces) if text is None else text, list(accumulate(map(len, pieces), initial=0))[: len(pieces)]


def pieces_of(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text that each token adds. A character of several tokens belongs to the last of them."""
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


def _offsets_in(text: str, tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool) -> list[int]:
    """Return the positions of tokens. A space before a word, which some tokenizers omit, belongs to the word."""
    options = {"add_special_tokens": add_special_tokens, "return_offsets_mapping": True, "verbose": False}
    offsets, end = [], 0
    for start, stop in tokenizer(text, **options)["offset_mapping"]:
        offsets.append(min(start, end) if stop else end)
        end = max(end, stop)
    return offsets


def grammar_vocabulary(
    tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, eos_token_ids: Sequence[int] = ()
) -> LLTokenizer:
    """Return the vocabulary of a tokenizer for a model with `vocab_size` logits. This takes up to 1 s.

    `eos_token_ids` are the model's. By default, the tokenizer's own end-of-sequence token is used.

    Raises:
        ModelError: the bytes of the tokenizer's tokens cannot be determined, or no token ends an output.
    """
    from llguidance.hf import from_tokenizer  # noqa: PLC0415 - imports transformers

    eos = list(eos_token_ids) or [token for token in (tokenizer.eos_token_id,) if token is not None]
    if not eos:
        raise ModelError("structured outputs need an end-of-sequence token, but this model has none: leave them out")
    try:
        return from_tokenizer(tokenizer, n_vocab=max(vocab_size, len(tokenizer)), eos_token=eos)
    except ValueError as error:
        raise ModelError(f"structured outputs cannot work with this model's tokenizer ({one_line(error)})") from error
