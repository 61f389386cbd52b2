"""The verb `batch`: answers a file of requests in OpenAI's batch format."""

from __future__ import annotations

import fcntl
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Self

import msgspec
from tqdm import tqdm

from longspan.args import AUTO, EngineArgs
from longspan.cli.auto_parallel import with_best_parallel
from longspan.cli.inputs import TOO_LONG, read_lines
from longspan.cli.options import ModelArgument, start, verb
from longspan.cli.outputs import check_writable, note, note_progress, write_result
from longspan.core.options import Option
from longspan.core.transitions import phase_seconds
from longspan.errors import ParameterError
from longspan.file_errors import unread, unwritten
from longspan.progress import MinuteLines

if TYPE_CHECKING:
    from longspan.core.config import EngineConfig
    from longspan.core.engine import Engine
    from longspan.llm import LLM
    from longspan.text.output_processor import Choice

_MAX_CONCURRENT = 512
_REFRESH_S = 0.2
URLS = ("/v1/completions", "/v1/chat/completions")


class _Given(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Named(msgspec.Struct):
    id: str | None = None
    custom_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class BatchLine:
    """A request of a batch file. `error` is the problem if the line is no request. `number` counts lines from 1."""

    number: int
    custom_id: str | None
    url: str = ""
    body: bytes = b""
    error: str | None = None

    @property
    def id(self) -> str:
        return f"batch_req_{self.number}"

    @property
    def key(self) -> str:
        """The key that is unique among the requests of the file."""
        return self.id if self.custom_id is None else self.custom_id


Answers = Callable[[Iterator[tuple[BatchLine, str, bytes]]], Iterator[tuple[BatchLine, int, dict[str, Any]]]]
"""Answers requests, in any order: from tuples of request, URL and body to tuples of request, HTTP status and body."""


@verb
def batch(
    model: ModelArgument = "smollm2-135m",
    *,
    input_file: Annotated[Path, Option("Requests, with custom_id, method, url and body in each line.", short="i")],
    output_file: Annotated[Path, Option("File to which answers are appended. Its answers are kept.", short="o")],
    served_model_name: Annotated[list[str] | None, Option("Further name of the model in requests. Repeatable.")] = None,
    json_stats: Annotated[
        Path | None, Option("File for throughput and transitions between clusters.", metavar="FILE.json")
    ] = None,
    seed: Annotated[int, Option("Seed of requests without a seed, and of dummy weights.")] = 0,
    engine: EngineArgs = EngineArgs(),
) -> int:
    """Answer the requests of a batch file, as OpenAI's batch service does.

    A stopped run can be repeated: requests with an answer in the output file are skipped. If a request could not be
    served, the exit code is 2, and its answer has the error.

    With --parallel auto the simulator searches the fastest parallel spec for all cores or CUDA devices. With
    --host-kv-gib it also searches the fastest pair of Seesaw. It simulates up to 64 of the requests with the profile
    that longspan profile measured. An output has max_tokens tokens, or 256 if the request has no max_tokens.
    """
    if input_file.exists() and output_file.exists() and input_file.samefile(output_file):
        problem = f"{str(output_file)!r} is the input file: give another one"
        raise ParameterError("output_file", problem, output_file)
    if json_stats is not None:
        check_writable("--json-stats", json_stats)
    keys = keys_in(input_file)
    with appended(output_file) as out:
        answered = answered_in(output_file)
        num_new = len(keys - answered)
        if not num_new:
            note("every request has an answer already" if keys else f"--input-file {str(input_file)!r} has no requests")
            return 0
        if engine.parallel == AUTO:
            unanswered = (line for line in read_batch(input_file) if line.key not in answered)
            engine = with_best_parallel(model, engine, unanswered, num_new)
        lines = (line for line in read_batch(input_file) if line.key not in answered)
        with start(model, engine, seed=seed) as llm, _Progress(llm, num_new) as progress:
            answers = _answers(llm, model, served_model_name or [], progress)
            progress.begun_s = time.monotonic()
            try:
                num_bad = run_lines(lines, out, answers, progress.advance)
            finally:  # also when a worker is lost, or a signal ends the run
                if json_stats is not None:
                    stats = run_stats(llm, progress, ended_s=time.monotonic())
                    write_result("--json-stats", json_stats, json.dumps(stats, allow_nan=False) + "\n")
    if num_bad:
        note(f"{num_bad} of {num_new} requests could not be served: see {output_file}")
    return 2 if num_bad else 0


def run_lines(
    lines: Iterator[BatchLine], out: IO[bytes], answers: Answers, done: Callable[[dict[str, Any] | None], object]
) -> int:
    """Write an answer for each line as soon as there is one. Return the number of failures.

    `done` is called with the body of an answer with status 200, and with None for each failure.
    """
    num_bad = 0

    def write(line: BatchLine, *, response: dict[str, Any] | None, error: dict[str, str] | None) -> None:
        nonlocal num_bad
        body = response["body"] if response is not None and response["status_code"] == HTTPStatus.OK else None
        num_bad += body is None
        named = {"id": line.id, "custom_id": line.custom_id}
        append(out, msgspec.json.encode({**named, "response": response, "error": error}) + b"\n")
        done(body)

    def requests() -> Iterator[tuple[BatchLine, str, bytes]]:
        for line in lines:
            if line.error is None:
                yield line, line.url, line.body
            else:
                write(line, response=None, error={"code": "invalid_request", "message": line.error})

    for line, status, body in answers(requests()):
        write(line, response={"status_code": status, "request_id": uuid.uuid4().hex, "body": body}, error=None)
    return num_bad


def _answers(llm: LLM, model: str, names: list[str], progress: _Progress) -> Answers:
    from longspan.serve.convert import ServedModel  # noqa: PLC0415
    from longspan.serve.responses import answer_each  # noqa: PLC0415  # loads transformers
    from longspan.serve.settings import ServerSettings  # noqa: PLC0415

    all_names = tuple(dict.fromkeys([*names, model, llm.service.files.name]))
    served = ServedModel(input_processor=llm.input_processor, settings=ServerSettings(model_names=all_names))
    max_groups, max_tokens = concurrency(llm.engine.config)
    return partial(
        answer_each, llm, served, max_groups=max_groups, max_waiting_tokens=max_tokens, stepped=progress.stepped
    )


def concurrency(config: EngineConfig) -> tuple[int, int]:
    """Return the maximum number of concurrent requests, and of prompt tokens that wait.

    With phases, there is a request for each request slot on devices and for each block on hosts. A request has at least
    one host block. So a phase ends only if the hosts are full, or no request remains. Waiting prompts take a
    small part of the memory of their KV.
    """
    from longspan.llm import MAX_WAITING_TOKENS  # noqa: PLC0415  # loads transformers

    if not config.phases:
        return min(2 * config.max_num_seqs, _MAX_CONCURRENT), MAX_WAITING_TOKENS
    num_blocks = sum(config.cluster.host_blocks)
    num_slots = config.max_num_seqs * max(cluster.num_instances for cluster in config.phases)
    return num_blocks + num_slots, max(MAX_WAITING_TOKENS, num_blocks * config.block_size)


def run_stats(llm: LLM, progress: _Progress, *, ended_s: float) -> dict[str, object]:
    """Return the content of `--json-stats` for a finished or stopped run of an engine that was started for it.

    `ended_s` is a time of the engine's clock.
    """
    engine, begun_s = llm.engine, progress.begun_s
    transitions, run_s = engine.transitions, ended_s - begun_s
    return {
        "throughput_tokens_per_s": progress.num_tokens / run_s if run_s else None,
        "requests_per_s": progress.num_served / run_s if run_s else None,
        "num_transitions": len(transitions),
        "transition_s": [transition.exposed_s for transition in transitions],
        "weight_bytes_copied": sum(transition.copied_bytes for transition in transitions),
        "swap_bytes": engine.kv.counts.num_swapped_blocks * llm.service.block_bytes,
        "phase_s": phase_seconds(transitions, engine.config.phases, begun_s, ended_s),
        "host_kv_peak_bytes": engine.kv.counts.peak_host_blocks * llm.service.block_bytes,
    }


class _Progress:
    """Counts the served requests and tokens of a run, and shows progress on stderr if it is a terminal.

    Attributes:
        begun_s: time of the first request, by the engine's clock.
        num_tokens: number of tokens in prompts and outputs of served requests.
    """

    def __init__(self, llm: LLM, total: int) -> None:
        self._llm, self._num_done, self._shown_s = llm, 0, 0.0
        self.begun_s = time.monotonic()
        self.num_tokens = self.num_served = 0
        note(f"{total} requests to answer")
        self._total, self._lines = total, MinuteLines("batch", note_progress)
        self._bar = tqdm(total=total, desc="requests", unit="request", dynamic_ncols=True, disable=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, body: dict[str, Any] | None) -> None:
        """Count an answer, and the tokens of its body. A failure has no body."""
        if body is not None:
            self.num_tokens += body["usage"]["total_tokens"]
            self.num_served += 1
        self._num_done += 1
        self._lines.update(self._num_done / self._total, f"{self._num_done} of {self._total} requests")
        if not self._bar.disable:
            self._bar.update(max(0, self._num_done - self._bar.n))

    def stepped(self, choices: Sequence[Choice]) -> None:
        """Show the progress of the running requests, at most every `_REFRESH_S`."""
        now_s = time.monotonic()
        if self._bar.disable or now_s < self._shown_s + _REFRESH_S:
            return
        self._shown_s = now_s
        requests = [choice.request for choice in choices]
        computed = [request.num_prompt if request.output else request.num_computed for request in requests]
        outputs = [len(request.output) for request in requests]
        parts = [
            (number + output) / (request.num_prompt + request.max_tokens) / request.params.n
            for request, number, output in zip(requests, computed, outputs, strict=True)
        ]
        num_tokens = self.num_tokens + sum(computed) + sum(outputs)
        words = [f"{num_tokens / max(now_s - self.begun_s, 1e-9):,.0f} tok/s"]
        words += self._llm.with_engine(occupancy)
        self._bar.set_postfix_str(", ".join(words), refresh=False)
        self._bar.n = max(self._bar.n, round(min(self._num_done + sum(parts), self._bar.total), 1))
        self._bar.refresh()


def occupancy(engine: Engine) -> list[str]:
    """Return the usage of pools on devices, and on hosts if there are some: `KV 40 %`, `host 63 %`.

    With phases, the first text is the present phase.
    """
    cluster = engine.config.cluster
    parts = {"KV": (sum(engine.load().used_blocks), sum(cluster.num_blocks))}
    if cluster.host_blocks:
        parts["host"] = (engine.kv.account.usage(cluster.host_pools).num_used, sum(cluster.host_blocks))
    phase = [engine.phase] if engine.phase else []
    return phase + [f"{name} {used / total:.0%}" for name, (used, total) in parts.items()]


# ---------------------------------------------------------------- files


def read_batch(path: Path) -> Iterator[BatchLine]:
    try:
        with path.open("rb") as file:
            for number, text in enumerate(read_lines(file), start=1):
                if text is None:
                    yield BatchLine(number=number, custom_id=None, error=f"line {number} is no request: it {TOO_LONG}")
                elif text.strip():
                    yield parse_batch_line(text, number)
    except OSError as error:
        raise ParameterError("input_file", unread(path, error), path) from None


def parse_batch_line(text: bytes, number: int) -> BatchLine:
    """Parse the request in a line. If that fails, the result has an error."""
    try:
        given = msgspec.json.decode(text, type=_Given)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return BatchLine(number=number, custom_id=_named(text).custom_id, error=f"line {number} is no request: {error}")
    problem = None
    if given.method != "POST":
        problem = f"method must be 'POST', but {given.method!r:.40} given"
    elif given.url not in URLS:
        problem = f"url must be {' or '.join(URLS)}, but {given.url!r:.100} given"
    return BatchLine(number=number, custom_id=given.custom_id, url=given.url, body=bytes(given.body), error=problem)


def keys_in(path: Path) -> set[str]:
    """Return the keys of the requests in a file. Raise ValueError if two are equal."""
    if path.exists() and not path.is_file():
        problem = f"{str(path)!r} must be an ordinary file, which can be read twice"
        raise ParameterError("input_file", problem, path)
    numbers: dict[str, int] = {}
    for line in read_batch(path):
        if (first := numbers.setdefault(line.key, line.number)) != line.number:
            problem = f"{str(path)!r} has the same custom_id {line.key!r} in lines {first} and {line.number}"
            raise ParameterError("input_file", f"{problem}: change one", path)
    return set(numbers)


def answered_in(path: Path) -> set[str]:
    """Return the keys of the requests in a file of answers. Remove an incomplete last line."""
    answered: set[str] = set()
    try:
        with path.open("r+b") as file:
            end = 0
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    file.truncate(end)
                    break
                if (names := _named(text)).id is None:
                    problem = f"{str(path)!r} has no answer of a batch in line {number}"
                    raise ParameterError("output_file", f"{problem}: give another file, or move this one", path)
                answered.add(names.id if names.custom_id is None else names.custom_id)
                end += len(text)
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise _not_written(path, error) from None
    return answered


@contextmanager
def appended(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for appending, and lock it against other processes.

    A new file is removed if a mistake of the user is detected before the first line.
    """
    is_new = not path.exists()
    if not (is_new or path.is_file() or path.samefile(os.devnull)):
        problem = f"{str(path)!r} must be an ordinary file, whose answers are read before a run"
        raise ParameterError("output_file", problem, path)
    try:
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise _not_written(path, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            problem = f"{str(path)!r} is written by another process: wait until it ends"
            raise ParameterError("output_file", problem, path) from None
        try:
            yield file
        except ValueError:
            if is_new and not file.tell():
                path.unlink(missing_ok=True)
            raise


def append(file: IO[bytes], line: bytes) -> None:
    """Write a line to an unbuffered file. Raise ValueError if the disk is full. `answered_in` removes a cut line."""
    rest = memoryview(line)
    while rest:
        try:
            rest = rest[file.write(rest) :]
        except OSError as error:
            raise _not_written(Path(file.name), error) from None


def _named(text: bytes) -> _Named:
    """Return the names in a line of any content."""
    try:
        return msgspec.json.decode(text, type=_Named)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Named()


def _not_written(path: Path, error: OSError) -> ValueError:
    return ParameterError("output_file", unwritten(path, error), path)
