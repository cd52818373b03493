"""A check that a training step does not depend on earlier steps.

A trace freezes the state of Python: counters in attributes, lists, globals, iterators, Python's random numbers and tensors of the
last batch. Several forward passes on fake tensors reveal a dependence on such state. A pass must not read what an earlier one has
computed from its batch. The third pass must call the same operators with the same numbers as the second one. The first pass may
differ, because it may fill caches.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
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
"""Parts of the names of operators that only use the shape of their operand."""

_PASSES, _RANDOM_PASSES = 3, 6
"""Number of passes, and their number if forward draws random numbers of Python or numpy. In that case those of ``_WORDS`` follow."""

_WORDS = (0x40, 0x12DD9BB3, 0xC99D5AD4, 0xDB40C167, 0xA4E5B5C9, 0xB6382E7A)
"""Words of the state of a Mersenne Twister. One pass draws only the numbers that follow from each.

The tempering of the generator (Matsumoto and Nishimura 1998) turns them into 0x40 and into 5, 2, 3, 1 and 4 times 0x33333333, so that
the drawn numbers lie at the ends and at the fifths of their range, whether a function uses the first or the last bits of a word. A
branch on a threshold, on a probability of at least a fifth or on one of up to four choices takes another way in one of these passes. A
branch that compares two draws does so in the passes before. The smallest number is 1.5e-8 and not 0, which no real step draws, so that
a branch on ``<= 0.0`` is not taken."""

_Numbers: TypeAlias = tuple[object, ...]
"""The name of an operator, followed by the numbers in its arguments."""


class _StepError(RuntimeError):
    """A step depends on an earlier one. It is raised in the user's line that shows the dependence."""


class _OutsideError(RuntimeError):
    """Forward reads a parameter that does not belong to the model. It is raised in the user's line that reads it."""


