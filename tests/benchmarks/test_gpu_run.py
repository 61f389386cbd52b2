"""`scripts/gpu_check.sh` with an interpreter that only pretends: its time, its report and its output."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import gpu_check
import gpu_plan
from kernel_cases import block_cases, triton_cases

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    [*(ROOT / "tools").glob("gpu_*.py"), *(ROOT / "benchmarks").glob("gpu_*.py"), ROOT / "benchmarks/twin.py"]
)
WHEELS = ("a.whl",)
PRINTED = 12_000
"""Characters of output that a caller sees."""


def stub(folder: Path, script: str) -> Path:
    """Makes an interpreter that runs some lines of shell, in which `$OUT` is the folder of the report."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\nOUT={folder}/out\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def command(mode: str, folder: Path) -> list[str]:
    return ["bash", str(ROOT / "scripts" / "gpu_check.sh"), mode, str(folder / "out")]


def run_checks(
    mode: str, folder: Path, script: str, **environment: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    settings = os.environ | {"PYTHON": str(stub(folder, script))} | environment
    result = subprocess.run(command(mode, folder), env=settings, capture_output=True, text=True, check=False)
    return result, report_in(folder)


def report_in(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "out" / "report.json").read_text())
    return report


def names(mode: str) -> list[str]:
    return [check.name for check in gpu_plan.plan(mode, "results", "packages", ())]


# ---------------------------------------------------------------- the plan


@pytest.mark.parametrize(("mode", "limit_s"), [("quick", 150), ("full", 590)])
def test_the_seconds_of_all_checks_fit_into_the_limit(mode: str, limit_s: float) -> None:
    checks = gpu_plan.plan(mode, "results", "packages", WHEELS)
    slack_s = gpu_plan.TOTAL_S[mode] - sum(check.seconds for check in checks)
    assert slack_s >= 0 and gpu_plan.TOTAL_S[mode] <= limit_s - 2, "the last check may have to be killed"
    assert all(gpu_plan.GRACE_S < check.seconds <= check.at_most for check in checks)
    assert checks[0].name == "wheels" and checks[0].at_most == gpu_plan.INSTALL_S <= checks[0].seconds + slack_s
    assert {"--no-compile", "--no-cache-dir"} < {*checks[0].command}


def test_full_begins_with_the_checks_of_quick() -> None:
    assert names("full")[: len(names("quick"))] == names("quick")
    quick = names("quick")
    assert quick.index("compile") < quick.index("kernels"), "kernels are compiled before the tests"
    assert {"profile", "twin", "memory", "8b_cudnn", "8b_flash", "8b_transformers"} < {*names("full")}


def test_checks_name_files_that_exist_and_use_no_model_that_cannot_travel() -> None:
    for check in gpu_plan.plan("full", "results", "packages", WHEELS):
        files = [part.removeprefix("--ignore=") for part in check.command if part.startswith(("tests/", "benchmarks/"))]
        assert all((ROOT / file).exists() for file in files)
        assert not any("smollm2" in part for part in check.command)
        if check.name in {"profile", "twin"}:
            assert "results/shape" in check.command and "dummy" in check.command


# ---------------------------------------------------------------- the report


def test_checks_continue_after_a_failed_check(tmp_path: Path) -> None:
    result, report = run_checks("full", tmp_path, 'echo "said $@"; case "$1" in *ceilings.py) exit 3;; esac')
    assert result.returncode == 1, result.stderr
    assert [check["name"] for check in report["checks"]] == names("full")
    assert {check["name"]: check["exit_code"] for check in report["checks"] if check["exit_code"]} == {"ceilings": 3}
    assert report["state"] == "complete" and "1 failed" in result.stdout.splitlines()[-1]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["log.txt", "report.json"]
    log = (tmp_path / "out" / "log.txt").read_text()
    assert all(f"===== {name}: " in log for name in names("full"))


