"""What a graph of one step at one batch size promises, tried: steps do not depend on earlier ones, numbers do not count samples.

A trace freezes what Python keeps: a counter in an attribute, a list, a global, an iterator, Python's random numbers, a
tensor of the last batch. Forward passes in a row on fake tensors show it: the second may read nothing that the first has
computed from its batch and must call the same operators with the same numbers; where the first has filled caches, a third
must call those of the second.

``loss.sum() / labels.numel()`` traces as a division by a number, that of the example's batch: for another batch size
it would be wrong. Whether a number depends on the batch size, a second trace at twice the size tells; of a number that the
model's own code multiplies by, forward passes at both sizes tell it too, in a fraction of the time.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, TypeGuard
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import AutoparError, TraceError
from autopar.graph.graph import Graph, Op, Ref
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

Call = tuple[object, ...]


class _StepError(RuntimeError):
    """Raised in the user's line that shows the dependence."""


class _Watch(TorchDispatchMode):
    """Notes the operators that a pass calls.

    Attributes:
        calls: operators with their numbers, in order.
        made: tensors that depend on ``sources``, by identity; held, so that identities stay theirs.
        earlier: ``made`` of the pass before.
        expected: ``calls`` of the pass before, where they must be the same.
    """

    def __init__(
        self, sources: Mapping[int, Tensor], earlier: Mapping[int, Tensor], expected: list[Call] | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources, self.earlier, self.expected = sources, earlier, expected
        self.calls: list[Call] = []
        self.made: dict[int, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # reads no data; fake tensors ask it more often the first time
            return func(*args, **(kwargs or {}))
        given = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        name = str(func)
        if any(id(tensor) in self.earlier for tensor in tensors):
            raise _StepError(f"{name} reads what an earlier step has computed")
        call = (name, *map(_number, given))
        if self.expected is not None:
            before = self.expected[len(self.calls)] if len(self.calls) < len(self.expected) else None
            if call != before:
                raise _StepError(_difference(before, call))
        self.calls.append(call)
        result = func(*args, **(kwargs or {}))
        if not any(word in name for word in _LIKE) and any(
            id(tensor) in self.sources or id(tensor) in self.made for tensor in tensors
        ):
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor) and id(leaf) not in self.sources:
                    self.made[id(leaf)] = leaf
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


def _difference(before: Call | None, now: Call) -> str:
    if before is None or before[0] != now[0]:
        return f"{now[0]} follows in one step, {'nothing' if before is None else before[0]} in another"
    first, second = next((a, b) for a, b in zip(before, now, strict=False) if a != b)
    return f"{now[0]} takes {first} in one step, {second} in the next"


def check(
    forward: Callable[..., object], model: torch.nn.Module, mode: FakeTensorMode, batch: Mapping[str, Any]
) -> tuple[str, ...]:
    """Runs two or three steps of a fake model, more of one that draws numbers as Python does; a note on attributes that change from step to step without an effect yet.

    Nothing is said of a model that does not run on fake tensors outside of an export.

    Args:
        forward: takes a batch by name.
        mode: of the tensors of ``model`` and ``batch``.

    Raises:
        TraceError: a step depends on what earlier ones have left.
    """
    state = {id(t): t for t in (*model.parameters(), *model.buffers())}
    seen: list[memory.State] = [memory.state_of(model)]
    watch, at_first = _Watch({}, {}, None), _random_state()
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
                watch = _Watch(state | given, past, before if number >= 2 else None)
                with watch:
                    forward(**fresh)
                seen.append(memory.state_of(model))
                if watch.expected is not None and len(watch.calls) < len(watch.expected):
                    raise _StepError(_difference(None, watch.expected[len(watch.calls)]))
                if number < _DRAWING_PASSES:
                    drawn = _random_state()
                if drawn == at_first and (number == _PASSES - 1 or (number == 1 and watch.calls == before)):
                    break
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
        return ()
    finally:
        _set_random_state(drawn)
    return _counting(model, seen)


def calls(forward: Callable[..., object], mode: FakeTensorMode, batch: Mapping[str, Any]) -> list[Call] | None:
    """Operators with their numbers, in order, of one pass of a fake model; None where it does not run outside of an export.

    Args:
        forward: takes a batch by name.
        mode: of the tensors of the model and ``batch``.
    """
    watch = _Watch({}, {}, None)
    try:
        with _as_exporting(mode), watch:
            forward(**batch)
    except (*FAILURES, AutoparError):
        return None
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


_SCALING = frozenset(f"aten.{name}.{kind}" for name in ("mul", "div") for kind in ("Tensor", "Scalar"))
_SHIFTING = _SCALING | {
    f"aten.{name}.{kind}" for name in ("add", "sub", "rsub", "pow") for kind in ("Tensor", "Scalar")
}


class CountError(TraceError):
    """A loss is scaled by a number that depends on the batch size."""


def suspects(graph: Graph) -> list[Op]:
    """Operators that scale by a number what has a gradient and may have no batch dim: surely not, or near the loss."""
    last = graph.blocks[-1].start
    found = [
        op
        for i, op in enumerate(graph.ops)
        if op.target in _SCALING
        and op.spec.requires_grad
        and (not op.spec.shape or op.spec.shape[0] % graph.batch_size or i >= last)
        and any(n != 1 for n in _numbers(graph, op))
    ]
    return found + [op for op in _for_buffers(graph) if op not in found and any(_numbers(graph, op))]


def _for_buffers(graph: Graph) -> Iterator[Op]:
    """Elementwise operators with numbers that new values of buffers depend on (a count of samples seen)."""
    needed = {m.value.name for m in graph.mutations}
    for op in reversed((*graph.prelude, *graph.ops)):
        if op.name in needed:
            needed.update(ref.name for ref in op.operands)
            if op.target in _SHIFTING and not op.spec.requires_grad:
                yield op


def are_same(graph: Graph, calls: Sequence[Call], larger: Sequence[Call]) -> bool:
    """Whether two forward passes show that no number of :func:`suspects` depends on the batch size; False where they may not.

    They show it where both scale and shift by the same numbers in the same order, the suspects' among them: constants that are
    computed, and numbers that a trace has made of others, are not.

    Args:
        calls, larger: of passes at the batch size of ``graph`` and at another (:func:`autopar.tracing.repeated_steps.calls`).
    """
    here, there = (list(_shifts(own)) for own in (calls, larger))
    if here != there:
        return False
    called = {(target, float(n)) for target, *given in here for n in given if _is_number(n)}
    for op in suspects(graph):
        literals = [float(n) for n in op.args if _is_number(n)]
        if literals != list(_numbers(graph, op)) or not called.issuperset((op.target, n) for n in literals):
            return False
    return True


def _shifts(calls: Iterable[Call]) -> Iterator[Call]:
    """Those that scale or shift, in place or not, which are the same in a graph."""
    for name, *given in calls:
        target = str(name).replace("_.", ".")
        if target in _SHIFTING:
            yield target, *given


def check_numbers(graph: Graph, larger: Graph) -> None:
    """Compare a trace with one at another batch size.

    Raises:
        CountError: a number of :func:`suspects` differs.
    """
    others = {op.name: op for op in (*larger.prelude, *larger.ops)}
    for op in suspects(graph):
        other = others.get(op.name)
        here, there = list(_numbers(graph, op)), [] if other is None else list(_numbers(larger, other))
        if here != there:
            raise CountError(
                f"A number in a loss or buffer depends on the batch size: {here} for a batch of {graph.batch_size}, "
                f"{there} for one of {larger.batch_size}",
                where=op.source or op.module or op.name,
                fix="Take a mean, or divide by a count of the inputs: (labels != -100).sum()",
            )


def _numbers(graph: Graph, op: Op) -> Iterator[float]:
    """Literals, and constants of one value, among the arguments."""
    values = {buffer.name: buffer.value for buffer in graph.buffers if not buffer.fqn}
    for argument in op.args:
        if _is_number(argument):
            yield float(argument)
        elif isinstance(argument, Ref):
            value = values.get(argument.name)
            if value is not None and value.numel() == 1:
                yield float(value.item())


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
