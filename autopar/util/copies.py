"""Copies of modules."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from torch import nn

Copied = TypeVar("Copied", bound=nn.Module)


def deep_copy(module: Copied, memo: dict[int, Any] | None = None) -> Copied:
    """``copy.deepcopy``, whose functions that remember a part of ``module`` remember that of the copy.

    Python copies no functions: a hook or an activation that was written as ``lambda x: x * self.scale`` would read the
    parameters of ``module``, and a hook that keeps what it sees would keep it there.
    """
    memo = {} if memo is None else memo
    made: list[tuple[types.FunctionType, tuple[types.CellType, ...]]] = []
    for function in {id(f): f for inner in module.modules() for f in _functions(vars(inner))}.values():
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        copied = types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
        copied.__dict__.update(function.__dict__)
        memo[id(function)] = copied
        made.append((function, cells))
    result = copy.deepcopy(module, memo)
    for function, cells in made:
        for old, new in zip(function.__closure__ or (), cells, strict=True):
            try:
                kept = old.cell_contents
            except ValueError:  # a name that is bound to nothing yet
                continue
            new.cell_contents = _copied(kept, memo)
    return result


def _copied(kept: object, memo: Mapping[int, Any]) -> object:
    """What stands for ``kept`` in the copy: itself, unless it is a part of what was copied, or a method of one."""
    if isinstance(kept, types.MethodType) and id(kept.__self__) in memo:
        return types.MethodType(kept.__func__, memo[id(kept.__self__)])
    return memo.get(id(kept), kept)


def _functions(value: object) -> Iterator[types.FunctionType]:
    """Functions with a closure, in containers, partial calls and the closures of others."""
    waiting, seen = [value], set[int]()
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, partial):
            waiting += [found.func, *found.args, *found.keywords.values()]
        elif isinstance(found, Mapping):
            waiting += found.values()
        elif isinstance(found, list | tuple | set):
            waiting += found
        elif isinstance(found, types.FunctionType) and found.__closure__:
            yield found
            waiting += [cell.cell_contents for cell in found.__closure__ if cell != types.CellType()]
