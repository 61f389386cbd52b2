"""KV pools, and KV that moves between ranks."""
