"""What the commands share: printing results, progress on stderr, and the environment, which is read here alone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def print_json(value: object) -> None:
    """Exactly one JSON object on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_text(text: str) -> None:
    """A result for people, on stdout."""
    sys.stdout.write(text.rstrip("\n") + "\n")


def warn(text: str) -> None:
    """A remark on stderr."""
    sys.stderr.write(f"{text}\n")


def write_report(path: Path, text: str) -> None:
    """A result in a file, and a remark that it is there.

    Raises:
        UsageError: the file cannot be written.
    """
    from autopar.util.files import write_text

    write_text(path, text)
    warn(f"wrote {path}")


def cache_dir() -> Path | None:
    """``AUTOPAR_CACHE``: where measurements of this machine are kept; None for the user's cache directory."""
    value = os.environ.get("AUTOPAR_CACHE", "")
    return Path(value).expanduser() if value else None


def kept_dir() -> Path:
    """The folder that keeps measurements, rules and graphs."""
    return cache_dir() or Path.home() / ".cache" / "autopar"


@contextmanager
def progress(text: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr while the body runs; nothing where stderr is no terminal.

    Yields:
        ``advance(what, done, total)``; ``total`` 0 while it is not known.
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
