"""Costs: bytes and seconds of exchanges and steps, from plain numbers."""
