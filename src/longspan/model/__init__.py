"""Models from Hugging Face transformers: sources, the shared weight store, the adapter and the tokenizer."""
