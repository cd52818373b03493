"""The revision of the checkout that runs, for pages that say what they were made from."""

from __future__ import annotations

import subprocess
from pathlib import Path

_FOLDER = Path(__file__).parents[1]


def revision() -> str:
    """The commit, short, with ``+`` where tracked files differ from it; ``unknown`` outside of a checkout."""
    found = _git("rev-parse", "--short=7", "HEAD")
    if not found:
        return "unknown"
    return found + "+" * bool(
        _git("status", "--porcelain", "--untracked-files=no", "--", "autopar", "profiles", "search")
    )


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(_FOLDER), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""
