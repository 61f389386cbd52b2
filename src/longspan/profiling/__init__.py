"""Times prompts, decodes and links on the machine at hand, and keeps what was measured."""