def test_quick_passes_when_all_pass(tmp_path: Path) -> None:
    result, report = run_checks("quick", tmp_path, "true")
    assert result.returncode == 0, result.stderr
    assert {check["status"] for check in report["checks"]} == {"passed"}
    assert [aim["share"] for aim in report["aims"]] == [None] * 3, "nothing was measured"


def test_only_the_checks_that_are_named_run_in_their_order(tmp_path: Path) -> None:
    wheel(tmp_path)
    settings = os.environ | {"PYTHON": str(stub(tmp_path, "true")), "WHEELS": str(tmp_path)}
    chosen = [*command("full", tmp_path), "--only", "twin", "memory", "kernels"]
    result = subprocess.run(chosen, env=settings, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert [check["name"] for check in report_in(tmp_path)["checks"]] == [
        *("wheels", "kernels", "memory"),
        *("shape", "profile", "twin"),  # which need those before
    ]
    result = subprocess.run(
        [*command("quick", tmp_path), "--only", "memory"], env=settings, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2 and "--only names memory; the checks of quick are versions, " in result.stderr


def test_the_report_is_complete_whenever_a_check_runs(tmp_path: Path) -> None:
    script = 'n=$(ls "$OUT/.." | grep -c saved); cp "$OUT/report.json" "$OUT/../saved.$n"'
    run_checks("full", tmp_path, script)
    for place, _ in enumerate(names("full")):
        report = json.loads((tmp_path / f"saved.{place}").read_text())
        status = [check["status"] for check in report["checks"]]
        assert status == ["passed"] * place + ["running"] + ["not run"] * (len(status) - place - 1)
        assert report["state"] == "running"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=str)
def test_an_interrupted_run_leaves_a_report_and_no_process(tmp_path: Path, number: signal.Signals) -> None:
    script = 'case "$1" in *ceilings.py) echo begins; echo $$ > "$OUT/../pid"; exec sleep 100;; esac'
    settings = os.environ | {"PYTHON": str(stub(tmp_path, script)), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command("quick", tmp_path), env=settings, stdout=subprocess.PIPE, text=True)
    wait_for(tmp_path / "pid")
    process.send_signal(number)
    printed, _ = process.communicate()
    report = report_in(tmp_path)
    status = [check["status"] for check in report["checks"]]
    running = "running" if number == signal.SIGKILL else "interrupted"
    assert status == ["passed", running] + ["not run"] * (len(status) - 2)
    assert "begins" in (tmp_path / "out" / "log.txt").read_text()
    pid = int((tmp_path / "pid").read_text())
    if number == signal.SIGKILL:
        os.kill(pid, signal.SIGKILL)
        return
    assert process.returncode == 128 + number and f"interrupted by {number.name}" in printed
    assert report["state"] == f"interrupted by {number.name}"
    assert has_ended(pid)
    assert not [*tmp_path.glob("gpu-check-*")]


def has_ended(pid: int) -> bool:
    """Wait until a process has ended. A killed process whose parent has ended, too, stays a zombie for some time."""
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists() and path.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"no {path.name} within 30 seconds")


def test_a_check_that_takes_too_long_says_where_it_was_and_later_checks_have_their_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = "import time\nprint('at work', flush=True)\ntime.sleep(60)"
    ignores = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + hangs
    checks = [
        gpu_plan.Check("hangs", ("-c", hangs), seconds=1.0, at_most=3.0),
        gpu_plan.Check("ignores", ("-c", ignores), seconds=1.5, at_most=1.5),
        gpu_plan.Check("short", ("-c", "print(1)"), seconds=20, at_most=20),
    ]
    monkeypatch.setattr(gpu_check, "plan", lambda *_: checks)
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.5)
    monkeypatch.setattr(gpu_check, "TOTAL_S", {"quick": 26.0})
    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.delenv("WHEELS", raising=False)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "quick", str(tmp_path / "out")])
    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    try:
        assert gpu_check.main() == 1
    finally:
        for one, handler in zip((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), handlers, strict=True):
            signal.signal(one, handler)
    first, second, third = report_in(tmp_path)["checks"]
    assert [one["status"] for one in (first, second, third)] == ["timed out", "timed out", "passed"]
    assert first["limit_s"] == 3.0 and second["limit_s"] == 1.5, "the remaining seconds, or the limit"
    assert "KeyboardInterrupt" in first["tail"][-1], "Python says where it was"
    assert "at work" in " ".join(second["tail"])


