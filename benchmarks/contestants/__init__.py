"""One process per contestant is measured, all driven in the same way.

`serving` and `vllm_cpu` run in vLLM's own environment, too: neither they nor this file import longspan.
"""
