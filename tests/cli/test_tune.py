"""The verb `tune csa`: measures a tiny model, resumes after a stop, and writes a file for `--csa`."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import ThreadLLM, run_on_threads
from fake_llm import restored_signals, run
from invented_tuned import invented_tuned
from transformers import AutoModelForCausalLM

from longspan import tuning
from longspan.core.sampling import SamplingParams
from longspan.cost.profile import Transfer
from longspan.csa_file import csa_settings
from longspan.errors import ParameterError
from longspan.evals import Text
from longspan.model.source import prepare
from longspan.policy.csps.search import Configuration
from longspan.policy.csps.settings import CsaConfig
from longspan.policy.csps.tuned import Tuned
from longspan.tuning import drawn

LENGTHS = (160, 256)
ENGINE = ("--block-size", "16", "--num-gpu-blocks-override", "100", "--policy-option", "threshold=30")


class Clock:
    """Makes prompts short, does not time links, and moves the clock by a minute at each read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        patch.setenv("LONGSPAN_HOSTS", "2")
        patch.setattr(tuning, "LENGTHS", LENGTHS)
        transfers = [
            Transfer(kind="alltoall", members=4, num_bytes=size, seconds=(3e-4 + size / 1e9,), link_class="other_host")
            for size in (2**12, 2**20)
        ]
        patch.setattr(tuning, "time_links", lambda *_: transfers)

    def restart(self, min_points: int) -> None:
        minutes = count()
        self._patch.setattr("longspan.cli.tune.time", SimpleNamespace(monotonic=lambda: 60 * next(minutes)))
        self._patch.setattr(tuning, "MIN_POINTS", min_points)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, thread_llm: None) -> Clock:
    del thread_llm
    return Clock(monkeypatch)


def tune_in(folder: Path, model: Path, minutes: int, *more: str) -> int:
    out, limit = ("--out", str(folder / "t.json")), ("--max-minutes", str(minutes))
    return run("tune", "csa", str(model), *out, *limit, *ENGINE, *more)