# ---------------------------------------------------------------- the output


@pytest.mark.parametrize("line", ["x" * 5000, "short"], ids=["long", "short"])
def test_the_last_lines_of_each_failed_check_fit_into_the_summary(tmp_path: Path, line: str) -> None:
    script = f'i=0; while [ $i -lt 40 ]; do i=$((i+1)); echo "$i {line}"; done; exit 1'
    result, report = run_checks("full", tmp_path, script)
    assert len(result.stdout) < PRINTED - 1000
    lines = [text.split()[0] for text in result.stdout.splitlines() if text.startswith("  ")]
    assert lines == [str(number) for number in range(26, 41)] * len(report["checks"])
    assert all(len(check["tail"]) == 15 for check in report["checks"])


def test_a_single_failed_check_is_quoted_at_length(tmp_path: Path) -> None:
    line = "y" * 100
    result, _ = run_checks("quick", tmp_path, f'case "$1" in *ceilings.py) echo {line}; exit 1;; esac')
    assert f"  {line}\n" in result.stdout


def test_the_log_of_a_check_that_prints_without_end_is_cut(tmp_path: Path) -> None:
    script = 'case "$1" in *ceilings.py) head -c 9000000 /dev/zero | tr "\\0" "z"; echo; echo last;; esac; echo end'
    _, report = run_checks("quick", tmp_path, script)
    log = (tmp_path / "out" / "log.txt").read_text()
    assert len(log) < 1.1 * gpu_check.MAX_LOGGED and "bytes are left out" in log
    assert log.count("end\n") == len(report["checks"]) and "last\n" in log


# ---------------------------------------------------------------- wheels


