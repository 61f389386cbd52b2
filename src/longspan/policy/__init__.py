"""Policies and their baselines. `policy.registry` finds them by name."""
