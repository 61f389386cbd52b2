"""Runs the unmodified lm-eval against a longspan server, and compares its log-likelihoods with transformers.

The server has SmolLM2 in float32. lm-eval runs in an environment of its own and requests the log-likelihoods of answers
and texts (`local-completions`). It runs once with token ids, several per request, and once with texts. transformers
then computes the same numbers in one process. The exit code is 1 if a difference exceeds the tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from served import served
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from longspan.model.source import smollm2_folder

REPOSITORY = Path(__file__).resolve().parent.parent
TASKS = REPOSITORY / "benchmarks" / "eval_tasks"
MAX_LENGTH = 1024
WAYS = {
    "token ids": ("tokenized_requests=True", 4),
    "texts": ("tokenized_requests=False,num_concurrent=4", 1),
}
"""Arguments of lm-eval's model, and the number of prompts per request."""
FLAGS = ("--dtype", "float32", "--max-model-len", str(MAX_LENGTH))


@dataclass(frozen=True, kw_only=True)
class Score:
    """The log-likelihood that lm-eval received for `text` behind `context`, which may be missing."""

    task: str
    context: str | None
    text: str
    logprob: float


def main() -> int:
    """Compare all log-likelihoods, and return the exit code: 0 if they agree."""
    options = _options()
    console = Console()
    lm_eval = options.clients_venv.absolute() / "bin" / "lm_eval"  # it runs in another folder
    if not lm_eval.is_file():
        console.print(f"{lm_eval} does not exist: make evals installs it")
        return 2
    table = Table("task", "asked with", "log-likelihoods", "largest difference", "within")
    reference = Reference()
    agrees = True
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), *FLAGS) as url:
        for way, (arguments, batch_size) in WAYS.items():
            scores = _evaluate(lm_eval, url, arguments, batch_size, Path(folder) / way)
            for task in sorted({score.task for score in scores}):
                errors = [abs(score.logprob - reference.logprob(score)) for score in scores if score.task == task]
                within = max(errors) <= options.tolerance
                agrees &= within
                table.add_row(task, way, str(len(errors)), f"{max(errors):.2e}", "yes" if within else "[red]no")
    console.print(table)
    return 0 if agrees else 1


def _evaluate(lm_eval: Path, url: str, arguments: str, batch_size: int, output: Path) -> list[Score]:
    """Run lm-eval over the tasks in `TASKS`."""
    model = f"model=smollm2-135m,base_url={url}/v1/completions,tokenizer={smollm2_folder()},max_length={MAX_LENGTH}"
    command = [
        *(lm_eval, "--model", "local-completions", "--model_args", f"{model},{arguments}"),
        *("--include_path", TASKS, "--tasks", "longspan_choice,longspan_text"),
        *("--batch_size", batch_size, "--output_path", output, "--log_samples"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = subprocess.run(list(map(str, command)), cwd=TASKS, env={**os.environ, **offline}, check=False)
    if ended.returncode:
        sys.exit(f"lm-eval has failed with code {ended.returncode}")
    files = sorted(output.rglob("samples_*.jsonl"))
    return [
        score for file in files for line in file.read_text().splitlines() for score in _scores(json.loads(line), file)
    ]


def _scores(sample: dict[str, Any], file: Path) -> Iterator[Score]:
    """Yield the scores that lm-eval wrote for one document: a request per answer, or one for the whole text."""
    task = file.name.removeprefix("samples_").rpartition("_")[0]
    for request, [response] in zip(sample["arguments"].values(), sample["resps"], strict=True):
        *context, text = request.values()
        logprob = response[0] if isinstance(response, list) else response
        yield Score(task=task, context=context[0] if context else None, text=text, logprob=float(logprob))


class Reference:
    """transformers in this process, in float32."""

    def __init__(self) -> None:
        self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(smollm2_folder())
        self._model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)
        self._model.eval()

    @torch.inference_mode()
    def logprob(self, score: Score) -> float:
        """Score the text behind its context, tokenized together, or behind the BOS token if there is no context."""
        if score.context is None:
            before, ids = 1, [self._tokenizer.bos_token_id, *self._ids(score.text)]
        else:
            before, ids = len(self._ids(score.context)), self._ids(score.context + score.text)
        logits = self._model(torch.tensor([ids])).logits[0, before - 1 : -1]
        logprobs = logits.double().log_softmax(dim=-1).gather(-1, torch.tensor(ids[before:])[:, None])
        return float(logprobs.sum())

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--clients-venv", type=Path, default=REPOSITORY / ".venv-clients", help="environment with lm-eval"
    )
    parser.add_argument("--tolerance", type=float, default=1e-2, help="largest difference of a log-likelihood, in nats")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
