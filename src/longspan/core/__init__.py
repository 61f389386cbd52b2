"""The core that all packages share: requests, runs, blocks, steps, the protocols and the engine loop. No torch."""
