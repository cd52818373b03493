"""Runs the shell command as ``python -m autopar``, for environments in which it is not on the path."""

from autopar.cli import main

main()
