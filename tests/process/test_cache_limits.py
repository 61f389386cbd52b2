"""Cache folders on a full disk, and read-only ones: real file systems, where tests may mount."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_tiny

from longspan.model.source import prepare

MOUNTS = """
mount --bind $1 $1; mount -o remount,bind,ro $1
mount -t tmpfs -o size=64k x $2
mount -t tmpfs -o size=8m x $3; cp -a $1/. $3; cat /dev/zero > $3/more 2> /dev/null || true
shift 3; exec "$@"
"""
ENGINES = """
import os, sys
from longspan import LLM, SamplingParams
for cache, dtype in zip(sys.argv[2::2], sys.argv[3::2]):
    os.environ["LONGSPAN_CACHE"] = cache
    try:
        with LLM(sys.argv[1], dtype=dtype, skip_tokenizer_init=True, attention_backend="torch") as llm:
            print(*llm.generate([[3, 4, 5]], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids)
    except ValueError as error:
        print(error)
"""


def test_a_cache_that_cannot_be_written_serves_its_models_and_is_named_in_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only folder and a full disk."""
    done = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this machine allows no mounts")
    read_only, small, full = folders = [tmp_path / name for name in ("read-only", "small", "full")]
    for folder in folders:
        folder.mkdir()
    model = make_tiny("llama", tmp_path / "m")
    monkeypatch.setenv("LONGSPAN_CACHE", str(read_only))
    prepare(str(model), dtype="float32")
    before = sorted(read_only.rglob("*"))
    cases = [
        (read_only, "float32"),
        (read_only, "bfloat16"),
        (full, "float32"),
        (full, "bfloat16"),
        (small, "bfloat16"),
    ]
    python = (sys.executable, "-c", ENGINES, model, *(word for case in cases for word in case))
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", MOUNTS, "sh", *folders, *python],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    answer, not_writable, same_answer, no_room, too_small = done.stdout.splitlines()
    assert len(answer.split()) == 2 and answer == same_answer
    assert f"the cache folder {read_only}/weights cannot be written to; set LONGSPAN_CACHE" in not_writable
    for folder, error in ((full, no_room), (small, too_small)):
        assert str(folder) in error and "free some space, or set LONGSPAN_CACHE to another folder" in error
    assert sorted(read_only.rglob("*")) == before
