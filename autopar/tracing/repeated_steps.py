"""Whether steps depend on earlier ones.

A trace freezes what Python keeps: a counter in an attribute, a list, a global, an iterator, Python's random numbers, a
tensor of the last batch. Forward passes in a row on fake tensors show it: the second may read nothing that the first has
computed from its batch and must call the same operators with the same numbers; where the first has filled caches, a third
must call those of the second.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.errors import AutoparError, TraceError
from autopar.tracing import side_effects as memory
from autopar.tracing.failures import FAILURES, user_line
from autopar.tracing.sample_counts import Call, call_of, number_of

_LIKE = ("_like", "new_zeros", "new_ones", "new_full", "new_empty")
"""In the names of operators that take of a tensor its shape alone."""
_PASSES, _DRAWING_PASSES = 3, 6
"""Passes that are tried; more where forward draws random numbers of Python's or numpy's, and then those of ``_WORDS``."""
_WORDS = (0x40, 0x12DD9BB3, 0xC99D5AD4, 0xDB40C167, 0xA4E5B5C9, 0xB6382E7A)
"""Words in the state of a Mersenne Twister of which its tempering (Matsumoto and Nishimura 1998) makes 0x40, and 5, 2, 3, 1 and 4 times
0x33333333: what forward draws in one pass each, by which numbers lie at the ends of their range and at its fifths. What goes another
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
        calls: the calls, in order.
        numbers: of each its operator and the numbers in its arguments.
        made: tensors that depend on ``sources``, by identity; held, so that identities stay theirs.
        tables: all other tensors that the pass made, likewise: of constants, and of buffers where it writes to none.
        of_buffers: tensors that depend on ``buffers`` and on none of ``sources``.
        writes: whether an operator may have written to a buffer.
        earlier: ``made`` of the pass before.
        filled: ``tables`` of the pass before; a second pass may read what the first has kept, a third makes no more of it.
        reads_tables: whether one of ``filled`` was read.
        expected: ``numbers`` of the pass before, where they must be the same.
    """

    def __init__(
        self,
        sources: Mapping[int, Tensor],
        buffers: Mapping[int, Tensor] = MappingProxyType({}),
        earlier: Mapping[int, Tensor] = MappingProxyType({}),
        filled: Mapping[int, Tensor] = MappingProxyType({}),
        expected: list[_Numbers] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources, self.buffers = sources, buffers
        self.earlier, self.filled, self.expected = earlier, filled, expected
        self.memory = {tensor.untyped_storage()._cdata for tensor in buffers.values()}
        self.calls: list[Call] = []
        self.numbers: list[_Numbers] = []
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
        numbers = (name, *map(number_of, given))
        if self.expected is not None:
            before = self.expected[len(self.numbers)] if len(self.numbers) < len(self.expected) else None
            if numbers != before:
                raise _StepError(_difference(before, numbers))
        self.numbers.append(numbers)
        result = func(*args, **(kwargs or {}))
        outside = [t for t in tensors if t.requires_grad and t.is_leaf and not isinstance(t, FakeTensor)]
        if outside and torch.is_grad_enabled() and func is not torch.ops.aten.detach.default:
            raise _OutsideError(f"one of shape {tuple(outside[0].shape)}")
        read_from = [id(tensor) for tensor in tensors if not any(word in name for word in _LIKE)]
        made = self.tables
        if any(key in self.sources or key in self.made for key in read_from):
            made = self.made
        elif any(key in self.buffers or key in self.of_buffers for key in read_from):
            made = self.of_buffers
        self.calls.append(call_of(func, args, kwargs or {}, result, depends=made is not self.tables))
        results = ((id(leaf), leaf) for leaf in _tensors(result))
        made.update((key, leaf) for key, leaf in results if key not in self.sources and key not in self.buffers)
        return result


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


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
        :func:`~autopar.tracing.sample_counts.are_same`; neither of a model that does not run on fake tensors outside of an export.

    Args:
        forward: takes a batch by name.
        mode: of the tensors of ``model`` and ``batch``.

    Raises:
        TraceError: a step depends on what earlier ones have left, or reads a parameter outside of the model that would learn.
    """
    trained, buffers = {id(p): p for p in model.parameters()}, {id(b): b for b in model.buffers()}
    state = trained | buffers
    seen: list[memory.State] = [memory.state_of(model)]
    watch, at_first = _Watch({}), _random_state()
    drawn, calls = at_first, watch.calls
    try:
        with _as_exporting(mode):
            for number in range(_DRAWING_PASSES + len(_WORDS)):
                if number >= _DRAWING_PASSES:
                    _draw_alike(_WORDS[number - _DRAWING_PASSES], drawn)
                fresh = pytree.tree_map_only(Tensor, torch.empty_like, dict(batch))
                given = {id(leaf): leaf for leaf in pytree.tree_leaves(fresh) if isinstance(leaf, Tensor)}
                past = {key: tensor for key, tensor in {**watch.made, **watch.sources}.items() if key not in state}
                before = watch.numbers
                watch = _Watch(trained | given, buffers, past, watch.tables, before if number >= 2 else None)
                calls = watch.calls if number == 0 else calls
                with watch:
                    forward(**fresh)
                is_kept = not watch.writes and all(id(buffer) in buffers for buffer in model.buffers())
                (watch.tables if is_kept else watch.made).update(watch.of_buffers)
                seen.append(memory.state_of(model))
                if watch.expected is not None and len(watch.numbers) < len(watch.expected):
                    raise _StepError(_difference(None, watch.expected[len(watch.numbers)]))
                if number < _DRAWING_PASSES:
                    drawn = _random_state()
                settled = number == 1 and watch.numbers == before and not watch.reads_tables
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
    return _counting(model, seen), calls


def calls_of(
    forward: Callable[..., object], model: torch.nn.Module, mode: FakeTensorMode, batch: Mapping[str, Any]
) -> Sequence[Call]:
    """What one pass of a fake model calls, in order; nothing where it does not run outside of an export.

    Args:
        forward: takes a batch by name.
        mode: of the tensors of ``model`` and ``batch``.
    """
    watch = _Watch({id(t): t for t in (*model.parameters(), *model.buffers(), *_tensors(dict(batch)))})
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


def _draw_alike(word: int, state: tuple[Any, bytes | None]) -> None:
    """The next words of both generators are this one, some 300 times; those of ``state`` follow."""
    (version, words, gauss), numpy = state
    random.setstate((version, (*[word] * _ALIKE, *words[_ALIKE:-1], 0), gauss))
    found = {} if numpy is None else pickle.loads(numpy)
    if found.get("bit_generator") == "MT19937":  # the caller may have set another one
        found["state"]["key"][:_ALIKE], found["state"]["pos"] = word, 0
        sys.modules["numpy"].random.set_state(found)


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
