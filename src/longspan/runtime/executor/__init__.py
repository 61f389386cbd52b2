"""The control plane: starts workers, sends them steps, and takes their completions."""
