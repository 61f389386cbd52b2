"""Measure the memory and the disk that the first start takes for a random checkpoint.

    python benchmarks/first_start.py [--gb 2] [--before SRC] [--require]

Each case has a checkpoint of its own, in shards, and an empty cache folder. A new process runs `prepare`, as the parent
process of an engine does, and then loads the model as a worker on a CPU does. The columns are ratios to the bytes of
the checkpoint:

- peak: the maximum resident size of `prepare` (VmHWM): all pages of mapped files, and 0.5 GB of Python and libraries
- own: the maximum memory of `prepare` that is in no file (RssAnon, every 5 ms), less its size after the imports
- disk: the space that the cache folder takes
- worker: the memory in no file that loading the model adds

`--before` names the folder `src` of an earlier version, which is measured as well. With --require, the exit code is 1
if the peak of a case is above 1.1. So it is if its disk is above 0.05 where names and dtypes agree. Three times the
size of a checkpoint must be free on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

import longspan.model.checkpoint  # noqa: F401 - memory of imports does not count
from longspan.model.adapter import Model
from longspan.model.source import prepare

HERE = Path(__file__).parents[1] / "src"
MAX_PEAK, MAX_DISK = 1.1, 0.05
_SHARD_BYTES = 2**28
_SAMPLE_S = 0.005
_SIZES = {"hidden_size": 2048, "vocab_size": 32000, "num_attention_heads": 16, "num_key_value_heads": 4}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A checkpoint of a dtype, and the dtype in which it is served.

    Attributes:
        agrees: whether all weights can be mapped from the checkpoint.
    """

    config: PreTrainedConfig
    stored: torch.dtype
    served: str
    agrees: bool = False


def cases() -> dict[str, Case]:
    dense = LlamaConfig(**_SIZES, intermediate_size=8192, tie_word_embeddings=False)
    tied = LlamaConfig(**_SIZES, intermediate_size=8192, tie_word_embeddings=True)
    experts = MixtralConfig(**_SIZES, intermediate_size=2048, num_local_experts=8)
    return {
        "names and dtypes agree": Case(config=dense, stored=torch.bfloat16, served="bfloat16", agrees=True),
        "tied, names and dtypes agree": Case(config=tied, stored=torch.float32, served="float32", agrees=True),
        "float16 as bfloat16": Case(config=dense, stored=torch.float16, served="bfloat16"),
        "float32 as bfloat16": Case(config=dense, stored=torch.float32, served="bfloat16"),
        "experts are stacked": Case(config=experts, stored=torch.bfloat16, served="bfloat16"),
    }


def main() -> int:
    """Measure all cases and print their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of a checkpoint")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--require", action="store_true")
    parser.add_argument("--measure", nargs=2, metavar=("FOLDER", "DTYPE"), help="one case, in this process")
    args = parser.parse_args()
    if args.measure is not None:
        print(json.dumps(measure(*args.measure)))
        return 0
    versions = {"": HERE} if args.before is None else {" (before)": args.before.resolve(), "": HERE}
    table = Table("case", "checkpoint, GB", "peak", "own", "disk", "worker")
    failed = []
    for name, case in cases().items():
        with tempfile.TemporaryDirectory(prefix="ls-first-") as folder:
            num_bytes = write_checkpoint(case, Path(folder, "model"), args.gb * 1e9)
            for version, src in versions.items():
                environment = {**os.environ, "PYTHONPATH": str(src), "LONGSPAN_CACHE": f"{folder}/cache{version}"}
                command = [sys.executable, __file__, "--measure", f"{folder}/model", case.served]
                output = subprocess.run(command, stdout=subprocess.PIPE, env=environment, check=True, text=True).stdout
                sizes = json.loads(output) | {"disk": disk_bytes(Path(environment["LONGSPAN_CACHE"]))}
                ratios = {key: size / num_bytes for key, size in sizes.items()}
                shown = [f"{ratios[key]:.3f}" for key in ("peak", "own", "disk", "worker")]
                table.add_row(name + version, f"{num_bytes / 1e9:.2f}", *shown)
                if ratios["peak"] > MAX_PEAK or (case.agrees and ratios["disk"] > MAX_DISK):
                    failed += [] if version else [name]
    Console().print(table)
    if args.require and failed:
        print(f"too much memory or disk: {', '.join(failed)}", file=sys.stderr)
        return 1
    return 0


def write_checkpoint(case: Case, folder: Path, num_bytes: float) -> int:
    """Write random weights of about `num_bytes` in Hugging Face's format, a shard at a time. Return their size."""

    def model_of(num_layers: int) -> AutoModelForCausalLM:
        case.config.num_hidden_layers = num_layers
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(case.config, dtype=case.stored)

    one, two = (sum(weight.nbytes for weight in model_of(number).parameters()) for number in (1, 2))
    model = model_of(max(1, 1 + round((num_bytes - one) / (two - one))))
    case.config.dtype = case.stored
    model.config.save_pretrained(folder)
    places: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def write() -> None:
        file = f"model-{len(set(places.values())):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, weight in model.named_parameters():
        own = {name: torch.empty(weight.shape, dtype=weight.dtype).normal_(0.0, 0.02)}
        for key, tensor in revert_weight_conversion(model, own).items():
            shard[key] = tensor.contiguous()
            if sum(tensor.nbytes for tensor in shard.values()) > _SHARD_BYTES:
                write()
    write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def measure(folder: str, dtype: str) -> dict[str, int]:
    """Prepare a model and load it in this process. Return the bytes of memory."""
    before, samples, done = own_bytes(), [0], Event()

    def sample() -> None:
        while not done.is_set():
            samples.append(own_bytes())
            time.sleep(_SAMPLE_S)

    thread = Thread(target=sample)
    thread.start()
    files = prepare(folder, dtype=dtype)
    done.set()
    thread.join()
    peak, prepared = memory("VmHWM"), own_bytes()
    model = Model(files, torch.device("cpu"))
    return {"peak": peak, "own": max(samples) - before, "worker": own_bytes() - prepared, "copied": model.copied_bytes}


def own_bytes() -> int:
    return memory("RssAnon")


def memory(field: str) -> int:
    """Return a field of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


def disk_bytes(folder: Path) -> int:
    """Return the space that the files of a folder take."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


if __name__ == "__main__":
    sys.exit(main())