@pytest.fixture
def tune(speaking_model: Path, tmp_path: Path) -> Callable[..., int]:
    return partial(tune_in, tmp_path, speaking_model)


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A run that stopped at its time limit and was then resumed.

    Attributes:
        folder: holds the tuned file and its journal.
        exit_code: of the first run.
        message: of the first run.
        journal: lines after the first run.
        shown: output of the second run.
    """

    folder: Path
    exit_code: int
    message: str
    journal: list[str]
    shown: str

    @property
    def tuned(self) -> Tuned:
        return Tuned.from_json((self.folder / "t.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def stopped(speaking_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stopped]:
    """Tune a model in two runs. The first is killed while it writes a line of the journal."""
    folder = tmp_path_factory.mktemp("tuned")
    journal, message, shown = folder / "t.json.journal", io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, restored_signals():
        run_on_threads(patch)
        clock = Clock(patch)
        clock.restart(6)
        with redirect_stderr(message):
            exit_code = tune_in(folder, speaking_model, 6)
        assert not (folder / "t.json").exists()
        before = journal.read_text(encoding="utf-8").splitlines()
        journal.write_text("\n".join([*before, '{"num_tok']), encoding="utf-8")
        clock.restart(6)
        with redirect_stdout(shown):
            assert tune_in(folder, speaking_model, 12) == 0
        yield Stopped(
            folder=folder, exit_code=exit_code, message=message.getvalue(), journal=before, shown=shown.getvalue()
        )


def test_a_run_that_stops_at_its_time_limit_is_resumed(stopped: Stopped, speaking_model: Path) -> None:
    assert stopped.exit_code == 2
    assert "--max-minutes is too short: " in stopped.message and "run the command again" in stopped.message
    assert "2 exact points" in stopped.message
    assert "6 points with prompts of up to 256 tokens take about " in stopped.message
    before, lines = stopped.journal, (stopped.folder / "t.json.journal").read_text(encoding="utf-8").splitlines()
    assert lines[: len(before)] == before and len(lines) > len(before) + 3
    found = stopped.tuned
    assert len(found.points) == len(lines) - 1
    assert [point.num_tokens for point in found.points if point.levels == 1] == list(LENGTHS)
    assert (found.hosts, found.tuned_for, found.dtype) == ((0, 0, 1, 1), str(speaking_model), "float32")
    assert found.rates.inside.bytes_per_s == pytest.approx(1e9)
    assert found.rates.inside.message_s == pytest.approx(1e-4)
    assert f"{found.held_out.accuracy:.1%} accurate" in stopped.shown


def test_prompts_are_computed_by_a_tuned_file(stopped: Stopped, speaking_model: Path) -> None:
    prompt = list(range(3, 203))
    for max_loss, drops in ((0.0, False), (99.0, True)):
        with ThreadLLM(
            str(speaking_model),
            parallel="4",
            policy="csps",
            csa=str(stopped.folder / "t.json"),
            max_accuracy_loss=max_loss,
            policy_options={"threshold": "30"},
            block_size=16,
            num_gpu_blocks_override=100,
        ) as llm:
            [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
            saved = llm.sparse_savings(output)
            assert not drops or (saved is not None and saved.mean_drop_ratio > 0)
            tuned = llm.service.policy_settings.options["csa"]
            for change, there in (("off", "off"), ("auto", tuned)):
                llm.service.update_policy({"csa": change})
                assert llm.service.policy_settings.options["csa"] == there, "auto is the file given at the start"


def test_points_depend_on_their_numbers_only(stopped: Stopped) -> None:
    """Thus a resumed run measures the same points as an uninterrupted run."""
    hosts = (0, 0, 1, 1)
    draws = [drawn(number, LENGTHS, hosts) for number in range(200)]
    assert draws == [drawn(number, LENGTHS, hosts) for number in range(200)]
    assert {length for length, *_ in draws} == set(LENGTHS)
    assert {one.levels for _, one, _ in draws} == {2, 3} and {mode for *_, mode in draws} == {"kv"}
    assert {one.levels for _, one, _ in (drawn(number, LENGTHS, (0, 1)) for number in range(50))} == {2}
    assert min(one.drop for _, one, _ in draws) == 0 and 0.5 < max(one.drop for _, one, _ in draws) <= 0.6
    points = stopped.tuned.points
    sparse = [(point.num_tokens, point.configuration, point.mode) for point in points if point.levels > 1]
    assert len(sparse) >= 6 and sparse == draws_of(len(sparse))
    assert all(0 <= score <= 1 for point in points for score in point.scores)
    assert [point.ttft_s is not None for point in points if point.levels > 1][:4] == [True, False, False, True]


def test_deviations_are_those_of_the_attention_of_transformers(stopped: Stopped, speaking_model: Path) -> None:
    """By layer and KV head: over the keys that a query sees, as the root of the mean over queries and their heads."""
    found = stopped.tuned
    with ThreadLLM(str(speaking_model), parallel="4", block_size=16, num_gpu_blocks_override=100) as llm:
        text = Text.of(llm)
        assert tuning.deviations(llm.service.files, text) == found.deviations
    tokens = [*text.begin, *text.window(1024, 0, 1)]
    expected = deviations_of(speaking_model, tokens, found.shape.num_kv_heads)
    assert found.deviations == tuple(pytest.approx(heads, rel=0.01) for heads in expected)


def deviations_of(folder: Path, tokens: Sequence[int], num_kv_heads: int) -> list[tuple[float, ...]]:
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        by_layer = reference(torch.tensor([tokens]), output_attentions=True).attentions
    expected = []
    for [weights] in by_layer:
        variances = [row[: index + 1].var(correction=0) for head in weights for index, row in enumerate(head)]
        by_head = torch.stack(variances).view(num_kv_heads, -1)
        expected.append(tuple(by_head.mean(dim=1).sqrt().tolist()))
    return expected


def test_deviations_of_layers_with_sinks(folders: dict[str, Path]) -> None:
    """A part of the attention goes to the sink."""
    tokens = [3 + number * 7 % 190 for number in range(90)]
    text: Any = SimpleNamespace(begin=(), token_ids=tokens, window=lambda *_: tokens)
    found = tuning.deviations(prepare(str(folders["gpt_oss"]), dtype="float32"), text)
    full = [0, 2]  # the reference counts keys outside a window
    expected = deviations_of(folders["gpt_oss"], tokens, 3)
    assert [found[layer] for layer in full] == [pytest.approx(expected[layer], rel=0.01) for layer in full]


def test_points_drop_by_the_deviations(stopped: Stopped) -> None:
    """The policy reads the same ratios from the settings of a point as from the tuned file."""
    found = stopped.tuned
    for configuration in (Configuration(2, 0.3), Configuration(3, 0.1)):
        settings = CsaConfig.parse(tuning.settings_of(found.group, configuration, "kv"))
        table = found.group.table(configuration)
        assert len(table) == found.shape.num_layers and len({len(heads) for heads in table}) == 1
        assert settings.table() == tuple(
            tuple(tuple(pytest.approx(ratio) for ratio in ratios) for ratios in heads) for heads in table
        )
    assert tuning.settings_of(found.group, Configuration(1), "kv") == "off"


def test_a_short_run_has_short_prompts_only() -> None:
    seconds = {1024: 10.0, 2048: 25.0, 4096: 70.0}
    assert tuning.affordable(seconds, 1000) == (1024, 2048, 4096)
    assert tuning.affordable(seconds, 100) == (1024, 2048)
    assert tuning.affordable(seconds, 1) == (1024,)
    assert tuning.least_s(seconds, (1024,)) == pytest.approx(10 + 10 * tuning.MIN_POINTS)
    assert tuning.least_s(seconds, (1024, 2048)) == pytest.approx(35 + 15 * tuning.MIN_POINTS)


def test_points_of_lengths_without_an_exact_point_are_left_out(
    stopped: Stopped, speaking_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "LENGTHS", LENGTHS)
    group = stopped.tuned.group
    with ThreadLLM(
        str(speaking_model),
        parallel="4",
        policy="csps",
        policy_options={"threshold": "30"},
        block_size=16,
        num_gpu_blocks_override=100,
    ) as llm:
        text = Text.of(llm)
        header = tuning.header_of(llm, "m", text)
        limit = count()
        points = [
            *tuning.measure(llm, text, header, [], group, LENGTHS[:1], continues=lambda: next(limit) < 6),
        ]
    assert header.lengths == LENGTHS and {point.num_tokens for point in points} == {LENGTHS[0]}
    assert [point.levels for point in points].count(1) == 1 and len(points) == 6


def draws_of(number: int) -> list[object]:
    """Return the first `number` distinct draws."""
    return list(dict.fromkeys(drawn(index, LENGTHS, (0, 0, 1, 1)) for index in range(200)))[:number]


def test_no_minutes_take_the_points_that_there_are(
    stopped: Stopped, clock: Clock, tune: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A journal of a model with other weights is refused."""
    before, journal = ((stopped.folder / name).read_text(encoding="utf-8") for name in ("t.json", "t.json.journal"))
    (tmp_path / "t.json.journal").write_text(journal, encoding="utf-8")
    clock.restart(6)
    assert tune(0) == 0
    assert (tmp_path / "t.json").read_text(encoding="utf-8") == before
    assert (tmp_path / "t.json.journal").read_text(encoding="utf-8") == journal
    (tmp_path / "t.json.journal").write_text(journal.replace('"weights":"', '"weights":"0', 1), encoding="utf-8")
    clock.restart(6)
    assert tune(0) == 2
    assert "has points of other measurements (weights 0" in capsys.readouterr().err


