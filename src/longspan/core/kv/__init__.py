"""KV blocks: where each of them lies, who uses it, and what is on its way (see `manager`)."""
