"""The verb `ask`: answers a question about files."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from longspan.args import EngineArgs
from longspan.cli.chat import Conversation, check_fits
from longspan.cli.documents import Content, read_documents
from longspan.cli.generate import FormOptions, stats_table, stream_to_stdout
from longspan.cli.inputs import STDIN, read_text
from longspan.cli.keep import KeepArgument, Kept
from longspan.cli.options import ModelArgument, start, verb
from longspan.cli.outputs import note
from longspan.core.options import Option
from longspan.core.sampling import SamplingParams

if TYPE_CHECKING:
    from longspan.cli.citations import Citation, Cited
    from longspan.llm import LLM
    from longspan.outputs import RequestOutput

_SAMPLING = SamplingParams(temperature=0.0, max_tokens=512, seed=0)


@verb
def ask(
    texts: Annotated[
        list[str], Option("Files or folders, then the question.", name="files", metavar="FILE... QUESTION")
    ],
    *,
    model: ModelArgument = "smollm2-135m",
    system: Annotated[str | None, Option("The system message.", metavar="TEXT")] = None,
    chat_template: Annotated[
        Path | None, Option("A Jinja template instead of the model's own.", metavar="FILE")
    ] = None,
    citations: Annotated[
        int, Option("Passages to show with the most attention from the question. 0 shows none.", minimum=0)
    ] = 3,
    keep: KeepArgument = None,
    as_json: Annotated[bool, Option("Print one JSON object as the last line, and no running text.", name="json")] = (
        False
    ),
    sampling: SamplingParams = _SAMPLING,
    form: FormOptions = FormOptions(),
    engine: EngineArgs = EngineArgs(),
) -> None:
    """Answer a question about files. The last argument is the question.

    Without a file and without --keep, a pipe is the document. Folders are read with all their text files. PDF and HTML
    files need the extra longspan[documents].
    """
    paths, question = texts[:-1], texts[-1].strip()
    params = replace(sampling, structured_outputs=form.params())
    if (params.n, params.logprobs, params.prompt_logprobs) != (1, None, None):
        raise ValueError("ask shows one answer and no logprobs: leave out --n, --logprobs and --prompt-logprobs")
    content = _content(paths, question, keep, system, chat_template)
    kept = None if keep is None else Kept(keep, content, {"system": system, "chat_template": chat_template})
    content = content if kept is None else kept.content
    assert content is not None, "without --keep there are files"
    with (start if kept is None else kept.start)(model, engine, seed=sampling.seed) as llm:
        conversation = Conversation(llm, content)
        prompt = conversation.prompt(question)
        check_fits(llm, prompt)
        if kept is not None:
            kept.check(llm, prompt)
        cited = _cited(llm, conversation, content, question) if citations else None
        output = stream_to_stdout(llm, prompt, params if cited is None else cited.params(params), quiet=as_json)
        moved = (llm.bytes_exchanged, llm.bytes_between_hosts)
        [completion] = output.outputs
        is_cited = cited is not None and output.prompt_attention is not None and completion.finish_reason != "abort"
        passages = cited.citations(output, citations) if cited is not None and is_cited else []
        if kept is not None:
            kept.save(llm, conversation.shared_tokens(question))
    if kept is not None:
        kept.finish(model)
    if as_json:
        print(json.dumps(_fields(output, passages)))
    else:
        _show_citations(passages)
        if sys.stderr.isatty():
            Console(stderr=True).print(stats_table(output.metrics, *moved))
    if completion.finish_reason == "error":
        raise ValueError(f"the answer ended early: {completion.stop_reason}")
    if completion.finish_reason == "length":
        note(f"the answer was cut off at {len(completion.token_ids)} tokens (--max-tokens)")


def _fields(output: RequestOutput, passages: Sequence[Citation]) -> dict[str, object]:
    [completion] = output.outputs
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "ttft_s": output.metrics.ttft_s,
        "citations": [passage.to_json() for passage in passages],
    }


def _cited(llm: LLM, conversation: Conversation, content: Content, question: str) -> Cited | None:
    """Return the prompt to cite. Return None, with a note, if the tokenizer or the template does not support it."""
    from longspan.cli.citations import Cited  # noqa: PLC0415 - needed with citations only

    try:
        return Cited(llm, conversation, content.documents, question)
    except ValueError as error:
        note(f"there are no citations: {error}")
        return None


def _show_citations(passages: Sequence[Citation]) -> None:
    if passages:
        print(
            "Most attention from the question, beyond that of an empty one (no proof of the answer):", file=sys.stderr
        )
    for passage in passages:
        print(passage, file=sys.stderr)


def _content(
    paths: Sequence[str], question: str, keep: str | None, system: str | None, chat_template: Path | None
) -> Content | None:
    """Read the documents of a question: files, or stdin if it is no terminal. None for a kept name without files."""
    if not question.strip():
        raise ValueError("the question, which is the last argument, is empty: add a question")
    if not paths and keep is not None:
        return None
    if not paths and (sys.stdin.isatty() or Path(question).exists()):
        problem = "there is no question after the file" if Path(question).exists() else "there is no file"
        raise ValueError(f"{problem}: give files or folders and then the question: longspan ask FILE... QUESTION")
    documents = read_documents([Path(path) for path in paths or (STDIN,)])
    template = None if chat_template is None else read_text(chat_template, "chat_template")
    return Content(documents=documents, system=system, chat_template=template)
