"""Measurements of prompts, decodes and links on this machine, and their files."""
