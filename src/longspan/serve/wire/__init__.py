"""OpenAI's and vLLM's JSON, in and out, without HTTP: bodies to engine requests, deltas to answers."""
