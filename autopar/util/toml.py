"""Reads TOML and JSON tables with checks, whose errors name the file, the line and the key.

A :class:`Table` returns typed values and records the keys that were read. :meth:`Table.finish` refuses all other keys, so that a misspelt
key is an error and not a silent default.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from autopar.errors import UsageError, shown
from autopar.util.files import read_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    T = TypeVar("T", bound=DataclassInstance)
else:
    T = TypeVar("T")

Key = str | int

CHANGE = "Change the value"
"""The remedy for a wrong value."""

MAY_BE_ZERO = {"may_be_zero": True}
"""Metadata of a dataclass's field whose number may be zero in a table."""
_LEAST = 1e-30
"""Least number but zero, and its inverse the largest: products and quotients of what files say are then finite."""
RARE = {"rare": True}
"""Metadata of a field that a table contains only if it differs from its default."""

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
        only_finite: whether :meth:`record` takes numbers of any size, and whole numbers from zero; otherwise its fields decide.
    """

    def __init__(
        self,
        data: Mapping[Any, object],
        *,
        file: str,
        text: str = "",
        keys: tuple[Key, ...] = (),
        only_finite: bool = False,
    ) -> None:
        self._data, self._file, self._text, self._keys, self._only_finite = data, file, text, keys, only_finite
        self._read: set[Key] = set()

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
        except (ValueError, RecursionError) as error:  # a number of too many digits, lists that are nested too deeply
            raise UsageError.unreadable(path, error) from error

    def wrong(self, key: Key | None, expected: str, got: object) -> UsageError:
        """Return the error for a wrong value of ``key``, or of this table itself if ``key`` is None."""
        name = dotted(self._keys if key is None else (*self._keys, key)) or "the file"
        problem = f"Wrong value of '{name}'"
        return UsageError(problem, where=self.place(key), expected=expected, got=got, fix=CHANGE)

    def place(self, key: Key | None) -> str:
        """Return the file and the line of ``key``, or of this table itself if ``key`` is None."""
        keys = self._keys if key is None else (*self._keys, key)
        line = line_of(self._text, keys) if self._text else None
        return self._file + (f", line {line}" if line else "")

    def beside(self, name: str) -> Path:
        """Return the path of a file that is named relative to the folder of this file."""
        return Path(self._file).parent / name

    def has(self, key: Key) -> bool:
        """Return whether the table has a key, which counts as read."""
        self._read.add(key)
        return key in self._data

    def names(self) -> tuple[str, ...]:
        """Return all keys, in order."""
        return tuple(self._data)

    def raw(self, key: Key, default: object = None) -> object:
        """Return the unchecked value of a key, or ``default`` if the key is missing.

        Raises:
            UsageError: the key is missing, and there is no default.
        """
        if not self.has(key):
            if default is not None:
                return default
            if near := difflib.get_close_matches(str(key), set(self._data) - self._read, n=1, cutoff=0.8):
                raise UsageError(f"Unknown key '{near[0]}'", where=self.place(near[0]), fix=f"Did you mean '{key}'?")
            raise UsageError.missing(f"key '{dotted((*self._keys, key))}'", where=self.place(key), fix="Add it")
        return self._data[key]

    def text(self, key: Key, default: str | None = None) -> str:
        """Return the string of a key."""
        value = self.raw(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a text", shown(value))
        return value

    def flag(self, key: Key, default: bool | None = None) -> bool:
        """Return the boolean of a key."""
        value = self.raw(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", shown(value))
        return value

    def number(self, key: Key, default: float | None = None, *, positive: bool = True) -> float:
        """Return the finite number of a key. It must be above zero, or at least zero if not ``positive``."""
        value = self._finite(key, default)
        if value and not _LEAST <= abs(value) <= 1 / _LEAST:
            raise self.wrong(key, f"zero, or a number between {_LEAST:g} and {1 / _LEAST:g}", value)
        if value < 0 or (value == 0 and positive):
            raise self.wrong(key, f"a number {'above' if positive else 'from'} zero", self.raw(key, default))
        return value

    def _finite(self, key: Key, default: float | None = None) -> float:
        """Return the finite number of a key."""
        value = self.raw(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(key, "a number", shown(value))
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise self.wrong(key, "a finite number", "a larger one" if isinstance(value, int) else value)
        return number

    def integer(self, key: Key, default: int | None = None, *, positive: bool = True) -> int:
        """Return the integer of a key, which may be written as ``1e9``; bounds are those of :meth:`number`."""
        value, exact = self.number(key, default, positive=positive), self.raw(key, default)
        if value != int(value):
            raise self.wrong(key, "a whole number", value)
        return exact if isinstance(exact, int) else int(value)

    def table(self, key: Key) -> Table:
        """Return the inner table of a key."""
        value = self.raw(key)
        if not isinstance(value, Mapping):
            raise self.wrong(key, "a table", shown(value))
        return self._inner(value, key)

    def tables(self, key: str) -> tuple[Table, ...]:
        """Return the tables of an array; none if the key is missing."""
        if not self.has(key):
            return ()
        items = self._items(key)
        return tuple(items.table(index) for index in items.names())

    def record(self, kind: type[T], **given: Any) -> T:
        """Return this table as a dataclass, whose fields decide which keys are read.

        A field is a text, a boolean, a number, a literal, a dataclass (an inner table), a tuple or list of such values, or one of these or
        None; a dict, and values of type Any, are not checked. A class with a function ``from_table`` or ``from_text`` is read by it. Metadata
        of a field: ``key`` is its key if that is not its name, and numbers must be above zero unless their default is zero or the metadata
        are :data:`MAY_BE_ZERO`, and not above ``at_most``.

        Args:
            kind: the dataclass.
            given: the values of fields that are not read from the table.

        Raises:
            UsageError: a key is missing or unknown, or has a wrong value.
        """
        keys = {field.metadata.get("key", field.name): field.name for field in fields(kind) if field.name not in given}
        given |= self.fields_of(kind, keys)
        self.finish()
        try:
            return kind(**given)
        except UsageError as error:
            raise self._here(error, None) from error

    def fields_of(self, kind: type[DataclassInstance], keys: Mapping[str, str]) -> dict[str, Any]:
        """Return some fields of a dataclass by name, read as in :meth:`record`.

        Args:
            keys: the name of the field for each key of this table.
        """
        hints, by_name = _hints(kind), {field.name: field for field in fields(kind)}
        return {name: self._field(key, by_name[name], hints[name]) for key, name in keys.items()}

    def _field(self, key: str, field: Field[Any], hint: Any) -> Any:
        """Return the value of a key as that of a field, or the field's default."""
        if not self.has(key) and field.default_factory is not MISSING:
            return field.default_factory()
        if not self.has(key) and field.default is not MISSING:
            return field.default
        if get_origin(hint) in (UnionType, Union):  # of a type and None, which JSON has
            if self._data.get(key, MISSING) is None:
                return None
            (hint,) = (option for option in get_args(hint) if option is not NoneType)
        value = self._value(key, hint, positive=field.default != 0 and not field.metadata.get("may_be_zero"))
        if "at_most" in field.metadata and value > field.metadata["at_most"]:
            raise self.wrong(key, f"a number up to {field.metadata['at_most']}", value)
        return value

    def _value(self, key: Key, hint: Any, *, positive: bool = True) -> Any:
        """Return the value of a key, which must have the type of an annotation."""
        if hint is float and self._only_finite:
            return self._finite(key)
        if hint is int or hint is float:
            return (self.integer if hint is int else self.number)(key, positive=positive and not self._only_finite)
        if get_origin(hint) is Literal:
            value, known = self.raw(key), get_args(hint)
            if value not in known and isinstance(value, str):
                name = key if isinstance(key, str) else dotted((*self._keys, key))
                raise UsageError.unknown(name, value, map(str, known), where=self._path(key))
            if value not in known:
                raise self.wrong(key, f"one of {', '.join(map(str, known))}", shown(value))
            return value
        if get_origin(hint) in (tuple, list):
            return self._sequence(key, hint, positive)
        if get_origin(hint) is dict:
            inner, (_, each) = self.table(key), get_args(hint)
            return {name: inner._value(name, each) for name in inner.names()}
        if hint is Any:
            return self.raw(key)
        if hasattr(hint, "from_text"):
            try:
                return hint.from_text(self.text(key))
            except UsageError as error:
                raise self._here(error, key) from error
        if is_dataclass(hint):
            own = getattr(hint, "from_table", None)
            return own(self.table(key)) if own else self.table(key).record(cast("type[Any]", hint))
        readers: dict[Any, Callable[[Key], Any]] = {str: self.text, bool: self.flag}
        return readers[hint](key)

    def _sequence(self, key: Key, hint: Any, positive: bool) -> Any:
        """Return the tuple or list of a key."""
        items, (first, *others) = self._items(key), get_args(hint)
        hints = [first, *others] if others and others != [Ellipsis] else [first] * len(items.names())
        if len(hints) != len(items.names()):
            raise self.wrong(key, f"{len(hints)} items", len(items.names()))
        values = (items._value(index, each, positive=positive) for index, each in enumerate(hints))
        return get_origin(hint)(values)

    def _items(self, key: Key) -> Table:
        """Return a list as a table, whose keys are the indices."""
        value = self.raw(key)
        if not isinstance(value, list | tuple):
            raise self.wrong(key, "a list", shown(value))
        return self._inner(dict(enumerate(value)), key)

    def _inner(self, data: Mapping[Any, object], key: Key) -> Table:
        """Return the table of a key."""
        keys = (*self._keys, key)
        return Table(data, file=self._file, text=self._text, keys=keys, only_finite=self._only_finite)

    def _path(self, key: Key) -> str:
        """Return the place of ``key``, with the path of this table where there are no lines."""
        return self.place(key) + ("" if self._text or not self._keys else f": {dotted(self._keys)}")

    def _here(self, error: UsageError, key: Key | None) -> UsageError:
        """Return the error of a value of ``key``, or of this table, with its place."""
        keys = dotted(self._keys if key is None else (*self._keys, key))
        return error.within(self.place(key) + (f": {keys}" if keys else ""))

    def finish(self) -> None:
        """Check that all keys were read.

        Raises:
            UsageError: a key is unknown.
        """
        for key in self._data:
            if key not in self._read:
                raise UsageError.unknown("key", key, map(str, self._read), where=self._path(key))


_hints = cache(get_type_hints)


def as_table(value: Any, *, rare: bool = False) -> Any:
    """Return a dataclass as :meth:`Table.record` reads it; one with a method ``to_table`` by that.

    Args:
        value: the dataclass, or a list or tuple of such.
        rare: whether to include fields with the metadata :data:`RARE` that have their default. Fields that are None are left out.
    """
    if isinstance(value, list | tuple):
        return [as_table(item, rare=rare) for item in value]
    if not is_dataclass(value) or isinstance(value, type):
        return value
    if hasattr(value, "to_table"):
        return value.to_table()
    shown = (f for f in fields(value) if rare or not (f.metadata.get("rare") and getattr(value, f.name) == f.default))
    values = {f.metadata.get("key", f.name): getattr(value, f.name) for f in shown}
    return {key: as_table(item, rare=rare) for key, item in values.items() if item is not None}


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
