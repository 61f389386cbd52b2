"""Reports, timelines and traces of simulations. Imported on first use only."""
