"""The control plane over TCP: workers find their controller and each other, and no process without the keys can."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import zmq
from leftovers import left_names, wait_until_gone
from oracle import Oracle
from torch.distributed import DistStoreError, PrefixStore

from longspan import LLM, SamplingParams
from longspan.errors import WorkerLostError
from longspan.runtime import heartbeats, messages
from longspan.runtime.contact import Contact, Keys
from longspan.runtime.executor import secure_channel
from longspan.runtime.executor.processes import ProcessLauncher
from longspan.runtime.executor.secure_channel import SecureChannel
from longspan.runtime.store import AddTo, ControllerStore
from longspan.service import Service

pytestmark = pytest.mark.usefixtures("own_folder")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [5 + token for token in np.random.default_rng(3).integers(0, 190, 120).tolist()]


class TcpLLM(LLM):
    """An engine whose workers are processes of this host and find it over TCP."""

    make_service = partial(Service, launcher=partial(ProcessLauncher, listen="127.0.0.1"))


def test_workers_over_tcp_answer_exactly_and_end(tiny: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks lie on two imitated hosts. So their process group meets by the store of the controller."""
    monkeypatch.setenv("LONGSPAN_HOSTS", "2")
    before, options = left_names(), {"threshold": "0"}
    with TcpLLM(
        str(tiny), dtype="float32", skip_tokenizer_init=True, instances=2, block_size=16, policy_options=options
    ) as llm:
        [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == oracle.complete(PROMPT, 12).token_ids
        assert llm.bytes_exchanged["ring_kv"] > 0
        pids = llm.service.executor.pids
        process = psutil.Process(pids[0])
        listening = {connection.laddr.ip for pid in pids for connection in psutil.Process(pid).net_connections("tcp")}
        assert listening == {"127.0.0.1"}
        process.kill()
        with pytest.raises(WorkerLostError, match="rank 0 was lost: its process was killed by SIGKILL"):
            llm.generate([PROMPT], GREEDY, use_tqdm=False)
    wait_until_gone(pids, before)


@contextmanager
def channel() -> Iterator[SecureChannel]:
    opened = SecureChannel("127.0.0.1")
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def worker(contact: Contact, rank: int = 0) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context[zmq.Socket[bytes]]()
    try:
        yield contact.connect(context, rank)
    finally:
        context.destroy(linger=0)


def wrong_keys(contact: Contact) -> dict[str, Contact]:
    """Return the contact of clients without keys, with a pair of their own, and with another controller's key."""
    assert contact.keys is not None
    public, secret = (key.decode() for key in zmq.curve_keypair())
    other, _ = (key.decode() for key in zmq.curve_keypair())
    replace = msgspec.structs.replace
    return {
        "no keys": replace(contact, keys=None),
        "own pair": replace(contact, keys=Keys(contact.keys.server, public, secret)),
        "other server": replace(contact, keys=Keys(other, contact.keys.public, contact.keys.secret)),
    }


@pytest.mark.parametrize("kind", ["no keys", "own pair", "other server"])
def test_only_workers_of_the_run_send_reports_get_commands_and_use_the_store(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    report = msgspec.msgpack.encode(messages.Ready(0))
    with channel() as controller:
        wrong = wrong_keys(controller.contact)[kind]
        controller.send(0, b"a command")
        with worker(wrong) as intruder, worker(controller.contact) as right:
            intruder.send(report)
            right.send(b"the only report")
            assert controller.receive(10.0) == b"the only report"
            assert right.poll(10_000) and right.recv() == b"a command"
            controller.send(0, b"another")
            assert right.poll(10_000) and right.recv() == b"another"
            assert controller.receive(0.3) is None
            assert not intruder.poll(100)
        store, theirs = ControllerStore(controller.contact), ControllerStore(wrong)
        store.set("key", "value")
        theirs.set_timeout(timedelta(seconds=0.3))
        for use in (lambda: theirs.get("key"), lambda: theirs.set("key", "other"), lambda: theirs.check(["key"])):
            with pytest.raises(DistStoreError, match="did not answer"):
                use()
        assert store.get("key") == b"value"
        store.close()
        theirs.close()
    warning = "refused a connection from 127.0.0.1, since its key is not of this run"
    assert caplog.messages == [warning] * (kind == "own pair"), "other handshakes fail before the check of keys"


def test_no_key_is_accepted_once_nothing_checks_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ accepts every pair of keys then, unless it has to check the domain."""

    def fail(zap: zmq.Socket[bytes], store: zmq.Socket[bytes], _: bytes) -> None:
        zap.close()
        store.close()

    monkeypatch.setattr(secure_channel, "_serve", fail)
    monkeypatch.setattr(secure_channel, "_JOIN_TIMEOUT_S", 0.1)
    with channel() as controller, worker(wrong_keys(controller.contact)["own pair"]) as intruder:
        intruder.send(b"a report")
        assert controller.receive(1.0) is None


def test_the_store_keeps_the_laws_of_pytorch() -> None:
    """Also through PyTorch's own prefix, which calls it from C++."""
    with channel() as controller:
        mine = ControllerStore(controller.contact)
        store = PrefixStore("a", mine)
        store.set("x", "1")
        assert store.get("x") == b"1" and mine.get("a/x") == b"1"
        assert [store.add("n", 2), store.add("n", 3)] == [2, 5] and store.get("n") == b"5"
        assert store.check(["x", "n"]) and not store.check(["x", "y"])
        assert store.compare_set("x", "0", "2") == b"1" and store.compare_set("x", "1", "2") == b"2"
        assert store.num_keys() == 2
        answers: list[bytes] = []
        waiting = threading.Thread(target=lambda: answers.append(store.get("later")))
        waiting.start()
        with pytest.raises(DistStoreError):
            store.wait(["never"], timedelta(seconds=0.1))
        store.set("later", "here")
        waiting.join(10)
        assert answers == [b"here"]
        assert store.delete_key("x") and not store.delete_key("x") and not store.check(["x"])
        mine.close()


def test_a_dropped_connection_is_reported_at_once() -> None:
    """Messages of it may be lost. Connections of clients that sent no greeting are ignored."""
    with channel() as controller:
        assert controller.contact.keys is not None
        with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.DEALER) as socket:
            controller.contact.keys.encrypt(socket)
            socket.connect(controller.contact.address)
            time.sleep(0.3)
            socket.linger = 0
        with worker(controller.contact, 3) as socket:
            socket.send(b"a report")
            assert controller.receive(10.0) == b"a report"
        report = controller.receive(10.0)
        assert report is not None
        assert msgspec.msgpack.decode(report, type=messages.Report) == messages.Exited(3, messages.DISCONNECTED)
        assert controller.receive(0.3) is None


@pytest.mark.parametrize("has_ended", [False, True])
def test_only_the_end_of_its_own_connection_is_the_end_of_a_worker(*, has_ended: bool) -> None:
    """A port scan during the start ends a connection whose descriptor the worker's connection gets."""
    with channel() as controller:
        address, port = controller.contact.address.removeprefix("tcp://").split(":")
        contact = msgspec.json.encode(controller.contact).decode()
        # It starts first, since its pipes would take the descriptor.
        command = [sys.executable, "-c", GREET, contact]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            subprocess.run([sys.executable, "-c", SCAN, address, port], check=True, timeout=30)
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("scanned\n")
            process.stdin.flush()
            assert process.stdout.readline() == "connected\n"
            if has_ended:
                process.kill()
                process.wait(30)
                time.sleep(0.3)
            report = controller.receive(0.3)  # before this, the engine prepares the start and reads no reports
            process.kill()
    expected = messages.Exited(0, messages.DISCONNECTED) if has_ended else None
    assert (None if report is None else msgspec.msgpack.decode(report, type=messages.Report)) == expected


def test_a_silent_worker_is_lost_long_before_the_step_timeout(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "INTERVAL_S", 0.2)
    monkeypatch.setattr(heartbeats, "SILENCE_S", 1.0)
    with TcpLLM(str(tiny), dtype="float32", skip_tokenizer_init=True, instances=1) as llm:
        os.kill(llm.service.executor.pids[0], signal.SIGSTOP)
        with pytest.raises(WorkerLostError, match="rank 0 was lost: its connection has ended, or its host is silent"):
            llm.generate([PROMPT], GREEDY, use_tqdm=False)


SCAN = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))):
    time.sleep(0.3)
