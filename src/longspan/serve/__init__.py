"""The OpenAI-compatible server: an API server, and the engine core in a process of its own."""
