"""Branches on values that a trace takes: those that only raise, and those that clamp what is not finite.

A trace knows no values. Of the two ways on from a line such as ``assert (ids >= 0).all()`` or ``if lengths.max() > 16: raise ValueError`` one
ends in an error, so that the other one is the step. Models of transformers guard their layers against an overflow of halves by ``if not
torch.isfinite(x).all(): x = torch.clamp(x, min=-limit, max=limit)``: such a branch does nothing but to clamp the tensor that it asks about, so
that its body is traced, and what it makes is chosen by ``torch.where``, for each sample by itself, as the line says for a batch of one: ranks
have different samples, and what one of them overflows to is no matter of the others. All finite values but halves next to the largest one are
below the limit anyway. Branches are read in the byte code; whatever else they may do (a loop, a value, an error that some caller catches)
is refused, or makes the module opaque, as ever.

Others write ``limit = torch.where(torch.isinf(x).any(), low, high)`` and clamp always. That exports; the program is changed so that
each sample has its own limit, where the question is asked for nothing but such limits.
"""

from __future__ import annotations

import dis
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.overrides import TorchFunctionMode

from autopar.tracing.failures import PACKAGE_FOLDER, TORCH_FOLDER, source_of
from autopar.util.formatting import some

_CHECKED = tuple(str(Path(TORCH_FOLDER) / part) for part in ("nn", "distributions"))
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
        clamps: likewise, of clamps that each sample decides about (:mod:`autopar.tracing.value_branches`).
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
    return tuple(f"{what}: {some(places)}" for what, places in notes if places)


def asking() -> tuple[FrameType | None, bool]:
    """The innermost frame of the model's code, and whether it asks for the number by itself."""
    names = set[str]()
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if not frame.f_code.co_filename.startswith((TORCH_FOLDER, PACKAGE_FOLDER)):
            return frame, names <= _BETWEEN
        names.add(frame.f_code.co_name)
    return None, False


def _checking() -> FrameType | None:
    """The frame of torch's own functions, modules or distributions that asks by itself; None where another does."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(PACKAGE_FOLDER) and not (file.startswith(TORCH_FOLDER) and name in _BETWEEN):
            return frame if file.startswith(_CHECKED) else None
    return None


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
    if _catches(frame.f_code, (code[here].offset, code[error].offset)) or _is_caught(frame):
        return None
    return jumps_if if on is not None else not jumps_if


def question_at(frame: FrameType) -> tuple[list[dis.Instruction], int, dis.Instruction | None]:
    """The steps of a frame's code, and where it asks for a truth value to jump; None where it asks for another reason."""
    code = list(dis.get_instructions(frame.f_code))
    here = next((i for i, step in enumerate(code) if step.offset == frame.f_lasti), len(code))
    # Up to Python 3.12 the jump itself asks; from 3.13 on a step of its own before it does, or the comparison.
    if here < len(code) and (code[here].opname == "TO_BOOL" or code[here].argrepr.startswith("bool(")):
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


def _is_caught(frame: FrameType) -> bool:
    """Whether ``frame`` or one of its callers up to this package has an ``except`` around its call."""
    for caller, _ in traceback.walk_stack(frame):
        file = caller.f_code.co_filename
        if file.startswith(PACKAGE_FOLDER):
            return False
        if not file.startswith(TORCH_FOLDER) and _catches(caller.f_code, (caller.f_lasti,)):
            return True
    return False


def _catches(body: CodeType, offsets: tuple[int, ...]) -> bool:
    """Whether an ``except`` covers one of the steps; ``with`` and ``finally`` hand an error on."""
    for entry in getattr(dis.Bytecode(body), "exception_entries", ()):
        if not any(entry.start <= offset < entry.end for offset in offsets):
            continue
        handler = [step for step in dis.get_instructions(body) if step.offset >= entry.target]
        names = [step.opname for step in handler[:2]]
        if names == ["PUSH_EXC_INFO", "POP_TOP"]:
            return True
        for step in handler:
            if step.opname in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH"):
                return True
            if step.opname in ("RERAISE", "WITH_EXCEPT_START"):
                break
    return False


_aten = torch.ops.aten

_FLAGS = frozenset(getattr(place, f"is{kind}") for place in (torch, Tensor) for kind in ("finite", "inf", "nan"))
_ALL, _ANY = (frozenset(getattr(place, name) for place in (torch, Tensor)) for name in ("all", "any"))

