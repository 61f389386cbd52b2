"""A program on a host of a Ray cluster: runs one engine, and prints facts about its answers as JSON.

    hosts_driver.py '{"model": ..., "options": {...}, "runs": [{"prompt": [...], "max_tokens": 4, "policy": {...}}]}'

`policy` sets options of the policy `context`. A run with an exchange also has the bytes that a prompt's step sends, and
those of the formula.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from exchange_bytes import bytes_of_layer, tokens_of_members

from longspan import LLM, SamplingParams


def run(llm: LLM, prompt: list[int], max_tokens: int, policy: dict[str, str] | None) -> dict[str, Any]:
    if policy is not None:
        llm.set_policy("context", {"threshold": "0", **policy})
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    [output] = llm.generate([prompt], greedy, use_tqdm=False)
    facts: dict[str, Any] = {"tokens": output.outputs[0].token_ids}
    if policy is not None:
        sent, crossed = llm.bytes_exchanged, llm.bytes_between_hosts
        [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        config = llm.engine.config
        exchange, members = policy["exchange"], config.cluster.num_instances
        tokens = tokens_of_members(output, exchange, len(prompt), members, config.block_size)
        facts["formula"] = {exchange: bytes_of_layer(llm, exchange, tokens) * llm.info.num_layers}
        facts["sent"] = _sent(llm.bytes_exchanged, sent)
        facts["crossed"] = _sent(llm.bytes_between_hosts, crossed)
    return facts


def _sent(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    sent = {kind: count - before.get(kind, 0) for kind, count in after.items() if kind != "total"}
    return {kind: count for kind, count in sent.items() if count}


def main(order: dict[str, Any]) -> dict[str, Any]:
    shared = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 16, "threads_per_rank": 1}
    with LLM(order["model"], executor="ray", policy="context", **{**shared, **order["options"]}) as llm:
        runs = [run(llm, each["prompt"], each["max_tokens"], each.get("policy")) for each in order["runs"]]
        cluster, kv, shape = llm.engine.config.cluster, llm.engine.kv, llm.facts.shape
        assert shape is not None
        return {
            "runs": runs,
            "hosts": cluster.hosts,
            "device_tokens": sum(cluster.num_blocks) * llm.engine.config.block_size,
            "used": [kv.account.usage([pool]).num_cached for pool in cluster.host_pools],
            "all": _sent(llm.bytes_exchanged, {}),
            "all_crossed": _sent(llm.bytes_between_hosts, {}),
            "layers": llm.info.num_layers,
            "hidden_size": shape.hidden_size,
        }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
