"""Incremental text equals the whole text. Stop strings end it exactly."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from longspan.model.files import ModelError, ModelFiles
from longspan.text.tokenizer import Detokenizer, grammar_vocabulary, load_tokenizer, token_text

PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
PRINTABLE_FIRST = PRINTABLE + [byte for byte in range(256) if byte not in PRINTABLE]


def byte_level_tokenizer() -> PreTrainedTokenizerBase:
    """Every byte and some letters are tokens. Ids 0 and 1 are special."""
    words = ["<eos>", "<pad>", *_stand_ins(), "ab", "abc", "Ġab", "Ġthe", "ðŁĺ"]
    model = models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[])
    core = Tokenizer(model)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")


def byte_fallback_tokenizer() -> PreTrainedTokenizerBase:
    """As Llama 2: word pieces with a leading space mark, which the text's beginning drops, and bytes <0x..>."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "ly", "▁"]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")


def _stand_ins() -> list[str]:
    """GPT-2's printable stand-ins for the bytes in `PRINTABLE_FIRST`."""
    return [chr(byte) for byte in PRINTABLE] + [chr(256 + n) for n in range(256 - len(PRINTABLE))]


BYTE_LEVEL = byte_level_tokenizer()
BYTE_FALLBACK = byte_fallback_tokenizer()
VOCAB = len(BYTE_LEVEL)


def spell(text: str, tokenizer: PreTrainedTokenizerBase = BYTE_LEVEL) -> list[int]:
    """The ids of a text, one token per byte."""
    if tokenizer is BYTE_FALLBACK:
        return [2 + byte for byte in text.encode()]
    return [2 + PRINTABLE_FIRST.index(byte) for byte in text.encode()]


def pieces(detokenizer: Detokenizer, ids: Sequence[int], chunk: int = 1) -> list[str]:
    out = [detokenizer.add(ids[at : at + chunk]) for at in range(0, len(ids), chunk)]
    return [*out, detokenizer.add((), finished=True)]


any_ids = st.lists(st.one_of(st.integers(0, VOCAB + 5), st.integers(0, 1), st.integers(194, 257)), max_size=150)


@given(ids=any_ids, chunk=st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_pieces_make_the_whole_for_any_tokens(ids: list[int], chunk: int) -> None:
    out = pieces(Detokenizer(BYTE_LEVEL), ids, chunk)
    assert "".join(out) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


characters = st.sampled_from(["é", "😀", "👩‍👩‍👧", "漢字", "a", " ", "\n"])
texts = st.lists(characters, max_size=40).map("".join)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
@given(text=texts)
@settings(max_examples=100, deadline=None)
def test_no_character_is_cut_or_late(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    text = text.lstrip()
    detokenizer = Detokenizer(tokenizer)
    for num_bytes, id_ in enumerate(spell(text, tokenizer), start=1):
        detokenizer.add([id_])
        known = text.encode()[:num_bytes].decode(errors="ignore")
        assert known.startswith(detokenizer.text)
        if known.encode() == text.encode()[:num_bytes]:
            assert detokenizer.text == known
    assert detokenizer.text == text


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte level", "byte fallback"])
@given(text=texts, cut=st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_output_continues_the_prompt(tokenizer: PreTrainedTokenizerBase, text: str, cut: int) -> None:
    """Also when the prompt ends within a character: then the output begins with that character."""
    text = text.lstrip()
    ids = spell(text, tokenizer)
    out = "".join(pieces(Detokenizer(tokenizer, ids[:cut]), ids[cut:]))
    assert text.encode()[:cut].decode(errors="ignore") + out == text


def test_a_space_between_prompt_and_output_is_kept() -> None:
    hello, world, ly = (BYTE_FALLBACK.convert_tokens_to_ids(word) for word in ("▁Hello", "▁world", "ly"))
    assert pieces(Detokenizer(BYTE_FALLBACK), [hello, world, ly]) == ["Hello", " world", "ly", ""]
    assert pieces(Detokenizer(BYTE_FALLBACK, [hello]), [world, ly]) == [" world", "ly", ""]


@given(text=st.text("abX\n", max_size=40), stop=st.lists(st.text("abX\n", min_size=1, max_size=4), max_size=3))
@settings(max_examples=300, deadline=None)
def test_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, stop=tuple(stop))
    out = pieces(detokenizer, spell(text))
    # One token at a time, the first complete stop string ends the text. Of two, the earlier beginning counts.
    first = min(((text.find(each) + len(each), text.find(each)) for each in stop if each in text), default=None)
    assert "".join(out) == detokenizer.text == (text if first is None else text[: first[1]])
    assert (detokenizer.stopped_by in stop) == (first is not None)


def test_a_possible_beginning_of_a_stop_string_is_held_back() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, stop=("\n\nX",))
    assert pieces(detokenizer, spell("a\n\nb\n")) == ["a", "", "", "\n\nb", "", "\n"]
    assert detokenizer.stopped_by is None


@given(
    text=st.text("abX", max_size=20),
    stop=st.lists(st.text("abX", min_size=1, max_size=4), max_size=3),
    least=st.integers(0, 8),
    chunk=st.integers(1, 6),
)
def test_stop_strings_that_end_within_min_tokens_do_not_count(
    text: str, stop: list[str], least: int, chunk: int
) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, stop=tuple(stop), min_tokens=least)
    out = "".join(pieces(detokenizer, spell(text), chunk))
    ends = [end for end in range(least + 1, len(text) + 1) if text[:end].endswith(tuple(stop))]
    begins = [ends[0] - len(each) for each in stop if text[: ends[0]].endswith(each)] if ends else [len(text)]
    assert out == text[: min(begins)]
    assert (detokenizer.stopped_by is not None) == bool(ends)


