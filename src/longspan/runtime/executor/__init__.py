"""The control plane: starts workers, sends them steps, and receives their completions."""
