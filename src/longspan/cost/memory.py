"""The memory that engines use, by default: shares and bounds that simulations assume, too."""

CPU_KV_BYTES = 4 * 2**30
"""Memory that the ranks on a CPU share for KV when the user names none, if so much is available."""
CPU_STEP_SHARE = 0.25
"""The part of that which a rank's activations may take beside it, so that a prompt is one step."""
USED_MEMORY = 0.9
"""The part of a device's memory that is used, as vLLM's gpu_memory_utilization."""