@pytest.mark.parametrize("id_", [2, 200])
def test_the_cost_of_a_token_does_not_grow(id_: int) -> None:
    """Also for a byte that never becomes a character: 50,000 tokens take seconds, not minutes."""
    detokenizer, begun = Detokenizer(BYTE_LEVEL), time.perf_counter()
    for _ in range(50_000):
        detokenizer.add([id_])
    assert time.perf_counter() - begun < 20


def test_a_model_without_tokenizer_files_is_named(tmp_path: Path) -> None:
    files = ModelFiles(name="bare", config_dir=tmp_path, weights=tmp_path / "w", tokenizer_dir=None, dtype="float32")
    with pytest.raises(ModelError, match="'bare' has no tokenizer files"):
        load_tokenizer(files)


def test_a_tokenizer_that_cannot_be_loaded_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    files = ModelFiles(name="x", config_dir=tmp_path, weights=tmp_path / "w", tokenizer_dir=tmp_path, dtype="float32")
    with pytest.raises(ModelError, match="the tokenizer of 'x' cannot be loaded") as refusal:
        load_tokenizer(files)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("length", [20, 200])
def test_a_prompt_of_which_no_byte_makes_a_character_changes_no_output(length: int) -> None:
    prompt = [spell("é")[1]] * length
    assert "".join(pieces(Detokenizer(BYTE_LEVEL, prompt), spell("aé!"))) == "aé!"


def test_a_grammar_needs_a_token_that_ends_an_output() -> None:
    endless = PreTrainedTokenizerFast(tokenizer_object=BYTE_LEVEL.backend_tokenizer)
    with pytest.raises(ModelError, match="need an end-of-sequence token, but this model has none: leave them out"):
        grammar_vocabulary(endless, vocab_size=VOCAB)
    assert grammar_vocabulary(endless, vocab_size=VOCAB, eos_token_ids=(1,)).eos_token == 1


def test_a_tokenizer_without_byte_values_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no bytes\nhere")

    monkeypatch.setattr("llguidance.hf.from_tokenizer", refuse)
    with pytest.raises(ModelError, match=r"cannot work with this model's tokenizer \(ValueError: no bytes here\)"):
        grammar_vocabulary(BYTE_LEVEL, vocab_size=VOCAB)


def test_load_tokenizer_reads_the_folder(tmp_path: Path) -> None:
    BYTE_LEVEL.save_pretrained(tmp_path)
    files = ModelFiles(name="x", config_dir=tmp_path, weights=tmp_path / "w", tokenizer_dir=tmp_path, dtype="float32")
    assert load_tokenizer(files).decode(spell("é!")) == "é!"


def test_a_token_by_itself_keeps_its_space_and_its_name() -> None:
    words = [("<eos>", "<eos>"), ("Ġab", " ab"), ("abc", "abc")]
    assert [token_text(BYTE_LEVEL, BYTE_LEVEL.convert_tokens_to_ids(word)) for word, _ in words] == [
        t for _, t in words
    ]
    words = [("</s>", "</s>"), ("▁Hello", " Hello"), ("ly", "ly"), ("▁", " ")]
    found = [token_text(BYTE_FALLBACK, BYTE_FALLBACK.convert_tokens_to_ids(word)) for word, _ in words]
    assert found == [text for _, text in words]
    assert token_text(BYTE_LEVEL, VOCAB + 5) == "", "a model may have more tokens than its tokenizer"
