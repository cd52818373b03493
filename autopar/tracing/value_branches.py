"""Branches on the values of tensors that a trace can take: checks that only raise, and clamps of values that are not finite.

A trace knows no values. A line such as ``if lengths.max() > 16: raise ValueError`` has one way on that ends in an error, so
:func:`assume_checks_hold` takes the other one. Models of transformers guard half precision against overflow by ``if not
torch.isfinite(x).all(): x = torch.clamp(x, min=-limit, max=limit)``. :class:`GuardedClamps` traces the body of such a branch and chooses
between its result and ``x`` by ``torch.where`` for each sample, as the line does for a batch of one, because a sample must not depend
on which others a rank has. A batch gives the same as one branch for all, but for finite values above the limit: the largest few of a dtype.

Branches are read from the byte code. A trace refuses those that do anything else (a loop, a value, an error that a caller catches), or
makes the module opaque. Code that always clamps and chooses by ``limit = torch.where(torch.isinf(x).any(), low, high)`` can be
exported; :func:`limit_each_sample` then gives each sample its own limit.
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
from autopar.tracing.side_effects import graph_modules
from autopar.util.formatting import some

_CHECKED = tuple(str(Path(TORCH_FOLDER) / part) for part in ("nn", "distributions"))
"""Folders of torch whose code checks the values of arguments: losses check variances, and distributions check their parameters."""

_BETWEEN = frozenset(
    ("_asking_frame", "guard", "bool_", "__bool__", "int_", "__int__", "__index__", "__float__", "__torch_function__")
)
"""Names of the functions between a line that asks for a value and :func:`_asking_frame`. With others, torch asked, and may go on."""


@dataclass(slots=True)
class Branches:
    """The branches on values that a trace has met. It grows while the model is traced.

    Attributes:
        checks: lines, as ``file.py:12``, of the checks that are assumed to hold, in order.
        clamps: lines of the clamps that each sample decides about, in order.
        refused: the first error for a value that user code asked for in vain. If the code catches it, it goes on as no step would.
    """

    checks: dict[str, None] = field(default_factory=dict)
    clamps: dict[str, None] = field(default_factory=dict)
    refused: GuardOnDataDependentSymNode | None = None


@contextmanager
def assume_checks_hold() -> Iterator[Branches]:
    """Within this context, a trace in this thread does not take branches that only raise; it gives the record of all branches."""
    owner, branches = threading.get_ident(), Branches()

    def patched(name: str) -> mock._patch[Any]:
        usual = getattr(SymNode, name)

        def guard(node: SymNode, file: str, line: int) -> Any:
            try:
                return usual(node, file, line)
            except GuardOnDataDependentSymNode as error:
                frame, is_direct = _asking_frame()
                if frame is None or threading.get_ident() != owner:
                    raise
                answer = _answer_that_holds(_checking_frame() or frame) if name == "guard_bool" else None
                if answer is None:
                    branches.refused = branches.refused or (error if is_direct else None)
                    raise
                branches.checks[f"{frame.f_code.co_filename}:{frame.f_lineno}"] = None
                return answer

        return mock.patch.object(SymNode, name, guard)

    with patched("guard_bool"), patched("guard_int"), patched("guard_float"):
        yield branches


def notes_of(branches: Branches) -> tuple[str, ...]:
    """Return the notes of a graph on the checks that its program leaves out and on the clamps that it decides for each sample."""
    notes = (
        ("checks of values that only raise are taken to hold, and are not made in the program", branches.checks),
        ("values that are not finite are clamped for each sample by itself, as for a batch of one", branches.clamps),
    )
    return tuple(f"{text}: {some(lines)}" for text, lines in notes if lines)


def _asking_frame() -> tuple[FrameType | None, bool]:
    """Return the innermost frame of user code, and whether that code asks for the value itself instead of calling torch code that does."""
    names = set[str]()
    for frame, _ in traceback.walk_stack(sys._getframe()):
        if not frame.f_code.co_filename.startswith((TORCH_FOLDER, PACKAGE_FOLDER)):
            return frame, names <= _BETWEEN
        names.add(frame.f_code.co_name)
    return None, False


def _checking_frame() -> FrameType | None:
    """Return the frame of torch's layers, losses or distributions that asks for a value; None if the code that asks is not one of these."""
    for frame, _ in traceback.walk_stack(sys._getframe()):
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(PACKAGE_FOLDER) and not (file.startswith(TORCH_FOLDER) and name in _BETWEEN):
            return frame if file.startswith(_CHECKED) else None
    return None


