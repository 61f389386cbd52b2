"""`longspan profile`: its requests, results, resumption and output. The last tests use a real engine."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from engines import ThreadLLM
from fake_llm import FakeLLM, run
from test_profile import SUBJECT, num_prompts
from tiny_models import make_tiny

import longspan
from longspan.args import locations
from longspan.attn.spec import Visibility
from longspan.core.cluster import Cluster
from longspan.core.locations import Location
from longspan.core.sampling import SamplingParams
from longspan.core.sparse import SparseSetting
from longspan.cost.profile import Decode, Profile, Transfer
from longspan.cost.shape import ModelShape
from longspan.model.files import ModelFiles
from longspan.policy.facts import Facts
from longspan.policy.registry import make_policy
from longspan.profiling import links, store
from longspan.profiling.plan import MIN_SPARSE_TOKENS, SHARED, kinds_of_links
from longspan.profiling.run import _timed_decode, measure
from longspan.profiling.store import load_partitions, load_profile, profile_file, profile_key_of, save_profile

SHAPE = ModelShape(num_layers=4, hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, bytes_per_element=4)
LENGTHS = ("--lengths", "8,100")
STEP = 40
BLOCK_SIZE = 8
NUM_PROMPTS = 6  # 8, 100. Behind 8: 1, 2. Behind 100: 3, 25.


class Machine(FakeLLM):
    """Takes 1 ms per token, on n instances 1/n of that, and 2 ms for every token with ring_q.

    In a chain of two, the last one needs three times as long for its tokens.
    """

    started: list[Machine]
    link_calls: list[int]
    failure_after: int | None = None
    failure_in_chains_of: int | None = None
    cached = together = True
    num_blocks = chain_step = 1000
    info: Any = SimpleNamespace(vocab_size=50, hidden_size=64, specs=())
    profile_key = SUBJECT
    facts = Facts(shape=SHAPE)

    def __init__(self, model: str, **arguments: Any) -> None:
        super().__init__(model, **arguments)
        Machine.started.append(self)
        self.num_instances = int(self.arguments["parallel"].partition("x")[0])
        cluster = Cluster.of(self.arguments["parallel"], num_blocks=[self.num_blocks] * self.num_instances)
        cluster = replace(cluster, locations=locations(cluster.num_ranks))
        step = self.chain_step if self.arguments["policy"] == "runahead" else STEP
        config = SimpleNamespace(block_size=BLOCK_SIZE, cluster=cluster, max_num_batched_tokens=step)
        self.engine = SimpleNamespace(config=config, set_policy=lambda _: self.set_policy("chunked", {}))
        self.num_sharing = 1
        self.policy: dict[str, str] = {}
        self.prompts: list[list[int]] = []

    def set_policy(self, policy: str, options: dict[str, str]) -> None:
        assert policy in ("context", "chunked", "csps")
        self.num_sharing = 1 if policy == "chunked" else self.num_instances
        self.policy = options

    def generate(self, prompts: Any, params: Any, *, use_tqdm: bool) -> list[object]:
        del use_tqdm
        if isinstance(params, list):
            return self._decode(prompts, params)
        assert params.max_tokens == 1
        assert len(prompts) in (1, self.num_instances // self.num_sharing), "one prompt, or one per group"
        return [self._prefill(prompt) for prompt in prompts]

    def _prefill(self, prompt: list[int]) -> object:
        if "fractions" in self.policy and len(prompt) == self.failure_in_chains_of:
            raise KeyboardInterrupt
        if self.failure_after == sum(len(one.prompts) for one in self.started):
            raise KeyboardInterrupt
        cached = max((len(p) for p in self.prompts if self.cached and prompt[: len(p)] == p), default=0)
        self.prompts.append(prompt)
        per_token = 2e-3 if self.policy.get("exchange") == "ring_q" else 1e-3
        ttft_s = per_token * (len(prompt) - cached) / self.num_sharing
        if "fractions" in self.policy:
            pieces = [float(piece) for piece in self.policy["fractions"].split(",")]
            assert max(pieces) * len(prompt) <= self.engine.config.max_num_batched_tokens, "it is one chain"
            ttft_s = per_token * len(prompt) * max(piece * cost for piece, cost in zip(pieces, (2, 6), strict=True))
        return SimpleNamespace(metrics=SimpleNamespace(ttft_s=ttft_s, num_cached_tokens=cached))

    def _decode(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[object]:
        """5 ms, and for each request 1 ms and 10 us per token. Arbitrary until all have started. 20 ms more for a group
        whose members have requests of half a block of their own.

        Meanwhile each other instance computes a prompt of a full step, if prompts may have that length.
        """
        num_others = self.num_instances // self.num_sharing - 1
        batch = len(prompts) - num_others
        decoding, others = prompts[:batch], prompts[batch:]
        singles = [prompt for prompt in decoding if len(prompt) == BLOCK_SIZE // 2]
        assert len(singles) in ({0, self.num_instances} if self.num_sharing > 1 else {0})
        assert all(prompt in self.prompts or prompt in singles for prompt in decoding), "their KV was computed before"
        assert all(len(prompt) % BLOCK_SIZE for prompt in decoding), "a full last block is not found again"
        assert self.num_sharing == 1 or int(self.policy["threshold"]) == (BLOCK_SIZE // 2 if singles else 0)
        assert not any(prompt in self.prompts for prompt in others), "theirs was not"
        assert {len(prompt) for prompt in others} <= {min(STEP, self.max_model_len - 1)}
        assert {one.max_tokens for one in params[batch:]} <= {1}
        self.prompts += others
        [num_tokens] = {one.max_tokens for one in params[:batch]}
        assert num_tokens is not None
        computed = [prompt for prompt in decoding if prompt not in singles]
        gap_s = 5e-3 + sum(1e-3 + 1e-5 * len(prompt) for prompt in computed) + (0.02 if singles else 0.0)
        tbt_s = [*[9.0] * batch, *[gap_s] * (num_tokens - batch - 1)]
        last = [9.0, *[gap_s] * (num_tokens - 2)]
        times = [*[tbt_s] * (batch - 1), last, *[[]] * num_others]
        return [
            SimpleNamespace(
                metrics=SimpleNamespace(
                    arrival_s=0.0,
                    ttft_s=1.0 + place,
                    tbt_s=gaps,
                    kv_tokens_per_instance=[9, 0] if place == 0 or self.together else [0, 9],
                )
            )
            for place, gaps in enumerate(times)
        ]


@pytest.fixture(autouse=True)
def machine(fake_llm: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    del fake_llm
    monkeypatch.setitem(vars(longspan), "LLM", Machine)
    monkeypatch.setattr(Machine, "started", [], raising=False)
    monkeypatch.setattr(Machine, "link_calls", [], raising=False)
    monkeypatch.setattr(links, "time_links", time_links)
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))


def time_links(locations: Sequence[Location], device: str) -> list[Transfer]:
    """A gigabyte per second."""
    assert device == "cpu"
    Machine.link_calls.append(len(locations))
    return [
        Transfer(kind=kind, members=members, num_bytes=size, seconds=(size / 1e9,), link_class=link_class)
        for kind, members, link_class in kinds_of_links(locations)
        for size in (1000, 9000)
    ]


def stored() -> Profile:
    found = load_profile(SUBJECT)
    assert found is not None
    return found


def test_groups_are_measured_with_every_exchange_and_a_single_instance_next_to_its_peers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("profile", "m", "--parallel", "3", "--repeats", "2", "--threads-per-rank", "1", "--json", *LENGTHS) == 0
    assert [one.arguments["parallel"] for one in Machine.started] == ["3", "2"], "one instance is timed while all run"
    assert {one.arguments["threads_per_rank"] for one in Machine.started} == {1}
    assert all(one.closed for one in Machine.started)
    profile = stored()
    assert num_prompts(profile) == 2 * NUM_PROMPTS * (2 * len(SHARED) + 1 + 2), "the quickest one, too, twice as often"
    shown = json.loads(capsys.readouterr().out)
    assert shown["subject"]["model"] == "m" and len(shown["prefills"]) == len(profile.prefills)
    for fit in shown["fits"]:
        expected = (2e-3 if fit["exchange"] == "ring_q" else 1e-3) / fit["members"]
        assert fit["token_s"] == pytest.approx(expected)
        assert fit["max_error"] < 1e-6
    assert [(fit["members"], fit["exchange"]) for fit in shown["decode_fits"]] == [
        (1, "local"),
        (2, "ring_q"),
        (3, "ring_q"),
    ]
    for fit in shown["decode_fits"]:
        assert (fit["start_s"], fit["request_s"], fit["context_s"]) == pytest.approx((5e-3, 1e-3, 1e-5), rel=0.02)
        assert fit["wait_s"] == (None if fit["members"] == 1 else pytest.approx(0.02 - 1e-3, rel=1e-3))
    assert {len(decode["seconds"]) for decode in shown["decodes"]} == {2}
    measured = {(link["kind"], link["members"], link["link_class"]) for link in shown["links"]}
    assert measured == kinds_of_links(locations(3))
    assert all(link["bytes_per_s"] == pytest.approx(1e9) for link in shown["links"])
    assert (Machine.link_calls, shown["partitions"]) == ([3], [])


@pytest.mark.parametrize("window", [None, 512])
def test_long_prompts_are_measured_with_sparse_attention_if_no_layer_has_a_window(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = SimpleNamespace(
        vocab_size=50, hidden_size=64, specs=(SimpleNamespace(visibility=Visibility(window=window)),)
    )
    monkeypatch.setattr(Machine, "info", info)
    monkeypatch.setattr(Machine, "max_model_len", 4096)
    settings: list[dict[str, str]] = []
    plain = Machine.set_policy

    def set_policy(machine: Machine, policy: str, options: dict[str, str]) -> None:
        plain(machine, policy, options)
        settings.extend([options] * (policy == "csps"))

    monkeypatch.setattr(Machine, "set_policy", set_policy)
    lengths = [100, MIN_SPARSE_TOKENS]
    profile = measure(lambda instances: Machine("m", parallel=str(instances), policy="auto"), 3, lengths, 2)
    sparse = [one for one in profile.prefills if one.exchange == "alltoall_sparse"]
    sizes = {(one.members, one.new_tokens, one.cached_tokens, len(one.seconds)) for one in sparse}
    assert sizes == ({(size, MIN_SPARSE_TOKENS, 0, 2) for size in (2, 3)} if window is None else set())
    assert [make_policy("csps", num_instances=2, options=one).sparse(2048, 16, 999) for one in settings] == [
        SparseSetting(1024, (1,), (((0.25,),),), "kv", (1,))
    ] * (4 if window is None else 0)
    assert {one.exchange for one in profile.prefills} >= {str(exchange) for exchange in SHARED}


@pytest.mark.parametrize(("device", "num_before"), [("cpu", 0), ("cuda", 1)])
def test_a_gpu_does_everything_once_before_it_is_timed(
    device: str, num_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "profile_key", msgspec.structs.replace(SUBJECT, device=device))
    profile = measure(lambda instances: Machine("m", parallel=str(instances), policy="auto"), 1, [8, 100], 3)
    assert num_prompts(profile) == 3 * NUM_PROMPTS
    [machine] = Machine.started
    in_batches = sum(one.batch for one in profile.decodes if one.context_tokens == 100)
    longest = [prompt for prompt in machine.prompts if len(prompt) == 100]
    assert len(longest) == (3 + num_before) * (1 + 2 + in_batches), "alone, before cached ones' new tokens, and decoded"


def test_one_instance_is_measured_again_next_to_busy_ones() -> None:
    """No prompt repeats an earlier prompt. `Machine` checks that."""
    assert run("profile", "m", "--repeats", "1", *LENGTHS) == 0
    alone = [prefill for prefill in stored().prefills if prefill.members == 1]
    assert {prefill.beside for prefill in alone} == {0}
    assert run("profile", "m", "--parallel", "2", "--repeats", "2", *LENGTHS) == 0
    prefills = [prefill for prefill in stored().prefills if prefill.members == 1]
    decodes = [decode for decode in stored().decodes if decode.members == 1]
    assert {(len(one.seconds), one.beside) for one in (*prefills, *decodes)} == {(2, 1)}
    for prefill in prefills:
        assert prefill.seconds == pytest.approx([1e-3 * prefill.new_tokens] * 2), "nothing else of it was cached"


def test_it_goes_on_where_it_was_stopped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Machine, "failure_after", 14)
    assert run("profile", "m", "--parallel", "2", "--repeats", "1", *LENGTHS) == 130
    assert Machine.started[-1].closed
    before = stored()
    assert 0 < num_prompts(before) < NUM_PROMPTS * len(SHARED)
    monkeypatch.setattr(Machine, "failure_after", None)
    assert run("profile", "m", "--parallel", "2", "--repeats", "1", *LENGTHS) == 0
    assert num_prompts(stored()) == NUM_PROMPTS * (len(SHARED) + 1 + 1), "of the quickest one two times"
    computed = [len(one.prompts) for one in Machine.started]
    assert run("profile", "m", "--parallel", "2", "--repeats", "1", *LENGTHS) == 0
    assert [len(one.prompts) for one in Machine.started] == [*computed, 0], "nothing is measured again"
    assert "2 gather_kv" in capsys.readouterr().out
    assert Machine.link_calls == [2]


def test_partitions_are_searched_kept_and_not_searched_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two members are timed: three quarters of the prompt to the first one. Three are modelled."""
    command = ("profile", "m", "--parallel", "3", "--repeats", "1", "--lengths", "16,96,160,320", "--partitions")
    monkeypatch.setattr(Machine, "failure_in_chains_of", 320)
    assert run(*command) == 130
    table = load_partitions(SUBJECT, BLOCK_SIZE)
    assert [(entry.members, entry.length) for entry in table.partitions] == [(2, 16), (2, 96), (2, 160)]
    monkeypatch.setattr(Machine, "failure_in_chains_of", None)
    num_started = len(Machine.started)
    assert run(*command, "--json") == 0
    timed = [len(prompt) for one in Machine.started[num_started:] for prompt in one.prompts]
    assert set(timed) == {320}
    table = load_partitions(SUBJECT, BLOCK_SIZE)
    assert table.lengths("m", 2) == (16, 96, 160, 320)
    assert table.lengths("m", 3) == (96, 160, 320), "three pieces need three blocks"
    assert table.predict("m", 2, 320) == (0.75, 0.25)
    three = table.predict("m", 3, 320)
    assert three is not None and three[0] >= three[2]
    shown = json.loads(capsys.readouterr().out)["partitions"]
    assert [entry["length"] for entry in shown if entry["members"] == 3] == [96, 160, 320]
    again = ("profile", "m", "--parallel", "3", "--repeats", "1", "--lengths", "16,96,160,320")
    assert run(*again, "--block-size", str(BLOCK_SIZE)) == 0
    assert "0.750, 0.250" in capsys.readouterr().out
    assert run(*again) == 0
    assert "0.750, 0.250" not in capsys.readouterr().out, "blocks have another size"


