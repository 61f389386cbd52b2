"""Citations of `longspan ask`: passages, and their attention on a real engine in this process."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from engines import ThreadLLM
from hypothesis import given
from hypothesis import strategies as st

from longspan import SamplingParams
from longspan.cli.chat import Conversation
from longspan.cli.citations import Cited, passages_of
from longspan.cli.documents import Content, Document

DOCUMENTS = [
    Document(name="a.txt", text="".join(f"Line {number} of a.\n" for number in range(30))),
    Document(name="b/c.md", text="One long line of the second file. " * 20),
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)
QUESTION = "Which line is it?"


@given(st.text(alphabet="ab \n", max_size=3000))
def test_passages_cover_a_text_in_order(text: str) -> None:
    passages = [*passages_of(text)]
    assert "".join(text[start:stop] for start, stop in passages) == text
    assert all(stop == start for (_, stop), (start, _) in pairwise(passages))
    assert all(0 < stop - start <= 500 for start, stop in passages)


def cited(llm: ThreadLLM) -> Cited:
    conversation = Conversation(llm, Content(documents=DOCUMENTS, system="Be brief."))
    return Cited(llm, conversation, DOCUMENTS, QUESTION)


def test_the_prompt_of_a_citation_is_that_of_the_conversation(speaking: ThreadLLM) -> None:
    conversation = Conversation(speaking, Content(documents=DOCUMENTS, system="Be brief."))
    prompt = cited(speaking)
    assert prompt.token_ids == conversation.prompt(QUESTION)
    text = speaking.input_processor.tokenizer.decode(prompt.token_ids[prompt.first :])
    assert text.lstrip().startswith(QUESTION)


def test_citations_name_passages_with_their_lines_and_characters(speaking: ThreadLLM) -> None:
    prompt = cited(speaking)
    [output] = speaking.generate([prompt.token_ids], prompt.params(GREEDY), use_tqdm=False)
    citations = prompt.citations(output, 100)
    assert citations
    assert sum(citation.share for citation in citations) == pytest.approx(1.0)
    assert [citation.share for citation in citations] == sorted((c.share for c in citations), reverse=True)
    texts = {document.name: document.text for document in DOCUMENTS}
    for citation in citations:
        assert citation.text == texts[citation.file][citation.start : citation.stop]
        lines = texts[citation.file].splitlines(keepends=True)
        assert "".join(lines[citation.first_line - 1 : citation.last_line]).find(citation.text.rstrip()) >= 0
        assert citation.file in str(citation)
    assert prompt.citations(output, 2) == citations[:2]


def test_the_passage_that_gets_the_attention_is_cited_first(speaking: ThreadLLM) -> None:
    """For any passage: the attention of one token is raised, in the report for the question only."""
    prompt = cited(speaking)
    [output] = speaking.generate([prompt.token_ids], prompt.params(GREEDY), use_tqdm=False)
    assert output.prompt_attention is not None
    text = speaking.input_processor.tokenizer.decode(prompt.token_ids)
    for words in ("Line 3 of a", "Line 21 of a", "second file"):
        attention = np.array(output.prompt_attention)
        attention[len(speaking.tokenize(text[: text.index(words) + 6], add_special_tokens=False))] += 5
        [first] = prompt.citations(replace(output, prompt_attention=attention), 1)
        assert words in first.text
        assert first.share > 0.5


def test_every_layout_cites_the_same_passages(speaking_model: Path, speaking: ThreadLLM) -> None:
    prompt = cited(speaking)
    [output] = speaking.generate([prompt.token_ids], prompt.params(GREEDY), use_tqdm=False)
    expected = prompt.citations(output, 3)
    options = {"policy": "context", "policy_options": {"threshold": "1"}}
    with ThreadLLM(str(speaking_model), threads_per_rank=1, instances=2, block_size=16, **options) as llm:
        other = cited(llm)
        [output] = llm.generate([other.token_ids], other.params(GREEDY), use_tqdm=False)
        found = other.citations(output, 3)
    assert [(citation.file, citation.start) for citation in found] == [(c.file, c.start) for c in expected]
    assert [citation.share for citation in found] == pytest.approx([c.share for c in expected], rel=1e-2)
