"""The command line has a file per verb; importing it loads no torch."""