def test_pieces_that_are_larger_than_a_step_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine fails for other cuts. The best cut has three quarters of the prompt in its first piece."""
    monkeypatch.setattr(Machine, "chain_step", 100)
    command = ("profile", "m", "--parallel", "2", "--repeats", "1", "--lengths", "96,160,320", "--partitions")
    assert run(*command) == 0
    table = load_partitions(SUBJECT, BLOCK_SIZE)
    assert {entry.length: entry.fractions for entry in table.partitions} == {96: (0.75, 0.25), 160: (0.6, 0.4)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--exchange", "ring_q"], "leave out"),
        (["--policy", "context"], "leave out"),
        (["-o", "threshold=3"], "leave out -o threshold=3"),
        (["--no-enable-prefix-caching"], "leave out"),
        (["--prefill-parallel", "2", "--decode-parallel", "1"], "give --parallel, and no roles"),
        (["--lengths", "8,1000"], "from 1 to 999 tokens with this model, but 8,1000 given"),
        (["--lengths", "0"], "at least 1"),
        (["--lengths", "x"], "whole numbers"),
        (["--repeats", "0"], "repeats"),
        (["--partitions"], "--partitions needs several instances, but there is 1"),
        (["--partitions", "--parallel", "2", "--lengths", "999"], "--lengths must be at least two"),
        (["--partitions", "--parallel", "2", "--max-num-batched-tokens", "64"], "64 given, but --partitions needs"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("profile", "m", *arguments) == 2
    *expected, error = capsys.readouterr().err.splitlines()
    assert words in error and all("measurements, about" in line for line in expected)


def test_expected_time_is_printed_before_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("profile", "m", *LENGTHS) == 0
    assert re.search(r"one instance: \d+ measurements, about \d+ s by the speed", capsys.readouterr().err)


def test_quick_profile_measures_each_point_once_without_the_longest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "max_model_len", 2100)
    assert run("profile", "m", "--quick") == 0
    profile = load_profile(SUBJECT)
    assert profile is not None
    assert {len(prefill.seconds) for prefill in profile.prefills if prefill.members == 1} == {1}
    assert {prefill.new_tokens for prefill in profile.prefills if not prefill.cached_tokens} == {512, 1024, 2048}
    assert run("profile", "m", "--quick", *LENGTHS) == 2


def test_lengths_that_fit_into_no_instance_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Machine, "num_blocks", 10)
    assert run("profile", "m", *LENGTHS) == 2
    assert "--lengths 100 is more than the 10 blocks of 8 tokens that one instance has" in capsys.readouterr().err
    assert not Machine.started[0].prompts


def test_prompts_are_doubled_up_to_the_longest_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("profile", "m", "--repeats", "1", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert {one["new_tokens"] for one in shown["prefills"] if not one["cached_tokens"]} == {512, 999}


def test_times_on_a_gpu_are_kept_by_its_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names of the system and the driver. CUDA has the missing ones."""
    cpu, gpu = tmp_path / "proc/cpuinfo", tmp_path / "proc/driver/nvidia/gpus/0/information"
    files = ModelFiles(name="m", config_dir=tmp_path, weights=tmp_path, tokenizer_dir=None, dtype="bfloat16")
    monkeypatch.setattr(store, "Path", lambda text: tmp_path / text.removeprefix("/"))
    monkeypatch.setattr(platform, "processor", lambda: "some processor")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some card")

    def machine_of(device: str) -> str:
        return profile_key_of(files, device, tp=1, threads=1, native=False, sizes="").machine

    assert machine_of("cuda") == "some processor, some card"
    gpu.parent.mkdir(parents=True)
    cpu.write_text("processor : 0\nmodel name : Fast 9\n")
    gpu.write_text("IRQ: 1\nModel: \t NVIDIA H200\n")
    assert machine_of("cuda") == "Fast 9, NVIDIA H200"
    assert machine_of("cpu") == "Fast 9"
    gpu.write_text("IRQ: 1\n")
    assert machine_of("cuda") == "Fast 9, some card"


