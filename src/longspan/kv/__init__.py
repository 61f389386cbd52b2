"""Paged KV pools: the tensors behind the block numbers."""
