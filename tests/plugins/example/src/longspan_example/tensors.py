"""The tensors of `broadcast`. Workers import this module."""

from __future__ import annotations

from longspan.attn.collectives import all_gather
from longspan.attn.exchanges import Call


def broadcast(call: Call) -> None:
    """Send the keys and values of this member to all peers, and attend to the keys of all members."""
    messages = call.all_kv()
    all_gather(call.group, messages)
    for source, message in enumerate(messages):
        call.attend(source, message)