def test_cached_tokens_that_did_not_stay_are_no_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Machine, "cached", False)
    assert run("profile", "m", *LENGTHS) == 2
    assert "of 8 tokens only 0 stayed cached" in capsys.readouterr().err
    assert all(prefill.cached_tokens == 0 for prefill in stored().prefills)


def test_decodes_that_did_not_stay_together_are_no_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Machine, "together", False)
    assert run("profile", "m", "--parallel", "2", *LENGTHS) == 2
    assert "2 requests with contexts of 8 tokens did not decode on one instance" in capsys.readouterr().err
    assert all(decode.batch == 1 for decode in stored().decodes if decode.members == 1)


def test_a_file_that_is_no_profile_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    save_profile(Profile(profile_key=SUBJECT))
    profile_file(SUBJECT).write_text("{}")
    assert run("profile", "m", *LENGTHS) == 2
    assert "remove it" in capsys.readouterr().err


def test_times_of_another_revision_are_not_used() -> None:
    older = msgspec.structs.replace(SUBJECT, revision=SUBJECT.revision - 1)
    save_profile(Profile(profile_key=older))
    assert load_profile(older) and load_profile(SUBJECT) is None


def test_a_real_engine_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(vars(longspan), "LLM", ThreadLLM)
    folder = make_tiny("llama", tmp_path / "tiny")
    engine = ("--dtype", "float32", "--parallel", "2", "--block-size", "16", "--max-model-len", "300")
    command = ("profile", str(folder), *engine, "--lengths", "64,128", "--repeats", "1", "--partitions", "--json")
    assert run(*command) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["subject"]["model"] == str(folder.resolve())
    assert shown["subject"]["revision"] > 0
    assert len(shown["prefills"]) == NUM_PROMPTS * (len(SHARED) + 1)
    assert [(fit["members"], fit["exchange"]) for fit in shown["fits"]] == [
        (1, "local"),
        *((2, name) for name in sorted(map(str, SHARED))),
    ]
    assert [(entry["members"], entry["length"]) for entry in shown["partitions"]] == [(2, 64), (2, 128)]
    sharing = {"partition": "searched", "threshold": "10"}
    with ThreadLLM(
        str(folder), instances=2, skip_tokenizer_init=True, block_size=16, policy="runahead", policy_options=sharing
    ) as llm:
        [output] = llm.generate([[5] * 128], SamplingParams(max_tokens=2), use_tqdm=False)
        assert output.metrics.exchanges["prefill"] == {"chain": 1}
        with pytest.raises(
            ValueError, match="partition=searched has none for 100 tokens on 2 instances, only for 64, 128"
        ):
            llm.generate([[5] * 100], use_tqdm=False)
    with ThreadLLM(str(folder), instances=2, skip_tokenizer_init=True, block_size=16) as llm:
        assert llm.facts.profile is not None
        assert num_prompts(llm.facts.profile) >= len(shown["prefills"]) + NUM_PROMPTS, "the quickest ones twice"


