"""Simulation: everything after a step is emitted, replaced by a clock and a cost."""
