"""Branches on values that only raise: ``assert (ids >= 0).all()``, ``if lengths.max() > 16: raise ValueError``.

A trace knows no values, and needs none there: of the two ways on from such a line one ends in an error, so that the
other one is the step. The branch is read in the byte code of the line that asks; what else the line may be (a loop, a
value, an error that some caller catches) is refused as ever.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

_OWN = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_CHECKED = tuple(str(Path(_TORCH) / part) for part in ("nn", "distributions"))
"""Where torch checks the values that it is given: a loss its variances, a distribution its parameters."""

_BETWEEN = frozenset(
    ("asking", "guard", "bool_", "__bool__", "int_", "__int__", "__index__", "__float__", "__torch_function__")
)
"""Functions between a line that asks for a number and the number that is not known; torch's own code may ask and go on."""


@dataclass(slots=True)
class Held:
    """What was met while tracing.

    Attributes:
        places: ``file.py:12`` of checks that were taken to hold.
        clamps: likewise, of clamps that each sample decides about (:mod:`autopar.tracing.guarded_clamps`).
        refused: the first question that has no answer; code that catches the error goes on as no step would.
    """

    places: dict[str, None] = field(default_factory=dict)
    clamps: dict[str, None] = field(default_factory=dict)
    refused: GuardOnDataDependentSymNode | None = None


@contextmanager
def taken_to_hold() -> Iterator[Held]:
    """While tracing, a branch that only raises is not taken."""
    owner, held = threading.get_ident(), Held()

    def watched(name: str) -> mock._patch[Any]:
        usual = getattr(SymNode, name)

        def guard(node: SymNode, file: str, line: int) -> Any:
            try:
                return usual(node, file, line)
            except GuardOnDataDependentSymNode as error:
                frame, is_direct = asking()
                if frame is None or threading.get_ident() != owner:
                    raise
                answer = _answer(_checking() or frame) if name == "guard_bool" else None
                if answer is None:
                    held.refused = held.refused or (error if is_direct else None)
                    raise
                held.places[f"{frame.f_code.co_filename}:{frame.f_lineno}"] = None
                return answer

        return mock.patch.object(SymNode, name, guard)

    with watched("guard_bool"), watched("guard_int"), watched("guard_float"):
        yield held


def notes_of(held: Held) -> tuple[str, ...]:
    """On checks that a program leaves out, and branches that it takes for each sample."""
    notes = (
        ("checks of values that only raise are taken to hold, and are not made in the program", held.places),
        ("values that are not finite are clamped for each sample by itself, as for a batch of one", held.clamps),
    )
    return tuple(f"{what}: {_listed([*places])}" for what, places in notes if places)


def _listed(places: list[str]) -> str:
    return ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")


def asking() -> tuple[FrameType | None, bool]:
    """The innermost frame of the model's code, and whether it asks for the number by itself."""
    frame: FrameType | None = sys._getframe()
    names = set()
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OWN)):
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return frame, names <= _BETWEEN


def _checking() -> FrameType | None:
    """The frame of torch's own functions, modules or distributions that asks by itself; None where another does."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (
        frame.f_code.co_filename.startswith(_OWN)
        or (frame.f_code.co_filename.startswith(_TORCH) and frame.f_code.co_name in _BETWEEN)
    ):
        frame = frame.f_back
    return frame if frame is not None and frame.f_code.co_filename.startswith(_CHECKED) else None


def _answer(frame: FrameType) -> bool | None:
    """What the test must give for the other way on than the error; None where no way on is an error alone."""
    code, here, jump = question_at(frame)
    place = {getattr(step, "start_offset", step.offset): i for i, step in enumerate(code)}
    if jump is None or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")) or jump.argval not in place:
        return None
    jumps_if = jump.opname.endswith("IF_TRUE")
    on, away = _raises(code, here + 1), _raises(code, place[jump.argval])
    if (on is None) == (away is None):
        return None
    error = on if on is not None else away
    assert error is not None
    if _catches(frame.f_code, code, (code[here].offset, code[error].offset)) or _is_caught(frame.f_back):
        return None
    return jumps_if if on is not None else not jumps_if


def question_at(frame: FrameType) -> tuple[list[dis.Instruction], int, dis.Instruction | None]:
    """The steps of a frame's code, and where it asks for a truth value to jump; None where it asks for another reason."""
    code = list(dis.get_instructions(frame.f_code))
    here = next((i for i, step in enumerate(code) if step.offset == frame.f_lasti), len(code))
    if here < len(code) and code[here].opname == "TO_BOOL":
        here += 1
    asks = here + 1 < len(code) and "POP_JUMP" in code[here].opname
    return code, here, code[here] if asks else None


def _raises(code: list[dis.Instruction], start: int) -> int | None:
    """The ``raise`` that the steps from ``start`` on end in, whatever the values."""
    for i, step in enumerate(code[start:], start):
        if step.opname == "RAISE_VARARGS":
            return i
        if "JUMP" in step.opname or step.opname.startswith(("RETURN", "YIELD", "RERAISE", "FOR_ITER", "SEND")):
            return None
    return None


def _is_caught(frame: FrameType | None) -> bool:
    """Whether one of the callers up to this package has an ``except`` around its call."""
    while frame is not None and not frame.f_code.co_filename.startswith(_OWN):
        if not frame.f_code.co_filename.startswith(_TORCH):
            code = list(dis.get_instructions(frame.f_code))
            if _catches(frame.f_code, code, (frame.f_lasti,)):
                return True
        frame = frame.f_back
    return False


def _catches(body: CodeType, code: list[dis.Instruction], offsets: tuple[int, ...]) -> bool:
    """Whether an ``except`` covers one of the steps; ``with`` and ``finally`` hand an error on."""
    for entry in getattr(dis.Bytecode(body), "exception_entries", ()):
        if not any(entry.start <= offset < entry.end for offset in offsets):
            continue
        handler = [step for step in code if step.offset >= entry.target]
        names = [step.opname for step in handler[:2]]
        if names == ["PUSH_EXC_INFO", "POP_TOP"]:
            return True
        for step in handler:
            if step.opname in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH"):
                return True
            if step.opname in ("RERAISE", "WITH_EXCEPT_START"):
                break
    return False
