"""KV pools of Ray nodes in network namespaces, which only reach each other."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hosts import network_hosts, why_not
from oracle import Oracle
from ray_nodes import ray_nodes, why_no_ray

DRIVER = """
import json, sys
from longspan import LLM, SamplingParams
model, address, kv_dir, prompts = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
tiers = {"host_kv_gib": 0.02, "disk_kv_gib": 0.02, "disk_kv_dir": kv_dir, "num_gpu_blocks_override": 6}
if __name__ == "__main__":
    with LLM(model, dtype="float32", skip_tokenizer_init=True, block_size=16, executor="ray", ray_address=address,
             parallel="2", policy="context", threads_per_rank=1, **tiers) as llm:
        hosts = llm.engine.config.cluster.hosts
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        outputs = [llm.generate([prompt], greedy, use_tqdm=False)[0] for prompt in prompts]
        print(json.dumps({
            "hosts": hosts,
            "tokens": [output.outputs[0].token_ids for output in outputs],
            "peak": llm.engine.kv.counts.peak_host_blocks,
            "used": [llm.engine.kv.account.usage([pool]).num_cached for pool in llm.engine.config.cluster.host_pools],
            "sent": llm.bytes_between_hosts["total"],
        }))
"""


@pytest.mark.full  # two Ray nodes and an engine: a minute
def test_a_context_larger_than_all_devices_lies_on_two_namespaces(tiny: Path, oracle: Oracle, tmp_path: Path) -> None:
    if (reason := why_not() or why_no_ray()) is not None:
        pytest.skip(reason)
    draw = np.random.default_rng(5)
    prompts = [[5 + token for token in draw.integers(0, 190, length).tolist()] for length in (500, 40)]
    with network_hosts(2) as hosts, ray_nodes(hosts, num_cpus=1) as nodes:
        command = (sys.executable, "-c", DRIVER, str(tiny), nodes.address, str(tmp_path), json.dumps(prompts))
        done = json.loads(hosts[0].run(*command).stdout.splitlines()[-1])
    assert done["hosts"] == [0, 1]
    assert done["tokens"] == [oracle.complete(prompt, 8).token_ids for prompt in prompts]
    assert done["peak"] > 20 and all(done["used"]) and done["sent"] > 0
    assert len({path.parent.name for path in tmp_path.glob("*/host-*/*.kv")}) == 2
