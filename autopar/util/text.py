"""Texts of errors: names that somebody may have meant, the first line of another error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, known: Iterable[str]) -> str:
    """A remedy: the closest known name if there is one, and all of them.

    >>> closest("h10", ["cpu", "h100"])
    "did you mean 'h100'? known: cpu, h100"
    """
    names = sorted(known)
    match = [known for known in names if name and known.lower().startswith(name.lower())]
    match = match or difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean '{match[0]}'? " if match else ""
    return f"{hint}known: {', '.join(names) or 'none'}"


def first_line(error: BaseException) -> str:
    """What an exception says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
