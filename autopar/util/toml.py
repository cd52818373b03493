"""Reads TOML and JSON tables with checks, whose errors name the file, the line and the key.

A :class:`Table` returns typed values and records the keys that were read. :meth:`Table.finish` refuses all other keys, so that a misspelt
key is an error and not a silent default.
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
    """One table of a file.

    Args:
        data: the keys and values.
        file: the name of the file, for errors.
        text: the text of a TOML file, in which errors find the line; empty if there is none.
        keys: the path of the table from the root.
    """

    def __init__(self, data: Mapping[str, object], *, file: str, text: str = "", keys: tuple[Key, ...] = ()) -> None:
        self._data, self._file, self._text, self._keys = data, file, text, keys
        self._read: set[str] = set()

    @classmethod
    def load(cls, path: Path) -> Table:
        """Return the root table of a TOML file.

        Raises:
            UsageError: the file cannot be read or is not TOML; the error names the line.
        """
        text = read_text(path)
        try:
            return cls(tomllib.loads(text), file=str(path), text=text)
        except tomllib.TOMLDecodeError as error:
            match = _DECODE_PLACE.match(str(error))
            number = int(match["line"]) if match and match["line"] else len(text.splitlines())
            lines = text.splitlines()
            content = lines[number - 1].strip() if 0 < number <= len(lines) else ""
            raise UsageError(
                "This is not TOML",
                where=f"{path}, line {number}",
                got=f"{match['problem'] if match else error} at '{content}'",
                fix="Correct that line",
            ) from error

    def wrong(self, key: str | None, expected: str, got: object) -> UsageError:
        """Return the error for a wrong value of ``key``, or of this table itself if ``key`` is None."""
        name = dotted(self._keys if key is None else (*self._keys, key)) or "the file"
        problem = f"Wrong value of '{name}'"
        return UsageError(problem, where=self.place(key), expected=expected, got=got, fix="Change the value")

    def place(self, key: str | None) -> str:
        """Return the file and the line of ``key``, or of this table itself if ``key`` is None."""
        keys = self._keys if key is None else (*self._keys, key)
        line = line_of(self._text, keys) if self._text else None
        return self._file + (f", line {line}" if line else "")

    def beside(self, name: str) -> Path:
        """Return the path of a file that is named relative to the folder of this file."""
        return Path(self._file).parent / name

    def has(self, key: str) -> bool:
        """Return whether the table has a key, which counts as read."""
        self._read.add(key)
        return key in self._data

    def names(self) -> tuple[str, ...]:
        """Return all keys, in order."""
        return tuple(self._data)

    def raw(self, key: str, default: object = None) -> object:
        """Return the unchecked value of a key, or ``default`` if the key is missing.

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
        """Return the string of a key."""
        value = self.raw(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a text", repr(value))
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return the boolean of a key."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", repr(value))
        return value

    def number(self, key: str, default: float | None = None, *, positive: bool = True) -> float:
        """Return the finite number of a key. It must be above zero, or at least zero if not ``positive``."""
        value = self.raw(key, default)
        expected = "a number above zero" if positive else "a number from zero"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, expected, repr(value))
        if not (0 < value < float("inf") or (value == 0 and not positive)):
            raise self.wrong(key, expected, value)
        return float(value)

    def integer(self, key: str, default: int | None = None, *, positive: bool = True) -> int:
        """Return the integer of a key, which may be written as ``1e9``; bounds are those of :meth:`number`."""
        value = self.number(key, default, positive=positive)
        if value != int(value):
            raise self.wrong(key, "a whole number", value)
        return int(value)

    def table(self, key: str) -> Table:
        """Return the inner table of a key."""
        return self._inner(self.raw(key), (key,))

    def tables(self, key: str) -> tuple[Table, ...]:
        """Return the tables of an array; none if the key is missing."""
        if not self.has(key):
            return ()
        value = self.raw(key)
        if not isinstance(value, list | tuple):
            raise self.wrong(key, "a list of tables", repr(value))
        return tuple(self._inner(item, (key, index)) for index, item in enumerate(value))

    def record(self, kind: type[T], *, may_be_zero: Collection[str] = (), **given: Any) -> T:
        """Return this table as a dataclass, whose fields and defaults decide which keys are read.

        Args:
            kind: the dataclass, with fields of the types str, bool, int and float. Its annotations must be strings, as in a module with
                ``from __future__ import annotations``.
            may_be_zero: the numbers that may be zero. All others must be above zero, unless their default is zero.
            given: the values of fields that are not read from the table.

        Raises:
            UsageError: a key is missing or unknown, or has a wrong value.
        """
        keys = {field.name: field.name for field in fields(kind) if field.name not in given}
        given |= self.fields_of(kind, keys, may_be_zero=may_be_zero)
        self.finish()
        return kind(**given)

    def fields_of(
        self, kind: type[DataclassInstance], keys: Mapping[str, str], *, may_be_zero: Collection[str] = ()
    ) -> dict[str, Any]:
        """Return some fields of a dataclass by name, read as in :meth:`record`.

        Args:
            keys: the name of the field for each key of this table.
        """
        readers: dict[Any, Callable[..., Any]] = {"str": self.text, "bool": self.flag}
        numbers: dict[Any, Callable[..., Any]] = {"int": self.integer, "float": self.number}
        values, by_name = {}, {field.name: field for field in fields(kind)}
        for key, name in keys.items():
            field = by_name[name]
            default = None if field.default is MISSING else field.default
            if field.type in numbers:
                is_positive = default != 0 and name not in may_be_zero
                values[name] = numbers[field.type](key, default, positive=is_positive)
            else:
                values[name] = readers[field.type](key, default)
        return values

    def finish(self) -> None:
        """Check that all keys were read.

        Raises:
            UsageError: a key is unknown.
        """
        for key in self._data:
            if key not in self._read:
                raise UsageError.unknown("key", key, self._read, where=self.place(key))

    def _inner(self, value: object, keys: tuple[Key, ...]) -> Table:
        path = (*self._keys, *keys)
        if not isinstance(value, Mapping):
            inner = Table(self._data, file=self._file, text=self._text, keys=path)
            raise inner.wrong(None, "a table", repr(value))
        return Table(cast("Mapping[str, object]", value), file=self._file, text=self._text, keys=path)


def dotted(keys: tuple[Key, ...]) -> str:
    """Return a path of keys as messages write it.

    >>> dotted(("group", 1, "nic"))
    'group[1].nic'
    """
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def line_of(text: str, keys: tuple[Key, ...]) -> int | None:
    """Return the line, counted from 1, of the longest prefix of ``keys`` that a TOML text contains; None if it contains none.

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
            path = current
        elif assignment:
            path = (*current, *_parts(assignment[1]))
        else:
            continue
        if path[: len(keys)] == keys:  # the key itself, or the first of its array of tables
            return number
        if len(path) > best_length and keys[: len(path)] == path:
            best, best_length = number, len(path)
    return best


def _parts(name: str) -> list[str]:
    """Return the parts of a dotted key."""
    return [part.strip().strip("\"'") for part in name.split(".")]


def _header_path(name: str, is_array: bool, counts: dict[tuple[Key, ...], int]) -> tuple[Key, ...]:
    """Return the path of a header ``[name]`` or ``[[name]]``; ``counts`` has the last index of each array of tables, and is updated."""
    path: tuple[Key, ...] = ()
    parts = _parts(name)
    for index, part in enumerate(parts):
        path = (*path, part)
        if is_array and index == len(parts) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = (*path, counts[path])
    return path
