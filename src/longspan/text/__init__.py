"""Prompts and chat templates to token ids, tokens to text, and grammars."""
