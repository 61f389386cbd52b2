"""The text of a prompt of token ids, token by token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_model_tokenizer import BYTE_FALLBACK, BYTE_LEVEL, VOCAB, spell

from longspan.text.tokenizer import echo_of, pieces_of, token_bytes, token_text


@given(st.lists(st.integers(0, VOCAB - 1), max_size=80))
def test_pieces_joined_are_the_text_of_any_tokens(token_ids: list[int]) -> None:
    pieces = pieces_of(token_ids, BYTE_LEVEL)
    assert len(pieces) == len(token_ids)
    assert "".join(pieces) == BYTE_LEVEL.decode(token_ids, skip_special_tokens=False)


@given(
    st.text(st.characters(codec="utf-8", exclude_characters=" "), max_size=20)
)  # in these vocabularies a space is no byte
def test_pieces_of_byte_tokens(text: str) -> None:
    token_ids = [258, *spell(text, BYTE_FALLBACK), 259]
    assert "".join(pieces_of(token_ids, BYTE_FALLBACK)) == f" Hello{text} world"


@given(st.text(st.sampled_from("a é😀€"), min_size=1, max_size=9))
def test_offsets_of_a_tokenizer_without_offsets(text: str) -> None:
    token_ids = tuple(spell(text))
    echo, offsets = echo_of(None, token_ids, BYTE_LEVEL, True, with_offsets=True)
    assert echo == text
    begins = [begin for begin, letter in enumerate(text) for _ in letter.encode()]
    assert offsets == begins


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
def test_bytes_of_tokens_joined_are_the_bytes_of_the_text(tokenizer: object) -> None:
    text = "aé 😀\n"
    parts = [token_bytes(tokenizer, token, token_text(tokenizer, token)) for token in spell(text, tokenizer)]  # type: ignore[arg-type]
    assert bytes(byte for part in parts for byte in part or ()) == text.encode()
