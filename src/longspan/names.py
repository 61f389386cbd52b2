"""Names for unknown names in errors: the parameter that serves the same purpose, or else a similar name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

_MENTION = re.compile(r"`(\w+)`")

_OTHERS = {
    "tensor_parallel_size": "tp",
    "tp_size": "tp",
    "pipeline_parallel_size": "pp",
    "pp_size": "pp",
    "data_parallel_size": "instances",
    "dp_size": "instances",
    "decode_context_parallel_size": "instances",
    "prefill_context_parallel_size": "instances",
    "distributed_executor_backend": "executor",
    "gpu_memory_utilization": "kv_cache_memory_bytes",
    "mem_fraction_static": "kv_cache_memory_bytes",
    "swap_space": "host_kv_gib",
    "cpu_offload_gb": "host_kv_gib",
    "kv_offloading_size": "host_kv_gib",
    "max_seq_len": "max_model_len",
    "context_length": "max_model_len",
    "chunked_prefill_size": "max_num_batched_tokens",
    "enable_chunked_prefill": "policy",
    "scheduling_policy": "policy",
    "max_running_requests": "max_num_seqs",
    "page_size": "block_size",
    "model_path": "model",
    "uds": "host",
    "max_new_tokens": "max_tokens",
    "num_return_sequences": "n",
    "best_of": "n",
    "do_sample": "temperature",
    "stop_strings": "stop",
    "eos_token_id": "stop_token_ids",
    "guided_json": "structured_outputs",
    "guided_regex": "structured_outputs",
    "guided_choice": "structured_outputs",
    "guided_grammar": "structured_outputs",
    "guided_decoding": "structured_outputs",
    "json_schema": "structured_outputs",
    "input_len": "workload",
    "random_input_len": "workload",
    "random_output_len": "output_len",
    "request_rate": "rate",
    "num_prompts": "num_requests",
}
"""Parameters of vLLM, SGLang and transformers, with the parameter of longspan that serves the same purpose."""


_MIN_PREFIX = 3
"""A longer name is taken as the beginning of a known name."""


def closest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name for an unknown one: the name for the same purpose, or else a similar name."""
    import difflib  # noqa: PLC0415 - an error

    known = list(known)
    plain = name.lstrip("-").replace("-", "_")
    if (ours := _OTHERS.get(plain)) in known:
        return ours
    begun = [full for full in known if len(plain) > _MIN_PREFIX and full.startswith(plain)]
    if len(begun) == 1:
        return begun[0]
    return next(iter(difflib.get_close_matches(plain, known, n=1, cutoff=0.7)), None)


def remedy(given: Mapping[str, object], known: Collection[str]) -> str:
    """Return `: use NAME` for the first unknown argument that has a known counterpart, or else the known names."""
    names = (closest(name, known) for name in given if name not in known)
    return next((f": use {name}" for name in names if name is not None), f": choose from {', '.join(known)}")


def choices(value: object, known: Iterable[str]) -> str:
    """Return the remedy for a value that is none of the known ones: all of them, and a similar one."""
    known = list(known)
    similar = closest(value, known) if isinstance(value, str) else None
    meant = "" if similar is None else f" ({similar} is similar)"
    return f"choose from {', '.join(known)}{meant}"


def renamed(message: str, names: Mapping[str, str]) -> str:
    """Return a message with other names of the parameters in backticks. Unknown names only lose the backticks."""
    return _MENTION.sub(lambda match: names.get(match[1], match[1]), message)