def _answer_that_holds(frame: FrameType) -> bool | None:
    """Return the truth value with which the branch at ``frame`` does not raise; None unless one way on only raises what nobody catches."""
    code, position, jump = _jump_at(frame)
    position_of = {getattr(step, "start_offset", step.offset): i for i, step in enumerate(code)}
    if jump is None or jump.argval not in position_of:
        return None
    jumps_if = jump.opname.endswith("IF_TRUE")
    raise_if_on, raise_if_jumped = _raise_after(code, position + 1), _raise_after(code, position_of[jump.argval])
    if (raise_if_on is None) == (raise_if_jumped is None):
        return None
    error = raise_if_on if raise_if_on is not None else raise_if_jumped
    assert error is not None
    if _catches(frame.f_code, (code[position].offset, code[error].offset)) or _is_caught(frame):
        return None
    return jumps_if if raise_if_on is not None else not jumps_if


def _jump_at(frame: FrameType) -> tuple[list[dis.Instruction], int, dis.Instruction | None]:
    """Return the instructions of a frame, its position in them, and the jump on a truth value there; None if there is no such jump."""
    code = list(dis.get_instructions(frame.f_code))
    position = next((i for i, step in enumerate(code) if step.offset == frame.f_lasti), len(code))
    # Up to Python 3.12 the jump itself calls __bool__. From 3.13 on the instruction before it does, which is TO_BOOL or a comparison.
    if position < len(code) and (code[position].opname == "TO_BOOL" or code[position].argrepr.startswith("bool(")):
        position += 1
    name = code[position].opname if position + 1 < len(code) else ""
    is_jump = "POP_JUMP" in name and name.endswith(("IF_TRUE", "IF_FALSE"))
    return code, position, code[position] if is_jump else None


def _raise_after(code: list[dis.Instruction], start: int) -> int | None:
    """Return the position of the ``raise`` that always ends the instructions from ``start`` on; None if they may end otherwise."""
    for position, step in enumerate(code[start:], start):
        if step.opname == "RAISE_VARARGS":
            return position
        if "JUMP" in step.opname or step.opname.startswith(("RETURN", "YIELD", "RERAISE", "FOR_ITER", "SEND")):
            return None
    return None


def _is_caught(frame: FrameType) -> bool:
    """Return whether ``frame`` or one of its callers up to this package has an ``except`` around its call."""
    for caller, _ in traceback.walk_stack(frame):
        file = caller.f_code.co_filename
        if file.startswith(PACKAGE_FOLDER):
            return False
        if not file.startswith(TORCH_FOLDER) and _catches(caller.f_code, (caller.f_lasti,)):
            return True
    return False


def _catches(body: CodeType, offsets: tuple[int, ...]) -> bool:
    """Return whether an ``except`` covers an instruction at one of ``offsets``. ``with`` and ``finally`` do not count: they raise again."""
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
_FINITE_FLAGS = frozenset(getattr(place, f"is{kind}") for place in (torch, Tensor) for kind in ("finite", "inf", "nan"))
_ALL, _ANY = (frozenset(getattr(place, name) for place in (torch, Tensor)) for name in ("all", "any"))

_STEPS = (
    "LOAD_FAST", "STORE_FAST", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "PUSH_NULL",
    "PRECALL", "KW_NAMES", "CALL", "BINARY_OP", "UNARY_NEGATIVE", "CACHE", "NOP", "NOT_TAKEN",
)  # fmt: skip
"""Beginnings of the names of instructions that only compute values."""
_CALLED = frozenset(("finfo", "clamp"))
_ATTRIBUTES = _CALLED | {"dtype", "max", "min"}


@dataclass(frozen=True, slots=True)
class _Condition:
    """The condition that all, or any, elements of a tensor are finite, infinite or nan.

    Attributes:
        tensor: its elements are tested.
        flags: the result of the test for each element, a boolean tensor of the same shape.
        is_any: whether the condition is on any element; else it is on all elements.
        dim: the dim of ``tensor`` along which samples lie.
    """

    tensor: Tensor
    flags: Tensor
    is_any: bool
    dim: int

    def by_sample(self, answer: bool) -> Tensor:
        """Return for each sample whether the condition on its elements is ``answer``; dims other than :attr:`dim` have size 1."""
        deciding = self.flags if self.is_any else ~self.flags
        other_dims = [d for d in range(deciding.dim()) if d != self.dim]
        if other_dims:
            deciding = deciding.sum(other_dims, keepdim=True) > 0
        return deciding if answer == self.is_any else ~deciding