@pytest.mark.usefixtures("fake_llm")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--csa", "off", "--exchange", "ring_kv"], "--exchange is set by tuning itself"),
        (["--csa", "auto"], "--csa is set by tuning itself"),
        (["--out", "gone/t.json"], "make its folder"),
        (["--max-minutes", "-1"], "--max-minutes"),
        (["--max-minutes", "soon"], "--max-minutes"),
        (["--target-ttft", "3"], "--target-ttft is set by tuning itself"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tune", "csa", "smollm2-135m", "--out", "t.json", "--max-minutes", "1", *arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and words in said.err and len(said.err.splitlines()) == 1


def test_inputs_that_cannot_be_tuned_are_refused(
    stopped: Stopped,
    clock: Clock,
    tune: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock.restart(4)
    text = tmp_path / "short.txt"
    text.write_text("too short", encoding="utf-8")
    other = tmp_path / "t.json.journal"
    for arguments, words in (
        (["--data", str(text)], "prompts have at least 160 tokens, but the text has"),
        (["--data", "gone.txt"], "--data 'gone.txt' cannot be read"),
    ):
        assert tune(9, *arguments) == 2
        assert words in capsys.readouterr().err
    other.write_text("{}\n", encoding="utf-8")
    assert tune(9) == 2
    assert "is no journal of longspan tune csa" in capsys.readouterr().err
    other.unlink()
    with monkeypatch.context() as one_host:
        one_host.setenv("LONGSPAN_HOSTS", "1")
        assert tune(9, "--parallel", "1") == 2
        assert "--parallel must have at least 2 instances" in capsys.readouterr().err
    shutil.copy(stopped.folder / other.name, other)
    assert tune(9, "--parallel", "2") == 2
    assert "has points of other measurements (hosts (0, 0, 1, 1)): remove it" in capsys.readouterr().err


def test_auto_is_the_file_that_comes_with_the_package() -> None:
    for name in ("smollm2-135m", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"):
        found = Tuned.from_json(csa_settings("auto", name))
        assert found.tuned_for == "smollm2-135m" and found.points == ()
        assert found.shape.num_layers == 30
    with pytest.raises(ParameterError, match="auto has no tuned file for llama-9: make one with longspan tune csa"):
        csa_settings("auto", "llama-9")


def test_a_tuned_file_is_known_by_its_content(tmp_path: Path) -> None:
    """The content tells YAML of settings from a tuned file. The policy gets JSON of both."""
    file = tmp_path / "any.name"
    file.write_text(invented_tuned().to_json(), encoding="utf-8")
    assert Tuned.from_json(csa_settings(str(file), "any")) == invented_tuned().brief
    file.write_text('{"tuned_for": "x"}', encoding="utf-8")
    with pytest.raises(ParameterError, match="not a file of longspan tune csa"):
        csa_settings(str(file), "any")
    file.write_text("levels: 2", encoding="utf-8")
    assert json.loads(csa_settings(str(file), "any")) == {"levels": 2}
    for odd in ("levels: 2024-01-01", "drop: &x {2: *x}"):
        file.write_text(odd, encoding="utf-8")
        with pytest.raises(ParameterError, match="values that settings cannot have"):
            csa_settings(str(file), "any")


@pytest.mark.usefixtures("fake_llm")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--max-accuracy-loss", "1", "--target-ttft", "2"],
            "--target-ttft and --max-accuracy-loss 1 exclude each other",
        ),
        (["--max-accuracy-loss", "-1"], "--max-accuracy-loss"),
        (["--target-ttft", "0"], "--target-ttft"),
    ],
)
def test_objectives_that_cannot_be(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--prompt", "x", "--policy", "csps", "--parallel", "2", *arguments) == 2
    assert words in capsys.readouterr().err
