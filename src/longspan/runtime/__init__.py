"""Real execution: worker processes, one per rank, and the executor that drives them."""
