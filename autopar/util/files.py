"""Files are written whole or not at all: another process may read them at any time."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from autopar.errors import UsageError, reason


def write_text(path: Path, text: str, *, make_folder: bool = False) -> None:
    """Under a temporary name beside ``path``, then renamed.

    Args:
        make_folder: make the folder that ``path`` is in, where it is not there.

    Raises:
        UsageError: the file cannot be written.
    """
    temporary = _beside(path)
    try:
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise _refused(path, error) from error


def check_writable(path: Path, *, make_folder: bool = False) -> None:
    """To be asked before a long computation whose result goes to ``path``.

    Raises:
        UsageError: its folder is not there or cannot be written to, or it is a folder itself.
    """
    temporary = _beside(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        if make_folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        temporary.open("x").close()
        temporary.unlink()
    except OSError as error:
        raise _refused(path, error) from error


def _beside(path: Path) -> Path:
    return path.parent / f".{path.name}.{os.getpid()}.tmp"


def _refused(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"Cannot write {path}", got=reason(error), fix="Choose a path in an existing folder that can be written to"
    )


def as_toml(data: dict[str, Any], *, comment: str = "") -> str:
    """``data`` as TOML under ``comment``."""
    import tomli_w  # a GPU machine that only measures ('make gpu') may not have it

    return (f"# {comment}\n" if comment else "") + tomli_w.dumps(data)


def write_toml(path: Path, data: dict[str, Any], *, comment: str = "") -> None:
    """``data`` as TOML under ``comment``; the folder is made where it is not there."""
    write_text(path, as_toml(data, comment=comment), make_folder=True)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """``data`` as JSON, one entry of its lists a line; the folder is made where it is not there."""
    parts = []
    for key, value in data.items():
        if isinstance(value, list) and value:
            inner = ",\n".join(json.dumps(item, separators=(",", ":")) for item in value)
            parts.append(f"{json.dumps(key)}: [\n{inner}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    write_text(path, "{\n" + ",\n".join(parts) + "\n}\n", make_folder=True)
