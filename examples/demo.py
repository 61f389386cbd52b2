"""Hide a pass key in the middle of Python's own documentation and ask for it, on two instances.

Each instance computes about half of the prompt and stores its keys and values. The ring between the instances makes the
attention exact, so the answer is the same as on a single instance.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import sys
from pydoc_data.topics import topics

from longspan import LLM, RequestOutput, SamplingParams

QUESTION = "What is the secret pass key? The secret pass key is"
NUM_TOKENS = 4_200


def main() -> int:
    """Run the demo. Return 0 if the model found the key."""
    options = _options()
    print(f"Starting {options.instances} instances of smollm2-135m ...")
    with LLM("smollm2-135m", dtype="float32", instances=options.instances) as llm:
        answer = ask_for(options.key, llm, options.depth)
        print_statistics(answer, llm)
    return report(answer, options.key)


def ask_for(key: int, llm: LLM, depth: float) -> RequestOutput:
    """Hide the key in the manual and ask for it. Return the answer, which is printed while it is generated."""
    manual = first_paragraphs("\n\n".join(topics.values()), NUM_TOKENS, llm)
    prompt = hide(key, manual, depth) + QUESTION
    print(f"Pass key {key} is hidden in {len(llm.tokenize(prompt)):,} tokens of Python's manual.")
    print(f"\n{QUESTION}", end="", flush=True)
    return ask(llm, prompt)


def report(answer: RequestOutput, key: int) -> int:
    """Print whether the answer is the key. Return the exit code: 0 if it is."""
    is_found = answer.outputs[0].text.strip() == str(key)
    print("The key was found." if is_found else "The key was not found.")
    return 0 if is_found else 1


def ask(llm: LLM, prompt: str) -> RequestOutput:
    """Print the answer while it is generated, and return it."""
    shown = 0
    for answer in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=16, stop=["."])):
        text = answer.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
    print("\n")
    return answer


def print_statistics(answer: RequestOutput, llm: LLM) -> None:
    """Print the prompt tokens on each instance, the times, and the bytes of exchanges."""
    metrics = answer.metrics
    for instance, num_tokens in enumerate(metrics.kv_tokens_per_instance):
        print(f"prompt tokens on instance {instance} {num_tokens:>12,}")
    print(f"time to first token {metrics.ttft_s:>17.2f} s")
    if metrics.tbt_s:
        print(f"median time between tokens {statistics.median(metrics.tbt_s) * 1e3:>9.1f} ms")
    for exchange, num_bytes in llm.bytes_exchanged.items():
        if num_bytes:
            print(f"{'bytes in all' if exchange == 'total' else f'bytes by {exchange}':23} {num_bytes:>14,}")


def first_paragraphs(text: str, num_tokens: int, llm: LLM) -> str:
    """Return the first paragraphs of `text` that have at least `num_tokens` tokens."""
    paragraphs: list[str] = []
    for paragraph in text.split("\n\n"):
        if num_tokens <= 0:
            break
        paragraphs.append(paragraph + "\n\n")
        num_tokens -= len(llm.tokenize(paragraphs[-1]))
    return "".join(paragraphs)


def hide(key: int, text: str, depth: float) -> str:
    """Return `text` with a paragraph that contains the key, inserted at about `depth` of its length."""
    before = text[: int(len(text) * depth)].rpartition("\n\n")[0]
    after = text[len(before) :]
    return f"{before}\n\nThe secret pass key is {key}. Remember it. {key} is the pass key.{after}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=2, help="instances that share the prompt (default 2)")
    parser.add_argument("--depth", type=float, default=0.5, help="position of the key, 0 to 1 (default 0.5)")
    parser.add_argument("--key", type=int, default=10_000 + secrets.randbelow(90_000), help="default: a random key")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
