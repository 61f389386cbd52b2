"""Exchanges that take over whole layers, beside the attention exchanges of `attn`."""