class GuardedClamps(TorchFunctionMode):
    """While tracing, takes branches that only clamp the tensor whose values they test, and decides for each sample.

    Args:
        batch_size: the number of samples in the traced batch.
        lines: receives the lines of the branches that were taken, as ``file.py:12``.
    """

    def __init__(self, batch_size: int, lines: dict[str, None]) -> None:
        super().__init__()
        self._batch_size, self._lines = batch_size, lines
        # Both are by the id of a tensor. They also hold that tensor, so that its id is not used again.
        self._flags: dict[int, tuple[Tensor, Tensor]] = {}
        self._conditions: dict[int, tuple[Tensor, _Condition]] = {}
        self._entered: tuple[_Condition, bool] | None = None  # until the clamp of the branch is called

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__bool__ and id(args[0]) in self._conditions:
            condition = self._conditions[id(args[0])][1]
            frame, is_direct = _asking_frame()
            answer = _answer_that_clamps(frame, condition.tensor) if frame is not None and is_direct else None
            if answer is not None:
                assert frame is not None
                self._lines[f"{frame.f_code.co_filename}:{frame.f_lineno}"] = None
                self._entered = condition, answer
                return answer
        result = func(*args, **(kwargs or {}))
        if func in _FINITE_FLAGS:
            self._flags[id(result)] = result, args[0]
        elif (func in _ALL or func in _ANY) and len(args) == 1 and not kwargs and id(args[0]) in self._flags:
            flags, tensor = self._flags[id(args[0])]
            dim = _sample_dim(tensor, self._batch_size)
            if dim is not None:
                self._conditions[id(result)] = result, _Condition(tensor, flags, func in _ANY, dim)
        elif func is torch.clamp and self._entered is not None:
            (condition, answer), self._entered = self._entered, None
            return torch.where(condition.by_sample(answer), result, condition.tensor)
        return result


def _sample_dim(value: Tensor, batch_size: int) -> int | None:
    """Return the dim, 0 or 1, along which samples lie: the first whose size is a multiple of the batch size. None if there is none."""
    return next((d for d, n in enumerate(value.shape[:2]) if n % batch_size == 0), None)


def _answer_that_clamps(frame: FrameType, tensor: Tensor) -> bool | None:
    """Return the truth value with which ``frame`` enters the branch at its position; None if that does not only clamp ``tensor``."""
    code, position, jump = _jump_at(frame)
    if jump is None:
        return None
    end = next((i for i, step in enumerate(code) if step.offset == jump.argval), 0)
    body = code[position + 1 : end]
    if not body or not all(step.opname.startswith(_STEPS) for step in body) or any(s.is_jump_target for s in body):
        return None
    if not _clamps_alone(body) or frame.f_globals.get("torch") is not torch:
        return None
    *limits, name = (name for step in body for kind, name in _locals(step) if kind == "STORE")
    if name in limits or frame.f_locals.get(name) is not tensor or any(_is_read_elsewhere(code, n) for n in limits):
        return None
    return str(jump.opname).endswith("IF_FALSE")


