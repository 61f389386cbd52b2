"""Hides a pass key in the middle of Python's own documentation and asks for it, on two instances.

Each instance computes, and keeps the keys and values of, about half of the prompt; the ring between them makes the
attention exact, so the answer is the one that a single instance would give.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from pydoc_data.topics import topics

from rich.console import Console

from longspan import LLM, SamplingParams
from longspan.cli import stats_table, stream_to_stdout

QUESTION = "What is the secret pass key? The secret pass key is"
NUM_TOKENS = 4_200


def main() -> int:
    """Runs the demo; returns 0 if the model found the key."""
    options = _options()
    console = Console(highlight=False)
    console.print(f"Starting {options.instances} instances of smollm2-135m ...")
    with LLM("smollm2-135m", instances=options.instances) as llm:
        manual = first_paragraphs("\n\n".join(topics.values()), NUM_TOKENS, llm)
        prompt = hide(options.key, manual, options.depth) + QUESTION
        console.print(f"Pass key {options.key} is hidden in {len(llm.tokenize(prompt)):,} tokens of Python's manual.")
        console.print(f"\n[dim]{QUESTION}[/]", end="")
        output = stream_to_stdout(llm, prompt, SamplingParams(temperature=0, max_tokens=16, stop=["."]))
        moved = (llm.bytes_exchanged, llm.bytes_between_hosts)
    console.print()
    console.print(stats_table(output.metrics, *moved))
    found = output.outputs[0].text.strip() == str(options.key)
    console.print("[green]The key was found.[/]" if found else "[red]The key was not found.[/]")
    return 0 if found else 1


def first_paragraphs(text: str, num_tokens: int, llm: LLM) -> str:
    """Returns the first paragraphs of `text`: as many as it takes to have `num_tokens` tokens."""
    paragraphs: list[str] = []
    for paragraph in text.split("\n\n"):
        if num_tokens <= 0:
            break
        paragraphs.append(paragraph + "\n\n")
        num_tokens -= len(llm.tokenize(paragraphs[-1]))
    return "".join(paragraphs)


def hide(key: int, text: str, depth: float) -> str:
    """Returns `text` with a sentence that gives the key away between two of its paragraphs, at about `depth` of it."""
    before = text[: int(len(text) * depth)].rpartition("\n\n")[0]
    after = text[len(before) :]
    return f"{before}\n\nThe secret pass key is {key}. Remember it. {key} is the pass key.{after}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=2, help="instances that share the prompt (default 2)")
    parser.add_argument("--depth", type=float, default=0.5, help="where the key is hidden, 0 to 1 (default 0.5)")
    parser.add_argument("--key", type=int, default=10_000 + secrets.randbelow(90_000), help="default: a random one")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
