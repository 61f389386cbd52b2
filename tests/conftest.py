"""Fixtures that several test files use."""

from __future__ import annotations

import ctypes
import gc
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from engines import Engines, ThreadLLM
    from interpreted import Run
    from oracle import Oracle

# The same examples on every run, so that results repeat. LONGSPAN_RANDOM_TESTS=1 draws new ones. None has a deadline,
# since shared machines stall now and then. `make test` runs an eighth of all examples,
# `make test-all` runs them with --hypothesis-profile=large.
_derandomize = "LONGSPAN_RANDOM_TESTS" not in os.environ
settings.register_profile("large", derandomize=_derandomize, deadline=None)
settings.register_profile("small", derandomize=_derandomize, deadline=None)
settings.load_profile("small")
_MIN_EXAMPLES = 10


def pytest_configure(config: pytest.Config) -> None:
    """Scripts that tests start find the helpers, too. Each process of `pytest -n` has an equal share of the cores.

    Threads of several processes on the same core would spin.
    """
    helpers = (str(Path(__file__).parent / folder) for folder in ("support", "attn"))
    os.environ["PYTHONPATH"] = os.pathsep.join([*helpers, *filter(None, [os.environ.get("PYTHONPATH")])])
    config.pluginmanager.register(_Memory())
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        cores = sorted(os.sched_getaffinity(0))
        first = int(worker.removeprefix("gw")) % len(cores)
        os.sched_setaffinity(0, cores[first :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that share a server first, so that no other process takes some and starts a second server.

    In the small profile a test runs an eighth of the examples that its settings name.
    """
    items.sort(key=lambda item: "tetris_server" not in getattr(item, "fixturenames", ()))
    if settings.get_current_profile_name() != "small":
        return
    for test in {id(item.function): item.function for item in items if isinstance(item, pytest.Function)}.values():
        own = getattr(test, "_hypothesis_internal_use_settings", None)
        if own is not None:
            fewer = min(own.max_examples, max(_MIN_EXAMPLES, own.max_examples // 8))
            test._hypothesis_internal_use_settings = settings(own, max_examples=fewer)


def pytest_collection_finish() -> None:
    """Leave all tests and imported modules out of later garbage collections.

    Else Python collects so rarely that the tensors of hundreds of ended engines stay in memory.
    """
    gc.collect()
    gc.freeze()


def release_memory() -> None:
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


class _Memory:
    """Returns the memory of ended engines to the system after a test that has grown the process.

    Engines are in reference cycles. Python counts objects and not the bytes of their tensors, so it collects too late.
    """

    max_growth_bytes = 48 * 2**20
    """A collection takes 10 to 60 ms of CPU time, and few tests grow by more."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before_bytes = self._process.memory_info().rss

    def pytest_runtest_logfinish(self) -> None:
        if self._process.memory_info().rss > self._before_bytes + self.max_growth_bytes:
            release_memory()
            self._before_bytes = self._process.memory_info().rss


@pytest.fixture(scope="module", autouse=True)
def cleared_caches(request: pytest.FixtureRequest) -> Iterator[None]:
    """Clear the caches of a test file at its end. Each tokenizer in them takes 35 MB."""
    yield
    owners, values = {request.module.__name__, "tool_models"}, vars(request.module).values()
    if cached := [value for value in values if hasattr(value, "cache_clear") and value.__module__ in owners]:
        for value in cached:
            value.cache_clear()
        release_memory()


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Restores the level of the log, which the command line sets for the whole process."""
    log = logging.getLogger("longspan")
    before = log.level
    yield
    log.setLevel(before)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Computes on one thread, where the members of a group are threads or tensors are tiny."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def signals() -> Iterator[None]:
    """Restore the handlers of signals that the command line sets."""
    from fake_llm import restored_signals

    with restored_signals():
        yield


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch, signals: None) -> None:
    """The command line starts no engine, see `fake_llm.py`."""
    import fake_llm

    del signals
    fake_llm.install(monkeypatch)


@pytest.fixture
def thread_llm(monkeypatch: pytest.MonkeyPatch, signals: None) -> None:
    """Let the command line start engines whose workers are threads, see `run_on_threads`."""
    from engines import run_on_threads

    del signals
    run_on_threads(monkeypatch)


@pytest.fixture
def events(tmp_path: Path) -> Iterator[Path]:
    """The model for fake engine cores, which write their events to this file."""
    from fake_engine_install import fake_engine_installed

    with fake_engine_installed():
        yield tmp_path / "events"


@pytest.fixture(scope="session")
def speaking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that can be talked to."""
    from tiny_models import make_speaking

    return make_speaking(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(scope="session")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a small tokenizer, for grammars."""
    from tiny_models import make_bytes

    return make_bytes(tmp_path_factory.mktemp("bytes"))


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Gives the command line a text as its standard input."""

    def put(text: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    return put


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of every tiny model."""
    from tiny_models import TINY, make_tiny

    root = tmp_path_factory.mktemp("tiny")
    return {name: make_tiny(name, root / name) for name in TINY}


@pytest.fixture(scope="session")
def oracles(folders: dict[str, Path]) -> dict[str, Oracle]:
    """Hugging Face as the reference for these models. See `Oracle` for longrope."""
    from oracle import Oracle

    return {name: Oracle(folder, use_cache=name != "llama-longrope") for name, folder in folders.items()}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with six query heads and three KV heads: they divide by neither two nor four."""
    from tiny_models import make_tiny

    return make_tiny("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def oracle(tiny: Path) -> Oracle:
    """Hugging Face as the reference for this model."""
    from oracle import Oracle

    return Oracle(tiny)


@pytest.fixture(scope="session")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads and layers divide by nothing."""
    from tiny_models import ODD, write_checkpoint
    from transformers import LlamaConfig

    return write_checkpoint(LlamaConfig(**ODD), tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="session")
def odd_oracle(odd: Path) -> Oracle:
    """Hugging Face as the reference for this model."""
    from oracle import Oracle

    return Oracle(odd)


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    """Engines on threads that tests share, see `Engines`."""
    from engines import Engines

    made = Engines()
    yield made
    made.close()


@pytest.fixture(scope="session")
def speaking(speaking_model: Path) -> Iterator[ThreadLLM]:
    """A shared engine of a model with a tokenizer. Tests must not change its policy."""
    from engines import ThreadLLM

    with ThreadLLM(str(speaking_model), threads_per_rank=1) as llm:
        yield llm


@pytest.fixture(scope="session")
def assert_interpreted() -> Iterator[Run]:
    """Run a comparison in a process where Triton interprets. Its failures are raised here."""
    from interpreted import interpreting_process

    with interpreting_process() as run:
        yield run


@pytest.fixture(scope="session")
def smollm2_oracle() -> Oracle:
    """Hugging Face as the reference for the default model."""
    from oracle import Oracle

    from longspan.model.source import smollm2_folder

    return Oracle(smollm2_folder())
