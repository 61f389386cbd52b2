"""Chunkwise dynamic sequence parallelism: the planner of Tetris, and what runs its plans."""
