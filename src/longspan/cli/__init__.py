"""The command line. Importing it loads no torch."""

from longspan.cli.app import app, main
from longspan.cli.output import stats_table, stream_to_stdout

__all__ = ["app", "main", "stats_table", "stream_to_stdout"]
