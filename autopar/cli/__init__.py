"""The shell command ``autopar``. Results go to stdout, progress and errors to stderr; ``docs`` describes its contract."""

from autopar.cli.app import main

__all__ = ["main"]
