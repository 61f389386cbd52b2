"""The command line, with one file per verb. Importing it loads no torch."""