def _clamps_alone(body: list[dis.Instruction]) -> bool:
    """Return whether instructions end in ``x = torch.clamp(x, ...)`` and only compute limits before."""
    attributes = [step.argval for step in body if step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD"))]
    global_names = {step.argval for step in body if step.opname.startswith("LOAD_GLOBAL")}
    calls = [step for step in body if step.opname.startswith("CALL")]
    called = [name for name in attributes if name in _CALLED]
    clamp = next((i for i, step in enumerate(body) if step.argval == "clamp"), 0)
    if not _ATTRIBUTES.issuperset(attributes) or global_names != {"torch"} or len(calls) != len(called):
        return False
    if called.count("clamp") != 1 or body[clamp - 1].argval != "torch" or body[-2] is not calls[-1]:
        return False
    (kind, name), *later = (access for step in body[clamp:] for access in _locals(step))
    return kind == "LOAD" and body[-1].opname == "STORE_FAST" and [n for k, n in later if k == "STORE"] == [name]


def _locals(step: dis.Instruction) -> list[tuple[str, str]]:
    """Return the local variables that an instruction accesses, each as ("LOAD" or "STORE", name). Some instructions access two."""
    kinds = re.findall("(LOAD|STORE)_FAST", step.opname)
    return list(zip(kinds, step.argval if isinstance(step.argval, tuple) else (step.argval,), strict=False))


def _is_read_elsewhere(code: list[dis.Instruction], name: str) -> bool:
    """Return whether code may read the local variable ``name`` at a place that a store does not reach without jumps."""
    is_stored = False
    for step in code:
        is_stored = is_stored and not step.is_jump_target
        for kind, accessed in _locals(step):
            if accessed == name and kind == "LOAD" and not is_stored:
                return True
            is_stored = is_stored or (accessed == name and kind == "STORE")
    return False


def limit_each_sample(program: torch.export.ExportedProgram, batch_size: int, lines: dict[str, None]) -> None:
    """Give each sample its own limits, in place, where ``torch.where`` chooses limits of a clamp by whether all values are finite.

    Args:
        program: is changed only where the choice is used for nothing but limits of the tensor that it tests.
        batch_size: the number of samples in the traced batch.
        lines: receives the lines of the changed calls, as ``file.py:12``.
    """
    for module in graph_modules(program):
        for node in list(module.graph.nodes):
            flags = node.args[0] if node.target in (_aten.any.default, _aten.all.default) else None
            if not isinstance(flags, fx.Node) or flags.target not in _TESTS:
                continue
            tensor = flags.args[0]
            assert isinstance(tensor, fx.Node)
            limits, dim = _limits(node, tensor), _sample_dim(tensor.meta["val"], batch_size)
            if limits and dim is not None and tensor.meta["val"].dim() > 1:
                lines[source_of(node)] = None
                _split(node, tensor, dim, limits)
                module.recompile()


_TESTS = frozenset((_aten.isfinite.default, _aten.isinf.default, _aten.isnan.default))
_NEGATED = frozenset((_aten.bitwise_not.default, _aten.logical_not.default))


def _limits(value: fx.Node, tensor: fx.Node) -> list[fx.Node] | None:
    """Return the nodes that compute limits of clamps of ``tensor`` from ``value``, in topological order.

    ``value`` is a condition on the elements of ``tensor`` or a limit. The result is None if ``value`` has other users or none.
    """
    if not value.users:
        return None
    is_limit, nodes = value.meta["val"].dtype != torch.bool, list[fx.Node]()
    for user in value.users:
        if is_limit and user.target == _aten.clamp.Tensor and user.args[0] is tensor:
            if user.meta["val"].dtype != tensor.meta["val"].dtype:
                return None
            continue
        follows = user.target == _aten.neg.default if is_limit else user.target in {*_NEGATED, _aten.where.Scalar}
        dependents = _limits(user, tensor) if follows else None
        if dependents is None:
            return None
        nodes += [user, *dependents]
    return nodes


def _split(condition: fx.Node, tensor: fx.Node, dim: int, limits: list[fx.Node]) -> None:
    """Replace ``condition`` on all elements of ``tensor`` by one for each sample along ``dim``.

    The condition and ``limits``, which depend on it, then have the size of ``tensor`` in ``dim`` and size 1 in all other dims.
    """
    graph, is_any = condition.graph, condition.target == _aten.any.default

    def insert(target: Any, *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta = {**condition.meta, "val": target(*fx.node.map_arg(args, _value))}
        return node

    with graph.inserting_before(condition):
        deciding = condition.args[0] if is_any else insert(_aten.logical_not.default, condition.args[0])
        other_dims = [d for d in range(tensor.meta["val"].dim()) if d != dim]
        count = insert(_aten.sum.dim_IntList, deciding, other_dims, True)
        by_sample = insert(_aten.gt.Scalar if is_any else _aten.eq.Scalar, count, 0)
    condition.replace_all_uses_with(by_sample)
    graph.erase_node(condition)
    for limit in limits:
        target: Any = limit.target
        limit.meta["val"] = target(*fx.node.map_arg(limit.args, _value))
        if target == _aten.where.Scalar and limit.meta["val"].dtype != torch.bool:
            # A limit without dims took the dtype of the clamped tensor by promotion; one with dims does not.
            users = list(limit.users)
            with graph.inserting_after(limit):
                cast = insert(_aten.to.dtype, limit, tensor.meta["val"].dtype)
            for user in users:
                user.replace_input_with(limit, cast)


def _value(node: fx.Node) -> Any:
    return node.meta["val"]
