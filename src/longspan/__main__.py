"""``python -m longspan`` is the command ``longspan``."""

from longspan.cli import main

main()
