"""What a graph of one step at one batch size promises, tried: steps do not depend on earlier ones, numbers do not count samples.

A trace freezes what Python keeps: a counter in an attribute, a list, a global, an iterator, Python's random numbers, a
tensor of the last batch. Forward passes in a row on fake tensors show it: the second may read nothing that the first has
computed from its batch and must call the same operators with the same numbers; where the first has filled caches, a third
must call those of the second.

``loss.sum() / labels.numel()`` traces as a division by a number, that of the example's batch: for another batch size
it would be wrong, wherever it stands. Sizes may depend on the batch size, numbers and constants may not. Forward passes at two
sizes show of nearly all models that none does, in a fraction of the time of a trace; of the others a second trace tells.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from operator import eq
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import AutoparError, TraceError
from autopar.graph.graph import Graph, Op
from autopar.ops.kernels import resolve
from autopar.tracing import side_effects as memory
from autopar.tracing.failures import FAILURES, user_line

_LIKE = ("_like", "new_zeros", "new_ones", "new_full", "new_empty")
"""In the names of operators that take of a tensor its shape alone."""
_SMALL = 64
"""Elements of a constant up to which its values are compared."""
_PASSES, _DRAWING_PASSES = 3, 6
"""Passes that are tried; more where forward draws random numbers of Python's or numpy's, and then those of ``_DRAWN``."""
_DRAWN = (0x40, *(fifths * 0x33333333 for fifths in (5, 2, 3, 1, 4)))
"""Words of 32 bits that forward draws in one pass each, by which numbers lie at the ends of their range and at its fifths. What goes another
way below or above some number, for a fifth of all or for one of up to four shows itself in one of these passes; some make their numbers
of a word's first bits, others of its last. What compares two draws shows itself in the passes before. The least number is 1.5e-8: a zero,
which no step draws, would take branches at ``<= 0.0``."""

_Numbers: TypeAlias = tuple[object, ...]


class _StepError(RuntimeError):
    """Raised in the user's line that shows the dependence."""


class _OutsideError(RuntimeError):
    """Raised in the user's line that reads a parameter which is not the model's."""