class _Watch(TorchDispatchMode):
    """Records the operators that a forward pass calls, and raises an error if they show a dependence on the previous pass.

    The mode keeps all tensors of the pass alive, so that the identity of a tensor is unique.

    Attributes:
        sources: The parameters and the tensors of the batch by identity.
        buffers: The buffers by identity.
        calls: The calls in order.
        numbers: For each call the operator and the numbers in its arguments.
        dependent: The tensors that depend on ``sources``, by identity.
        of_buffers: The tensors that depend on ``buffers`` and on none of ``sources``, by identity.
        constants: All other tensors that the pass computed, by identity; after a pass that wrote to no buffer, also ``of_buffers``.
        writes: Whether an operator may have written to a buffer.
        earlier: The tensors of the previous pass that depend on its batch, by identity. They must not be read.
        earlier_constants: ``constants`` of the previous pass. They may only be read if ``expected`` is None.
        reads_earlier_constants: Whether the pass has read one of ``earlier_constants``.
        expected: ``numbers`` of the previous pass if they must be the same, else None.
    """

    def __init__(
        self,
        sources: Mapping[int, Tensor],
        buffers: Mapping[int, Tensor] = MappingProxyType({}),
        earlier: Mapping[int, Tensor] = MappingProxyType({}),
        earlier_constants: Mapping[int, Tensor] = MappingProxyType({}),
        expected: list[_Numbers] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sources, self.buffers, self.expected = sources, buffers, expected
        self.earlier, self.earlier_constants = earlier, earlier_constants
        self.memory = {tensor.untyped_storage()._cdata for tensor in buffers.values()}
        self.calls: list[Call] = []
        self.numbers: list[_Numbers] = []
        self.dependent: dict[int, Tensor] = {}
        self.of_buffers: dict[int, Tensor] = {}
        self.constants: dict[int, Tensor] = {}
        self.reads_earlier_constants = self.writes = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # prim.device reads no data, and fake tensors call it more often in the first pass
        if func is torch.ops.prim.device.default:
            return func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        name = str(func)
        reads_constant = any(id(tensor) in self.earlier_constants for tensor in tensors)
        self.reads_earlier_constants |= reads_constant
        if any(id(tensor) in self.earlier for tensor in tensors) or (reads_constant and self.expected is not None):
            raise _StepError(f"{name} reads what an earlier step has computed")
        is_write = getattr(getattr(func, "_schema", None), "is_mutable", False)
        self.writes = self.writes or (is_write and any(t.untyped_storage()._cdata in self.memory for t in tensors))
        numbers = (name, *map(number_of, leaves))
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
        results = self.constants
        if any(key in self.sources or key in self.dependent for key in read_from):
            results = self.dependent
        elif any(key in self.buffers or key in self.of_buffers for key in read_from):
            results = self.of_buffers
        self.calls.append(call_of(func, args, kwargs or {}, result, depends=results is not self.constants))
        new = ((id(leaf), leaf) for leaf in _tensors(result))
        results.update((key, leaf) for key, leaf in new if key not in self.sources and key not in self.buffers)
        return result


def _tensors(value: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _difference(before: _Numbers | None, now: _Numbers) -> str:
    """Return the message for a call that differs from that of the previous pass, which is None after its last call."""
    if before is None or before[0] != now[0]:
        return f"{now[0]} follows in one step, {'nothing' if before is None else before[0]} in another"
    first, second = next((a, b) for a, b in zip(before, now, strict=False) if a != b)
    if len(f"{first}{second}") > 60:
        return f"{now[0]} takes other numbers in the next step"
    return f"{now[0]} takes {first} in one step, {second} in the next"


def check(
    forward: Callable[..., object], model: torch.nn.Module, mode: FakeTensorMode, batch: Mapping[str, Any]
) -> tuple[tuple[str, ...], Sequence[Call]]:
    """Run two or three forward passes of a fake model, or more if it draws random numbers of Python or numpy.

    Args:
        forward: The forward of the model; it takes a batch by name.
        model: The fake model.
        mode: The fake mode of the tensors of ``model`` and ``batch``.
        batch: The fake batch.

    Returns:
        A note if attributes change from pass to pass without an effect so far, and the calls of the first pass, for
        :func:`~autopar.tracing.sample_counts.are_same`. Both are empty if the model does not run on fake tensors outside of an
        export.

    Raises:
        TraceError: A pass depends on an earlier one, or reads a parameter that does not belong to the model and requires a gradient.
    """
    named = dict(model.named_buffers(remove_duplicate=False))
    trained, buffers = {id(p): p for p in model.parameters()}, {id(b): b for b in named.values()}
    tensors = trained | buffers
    states: list[memory.State] = [memory.state_of(model)]
    watch, initial = _Watch({}), _random_state()
    random_state, calls = initial, watch.calls
    try:
        with _as_exporting(mode):
            for number in range(_RANDOM_PASSES + len(_WORDS)):
                if number >= _RANDOM_PASSES:
                    _set_next_words(_WORDS[number - _RANDOM_PASSES], random_state)
                fresh = pytree.tree_map_only(Tensor, torch.empty_like, dict(batch))
                inputs = {id(leaf): leaf for leaf in _tensors(fresh)}
                earlier = {key: t for key, t in {**watch.dependent, **watch.sources}.items() if key not in tensors}
                before = watch.numbers
                watch = _Watch(trained | inputs, buffers, earlier, watch.constants, before if number >= 2 else None)
                calls = watch.calls if number == 0 else calls
                with watch:
                    forward(**fresh)
                now = dict(model.named_buffers(remove_duplicate=False))
                is_unchanged = not watch.writes and all(now.get(name) is buffer for name, buffer in named.items())
                (watch.constants if is_unchanged else watch.dependent).update(watch.of_buffers)
                states.append(memory.state_of(model))
                if watch.expected is not None and len(watch.numbers) < len(watch.expected):
                    raise _StepError(_difference(None, watch.expected[len(watch.numbers)]))
                if number < _RANDOM_PASSES:
                    random_state = _random_state()
                is_settled = number == 1 and watch.numbers == before and not watch.reads_earlier_constants
                if random_state == initial and (number == _PASSES - 1 or is_settled):
                    break
    except (_OutsideError, _StepError) as error:
        raise _refused(error, model, [*states, memory.state_of(model)]) from error
    except (*FAILURES, AutoparError):
        return (), ()
    finally:
        _set_random_state(random_state)
    return _notes(model, states), calls


def _refused(error: _OutsideError | _StepError, model: torch.nn.Module, states: list[memory.State]) -> TraceError:
    """Return the error for a model that has raised ``error``; ``states`` are those of its attributes after each pass."""
    place, line = user_line(error, model)
    reason = str(error) + (f" at `{line}`" if line else "")
    if isinstance(error, _OutsideError):
        problem = "Forward reads a parameter outside of the model, which no plan trains"
        fix = "Make its module a part of the model (an nn.ModuleList for several), or read it under torch.no_grad()"
    else:
        attributes = sorted({name for a, b in pairwise(states) for name in memory.changed(a, b)})
        reason += f"; forward sets {', '.join(attributes[:3])}" if attributes else ""
        problem = "A second step does not run, as the first has left something in the model"
        fix = "Keep what changes in a buffer (register_buffer), draw random numbers with torch, pass it as an input, or leave it out"
    return TraceError(problem, where=place, got=reason, fix=fix)


def calls_of(
    forward: Callable[..., object], model: torch.nn.Module, mode: FakeTensorMode, batch: Mapping[str, Any]
) -> Sequence[Call]:
    """Return the calls of one forward pass of a fake model in order; none if it does not run outside of an export.

    Args:
        forward: The forward of the model; it takes a batch by name.
        model: The fake model.
        mode: The fake mode of the tensors of ``model`` and ``batch``.
        batch: The fake batch.
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
    """Enter a context in which a fake model runs the same code as in an export."""
    with (
        mock.patch.object(torch.compiler, "_is_exporting_flag", new=True),
        mock.patch.object(torch.compiler, "_is_compiling_flag", new=True),
        mock.patch.object(mode, "allow_non_fake_inputs", new=True),
        mock.patch.object(mode, "shape_env", new=ShapeEnv()),
        mode,
    ):
        yield


def _random_state() -> tuple[Any, bytes]:
    """Return the states of the global random generators of Python and of numpy, in a form that can be compared."""
    return random.getstate(), pickle.dumps(np.random.get_state(legacy=False))


def _set_random_state(state: tuple[Any, bytes]) -> None:
    """Restore what :func:`_random_state` returned."""
    random.setstate(state[0])
    np.random.set_state(pickle.loads(state[1]))


_NUM_EQUAL_WORDS = 312
"""Half of the 624 words in the state of a Mersenne Twister. The others differ, so that code that draws until a number fits ends."""


def _set_next_words(word: int, state: tuple[Any, bytes]) -> None:
    """Set the next words of both generators to ``word``, :data:`_NUM_EQUAL_WORDS` times, and those after them to words of ``state``."""
    (version, words, gauss), numpy_bytes = state
    random.setstate((version, (*[word] * _NUM_EQUAL_WORDS, *words[_NUM_EQUAL_WORDS:-1], 0), gauss))
    numpy_state = pickle.loads(numpy_bytes)
    if numpy_state["bit_generator"] == "MT19937":  # the user may have selected another generator
        numpy_state["state"]["key"][:_NUM_EQUAL_WORDS], numpy_state["state"]["pos"] = word, 0
        np.random.set_state(numpy_state)


def _notes(model: torch.nn.Module, states: list[memory.State]) -> tuple[str, ...]:
    """Return a note on the attributes that change in each pass, if there are any."""
    changes = [set(memory.changed(a, b)) for a, b in pairwise(states)]
    names = sorted(set.intersection(*changes))
    kinds = [f"{name} ({type(model.get_submodule(name.rpartition('.')[0])).__name__})" for name in names[:3]]
    if not names:
        return ()
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    what = f"attributes that forward changes from step to step: {', '.join(kinds)}{more}"
    said = "the plan runs the first step's code for ever; where forward decides by them, keep them in a buffer"
    return (f"{what}; {said} (register_buffer)",)