"""
"""A client that sends nothing."""
GREET = """
import msgspec, sys, time, zmq
from longspan.runtime.contact import Contact
context, _ = zmq.Context(), sys.stdin.readline()
socket = msgspec.json.decode(sys.argv[1], type=Contact).connect(context, 0)
time.sleep(1)
print("connected", flush=True)
time.sleep(100)
"""
"""A worker that sends its greeting only."""
LISTEN = """
import msgspec, time
from longspan.runtime.executor.secure_channel import SecureChannel
channel = SecureChannel("127.0.0.1")
print(msgspec.json.encode(channel.contact).decode(), flush=True)
time.sleep(100)
"""
"""A controller that does nothing."""
FOLLOW = """
import msgspec, sys, time, zmq
from longspan.runtime import contact, heartbeats
heartbeats.INTERVAL_S, heartbeats.SILENCE_S = 0.2, 1.0
socket = msgspec.json.decode(sys.argv[1], type=contact.Contact).connect(zmq.Context(), 0)
with heartbeats.exits_without_controller(socket):
    time.sleep(2)
    print("connected", flush=True)
    time.sleep(100)
"""


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_a_worker_exits_when_its_controller_is_silent_or_ends(end: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        command = [sys.executable, "-c", FOLLOW, controller.stdout.readline()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
            try:
                assert follower.stdout is not None and follower.stdout.readline() == "connected\n"
                controller.send_signal(end)
                assert follower.wait(20) == heartbeats.LOST_CONTROLLER
            finally:
                controller.kill()
                follower.kill()


@pytest.mark.parametrize(
    "frames", [[b"", b"no request"], [b"", msgspec.msgpack.encode(AddTo("text", 1))], [b"x"], [b"", b"", b"\xc1", b""]]
)
def test_a_malformed_request_with_the_keys_of_the_run_harms_no_other_worker(
    frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with channel() as controller:
        mine, contact = ControllerStore(controller.contact), controller.contact
        mine.set("text", "no number")
        assert contact.keys is not None and contact.store is not None
        with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.DEALER) as socket:
            contact.keys.encrypt(socket)
            socket.connect(contact.store)
            socket.send_multipart(frames)
            deadline_s = time.monotonic() + 10
            while not caplog.messages:
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            socket.linger = 0
        assert "the rendezvous store ignores a request that it cannot read" in caplog.text
        assert mine.get("text") == b"no number"
        mine.close()


def test_commands_wait_for_their_worker_and_a_closed_channel_is_gone() -> None:
    with channel() as controller:
        port = int(controller.contact.address.rpartition(":")[2])
        for number in range(3):
            controller.send(1, b"%d" % number)
        assert controller.receive(0.05) is None
        with worker(controller.contact, 1) as socket:
            assert controller.receive(0.5) is None, "a greeting is no report"
            assert [socket.recv() for _ in range(3)] == [b"0", b"1", b"2"]
        controller.send(1, b"nobody reads this")
    controller.close()
    with suppress(psutil.AccessDenied):
        assert port not in {connection.laddr.port for connection in psutil.Process().net_connections("tcp")}


def test_a_channel_closes_after_its_thread_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(zap: zmq.Socket[bytes], store: zmq.Socket[bytes], _: bytes) -> None:
        zap.close(0)
        store.close(0)

    monkeypatch.setattr(secure_channel, "_serve", fail)
    monkeypatch.setattr(secure_channel, "_JOIN_TIMEOUT_S", 0.1)
    controller = SecureChannel("127.0.0.1")
    closing = threading.Thread(target=controller.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
