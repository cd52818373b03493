"""Checked reading of TOML and JSON tables, whose errors name the file, the line and the key.

A :class:`Table` returns typed values and remembers the keys that were read, so that :meth:`Table.finish` can refuse the others: a misspelt
key is an error, not a default.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from autopar.errors import UsageError
from autopar.util.files import read_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)
else:
    T = TypeVar("T")

Key = str | int

_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\[\]#]+?)\s*\]")
_ASSIGNMENT = re.compile(r"^\s*([A-Za-z0-9_.\"'-]+)\s*=")
_DECODE_PLACE = re.compile(r"^(?P<problem>.*) \(at (?:line (?P<line>\d+), column \d+|end of document)\)$")


class Table:
    """One table of a file; ``keys`` is its path from the root, ``text`` the file's text where there is one."""

    def __init__(self, data: Mapping[str, object], *, file: str, text: str = "", keys: tuple[Key, ...] = ()) -> None:
        self._data, self._file, self._text, self._keys = data, file, text, keys
        self._read: set[str] = set()

    @classmethod
    def load(cls, path: Path) -> Table:
        """The root table of a TOML file.

        Raises:
            UsageError: the file cannot be read, or is not TOML (with the line).
        """
        text = read_text(path)
        try:
            return cls(tomllib.loads(text), file=str(path), text=text)
        except tomllib.TOMLDecodeError as error:
            found = _DECODE_PLACE.match(str(error))
            number = int(found["line"]) if found and found["line"] else len(text.splitlines())
            lines = text.splitlines()
            content = lines[number - 1].strip() if 0 < number <= len(lines) else ""
            raise UsageError(
                "This is not TOML",
                where=f"{path}, line {number}",
                got=f"{found['problem'] if found else error} at '{content}'",
                fix="Correct that line",
            ) from error

    def wrong(self, key: str | None, expected: str, got: object) -> UsageError:
        """The error for a value of ``key`` (``None``: this table itself) that is not what is ``expected``."""
        name = dotted(self._keys if key is None else (*self._keys, key)) or "the file"
        problem = f"Wrong value of '{name}'"
        return UsageError(problem, where=self.place(key), expected=expected, got=got, fix="Change the value")

    def place(self, key: str | None) -> str:
        """File and line of ``key`` (``None``: of the table itself)."""
        keys = self._keys if key is None else (*self._keys, key)
        line = line_of(self._text, keys) if self._text else None
        return self._file + (f", line {line}" if line else "")

    def beside(self, name: str) -> Path:
        """The path of a file that this one names, relative to its folder."""
        return Path(self._file).parent / name

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        self._read.add(key)
        return key in self._data

    def names(self) -> tuple[str, ...]:
        """All keys, in order."""
        return tuple(self._data)

    def raw(self, key: str, default: object = None) -> object:
        """The value as it is; ``default`` where the key is missing.

        Raises:
            UsageError: the key is missing, and there is no default.
        """
        if not self.has(key):
            if default is not None:
                return default
            if near := difflib.get_close_matches(key, set(self._data) - self._read, n=1, cutoff=0.8):
                raise UsageError(f"Unknown key '{near[0]}'", where=self.place(near[0]), fix=f"Did you mean '{key}'?")
            raise UsageError.missing(f"key '{dotted((*self._keys, key))}'", where=self.place(key), fix="Add it")
        return self._data[key]

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self.raw(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a text", repr(value))
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A boolean."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", repr(value))
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """A finite number; greater than zero, or at least zero if not ``positive``."""
        value = self.raw(key, default)
        expected = "a number above zero" if positive else "a number from zero"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, expected, repr(value))
        if not (0 < value < float("inf") or (value == 0 and not positive)):
            raise self.wrong(key, expected, value)
        return float(value)

    def integer(self, key: str, default: int | None = None, *, positive: bool = True) -> int:
        """A whole number; ``1e9`` counts as one."""
        value = self.number(key, default, positive=positive)
        if value != int(value):
            raise self.wrong(key, "a whole number", value)
        return int(value)

    def table(self, key: str) -> Table:
        """A table inside this one."""
        return self._inner(self.raw(key), (key,))

    def tables(self, key: str) -> tuple[Table, ...]:
        """An array of tables; empty if the key is missing."""
        if not self.has(key):
            return ()
        value = self.raw(key)
        if not isinstance(value, list | tuple):
            raise self.wrong(key, "a list of tables", repr(value))
        return tuple(self._inner(item, (key, index)) for index, item in enumerate(value))

    def record(self, kind: type[T], *, may_be_zero: Collection[str] = (), **given: Any) -> T:
        """All of this table as a dataclass, whose fields and defaults say what is read.

        Args:
            kind: of the result; its annotations are text, which ``from __future__ import annotations`` makes of them.
            may_be_zero: numbers that may; the others are above zero, but for those that are zero by default.
            given: fields that are not read here.

        Raises:
            UsageError: a key is missing, unknown or wrong.
        """
        own = {field.name: field.name for field in fields(kind) if field.name not in given}
        given |= self.fields_of(kind, own, may_be_zero=may_be_zero)
        self.finish()
        return kind(**given)

    def fields_of(
        self, kind: type[DataclassInstance], keys: Mapping[str, str], *, may_be_zero: Collection[str] = ()
    ) -> dict[str, Any]:
        """Some fields of a dataclass, by name; as :meth:`record` reads them.

        Args:
            keys: of this table, and which field each is.
        """
        readers: dict[Any, Callable[..., Any]] = {"str": self.text, "bool": self.flag}
        numbers: dict[Any, Callable[..., Any]] = {"int": self.integer, "float": self.number}
        found, by_name = {}, {field.name: field for field in fields(kind)}
        for key, name in keys.items():
            field = by_name[name]
            default = None if field.default is MISSING else field.default
            if field.type in numbers:
                is_positive = default != 0 and name not in may_be_zero
                found[name] = numbers[field.type](key, default, positive=is_positive)
            else:
                found[name] = readers[field.type](key, default)
        return found

    def finish(self) -> None:
        """Refuses keys that were not read.

        Raises:
            UsageError: a key is unknown here.
        """
        for key in self._data:
            if key not in self._read:
                raise UsageError.unknown("key", key, self._read, where=self.place(key))

    def _inner(self, value: object, keys: tuple[Key, ...]) -> Table:
        path = (*self._keys, *keys)
        if not isinstance(value, Mapping):
            at = Table(self._data, file=self._file, text=self._text, keys=path)
            raise at.wrong(None, "a table", repr(value))
        return Table(cast("Mapping[str, object]", value), file=self._file, text=self._text, keys=path)


