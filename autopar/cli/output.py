"""What commands share with their surroundings: output of results, remarks, progress, and environment variables (read only here)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO

from autopar.util.files import default_cache_dir, write_text

_results: ContextVar[TextIO | None] = ContextVar("results", default=None)


@contextmanager
def json_alone() -> Iterator[None]:
    """Send all output of the body, that of child processes too, to stderr; only :func:`print_result` writes to stdout."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results, redirect_stdout(sys.stderr):
        token = _results.set(results)
        os.dup2(2, 1)
        try:
            yield
        finally:
            _results.reset(token)
            os.dup2(results.fileno(), 1)


def print_result(as_json: bool, summary: Callable[[], object], text: Callable[[], str]) -> None:
    """Print the result of a command, as JSON or as text; the other form is not computed."""
    if as_json:
        (_results.get() or sys.stdout).write(json.dumps(summary(), indent=2, allow_nan=False) + "\n")
    else:
        sys.stdout.write(text().rstrip("\n") + "\n")


def warn(text: str) -> None:
    """Print a remark on stderr."""
    sys.stderr.write(f"{text}\n")


def write_report(path: Path, text: str) -> None:
    """Write a result to a file, and say so on stderr.

    Raises:
        UsageError: the file cannot be written.
    """
    write_text(path, text)
    warn(f"wrote {path}")


def cache_dir() -> Path | None:
    """Return the folder with measurements of this machine, from ``AUTOPAR_CACHE``; None for the user's cache directory."""
    value = os.environ.get("AUTOPAR_CACHE", "")
    return Path(value).expanduser() if value else None


def kept_dir() -> Path:
    """Return the folder with measurements and graphs."""
    return cache_dir() or default_cache_dir()


@contextmanager
def progress(text: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on stderr while the body runs, if stderr is a terminal.

    Yields:
        ``advance(what, done, total)``; ``total`` is 0 while it is unknown.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=None)

        def advance(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield advance