_STEPS = (
    "LOAD_FAST", "STORE_FAST", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "PUSH_NULL",
    "PRECALL", "KW_NAMES", "CALL", "BINARY_OP", "UNARY_NEGATIVE", "CACHE", "NOP", "NOT_TAKEN",
)  # fmt: skip
"""Beginnings of the names of steps that do nothing but work out values."""
_CALLED = frozenset(("finfo", "clamp"))
_ATTRIBUTES = _CALLED | {"dtype", "max", "min"}


@dataclass(frozen=True, slots=True)
class _Question:
    """Whether all or any elements of a tensor are finite, or are not.

    Attributes:
        flags: the answer for each element of ``asked``.
        is_any: whether it is asked of any; else of all.
        dim: along which samples lie.
    """

    asked: Tensor
    flags: Tensor
    is_any: bool
    dim: int

    def by_sample(self, answer: bool) -> Tensor:
        """Where the answer for a sample is ``answer``; other dims are of size one."""
        counted = self.flags if self.is_any else ~self.flags
        inside = [d for d in range(counted.dim()) if d != self.dim]
        if inside:
            counted = counted.sum(inside, keepdim=True) > 0
        return counted if answer == self.is_any else ~counted


class GuardedClamps(TorchFunctionMode):
    """While tracing, takes such branches.

    Args:
        batch_size: samples in the traced batch.
        places: ``file.py:12`` of those taken; grows.
    """

    def __init__(self, batch_size: int, places: dict[str, None]) -> None:
        super().__init__()
        self._batch_size, self._places = batch_size, places
        self._flags: dict[int, tuple[Tensor, Tensor]] = {}  # by identity; held, so that identities stay theirs
        self._questions: dict[int, tuple[Tensor, _Question]] = {}
        self._taken: tuple[_Question, bool] | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__bool__ and id(args[0]) in self._questions:
            question = self._questions[id(args[0])][1]
            frame, is_direct = asking()
            answer = _entering(frame, question.asked) if frame is not None and is_direct else None
            if answer is not None:
                assert frame is not None
                self._places[f"{frame.f_code.co_filename}:{frame.f_lineno}"] = None
                self._taken = question, answer
                return answer
        result = func(*args, **(kwargs or {}))
        if func in _FLAGS:
            self._flags[id(result)] = result, args[0]
        elif (func in _ALL or func in _ANY) and len(args) == 1 and not kwargs and id(args[0]) in self._flags:
            flags, asked = self._flags[id(args[0])]
            dim = _samples_of(asked, self._batch_size)
            if dim is not None:
                self._questions[id(result)] = result, _Question(asked, flags, func in _ANY, dim)
        elif func is torch.clamp and self._taken is not None:
            (question, answer), self._taken = self._taken, None
            return torch.where(question.by_sample(answer), result, question.asked)
        return result


def _samples_of(value: Tensor, batch_size: int) -> int | None:
    """The dim along which samples lie."""
    return next((d for d, n in enumerate(value.shape[:2]) if n % batch_size == 0), None)


def _entering(frame: FrameType, asked: Tensor) -> bool | None:
    """The answer with which the branch that asks is entered; None where it does anything but to clamp ``asked``."""
    code, here, jump = question_at(frame)
    if jump is None or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    end = next((i for i, step in enumerate(code) if step.offset == jump.argval), 0)
    body = code[here + 1 : end]
    if not body or not all(step.opname.startswith(_STEPS) for step in body) or any(s.is_jump_target for s in body):
        return None
    if not _clamps_alone(body) or frame.f_globals.get("torch") is not torch:
        return None
    *others, name = (name for step in body for kind, name in _locals(step) if kind == "STORE")
    if name in others or frame.f_locals.get(name) is not asked or any(_is_read_elsewhere(code, o) for o in others):
        return None
    return str(jump.opname).endswith("IF_FALSE")


