"""Attention over paged and exchanged keys and values."""
