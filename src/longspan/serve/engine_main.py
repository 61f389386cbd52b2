"""The engine process of a server: `python -m longspan.serve.engine_main FOLDER`, its setup a line of JSON on stdin.

It ends when it is told to, and when its standard input closes: that is, with the HTTP face, however that ends.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from contextlib import closing

import msgspec
import zmq

from longspan.errors import WorkerLostError
from longspan.runtime.executor.forkserver import start_server
from longspan.serve.engine_loop import EngineLoop
from longspan.serve.messages import EngineSetup, NotStarted, PolicySet, Started, address
from longspan.service import Deployment


def main() -> None:
    """Runs until told to quit; exit code 1 when it cannot start or workers do not come back."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the face decides when to stop
    tempfile.tempdir = folder = sys.argv[1]  # what lies in it is removed with it, whoever of the two is killed
    line = sys.stdin.buffer.readline()
    if not line:  # the face is gone already
        shutil.rmtree(folder, ignore_errors=True)
        return
    setup = msgspec.json.decode(line, type=EngineSetup)
    threading.Thread(target=_end_with_face, args=(folder,), daemon=True).start()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("longspan").setLevel(logging.INFO)
    logging.getLogger().setLevel(logging.WARNING)
    with zmq.Context() as context, closing(context.socket(zmq.PAIR)) as socket:
        socket.sndhwm = socket.rcvhwm = 0
        socket.connect(address(folder))
        sys.exit(_serve(setup, socket))


def _serve(setup: EngineSetup, socket: zmq.Socket[bytes]) -> int:
    start_server()  # it imports beside us
    try:
        deployment = Deployment(setup.model, **setup.arguments)
    except (ValueError, WorkerLostError) as error:
        mistake = isinstance(error, ValueError)
        socket.send(msgspec.msgpack.encode(NotStarted(reason=str(error), is_mistake=mistake)))
        return 1
    with deployment:
        files, config = deployment.files, deployment.engine.config
        pools = [deployment.engine.account.pool(instance) for instance in range(config.num_instances)]
        started = Started(
            name=files.name,
            tokenizer_dir=None if deployment.input_processor.tokenizer is None else str(files.tokenizer_dir),
            trust_remote_code=files.trust_remote_code,
            vocab_size=deployment.input_processor.vocab_size,
            max_model_len=config.max_model_len,
            max_num_seqs=config.limits.max_num_seqs,
            num_instances=config.num_instances,
            num_kv_blocks=sum(pool.num_blocks for pool in pools),
            block_size=config.block_size,
            worker_pids=list(deployment.worker_pids),
        )
        socket.send(msgspec.msgpack.encode(PolicySet(deployment.policy_settings)))
        socket.send(msgspec.msgpack.encode(started))
        try:
            EngineLoop(deployment, setup, socket).run()
        except (WorkerLostError, OSError):
            logging.getLogger("longspan").exception("workers do not come back")
            return 1
    return 0


def _end_with_face(folder: str) -> None:
    while os.read(sys.stdin.fileno(), 1):  # not by its buffer, whose lock would be held when the process ends
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)  # workers end with their controller


if __name__ == "__main__":
    main()