def _clamps_alone(body: list[dis.Instruction]) -> bool:
    """Whether steps end in ``x = torch.clamp(x, ...)`` and do nothing before but to work out limits."""
    attributes = [step.argval for step in body if step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD"))]
    reached = {step.argval for step in body if step.opname.startswith("LOAD_GLOBAL")}
    calls = [step for step in body if step.opname.startswith("CALL")]
    called = [name for name in attributes if name in _CALLED]
    place = next((i for i, step in enumerate(body) if step.argval == "clamp"), 0)
    if not _ATTRIBUTES.issuperset(attributes) or reached != {"torch"} or len(calls) != len(called):
        return False
    if called.count("clamp") != 1 or body[place - 1].argval != "torch" or body[-2] is not calls[-1]:
        return False
    (kind, name), *rest = (found for step in body[place:] for found in _locals(step))
    return kind == "LOAD" and body[-1].opname == "STORE_FAST" and [n for k, n in rest if k == "STORE"] == [name]


def _locals(step: dis.Instruction) -> list[tuple[str, str]]:
    """Names that a step loads and stores; some steps do two."""
    kinds = re.findall("(LOAD|STORE)_FAST", step.opname)
    return list(zip(kinds, step.argval if isinstance(step.argval, tuple) else (step.argval,), strict=False))


def _is_read_elsewhere(code: list[dis.Instruction], name: str) -> bool:
    """Whether a name may be read with a value that was not given to it just before."""
    known = False
    for step in code:
        known = known and not step.is_jump_target
        for kind, mine in _locals(step):
            if mine == name and kind == "LOAD" and not known:
                return True
            known = known or (mine == name and kind == "STORE")
    return False


def limit_each_sample(program: torch.export.ExportedProgram, batch_size: int, places: dict[str, None]) -> None:
    """Gives each sample a limit of its own where ``torch.where`` chooses one for all; changes ``program``.

    Args:
        batch_size: samples in the traced batch.
        places: ``file.py:12`` of what was changed; grows.
    """
    for module in program.graph_module.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in list(module.graph.nodes):
            flags = node.args[0] if node.target in (_aten.any.default, _aten.all.default) else None
            if not isinstance(flags, fx.Node) or flags.target not in _KINDS:
                continue
            asked = flags.args[0]
            assert isinstance(asked, fx.Node)
            limits, dim = _limits(node, asked), _samples_of(asked.meta["val"], batch_size)
            if limits and dim is not None and asked.meta["val"].dim() > 1:
                places[source_of(node)] = None
                _split(node, asked, dim, limits)
                module.recompile()


_KINDS = frozenset((_aten.isfinite.default, _aten.isinf.default, _aten.isnan.default))
_NEGATED = frozenset((_aten.bitwise_not.default, _aten.logical_not.default))


def _limits(value: fx.Node, asked: fx.Node) -> list[fx.Node] | None:
    """What is made of the answer ``value`` about ``asked`` and limits its elements, each after what it is made of.

    None where nothing is limited, or anything else reads it.
    """
    if not value.users:
        return None
    is_chosen, found = value.meta["val"].dtype != torch.bool, list[fx.Node]()
    for user in value.users:
        if is_chosen and user.target == _aten.clamp.Tensor and user.args[0] is asked:
            if user.meta["val"].dtype != asked.meta["val"].dtype:
                return None
            continue
        follows = user.target == _aten.neg.default if is_chosen else user.target in {*_NEGATED, _aten.where.Scalar}
        more = _limits(user, asked) if follows else None
        if more is None:
            return None
        found += [user, *more]
    return found


def _split(question: fx.Node, asked: fx.Node, dim: int, limits: list[fx.Node]) -> None:
    """Answers ``question`` for each sample along ``dim``, and so makes ``limits`` of size one in all other dims."""
    graph, is_any = question.graph, question.target == _aten.any.default

    def put(target: Any, *args: Any) -> fx.Node:
        made = graph.call_function(target, args)
        made.meta = {**question.meta, "val": target(*fx.node.map_arg(args, _value))}
        return made

    with graph.inserting_before(question):
        counted = question.args[0] if is_any else put(_aten.logical_not.default, question.args[0])
        inside = [d for d in range(asked.meta["val"].dim()) if d != dim]
        count = put(_aten.sum.dim_IntList, counted, inside, True)
        answer = put(_aten.gt.Scalar if is_any else _aten.eq.Scalar, count, 0)
    question.replace_all_uses_with(answer)
    graph.erase_node(question)
    for limit in limits:
        target: Any = limit.target
        limit.meta["val"] = target(*fx.node.map_arg(limit.args, _value))
        if target == _aten.where.Scalar and limit.meta["val"].dtype != torch.bool:
            # of no dims, it took the dtype of what it limits
            users = list(limit.users)
            with graph.inserting_after(limit):
                cast = put(_aten.to.dtype, limit, asked.meta["val"].dtype)
            for user in users:
                user.replace_input_with(limit, cast)


def _value(node: fx.Node) -> Any:
    return node.meta["val"]