def test_a_batch_is_seeded_on_one_instance(tmp_path: Path) -> None:
    """A policy that shares the prompts out would leave the batch to decode on both."""
    folder = make_tiny("llama", tmp_path)
    with ThreadLLM(str(folder), instances=2, skip_tokenizer_init=True, block_size=16) as llm:
        task = Decode(members=1, exchange="local", batch=4, context_tokens=20, seconds=())
        assert _timed_decode(llm, task, 0) > 0


@pytest.mark.parametrize("places", ["2", "0-0,0-0,0-1,0-1"])
def test_measurements_have_the_class_of_link_of_their_group(
    places: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Smaller groups are on the first hosts of the whole run. Singles have one busy neighbour on their host."""
    arguments = ("profile", "m", "--parallel", "4", "--repeats", "1", "--threads-per-rank", "1", *LENGTHS)
    monkeypatch.setenv("LONGSPAN_HOSTS", places)
    assert run(*arguments, "--json") == 0
    assert os.environ["LONGSPAN_HOSTS"] == places
    profile, shown = stored(), json.loads(capsys.readouterr().out)
    classes = {(prefill.members, prefill.link_class, prefill.beside) for prefill in profile.prefills}
    several = {(members, "other_host", 0) for members in (3, 4)}
    assert classes == {(1, "same_host", 1), (2, "same_host", 0), *several}
    assert {(decode.members, decode.link_class, decode.beside) for decode in profile.decodes} == classes
    assert set(profile.links) == kinds_of_links(locations(4))
    assert ("point_to_point", 2, "other_host") in profile.links and ("point_to_point", 2, "same_host") in profile.links
    assert {(fit["members"], fit["link_class"]) for fit in shown["fits"]} == {kind[:2] for kind in classes}
    num_before = num_prompts(profile)
    monkeypatch.delenv("LONGSPAN_HOSTS")
    assert run(*arguments) == 0
    both = stored()
    assert {prefill.link_class for prefill in both.prefills if prefill.members > 1} == {"same_host", "other_host"}
    assert num_prompts(both) > num_before, "times on one host are measured apart"
    text = capsys.readouterr().out
    assert "other_host: Fits" in text and "point_to_point, other_host" in text
