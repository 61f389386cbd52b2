"""A policy reads only attributes that `core.view` declares and changes nothing. A simple policy needs little code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, make_dataclass
from typing import Any
from unittest.mock import patch

from cluster import Setup
from hypothesis import given, settings
from hypothesis import strategies as st
from test_roles import setups
from workloads import RANDOM_RUNS, Job, jobs, play, setups_of

from longspan.core import engine
from longspan.core.kv.account import KvAccount
from longspan.core.kv.lookup import Lookup
from longspan.core.queues import Running
from longspan.core.request import Request
from longspan.core.view import ClusterView, KvView, RequestView, RunningView

MAX_LINES = 1500
POLICIES = ("chunked", "context", "runahead", "loongserve", "prefill-first", "decode-first")
ALIKE = st.sampled_from(POLICIES).flatmap(lambda policy: setups_of(policy, 3, {}))
VIEWS: dict[type, type] = {Request: RequestView, Running: RunningView, KvAccount: KvView, Lookup: KvView}
FrozenView = make_dataclass(
    "FrozenView",
    [(one.name, one.type) for one in fields(ClusterView)],
    frozen=True,
    kw_only=True,
    namespace={"changes": ClusterView.changes},
)


class Guard:
    """One of the engine's objects, as the protocol of its view lets it be read. Lists are shown as tuples."""

    def __init__(self, target: object, guards: dict[int, Guard]) -> None:
        self.__dict__.update(target=target, guards=guards, declared=vars(VIEWS[type(target)]))

    def __getattr__(self, name: str) -> Any:
        assert name in self.declared, f"{type(self.target).__name__}.{name} is not declared for policies"
        value = getattr(self.target, name)
        return (lambda *given: self.guard(value(*map(bare, given)))) if callable(value) else self.guard(value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AssertionError(f"a policy sets {name} of {type(self.target).__name__}")

    def __len__(self) -> int:
        return len(self.target)

    def __iter__(self) -> Iterator[Any]:
        return map(self.guard, self.target)

    def guard(self, value: Any) -> Any:
        if type(value) in VIEWS:
            return self.guards.setdefault(id(value), Guard(value, self.guards))
        if isinstance(value, (list, Iterator, type({}.values()))):
            return tuple(map(self.guard, value))
        return value


def bare(value: Any) -> Any:
    return value.target if isinstance(value, Guard) else value


@settings(RANDOM_RUNS, max_examples=100)
@given(setups() | ALIKE, st.lists(jobs(), min_size=1, max_size=10))
def test_policies_read_only_declared_attributes_and_write_nothing(setup: Setup, work: list[Job]) -> None:
    expected, guards = play(setup, work).executor.steps, dict[int, Guard]()

    def guarded(*, kv: KvAccount, **given: object) -> object:
        view, root = ClusterView(kv=kv, **given), Guard(kv, guards)  # type: ignore[arg-type]
        return FrozenView(**{one.name: root.guard(getattr(view, one.name)) for one in fields(view)})

    with patch.object(engine, "ClusterView", guarded):
        assert play(setup, work).executor.steps == expected


def test_chunked_needs_little_code() -> None:
    """All modules of ours that importing it loads, the packages' `__init__` included."""
    code = (
        "import sys, longspan.policy.chunked; from pathlib import Path;"
        "print(sum(len(Path(m.__file__).read_text().splitlines()) for n, m in sys.modules.items() if 'longspan' in n))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout) <= MAX_LINES
