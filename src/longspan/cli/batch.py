"""The verb `batch`: answers a file of requests in OpenAI's batch format."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Self

import msgspec
from tqdm import tqdm

from longspan.args import AUTO, EngineArgs
from longspan.cli.auto_parallel import with_best_parallel
from longspan.cli.inputs import TOO_LONG, read_lines
from longspan.cli.options import ModelArgument, check_writable, start, verb, write_result
from longspan.core.options import Option
from longspan.core.transitions import phase_seconds

if TYPE_CHECKING:
    from longspan.core.config import EngineConfig
    from longspan.core.engine import Engine
    from longspan.llm import LLM
    from longspan.text.output_processor import Choice

_MAX_AT_ONCE = 512
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
    """A request of a batch file. `error` says why it is none; `number` counts lines from 1."""

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
        """The key that tells this request from others of the file."""
        return self.id if self.custom_id is None else self.custom_id


Answers = Callable[[Iterator[BatchLine]], Iterator[tuple[BatchLine, int, dict[str, Any]]]]
"""Answers requests, in any order: the request, the HTTP status, the body."""


_ENGINE = EngineArgs()


@verb
def batch(
    model: ModelArgument = "smollm2-135m",
    *,
    input_file: Annotated[Path, Option("Requests: custom_id, method, url and body in each line.", short="i")],
    output_file: Annotated[Path, Option("Answers, appended as they get done; those there are kept.", short="o")],
    served_model_name: Annotated[
        list[str] | None, Option("Another name by which requests may call the model; repeatable.")
    ] = None,
    json_stats: Annotated[
        Path | None, Option("Throughput, changes of clusters and their times, written at the end.", metavar="FILE.json")
    ] = None,
    seed: Annotated[int, Option("Seed of requests without one, and of dummy weights.")] = 0,
    engine: EngineArgs = _ENGINE,
) -> int:
    """Answers the requests of a batch file, as OpenAI's batch service does.

    Run it again after it was stopped: requests with an answer in the output file are not run again. With requests that
    could not be served, the exit code is 2, and their answers say why.

    With --parallel auto the simulator looks for the quickest parallel spec for all cores or CUDA devices, and with
    --host-kv-gib for the quickest pair of Seesaw, too: for up to 64 of the requests, by what longspan profile measured.
    Outputs count as long as max_tokens, or 256 tokens where a request has none.
    """
    if input_file.exists() and output_file.exists() and input_file.samefile(output_file):
        raise ValueError(f"--output-file {str(output_file)!r} is the input file: give another one")
    if json_stats is not None:
        check_writable("--json-stats", json_stats)
    keys = keys_in(input_file)
    with appended(output_file) as out:
        answered = answered_in(output_file)
        num_new = len(keys - answered)
        if not num_new:
            print("longspan: every request has an answer already", file=sys.stderr)
            return 0
        if engine.parallel == AUTO:
            unanswered = (line for line in read_batch(input_file) if line.key not in answered)
            engine = with_best_parallel(model, engine, unanswered, num_new)
        lines = (line for line in read_batch(input_file) if line.key not in answered)
        with start(model, engine, seed=seed) as llm, _Progress(llm, num_new) as progress:
            if llm.service.hint is not None:
                print(f"longspan: {llm.service.hint}", file=sys.stderr)
            answers = _answers(llm, model, served_model_name or [], progress)
            try:
                num_bad = run_lines(lines, out, answers, progress.advance)
            finally:  # also when a worker is lost, or a signal ends the run
                if json_stats is not None:
                    stats = run_stats(llm, progress, ended_s=time.monotonic())
                    write_result("--json-stats", json_stats, json.dumps(stats, allow_nan=False) + "\n")
    if num_bad:
        print(f"longspan: {num_bad} of {num_new} requests could not be served: see {output_file}", file=sys.stderr)
    return 2 if num_bad else 0


def run_lines(lines: Iterator[BatchLine], out: IO[bytes], answers: Answers, done: Callable[[], object]) -> int:
    """Writes an answer for each line as soon as there is one, calls `done`, and returns how many are no success."""
    num_bad = 0

    def write(line: BatchLine, *, response: dict[str, Any] | None, error: dict[str, str] | None) -> None:
        nonlocal num_bad
        num_bad += response is None or response["status_code"] != 200
        named = {"id": line.id, "custom_id": line.custom_id}
        append(out, msgspec.json.encode({**named, "response": response, "error": error}) + b"\n")
        done()

    def requests() -> Iterator[BatchLine]:
        for line in lines:
            if line.error is None:
                yield line
            else:
                write(line, response=None, error={"code": "invalid_request", "message": line.error})

    for line, status, body in answers(requests()):
        write(line, response={"status_code": status, "request_id": uuid.uuid4().hex, "body": body}, error=None)
    return num_bad


def _answers(llm: LLM, model: str, names: list[str], progress: _Progress) -> Answers:
    from longspan.serve.convert import ServedModel  # noqa: PLC0415
    from longspan.serve.responses import answer_each  # noqa: PLC0415  # loads transformers

    names_of_it = tuple(dict.fromkeys([*names, model, llm.service.files.name]))
    served = ServedModel(input_processor=llm.input_processor, names=names_of_it)
    most, most_waiting_tokens = most_at_once(llm.engine.config)

    def answers(lines: Iterator[BatchLine]) -> Iterator[tuple[BatchLine, int, dict[str, Any]]]:
        requests = ((line, line.url, line.body) for line in progress.taken(lines))
        for line, status, body in answer_each(
            llm, served, requests, most=most, most_waiting_tokens=most_waiting_tokens, stepped=progress.stepped
        ):
            if status == HTTPStatus.OK:
                progress.count(body["usage"]["total_tokens"])
            yield line, status, body

    return answers


def most_at_once(config: EngineConfig) -> tuple[int, int]:
    """Says how many requests the engine is given at once, and how many tokens of prompts that wait.

    A policy that takes turns gets what the hosts can hold, since each request has a block there at least, beside
    those that have a seat on devices. So a turn only ends when the hosts are full, or nothing more is in the file. What
    waits takes a small part of the memory that its KV will.
    """
    from longspan.llm import MOST_WAITING_TOKENS  # noqa: PLC0415  # loads transformers

    if not config.phases:
        return min(2 * config.max_num_seqs, _MAX_AT_ONCE), MOST_WAITING_TOKENS
    num_blocks = sum(config.cluster.host_blocks)
    num_seats = config.max_num_seqs * max(one.num_instances for one in config.phases)
    return num_blocks + num_seats, max(MOST_WAITING_TOKENS, num_blocks * config.block_size)


def run_stats(llm: LLM, progress: _Progress, *, ended_s: float) -> dict[str, object]:
    """Returns what `--json-stats` writes of a run, by an engine that was started for it.

    The run may have been stopped. `ended_s` is by the engine's clock.
    """
    engine, begun_s = llm.engine, progress.begun_s
    transitions, run_s = engine.transitions, ended_s - begun_s
    return {
        "throughput_tokens_per_s": progress.num_tokens / run_s if run_s else None,
        "requests_per_s": progress.num_served / run_s if run_s else None,
        "num_transitions": len(transitions),
        "transition_s": [one.exposed_s for one in transitions],
        "weight_bytes_copied": sum(one.copied_bytes for one in transitions),
        "swap_bytes": engine.kv.counts.num_swapped_blocks * llm.service.block_bytes,
        "phase_s": phase_seconds(transitions, engine.config.phases, begun_s, ended_s),
        "host_kv_peak_bytes": engine.kv.counts.peak_host_blocks * llm.service.block_bytes,
    }


class _Progress:
    """Counts what a run has served; shows it on stderr, if that is a terminal, also while nothing finishes.

    Attributes:
        begun_s: when the first request was taken, by the engine's clock.
        num_tokens: of prompts and outputs of requests that were served.
    """

    def __init__(self, llm: LLM, total: int) -> None:
        self._llm, self._num_done, self._shown_s = llm, 0, 0.0
        self.begun_s = time.monotonic()
        self.num_tokens = self.num_served = 0
        self._bar = tqdm(total=total, desc="requests", unit="request", dynamic_ncols=True, disable=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def taken(self, lines: Iterator[BatchLine]) -> Iterator[BatchLine]:
        """Yields the requests; the run begins with the first."""
        self.begun_s = time.monotonic()
        yield from lines

    def count(self, num_tokens: int) -> None:
        """Counts a request that was served, with so many tokens."""
        self.num_tokens += num_tokens
        self.num_served += 1

    def advance(self) -> None:
        """Counts an answer, whatever it says."""
        self._num_done += 1
        if not self._bar.disable:
            self._bar.update(max(0, self._num_done - self._bar.n))

    def stepped(self, choices: Sequence[Choice]) -> None:
        """Shows how far the requests under way are, now and then."""
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
    """Says how full the pools are of devices, and of hosts if they have some: `KV 40 %`, `host 63 %`.

    The phase is before them, while clusters take turns.
    """
    cluster = engine.config.cluster
    parts = {"KV": (sum(engine.load().used_blocks), sum(cluster.num_blocks))}
    if cluster.host_blocks:
        parts["host"] = (engine.kv.usage(cluster.host_pools).num_used, sum(cluster.host_blocks))
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
        raise ValueError(f"input file {str(path)!r} cannot be read: {error.strerror}") from None


def parse_batch_line(text: bytes, number: int) -> BatchLine:
    """Reads the request in a line, or why there is none."""
    try:
        given = msgspec.json.decode(text, type=_Given)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return BatchLine(number=number, custom_id=_named(text).custom_id, error=f"line {number} is no request: {error}")
    wrong = None
    if given.method != "POST":
        wrong = f"method must be 'POST', but {given.method!r:.40} given"
    elif given.url not in URLS:
        wrong = f"url must be {' or '.join(URLS)}, but {given.url!r:.100} given"
    return BatchLine(number=number, custom_id=given.custom_id, url=given.url, body=bytes(given.body), error=wrong)


def keys_in(path: Path) -> set[str]:
    """Returns the keys of the requests in a file; they must differ."""
    if path.exists() and not path.is_file():
        raise ValueError(f"input file {str(path)!r} must be an ordinary file: it is read twice")
    numbers: dict[str, int] = {}
    for line in read_batch(path):
        if (first := numbers.setdefault(line.key, line.number)) != line.number:
            raise ValueError(
                f"lines {first} and {line.number} of {str(path)!r} have the same custom_id {line.key!r}: change one"
            )
    return set(numbers)


def answered_in(path: Path) -> set[str]:
    """Returns the keys of the requests that a file of answers holds, and removes a last line that was cut off."""
    answered: set[str] = set()
    try:
        with path.open("r+b") as file:
            end = 0
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    file.truncate(end)
                    break
                if (found := _named(text)).id is None:
                    raise ValueError(
                        f"line {number} of output file {str(path)!r} is no answer of a batch: "
                        "give another file, or move it away"
                    )
                answered.add(found.id if found.custom_id is None else found.custom_id)
                end += len(text)
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise _not_written(path, error) from None
    return answered


@contextmanager
def appended(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file to append lines to, and keeps other processes from appending meanwhile.

    Nothing is left of a file that was not there, if a mistake is found before there is a line.
    """
    is_new = not path.exists()
    if not (is_new or path.is_file() or path.samefile(os.devnull)):
        raise ValueError(f"output file {str(path)!r} must be an ordinary file: its answers are read before a run")
    try:
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise _not_written(path, error) from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process writes to output file {str(path)!r}: wait until it ends") from None
        try:
            yield file
        except ValueError:
            if is_new and not file.tell():
                path.unlink(missing_ok=True)
            raise


def append(file: IO[bytes], line: bytes) -> None:
    """Writes a line to an unbuffered file; raises ValueError when the disk is full. A cut line is removed later."""
    rest = memoryview(line)
    while rest:
        try:
            rest = rest[file.write(rest) :]
        except OSError as error:
            raise _not_written(Path(file.name), error) from None


def _named(text: bytes) -> _Named:
    """Finds the names in a line of any content."""
    try:
        return msgspec.json.decode(text, type=_Named)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Named()


def _not_written(path: Path, error: OSError) -> ValueError:
    return ValueError(f"output file {str(path)!r} cannot be written: {error.strerror}")
