"""Packages add policies and exchanges by entry points. Each test runs processes that find such a package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from oracle import Oracle

EXAMPLE = Path(__file__).parent / "example"


def install(folder: Path, name: str, entry_points: Mapping[str, Mapping[str, str]], version: str = "0.1.0") -> None:
    """Write the metadata that pip would write for a distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = (
        "\n".join([f"[{group}]", *(f"{key} = {value}" for key, value in points.items())])
        for group, points in entry_points.items()
    )
    (info / "entry_points.txt").write_text("\n\n".join(groups) + "\n")


def install_example(folder: Path) -> Path:
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    install(folder, project["name"], project["entry-points"], project["version"])
    shutil.copytree(EXAMPLE / "src", folder, dirs_exist_ok=True)
    return folder


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where the packages of a folder are installed."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "1000", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=200, check=False
    )


def longspan(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return python(folder, "-m", "longspan", *arguments)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_example(tmp_path_factory.mktemp("packages"))


LISTED = """
import sys
from longspan.core.exchange import exchange_of
from longspan.core.exchange_plugins import exchange_names
from longspan.policy.registry import make_policy, policy_names
assert "importlib.metadata" not in sys.modules
assert "last" in policy_names() and "broadcast" in exchange_names()
make_policy("context", num_instances=2, options={})
assert not [name for name in sys.modules if name.startswith("longspan_example")]
assert make_policy("last", num_instances=2, options={"most": "7"}).options.most == 7
assert "longspan_example.exchange" not in sys.modules
options = {"exchange": "broadcast", "decode": "broadcast", "threshold": "20"}
make_policy("context", num_instances=2, options=options)
from longspan.cost.channels import cost_of
assert cost_of(exchange_of("broadcast")).time is not None
assert "torch" not in sys.modules and "longspan_example.tensors" not in sys.modules
"""


def test_names_are_listed_without_an_import_and_loaded_on_first_use(example: Path) -> None:
    done = python(example, "-c", LISTED)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("flags", "built_in"),
    [
        (["--policy", "last", "-o", "most=50"], ["--policy", "chunked"]),
        (["--policy", "context", "--exchange", "broadcast"], ["--policy", "context", "--exchange", "ring_q"]),
    ],
)
def test_a_simulation_takes_them(example: Path, flags: list[str], built_in: list[str]) -> None:
    cluster = ("--hardware", "a100-sxm-80g", "--hosts", "1", "--gpus-per-host", "2")
    load = ("--workload", "short", "--rate", "1", "--num-requests", "5")
    done, other = (longspan(example, "simulate", "llama-3-8b", *cluster, *load, *one) for one in (flags, built_in))
    assert (done.returncode, other.returncode) == (0, 0), done.stderr
    assert done.stdout != other.stdout


@pytest.mark.parametrize("most", ["0", "-3"])
def test_the_options_of_a_plug_in_are_checked(example: Path, most: str) -> None:
    cluster = ("--hardware", "a100-sxm-80g", "--hosts", "1", "--gpus-per-host", "2", "--rate", "1")
    done = longspan(example, "simulate", "llama-3-8b", *cluster, "--policy", "last", "-o", f"most={most}")
    assert done.returncode == 2
    assert f"most must be at least 1, but {most} given" in done.stderr


def test_the_command_line_lists_them(example: Path) -> None:
    done = longspan(example, "serve", "--help")
    assert done.returncode == 0, done.stderr
    for name in ("last", "broadcast"):
        assert any(f"{mark}{name}" in done.stdout for mark in ("|", ", "))


SERVED = """
import sys
from longspan import LLM, SamplingParams

if __name__ == "__main__":
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    options = {"exchange": "broadcast", "threshold": "20", "decode": "broadcast"}
    shared = {"skip_tokenizer_init": True, "instances": 2, "block_size": 16, "threads_per_rank": 1}
    with LLM(sys.argv[1], **shared, policy="last", policy_options={"most": "30"}) as llm:
        for change in (None, ("context", options)):
            if change is not None:
                llm.set_policy(*change)
                llm.reset_prefix_cache()
            [output] = llm.generate([[5, 9, 3, 11] * 20], params, use_tqdm=False)
            sent = llm.bytes_exchanged.get("broadcast", 0)
            print(*output.outputs[0].token_ids, sent > 0, *output.metrics.kv_tokens_per_instance)
    assert "longspan_example.tensors" not in sys.modules
"""


def test_worker_processes_compute_with_them(example: Path, tiny: Path, oracle: Oracle, tmp_path: Path) -> None:
    script = tmp_path / "served.py"
    script.write_text(SERVED)
    done = python(example, str(script), str(tiny))
    assert done.returncode == 0, done.stderr
    alone, shared = (line.split() for line in done.stdout.splitlines())
    tokens = [str(token) for token in oracle.complete([5, 9, 3, 11] * 20, 4).token_ids]
    assert alone[:4] == shared[:4] == tokens
    assert alone[4:6] == ["False", "0"], "policy last uses the last instance alone"
    assert shared[4] == "True" and "0" not in shared[5:]


