"""Costs: bytes and seconds of exchanges, from plain numbers, and the choices that follow from them."""
