"""The control plane over TCP: workers find their controller and each other, and no process without the keys can."""

from __future__ import annotations

import threading
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
from longspan.runtime import messages
from longspan.runtime.contact import Contact, Keys
from longspan.runtime.executor import secure_channel
from longspan.runtime.executor.processes import ProcessLauncher
from longspan.runtime.executor.secure_channel import SecureChannel
from longspan.runtime.store import ControllerStore
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