def dotted(keys: tuple[Key, ...]) -> str:
    """A path as it is written in a message.

    >>> dotted(("group", 1, "nic"))
    'group[1].nic'
    """
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def line_of(text: str, keys: tuple[Key, ...]) -> int | None:
    """The line (from 1) of the longest part of ``keys`` that is written down in the TOML text.

    >>> line_of('a = 1' + chr(10) + '[[b]]' + chr(10) + 'c = 2', ("b", 0, "c"))
    3
    >>> line_of('a = 1' + chr(10) + '[[b]]', ("b",))
    2
    """
    best, best_length, counts = None, 0, dict[tuple[Key, ...], int]()
    current: tuple[Key, ...] = ()
    for number, line in enumerate(text.splitlines(), start=1):
        header, assignment = _HEADER.match(line), _ASSIGNMENT.match(line)
        if header:
            current = _header_path(header[2], header[1] == "[[", counts)
            here = current
        elif assignment:
            here = (*current, *_parts(assignment[1]))
        else:
            continue
        if here[: len(keys)] == keys:  # the key itself, or the first of its array of tables
            return number
        if len(here) > best_length and keys[: len(here)] == here:
            best, best_length = number, len(here)
    return best


def _parts(name: str) -> list[str]:
    return [part.strip().strip("\"'") for part in name.split(".")]


def _header_path(name: str, is_array: bool, counts: dict[tuple[Key, ...], int]) -> tuple[Key, ...]:
    path: tuple[Key, ...] = ()
    parts = _parts(name)
    for index, part in enumerate(parts):
        path = (*path, part)
        if is_array and index == len(parts) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path
