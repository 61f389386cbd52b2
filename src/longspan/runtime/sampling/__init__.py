"""Sampling: from logits to tokens, on the rank that computes them."""
