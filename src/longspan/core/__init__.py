"""The core that every other room shares: requests, runs, blocks, steps, the protocols and the engine loop. No torch."""
