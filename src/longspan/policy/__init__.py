"""This package has the policies and their baselines. `policy.registry` finds them by name."""
