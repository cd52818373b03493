"""Reads files, writes them atomically (other processes may read them), and locates shipped data and autopar's sources."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EINVAL, EISDIR
from pathlib import Path
from typing import Any

from autopar.errors import CHECK_FILE, AutoparError, UsageError, reason


def check_places(**places: object) -> None:
    """Check that files and folders are given as paths; an empty text would be the folder in which the program was started.

    Raises:
        UsageError: names the first that is none.
    """
    for name, place in places.items():
        if not isinstance(place, str | Path) or not str(place):
            raise UsageError(f"{name} takes a path, but got {place!r}", fix=f"Write for example {name}='folder'")


def write_text(path: Path, text: str, *, make_folder: bool = False) -> None:
    """Write a text in UTF-8, completely or not at all: to a temporary file in the folder of ``path``, which is then renamed.

    Args:
        make_folder: create the folder of ``path`` if it does not exist.

    Raises:
        UsageError: the file cannot be written.
    """
    with _temporary_file(path, make_folder=make_folder) as (temporary, target):
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(target)


def read_text(path: Path, *, fix: str = CHECK_FILE) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark.

    Args:
        fix: the remedy in the error.

    Raises:
        UsageError: the file cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError.unreadable(path, error, fix=fix) from error


def check_same(
    what: str, path: Path, *, expected: object, got: object, fix: str = "Write to another file, or remove this one"
) -> None:
    """Check that a file from which a run continues belongs to it: its ``what`` (device, job or title) is the expected one.

    Raises:
        UsageError: it is not.
    """
    if got != expected:
        raise UsageError.mismatch(what, where=str(path), expected=repr(expected), got=repr(got), fix=fix)


def check_writable(path: Path, *, make_folder: bool = False) -> None:
    """Check before a long computation that its result can be written to ``path``.

    Args:
        make_folder: create the folder of ``path`` if it does not exist.

    Raises:
        UsageError: the folder does not exist or is not writable, or ``path`` is there and no file.
    """
    with _temporary_file(path, make_folder=make_folder) as (temporary, _):
        temporary.open("x").close()
        temporary.unlink()


@contextmanager
def _temporary_file(path: Path, *, make_folder: bool) -> Iterator[tuple[Path, Path]]:
    """Provide the path of a temporary file, which is removed if the body fails, and the path that it is to be renamed to.

    That is ``path``, or the file to which it links. A rename would put a file in the place of a device, and of the links to streams in /dev.

    Raises:
        UsageError: the body, or creating the folder, raises an OSError; ``path`` is a folder, a device or a stream.
    """
    target = path.resolve() if path.is_symlink() else path
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    try:
        if path.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        if (target != path and path.absolute().is_relative_to("/dev")) or (target.exists() and not target.is_file()):
            raise OSError(EINVAL, "It is a device or a stream, and no file")
        if make_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        yield temporary, target
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        fix = "Choose a path in an existing folder that can be written to"
        raise UsageError(f"Cannot write {path}", got=reason(error), fix=fix) from error


def as_toml(data: dict[str, Any], *, comment: str = "") -> str:
    """Return ``data`` as TOML, behind a first line with ``comment``."""
    import tomli_w  # a GPU machine that only measures ('make gpu') may not have it

    return (f"# {comment}\n" if comment else "") + tomli_w.dumps(data)


def write_toml(path: Path, data: dict[str, Any], *, comment: str = "") -> None:
    """Write ``data`` as TOML, behind a first line with ``comment``; the folder is created if it does not exist."""
    write_text(path, as_toml(data, comment=comment), make_folder=True)


def write_json(path: Path, data: dict[str, Any], *, make_folder: bool = False) -> None:
    """Write ``data`` as JSON that people can read; see :func:`dumps` and :func:`write_text`."""
    write_text(path, dumps(data) + "\n", make_folder=make_folder)


_LINE_LENGTH = 110
"""Columns of a line of a JSON file."""


def dumps(data: object) -> str:
    """Return JSON that people can read: short values are on one line, and long lists of words are filled like a paragraph."""
    return _write(data, 0, 0)


def _write(value: Any, depth: int, lead: int) -> str:
    """Return the JSON of a value; ``lead`` is the number of characters in front of it on its line."""
    line = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if not isinstance(value, dict | list) or not value or (depth > 0 and lead + len(line) < _LINE_LENGTH):
        return line
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict):
        items = []
        for key, item in value.items():
            head = f"{json.dumps(key, ensure_ascii=False)}: "
            items.append(f"{inner}{head}{_write(item, depth + 1, len(inner) + len(head))}")
        return "{\n" + ",\n".join(items) + f"\n{outer}}}"
    if any(isinstance(item, dict | list) for item in value):
        return "[\n" + ",\n".join(inner + _write(item, depth + 1, len(inner)) for item in value) + f"\n{outer}]"
    return "[\n" + _fill([json.dumps(item, ensure_ascii=False) for item in value], inner) + f"\n{outer}]"


def _fill(words: list[str], indent: str) -> str:
    """Return words with commas as a paragraph of indented lines."""
    lines, line = [], indent
    for index, word in enumerate(words):
        piece = word + ("," if index < len(words) - 1 else "")
        if line != indent and len(line) + 1 + len(piece) > _LINE_LENGTH:
            lines.append(line)
            line = indent
        line += piece if line == indent else f" {piece}"
    return "\n".join([*lines, line])


PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package autopar."""

_NOT_PRICED = ("cli", "report", "runtime", "lower", "benchmark", "validate", "measure", "verification")
"""Folders of the package on which neither graphs nor predicted times depend."""


def sources() -> str:
    """Return a hash of the sources on which graphs and predicted times depend, so that results of different versions do not mix."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE)
        if name.parts[0] not in _NOT_PRICED:
            digest.update(f"{name.as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def child_environment() -> dict[str, str]:
    """Return the environment for a Python child process: one thread, and all modules that this process can import, autopar included."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(PACKAGE.parent), *sys.path])}


def default_cache_dir() -> Path:
    """Return the default folder for measurements, rules and graphs."""
    return Path.home() / ".cache" / "autopar"


def data_directory(name: str) -> Path:
    """Return the data directory ``name``: ``autopar/_data/NAME`` if installed, or ``NAME`` next to the package in a checkout.

    Raises:
        AutoparError: neither exists; the installation is broken.

    >>> (data_directory("profiles") / "cpu.toml").is_file()
    True
    """
    candidates = (PACKAGE / "_data" / name, PACKAGE.parent / name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise AutoparError.missing(
        f"data directory '{name}' (neither {' nor '.join(str(candidate) for candidate in candidates)} is there)",
        fix="Install autopar again",
    )


def data_files(name: str) -> dict[str, Path]:
    """Return the TOML files of a data directory by their names without ``.toml``, sorted.

    >>> "h100-sxm5-80gb" in data_files("profiles")
    True
    """
    return {path.stem: path for path in sorted(data_directory(name).glob("*.toml"))}
