"""Models from Hugging Face transformers: sources, the shared weight store, sharding and the adapter."""
