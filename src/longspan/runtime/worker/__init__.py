"""One rank: a process that owns a device, a model and a KV pool, and computes steps."""
