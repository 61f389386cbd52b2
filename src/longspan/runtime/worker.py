"""One rank: a process that owns a device, a model and a KV pool, and computes the steps it is sent, first in first out.

Started as `python -m longspan.runtime.worker` with its configuration as one line of JSON on standard input. When that
pipe closes, the controller is gone and the worker exits.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
import zmq

from longspan.attn.comm import CommError, TorchTransport
from longspan.core.steps import Forward, Sampled
from longspan.kv.pool import KvPool
from longspan.model.adapter import Model
from longspan.model.files import ModelFiles
from longspan.model.store import DTYPES
from longspan.runtime.batch import BlockTables, pack
from longspan.runtime.exchange import StepAttention
from longspan.runtime.messages import (
    Command,
    Done,
    Failed,
    Ready,
    Report,
    RunForward,
    RunFree,
    Stop,
    WorkerConfig,
    command_address,
    report_address,
)
from longspan.runtime.sampler import sample

_log = logging.getLogger("longspan.worker")


class Worker:
    """Computes Forwards."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._device = _device(config)
        self._dtype = DTYPES[config.dtype]
        files = ModelFiles(
            name=config.model_name,
            config_dir=Path(config.config_dir),
            weights=Path(config.weights),
            tokenizer_dir=None,
            dtype=config.dtype,
            trust_remote_code=config.trust_remote_code,
        )
        self._model = Model.load(files, self._device)
        self._pool = KvPool(
            self._model.info.specs,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            dtype=self._dtype,
            device=self._device,
        )
        self._tables = BlockTables()
        self._transport = _join(config) if config.world_size > 1 else None

    def forget(self, request_ids: tuple[int, ...]) -> None:
        """Drops requests from the block tables."""
        self._tables.forget(request_ids)

    def run(self, forward: Forward) -> Done:
        """Computes this rank's share and samples what it is asked to."""
        packed = pack(
            forward,
            self._tables,
            instance=self._config.rank,
            block_size=self._config.block_size,
            device=self._device,
        )
        sent: Counter[str] = Counter()
        attention = StepAttention(
            packed,
            forward.number,
            pool=self._pool,
            specs=self._model.info.specs,
            transport=self._transport,
            world_size=self._config.world_size,
            sent=sent,
        )
        sampled: list[Sampled] = []
        if len(packed.tokens):
            logits = self._model.forward(packed.tokens, packed.positions, packed.keep, attention, packed.rope_lengths)
            chosen = sample(logits, packed.samples) if packed.samples else []
            for row, token in enumerate(chosen):
                wanted = packed.samples[row].output_logits
                data = logits[row].cpu().numpy().tobytes() if wanted else b""
                sampled.append(Sampled(request_id=packed.request_ids[row], token=token, logits=data))
        else:
            attention.without_tokens(self._dtype, self._device)
        if self._transport is not None:
            self._transport.flush()
        return Done(rank=self._config.rank, number=forward.number, sampled=tuple(sampled), bytes_sent=dict(sent))


def main() -> None:
    """Runs a worker until it is told to stop, its controller goes away, or it fails."""
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the controller decides
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s rank {config.rank} %(levelname)s %(message)s"
    )
    threading.Thread(target=_exit_with_controller, args=(config.run_dir,), daemon=True).start()
    context = zmq.Context()
    commands, reports = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.bind(command_address(config.run_dir, config.rank))
    reports.connect(report_address(config.run_dir))
    try:
        _serve(config, commands, reports)
    except Exception as error:  # noqa: BLE001 - whatever it is, the controller must hear of it and the process end
        _log.exception("the worker fails")
        failed = Failed(rank=config.rank, reason=f"{type(error).__name__}: {error}", peer=isinstance(error, CommError))
        _send(reports, failed)
        context.destroy(linger=1000)
        os._exit(1)  # at once, so that the peers' transfers fail instead of waiting for a time-out
    context.destroy(linger=1000)
    if dist.is_initialized():
        dist.destroy_process_group()


def _serve(config: WorkerConfig, commands: zmq.Socket[bytes], reports: zmq.Socket[bytes]) -> None:
    torch.set_num_threads(config.num_threads)
    worker = Worker(config)
    _send(reports, Ready(rank=config.rank))
    _log.info("ready: %s on %s, %d threads", config.model_name, config.device, config.num_threads)
    decoder = msgspec.msgpack.Decoder(Command)
    while True:
        match decoder.decode(commands.recv()):
            case RunForward(step):
                _send(reports, worker.run(step))
            case RunFree(step):
                worker.forget(step.request_ids)
            case Stop():
                return


def _send(reports: zmq.Socket[bytes], report: Report) -> None:
    reports.send(msgspec.msgpack.encode(report))


def _exit_with_controller(run_dir: str) -> None:
    """Standard input ends when the controller does, however it ends."""
    sys.stdin.buffer.read()
    _log.warning("the controller is gone")
    shutil.rmtree(run_dir, ignore_errors=True)
    os._exit(1)


def _device(config: WorkerConfig) -> torch.device:
    if config.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", config.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _join(config: WorkerConfig) -> TorchTransport:
    """Meets the other ranks through a file in the run folder; gloo listens on the loopback interface only.

    NCCL needs a device of its own per rank; ranks that share one are connected by gloo through host memory.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    nccl = config.device == "cuda" and torch.cuda.device_count() >= config.world_size
    path = f"{config.run_dir}/rendezvous"
    store = dist.FileStore(path, config.world_size)  # type: ignore[attr-defined]  # public, but not in its __all__
    dist.init_process_group("nccl" if nccl else "gloo", store=store, rank=config.rank, world_size=config.world_size)
    dist.barrier()
    return TorchTransport(staged=config.device == "cuda" and not nccl)


if __name__ == "__main__":
    main()