BROKEN = {
    "a module that is not there": (
        {"longspan.policies": {"mine": "nowhere_at_all:Mine"}},
        "make_policy('mine', num_instances=1, options={})",
        "entry point mine = nowhere_at_all:Mine of group longspan.policies in distribution broken 0.1.0 does not load",
    ),
    "no policy": (
        {"longspan.policies": {"mine": "json:loads"}},
        "make_policy('mine', num_instances=1, options={})",
        "in distribution broken 0.1.0 is no subclass of longspan.core.policy.Policy",
    ),
    "another name": (
        {"longspan.policies": {"mine": "longspan.policy.chunked:Chunked"}},
        "make_policy('mine', num_instances=1, options={})",
        "in distribution broken 0.1.0 is a policy that is named 'chunked'",
    ),
    "the name of a built-in policy": (
        {"longspan.policies": {"chunked": "longspan.policy.context:Context"}},
        "policy_names()",
        "in distribution broken 0.1.0 takes the name of a built-in",
    ),
    "no exchange": (
        {"longspan.exchanges": {"mine": "json:loads"}},
        "exchange_of('mine')",
        "in distribution broken 0.1.0 is no longspan.core.exchange_plugins.ExchangePlugin",
    ),
    "no module with the tensors of an exchange": (
        {"longspan.exchanges": {"mine": "exchange_without_tensors:MINE"}},
        "exchange_of('mine')",
        "in distribution broken 0.1.0 refers to nowhere_at_all:attend, but there is no module nowhere_at_all",
    ),
    "no module with the cost of an exchange": (
        {"longspan.exchanges": {"mine": "exchange_without_cost:MINE"}},
        "make_policy('context', num_instances=2, options={'exchange': 'mine'})",
        "in distribution broken 0.1.0 does not load nowhere_at_all:COST",
    ),
    "an exchange of whole layers": (
        {"longspan.exchanges": {"mine": "exchange_of_layers:MINE"}},
        "exchange_of('mine')",
        "in distribution broken 0.1.0 computes whole layers",
    ),
    "a sparse form of an exchange": (
        {"longspan.exchanges": {"mine": "exchange_that_is_sparse:MINE"}},
        "exchange_of('mine')",
        "in distribution broken 0.1.0 is a sparse form of an exchange",
    ),
    "the name of a built-in exchange": (
        {"longspan.exchanges": {"ring_kv": "longspan_example.exchange:BROADCAST"}},
        "exchange_names()",
        "in distribution broken 0.1.0 takes the name of a built-in",
    ),
}


MODULES = {
    "exchange_without_tensors": "traits=Traits(), attention='nowhere_at_all:attend', cost='json:loads'",
    "exchange_without_cost": "traits=Traits(), attention='json:loads', cost='nowhere_at_all:COST'",
    "exchange_that_is_sparse": "traits=Traits(sparse_form_of='ring_kv'), attention='json:loads', cost='json:loads'",
    "exchange_of_layers": "traits=Traits(level='layer'), attention='json:loads', cost='json:loads'",
}
"""Modules with broken exchanges: the arguments of `ExchangePlugin`."""


@pytest.mark.parametrize(("entry_points", "use", "words"), BROKEN.values(), ids=BROKEN)
def test_a_broken_package_is_named(
    tmp_path: Path, entry_points: Mapping[str, Mapping[str, str]], use: str, words: str
) -> None:
    install(tmp_path, "broken", entry_points)
    for module, fields in MODULES.items():
        imports = "from longspan.core.exchange import Traits\nfrom longspan.core.exchange_plugins import ExchangePlugin"
        text = f"{imports}\nMINE = ExchangePlugin({fields})\n"
        (tmp_path / f"{module}.py").write_text(text)
    code = f"""
from longspan.core.exchange import exchange_of
from longspan.core.exchange_plugins import exchange_names
from longspan.errors import PluginError
from longspan.policy.registry import make_policy, policy_names
try:
    {use}
except PluginError as error:
    print(error)
"""
    done = python(tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


def test_two_packages_with_one_name_are_named(tmp_path: Path) -> None:
    install_example(tmp_path)
    install(tmp_path, "other", {"longspan.policies": {"last": "longspan.policy.chunked:Chunked"}})
    done = longspan(tmp_path, "simulate", "llama-3-8b", "--hardware", "a100-sxm-80g", "--policy", "last")
    assert done.returncode == 2
    assert "other 0.1.0" in done.stderr and "longspan-example 0.1.0" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_line_refuses_a_broken_package_in_one_line(tmp_path: Path) -> None:
    install(tmp_path, "broken", {"longspan.policies": {"mine": "nowhere_at_all:Mine"}})
    given = ("simulate", "llama-3-8b", "--hardware", "a100-sxm-80g", "--rate", "1", "--num-requests", "2")
    for policy, code in (("mine", 2), ("chunked", 0)):
        done = longspan(tmp_path, *given, "--policy", policy)
        assert done.returncode == code, done.stderr
    done = longspan(tmp_path, *given, "--policy", "mine")
    [line] = done.stderr.splitlines()
    assert "entry point mine" in line and "broken 0.1.0" in line


def test_a_start_without_a_look_up_reads_no_metadata(tmp_path: Path) -> None:
    modules = "longspan.cli.app, longspan.core.exchange, longspan.policy.registry"
    done = python(tmp_path, "-c", f"import sys, {modules}; print('importlib.metadata' in sys.modules)")
    assert done.stdout == "False\n", done.stderr


def test_auto_is_the_same_policy_before_and_after_a_package_is_loaded(tmp_path: Path) -> None:
    install_example(tmp_path)
    code = """
from longspan.policy.registry import make_policy
print(*{make_policy("auto", num_instances=2, options={"exchange": "broadcast"}).name for _ in range(3)})
"""
    done = python(tmp_path, "-c", code)
    assert len(done.stdout.split()) == 1, done.stderr
