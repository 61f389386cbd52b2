"""Baselines that the papers compare with. Each is a policy of the registry, imported on first use."""
