"""Frozen dataclasses that are made by the hundred thousand: the same classes with a constructor that takes less time."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

_T = TypeVar("_T")


def quickly(cls: type[_T]) -> type[_T]:
    """A decorator around ``@dataclass(frozen=True, slots=True, kw_only=True)``: its ``__init__`` writes straight to the slots.

    That of a frozen dataclass goes by ``object.__setattr__``, which looks each name up again; that is most of what it takes.

    >>> from dataclasses import dataclass
    >>> @quickly
    ... @dataclass(frozen=True, slots=True, kw_only=True)
    ... class Point:
    ...     x: int
    ...     y: int = 0
    >>> Point(x=1)
    Point(x=1, y=0)

    Raises:
        TypeError: a field has a factory, or the class is no frozen dataclass with slots.
    """
    own: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
    if not cls.__dataclass_params__.frozen or "__slots__" not in vars(cls):  # type: ignore[attr-defined]
        raise TypeError(f"{cls.__name__} is no frozen dataclass with slots")
    if any(field.default_factory is not MISSING for field in own):
        raise TypeError(f"{cls.__name__} has a field with a factory")
    scope = _scope(cls, own)
    given: list[str] = []
    named: list[str] = []
    for field in own:
        if field.init:
            text = field.name if field.default is MISSING else f"{field.name}=_default_{field.name}"
            (named if field.kw_only else given).append(text)
    lines = [
        f"    _set_{field.name}(self, {field.name if field.init else f'_default_{field.name}'})"
        for field in own
        if field.init or field.default is not MISSING
    ]
    if hasattr(cls, "__post_init__"):
        lines.append("    self.__post_init__()")
    head = ", ".join(["self", *given, *(["*", *named] if named else [])])
    exec("\n".join([f"def __init__({head}):", *lines]), scope)
    made = scope["__init__"]
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    made.__annotations__ = cls.__init__.__annotations__
    cls.__init__ = made  # type: ignore[method-assign]
    cls.__replace__ = _replacing(cls, own)  # type: ignore[attr-defined]
    return cls


def _scope(cls: type[Any], own: tuple[Field[Any], ...]) -> dict[str, Any]:
    """What the methods that are made call: writers of the slots, and defaults."""
    writers = {f"_set_{field.name}": vars(cls)[field.name].__set__ for field in own}
    return writers | {f"_default_{field.name}": field.default for field in own}


def _replacing(cls: type[Any], own: tuple[Field[Any], ...]) -> Any:
    """The method behind :func:`replaced`."""
    scope = _scope(cls, own) | {"_cls": cls, "_new": cls.__new__, "_same": object()}
    given = [f"{field.name}=_same" for field in own if field.init]
    lines = [f"def __replace__({', '.join(['self', '*', *given])}):", "    found = _new(_cls)"]
    lines += [
        f"    _set_{field.name}(found, self.{field.name} if {field.name} is _same else {field.name})"
        if field.init
        else f"    _set_{field.name}(found, _default_{field.name})"
        for field in own
        if field.init or field.default is not MISSING
    ]
    if hasattr(cls, "__post_init__"):
        lines.append("    found.__post_init__()")
    exec("\n".join([*lines, "    return found"]), scope)
    return scope["__replace__"]


def replaced(value: _T, /, **changes: Any) -> _T:
    """As ``dataclasses.replace`` of a class made by :func:`quickly`, in a part of the time.

    >>> from dataclasses import dataclass
    >>> @quickly
    ... @dataclass(frozen=True, slots=True, kw_only=True)
    ... class Point:
    ...     x: int
    ...     y: int = 0
    >>> replaced(Point(x=1), y=2)
    Point(x=1, y=2)

    Raises:
        TypeError: there is no such field.
    """
    found: _T = value.__replace__(**changes)  # type: ignore[attr-defined]
    return found
