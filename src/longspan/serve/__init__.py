"""The OpenAI-compatible server: an HTTP face, and the engine in a process of its own."""