class _Watch(TorchDispatchMode):
    """Notes the operators that a pass calls.

    Attributes:
        calls: operators with their numbers, in order.
        made: tensors that depend on ``sources``, by identity; held, so that identities stay theirs.
        tables: all other tensors that the pass made, likewise: of constants, and of buffers where it writes to none.
        of_buffers: tensors that depend on ``buffers`` and on none of ``sources``.
        writes: whether an operator may have written to a buffer.
        earlier: ``made`` of the pass before.
        filled: ``tables`` of the pass before; a second pass may read what the first has kept, a third makes no more of it.
        reads_tables: whether one of ``filled`` was read.
        expected: ``calls`` of the pass before, where they must be the same.
    """

    def __init__(
        self,
        sources: Mapping[int, Tensor],
        buffers: Mapping[int, Tensor],
        earlier: Mapping[int, Tensor],
        filled: Mapping[int, Tensor],
        expected: list[_Numbers] | None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources, self.buffers, self.earlier, self.filled, self.expected = (
            sources,
            buffers,
            earlier,
            filled,
            expected,
        )
        self.memory = {tensor.untyped_storage()._cdata for tensor in buffers.values()}
        self.calls: list[_Numbers] = []
        self.made: dict[int, Tensor] = {}
        self.tables: dict[int, Tensor] = {}
        self.of_buffers: dict[int, Tensor] = {}
        self.reads_tables = self.writes = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # reads no data; fake tensors ask it more often the first time
            return func(*args, **(kwargs or {}))
        given = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        name = str(func)
        read = any(id(tensor) in self.filled for tensor in tensors)
        self.reads_tables = self.reads_tables or read
        if any(id(tensor) in self.earlier for tensor in tensors) or (read and self.expected is not None):
            raise _StepError(f"{name} reads what an earlier step has computed")
        is_write = getattr(getattr(func, "_schema", None), "is_mutable", False)
        self.writes = self.writes or (is_write and any(t.untyped_storage()._cdata in self.memory for t in tensors))
        call = (name, *map(_number, given))
        if self.expected is not None:
            before = self.expected[len(self.calls)] if len(self.calls) < len(self.expected) else None
            if call != before:
                raise _StepError(_difference(before, call))
        self.calls.append(call)
        result = func(*args, **(kwargs or {}))
        read_from = [id(tensor) for tensor in tensors if not any(word in name for word in _LIKE)]
        made = self.tables
        if any(key in self.sources or key in self.made for key in read_from):
            made = self.made
        elif any(key in self.buffers or key in self.of_buffers for key in read_from):
            made = self.of_buffers
        results = ((id(leaf), leaf) for leaf in _tensors(result))
        made.update((key, leaf) for key, leaf in results if key not in self.sources and key not in self.buffers)
        return result


def _number(value: object) -> object:
    if isinstance(value, Tensor):
        if isinstance(value, FakeTensor) or value.device.type == "meta" or value.numel() > _SMALL:
            return "tensor"
        with unset_fake_temporarily():
            return str(value.tolist())
    if isinstance(value, (float, complex)) and value != value:  # noqa: PLR0124  not a number, which equals nothing
        return "nan"
    return value if isinstance(value, (bool, int, float, complex, str)) else type(value).__name__


def _difference(before: _Numbers | None, now: _Numbers) -> str:
    if before is None or before[0] != now[0]:
        return f"{now[0]} follows in one step, {'nothing' if before is None else before[0]} in another"
    first, second = next((a, b) for a, b in zip(before, now, strict=False) if a != b)
    return f"{now[0]} takes {first} in one step, {second} in the next"


def check(
    forward: Callable[..., object], model: torch.nn.Module, mode: FakeTensorMode, batch: Mapping[str, Any]
) -> tuple[tuple[str, ...], Sequence[Call]]:
    """Runs two or three steps of a fake model, more of one that draws numbers as Python does.

    Returns:
        A note on attributes that change from step to step without an effect yet, and what the first step calls, for
        :func:`are_same`; neither of a model that does not run on fake tensors outside of an export.

    Args:
        forward: takes a batch by name.
        mode: of the tensors of ``model`` and ``batch``.

    Raises:
        TraceError: a step depends on what earlier ones have left, or reads a parameter outside of the model that would learn.
    """
    trained, buffers = {id(p): p for p in model.parameters()}, {id(b): b for b in model.buffers()}
    state = trained | buffers
    seen: list[memory.State] = [memory.state_of(model)]
    watch, at_first = _Watch({}, {}, {}, {}, None), _random_state()
    values = _Values(state)
    drawn = at_first
    try:
        with _as_exporting(mode):
            for number in range(_DRAWING_PASSES + len(_DRAWN)):
                if number >= _DRAWING_PASSES:
                    _draw_alike(_DRAWN[number - _DRAWING_PASSES], drawn)
                fresh = pytree.tree_map_only(Tensor, torch.empty_like, dict(batch))
                given = {id(leaf): leaf for leaf in pytree.tree_leaves(fresh) if isinstance(leaf, Tensor)}
                past = {key: tensor for key, tensor in {**watch.made, **watch.sources}.items() if key not in state}
                before = watch.calls
                watch = _Watch(trained | given, buffers, past, watch.tables, before if number >= 2 else None)
                values.made.update(given)
                with watch, values if number == 0 else nullcontext():
                    forward(**fresh)
                is_kept = not watch.writes and all(id(buffer) in buffers for buffer in model.buffers())
                (watch.tables if is_kept else watch.made).update(watch.of_buffers)
                seen.append(memory.state_of(model))
                if watch.expected is not None and len(watch.calls) < len(watch.expected):
                    raise _StepError(_difference(None, watch.expected[len(watch.calls)]))
                if number < _DRAWING_PASSES:
                    drawn = _random_state()
                settled = number == 1 and watch.calls == before and not watch.reads_tables
                if drawn == at_first and (number == _PASSES - 1 or settled):
                    break
    except _OutsideError as error:
        place, line = user_line(error, model)
        raise TraceError(
            "Forward reads a parameter outside of the model, which no plan trains",
            where=place,
            got=str(error) + (f" at `{line}`" if line else ""),
            fix="Make its module a part of the model (an nn.ModuleList for several), or read it under torch.no_grad()",
        ) from error
    except _StepError as error:
        seen.append(memory.state_of(model))
        place, line = user_line(error, model)
        left = sorted({name for a, b in pairwise(seen) for name in memory.changed(a, b)})
        said = str(error) + (f" at `{line}`" if line else "")
        said += f"; forward sets {', '.join(left[:3])}" if left else ""
        raise TraceError(
            "A second step does not run, as the first has left something in the model",
            where=place,
            got=said,
            fix="Keep what changes in a buffer (register_buffer), draw random numbers with torch, pass it as an "
            "input, or leave it out",
        ) from error
    except (*FAILURES, AutoparError):
        return (), ()
    finally:
        _set_random_state(drawn)
    return _counting(model, seen), values.calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a pass calls, without the sizes in it.

    Attributes:
        values: numbers, flags and small constants among its arguments.
        sizes: its other numbers.
        results: shapes.
        operands: shapes, where all of them are constants; else empty.
        dims: that it works along; none where each element of the results depends on its own place in the operands alone.
    """

    target: str
    values: tuple[object, ...]
    sizes: tuple[object, ...]
    results: tuple[tuple[int, ...], ...]
    operands: tuple[tuple[int, ...], ...] = ()
    dims: tuple[int, ...] | None = None


class _Values(TorchDispatchMode):
    """Notes the calls of a pass.

    Attributes:
        made: tensors that depend on more than shapes, by identity; held, so that identities stay theirs.
    """

    def __init__(self, sources: Mapping[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made = dict(sources)
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:
            return result
        operands, results = _tensors((args, kwargs)), _tensors(result)
        outside = [t for t in operands if t.requires_grad and t.is_leaf and not isinstance(t, FakeTensor)]
        if outside and torch.is_grad_enabled() and func is not torch.ops.aten.detach.default:
            raise _OutsideError(f"one of shape {tuple(outside[0].shape)}")
        values, sizes = _split(func, args, kwargs or {})
        call = Call(target=str(func), values=values, sizes=sizes, results=_shapes(results))
        if any(id(tensor) in self.made for tensor in operands) and not any(word in call.target for word in _LIKE):
            self.made.update((id(tensor), tensor) for tensor in results)
        elif operands:
            call = replace(call, operands=_shapes(operands), dims=_dims(func, args))
        self.calls.append(call)
        return result


def _dims(target: Any, args: Sequence[object]) -> tuple[int, ...] | None:
    """The dims that a call names, of its first tensor; None where it is elementwise or a view."""
    if torch.Tag.pointwise in target.tags or target.is_view:
        return None
    rank = next((leaf.dim() for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)), 0)
    named = [value for argument, value in zip(target._schema.arguments, args, strict=False) if "dim" in argument.name]
    return tuple(value % rank for value in pytree.tree_leaves(named) if isinstance(value, int) and rank)


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _shapes(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors)


def _split(
    target: Any, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Numbers and small constants among the arguments of a call: values, then sizes, places and counts along a dim.

    Of an operator without a schema whole numbers are taken for sizes.
    """
    schema = getattr(target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    named = {argument.name: argument for argument in arguments}
    given = [*zip_longest(arguments[: len(args)], args), *((named.get(key), value) for key, value in kwargs.items())]
    values: list[object] = []
    sizes: list[object] = []
    for argument, value in given:
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, bool | int | float | complex | Tensor):
                is_size = isinstance(leaf, int) if schema is None else _is_size(schema.name, argument)
                (sizes if is_size else values).append(_number(leaf))
    return tuple(values), tuple(sizes)


def _is_size(operator: str, argument: Any) -> bool:
    if operator == "aten::arange":  # what it counts to is a size, what it counts by a value
        return bool(argument.name == "end")
    return "int" in str(argument.type).lower() and argument.name != "steps"  # of linspace, whose values it changes


def calls(
    forward: Callable[..., object], model: torch.nn.Module, mode: FakeTensorMode, batch: Mapping[str, Any]
) -> Sequence[Call]:
    """What one pass of a fake model calls, in order; nothing where it does not run outside of an export.

    Args:
        forward: takes a batch by name.
        mode: of the tensors of ``model`` and ``batch``.
    """
    watch = _Values({id(t): t for t in (*model.parameters(), *model.buffers(), *_tensors(dict(batch)))})
    try:
        with _as_exporting(mode), watch:
            forward(**batch)
    except (*FAILURES, AutoparError):
        return ()
    return watch.calls


@contextmanager
def _as_exporting(mode: FakeTensorMode) -> Iterator[None]:
    """A fake model runs the code that it runs in an export."""
    with (
        mock.patch.object(torch.compiler, "_is_exporting_flag", new=True),
        mock.patch.object(torch.compiler, "_is_compiling_flag", new=True),
        mock.patch.object(mode, "allow_non_fake_inputs", new=True),
        mock.patch.object(mode, "shape_env", new=ShapeEnv()),
        mode,
    ):
        yield


def _random_state() -> tuple[Any, bytes | None]:
    """Of the generators that Python and numpy, where it is there, share among all callers."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))


def _set_random_state(state: tuple[Any, bytes | None]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(pickle.loads(state[1]))


_ALIKE = 312
"""Of the 624 words in the state of a Mersenne Twister, which both generators are: half, as code that draws until it likes a number has to
come to others."""


def _draw_alike(drawn: int, state: tuple[Any, bytes | None]) -> None:
    """The next words of both generators are this one, some 300 times; those of ``state`` follow."""
    word = _before_tempering(drawn)
    (version, words, gauss), numpy = state
    random.setstate((version, (*[word] * _ALIKE, *words[_ALIKE:-1], 0), gauss))
    found = {} if numpy is None else pickle.loads(numpy)
    if found.get("bit_generator") == "MT19937":  # the caller may have set another one
        found["state"]["key"][:_ALIKE], found["state"]["pos"] = word, 0
        sys.modules["numpy"].random.set_state(found)


def _before_tempering(drawn: int) -> int:
    """The word of which a Mersenne Twister makes ``drawn``: its tempering (Matsumoto and Nishimura 1998) taken back, step by step."""
    y = drawn ^ drawn >> 18
    y ^= y << 15 & 0xEFC60000
    word = y
    for _ in range(4):  # each brings seven bits more
        word = y ^ word << 7 & 0x9D2C5680
    y = word
    for _ in range(2):  # and eleven
        word = y ^ word >> 11
    return word


def _counting(model: torch.nn.Module, seen: list[memory.State]) -> tuple[str, ...]:
    """On attributes that every step has changed."""
    steps = [set(memory.changed(a, b)) for a, b in pairwise(seen)]
    names = sorted(set.intersection(*steps))
    kinds = [f"{name} ({type(model.get_submodule(name.rpartition('.')[0])).__name__})" for name in names[:3]]
    if not names:
        return ()
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    what = f"attributes that forward changes from step to step: {', '.join(kinds)}{more}"
    said = "the plan runs the first step's code for ever; where forward decides by them, keep them in a buffer"
    return (f"{what}; {said} (register_buffer)",)


class CountError(TraceError):
    """A number in a model depends on the batch size."""


def are_same(calls: Sequence[Call], larger: Sequence[Call]) -> bool:
    """Whether passes at two batch sizes show that no number or constant depends on the batch size; False where they may not.

    Of a constant whose shape does, elements are taken for the same as long as nothing joins or picks them along that dim.
    """
    return bool(calls) and len(calls) == len(larger) and all(map(_is_same, calls, larger))


def _is_same(one: Call, two: Call) -> bool:
    if (one.target, one.values, one.dims) != (two.target, two.values, two.dims):
        return False
    if any(map(eq, one.results, two.results)) and (one.sizes != two.sizes or one.operands != two.operands):
        return False
    if one.dims is None or one.operands == two.operands:
        return True
    if list(map(len, one.operands)) != list(map(len, two.operands)):
        return False
    cut = [
        [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if sizes[0] != sizes[1]]
        for shapes in zip(one.operands, two.operands, strict=True)
    ]
    return all(len(dims) < 2 for dims in cut) and not set(one.dims).intersection(cut[0])


def check_numbers(graph: Graph, larger: Graph) -> None:
    """Compare a trace with one at another batch size.

    Raises:
        CountError: numbers or constants differ, or the operators do.
    """
    there = {op.name: op for op in (*larger.prelude, *larger.ops)}
    constants, more = ({b.name: b.value for b in own.buffers if not b.fqn} for own in (graph, larger))
    for op in (*graph.prelude, *graph.ops):
        other = there.get(op.name)
        if other is None or (other.target, other.operands) != (op.target, op.operands):
            raise _depends(graph, larger, op, op.target, "other calls")
        (values, sizes), (larger_values, larger_sizes) = _given(op, constants), _given(other, more)
        for one, two in zip_longest(values, larger_values):
            if not _agree(one, two):
                raise _depends(graph, larger, op, _said(one), _said(two))
        if sizes != larger_sizes and op.outputs == other.outputs:
            raise _depends(graph, larger, op, f"{list(sizes)}", f"{list(larger_sizes)}")
    if graph.loss != larger.loss:
        raise _depends(graph, larger, graph.producer(graph.loss), f"{len(graph.ops)} calls", f"{len(larger.ops)}")


def _depends(graph: Graph, larger: Graph, op: Op | None, here: str, there: str) -> CountError:
    return CountError(
        f"A number in the model depends on the batch size: {here} for a batch of {graph.batch_size}, "
        f"{there} for one of {larger.batch_size}",
        where="" if op is None else op.source or op.module or op.name,
        fix="Take a mean, or divide by a count of the inputs: (labels != -100).sum()",
    )


def _given(op: Op, constants: Mapping[str, Tensor | None]) -> tuple[list[object], tuple[object, ...]]:
    """Numbers and constants among the arguments; and sizes."""
    target = resolve(op.target) if op.target.startswith("aten.") else None
    values, sizes = _split(target, op.args, dict(op.kwargs))
    return [*values, *(constants[r.name] for r in op.operands if constants.get(r.name) is not None)], sizes


def _agree(one: object, two: object) -> bool:
    """Whether two numbers are the same, or two constants where they share a place."""
    if not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return bool(one == two) or (one != one and two != two)  # noqa: PLR0124  not a number, which equals nothing
    if one.dim() != two.dim() or one.dtype != two.dtype:
        return False
    places = tuple(slice(min(sizes)) for sizes in zip(one.shape, two.shape, strict=True))
    return torch.allclose(one[places], two[places], rtol=0.0, atol=0.0, equal_nan=True)


def _said(value: object) -> str:
    if isinstance(value, Tensor):
        return str(value.item()) if value.numel() == 1 else f"a constant of shape {tuple(value.shape)}"
    return "nothing" if value is None else str(value)