def wheel(folder: Path) -> None:
    with zipfile.ZipFile(folder / "carried-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("carried.py", "print('found')")
        archive.writestr("carried-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        content = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr("carried-1.0.dist-info/WHEEL", content)
        archive.writestr("carried-1.0.dist-info/RECORD", "")


def test_checks_find_packages_from_wheels(tmp_path: Path) -> None:
    wheel(tmp_path)
    script = f'if [ "$2" = pip ]; then exec {sys.executable} "$@"; else exec {sys.executable} -m carried; fi'
    result, report = run_checks("quick", tmp_path, script, WHEELS=str(tmp_path))
    assert result.returncode == 0, (tmp_path / "out" / "log.txt").read_text()
    assert report["checks"][0]["name"] == "wheels" and report["checks"][0]["limit_s"] == gpu_plan.INSTALL_S
    assert report["checks"][-1]["tail"] == ["found"]


def test_nothing_else_runs_when_wheels_cannot_be_installed(tmp_path: Path) -> None:
    wheel(tmp_path)
    result, report = run_checks("quick", tmp_path, 'echo "no matching platform"; exit 1', WHEELS=str(tmp_path))
    assert result.returncode == 1 and report["state"] == "stopped: wheels failed"
    assert [check["status"] for check in report["checks"]] == ["failed"] + ["not run"] * len(names("quick"))
    assert "no matching platform" in result.stdout


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    settings = os.environ | {"PYTHON": "false", "WHEELS": str(tmp_path)}
    result = subprocess.run(command("quick", tmp_path), env=settings, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "WHEELS" in result.stderr and "gpu_wheels.py" in result.stderr


# ---------------------------------------------------------------- tests as checks


TESTS = """
import psutil
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("number", range(6))
def test_number(number):
    {body}
"""


@pytest.mark.parametrize(
    ("body", "status", "passed"),
    [("assert number != 4", "failed", 5), ("pytest.skip('no device')", "failed", 0), ("assert True", "passed", 6)],
)
def test_results_of_tests_are_in_the_report(tmp_path: Path, body: str, status: str, passed: int) -> None:
    """By pytest with exactly the plugins that the check names."""
    (tmp_path / "test_some.py").write_text(TESTS.format(body=body))
    kernels = "tests/gpu/test_gpu_kernels.py"
    script = (
        f'case "$*" in *" {kernels}") set -- "$@" {tmp_path}/test_some.py --deselect {kernels};; *) exit 0;; esac\n'
    )
    script += f'shift 2; exec {sys.executable} - "$@" <<"E"\n'
    script += "import sys, pytest\n"
    script += f'arguments = [one for one in sys.argv[1:] if one not in ("{kernels}", "--deselect")]\n'
    script += f'sys.exit(pytest.main(["-c", "{ROOT}/pyproject.toml", *arguments]))\nE'
    _, report = run_checks("quick", tmp_path, script)
    [check] = [one for one in report["checks"] if one["name"] == "kernels"]
    tests = check["results"]["tests"]
    assert (check["status"], tests["passed"]) == (status, passed), check["tail"]
    assert tests["num_failed"] == len(tests["failed"]) == (body == "assert number != 4")
    assert tests["skipped"] == ({"no device": 6} if "skip" in body else {})


CASES = """
import compile_kernels

def fails(error):
    raise error("of a case\\nwith details")

if __name__ == "__main__":
    from functools import partial

    cases = {"right": float, "wrong": partial(fails, AssertionError), "broken": partial(fails, RuntimeError)}
    print(compile_kernels.run(cases))
"""


def test_kernels_that_cannot_be_compiled_are_named_and_wrong_results_are_left_to_the_tests() -> None:
    pytest.importorskip("triton")
    folders = [
        str(ROOT / "src"),
        str(ROOT / "tools"),
        *(str(ROOT / "tests" / name) for name in (*gpu_check.TEST_FOLDERS, "gpu")),
    ]
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run([sys.executable, "-c", CASES], env=settings, capture_output=True, text=True, check=False)
    assert done.stdout == "{'broken': 'RuntimeError: of a case'}\n", done.stderr


def test_compiled_cases_include_all_kernel_tests_of_triton() -> None:
    assert {*block_cases()} < {*triton_cases()}


# ---------------------------------------------------------------- versions of Python


def python312() -> str | None:
    """Finds an interpreter of Python 3.12, also under pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which("python3.12"), *map(str, pyenv.glob("versions/3.12.*/bin/python3.12"))]
    for candidate in filter(None, found):
        done = subprocess.run([candidate, "-c", "import xml.etree"], capture_output=True, check=False)
        if not done.returncode:
            return candidate
    return None


def test_scripts_parse_for_every_python_that_longspan_supports() -> None:
    for path in SCRIPTS:
        for minor in (11, 12):
            ast.parse(path.read_text(), feature_version=(3, minor))


def test_the_check_runs_with_python_312(tmp_path: Path) -> None:
    found = python312()
    if found is None:
        pytest.skip("there is no Python 3.12 here")
    names = [str(path) for path in SCRIPTS]
    compiles = "import sys\nfor name in sys.argv[1:]: compile(open(name).read(), name, 'exec')"
    subprocess.run([found, "-W", "error", "-c", compiles, *names], check=True)
    path = tmp_path / "bin"
    path.mkdir()
    (path / "python3").symlink_to(found)
    result, report = run_checks("quick", tmp_path, "true", PATH=f"{path}{os.pathsep}{os.environ['PATH']}")
    assert result.returncode == 0, result.stderr
    assert report["state"] == "complete"
