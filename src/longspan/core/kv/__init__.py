"""KV blocks: their pools and contents, the requests that use them, and their moves (see `manager`)."""
