"""``python -m autopar``: the shell command where it is not on the path."""

from autopar.cli import main

main()
