"""What a model computes in ``eval()``: the values of its training graph, some of them in the places of others.

``par.evaluate`` runs the program of the training graph. A model that calls the same operators in ``eval()`` needs nothing else. Any other
is traced in ``eval()`` too, and its operators are looked for in the training graph. An operator has a counterpart where training does the
same with the same values. Where training computes a value that ``eval()`` does not (a mask of stochastic depth, noise, a power
iteration), its readers may read another value instead. If all operators of ``eval()``, its loss and its outputs have counterparts, these
replacements are all that ``eval()`` changes.

Torch's batch norms, recurrent networks and, where possible, dropouts stay in training here, as the runtime knows what they do in ``eval()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.rnn import RNNBase

from autopar.errors import AutoparError
from autopar.graph.elements import (
    Buffer,
    Evaluation,
    Input,
    Op,
    Outputs,
    Parameter,
    Ref,
    Structure,
    TensorSpec,
    map_refs,
)
from autopar.graph.graph import Graph
from autopar.graph.operator_kinds import draws_random, without_dropout

_RUNNING = "autopar.batch_norm_running"
_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
"""Names of the buffers of a batch norm."""
_ANY_REF = Ref("")


def kept_in_training(graph: Graph) -> tuple[type[torch.nn.Module], ...]:
    """Return the classes of modules that may stay in training where the others are in ``eval()``.

    Dropouts may not if something else draws random numbers: that may be a dropout which the export has taken apart.
    """
    draws = (op for op in _ops(graph) if draws_random(op.target) and op.target != "autopar.dropout")
    return (_BatchNorm, RNNBase) if any(draws) else (_BatchNorm, RNNBase, _DropoutNd)


def put_in_eval(model: torch.nn.Module, kept: tuple[type[torch.nn.Module], ...]) -> None:
    """Put all modules in ``eval()`` but those of the classes ``kept``, and of classes made from these."""
    for module in model.modules():
        if not isinstance(module, kept):
            module.training = False


def evaluation_of(training: Graph, model: torch.nn.Module, trace_in_eval: Callable[[], Graph]) -> Evaluation:
    """Return what ``eval()`` changes in the graph of a training step.

    Args:
        training: the graph of the training step.
        model: the model.
        trace_in_eval: traces the model after :func:`put_in_eval`, with as many samples.
    """
    try:
        other = trace_in_eval()
    except AutoparError as error:
        return Evaluation(unknown=f"in eval() it cannot be traced: {error.short}")
    norms = [path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, _BatchNorm)]
    statistics = {f"{path}.{name}" if path else name for path in norms for name in _STATISTICS}
    names = {buffer.name: buffer.fqn for buffer in other.buffers}
    changed = [names[m.buffer] for m in other.mutations if names[m.buffer] not in statistics]
    if changed:
        return Evaluation(unknown=f"it changes its buffer {changed[0]} in eval() too")
    found = _Counterparts(training, other)
    for op in _ops(other):
        if not found.add(op):
            return Evaluation(
                unknown=f"in eval() it calls {op.target} as training does not", where=op.source or op.module
            )
    return found.evaluation()


class _Counterparts:
    """The values of a training graph that are equal in ``eval()`` to those of the graph in ``eval()``.

    Attributes:
        same: for each value of ``other`` so far that of the training graph.
        replaced: for values of the training graph that ``eval()`` does not compute those that its readers use instead.
    """

    def __init__(self, training: Graph, other: Graph) -> None:
        self.training, self.other = training, other
        self._first = dict(_equal_leaves(training, training))  # a tensor of the model may be several leaves
        self.same = dict(_equal_leaves(training, other))
        self.replaced: dict[Ref, Ref] = {}
        ops = _ops(training)
        self._unmatched = {op.name: op for op in ops}
        self._alike: dict[object, list[Op]] = {}
        for op in ops:
            self._alike.setdefault(_call(op), []).append(op)
        self._specs = {ref: spec for op in ops for ref, spec in zip(op.refs, op.outputs, strict=True)}
        self._specs |= {Ref(leaf.name): leaf.spec for leaf in _leaves(training)}

    def add(self, op: Op) -> bool:
        """Find the counterpart of the next operator of ``other``, and return whether there is one; best is one without replacements."""
        kept = {ref.name for ref in self.replaced}
        alike = [one for one in self._alike.get(_call(op), ()) if one.name in self._unmatched and one.name not in kept]
        found = ((self._replaced_in(zip(op.operands, one.operands, strict=True)), one) for one in alike)
        possible = [(replaced, one) for replaced, one in found if replaced is not None]
        if not possible:
            return False
        replaced, match = min(possible, key=lambda pair: len(pair[0]))
        self.replaced |= replaced
        del self._unmatched[match.name]
        outputs = list(zip(op.refs, match.refs, strict=True))
        self.same |= outputs
        return all((a in self.other.sums) == (b in self.training.sums) for a, b in outputs)

    def _replaced_in(self, pairs: Iterable[tuple[Ref, Ref]]) -> dict[Ref, Ref] | None:
        """Return the further replacements by which values of the training graph are equal to those of ``other``; None if there are none.

        Args:
            pairs: values of ``other`` and of the training graph.
        """
        replaced: dict[Ref, Ref] = {}
        for value, there in pairs:
            wanted = self.same.get(value)
            if wanted is None:
                return None
            known = self.replaced.get(there) or replaced.get(there)
            if wanted in (known, self._first.get(there, there)):
                continue
            is_free = there.name in self._unmatched and known is None
            if not is_free or _kind(self._specs[wanted]) != _kind(self._specs[there]):
                return None
            replaced[there] = wanted
        return replaced

    def evaluation(self) -> Evaluation:
        """Return the result, after all operators of ``other`` were added."""
        outputs, others = self.training.outputs, self.other.outputs
        pairs = [(self.other.loss, self.training.loss)]
        if outputs is not None and others is not None:
            refs = [(a.ref, b.ref) for a, b in zip(others.leaves, outputs.leaves, strict=False)]
            pairs += [(a, b) for a, b in refs if a is not None and b is not None]
        replaced = self._replaced_in(pairs)
        if replaced is None or _returned(outputs) != _returned(others):
            return Evaluation(unknown="it returns other values in eval()")
        self.replaced |= replaced
        if outputs is not None and any(ref.name == op.name for ref in self.replaced for op in outputs.ops):
            return Evaluation(unknown="it returns values in eval() that training computes otherwise")
        needed = {ref.name for ref in self.training.sums}
        for op in reversed(self.training.prelude):
            if op.name in needed:
                needed |= {ref.name for ref in op.operands}
                if op.target == _RUNNING or any(ref in self.replaced for ref in op.operands):
                    return Evaluation(unknown="it counts samples otherwise in eval()", where=op.source or op.module)
        # what a dropout reads takes its place at run time, whichever layouts the two have
        dropouts = {Ref(op.name): op.operands[0] for op in self._unmatched.values() if op.target == "autopar.dropout"}
        return Evaluation(replaced=tuple((v, u) for v, u in self.replaced.items() if dropouts.get(v) != u))


def _call(op: Op) -> object:
    """Return what an operator does, without its operands and without dropout."""
    op = without_dropout(op)
    arguments = () if op.target == "autopar.dropout" else (op.args, *op.kwargs)  # a dropout has a number of its own
    return op.target, map_refs(arguments, lambda _: _ANY_REF), tuple(map(_kind, op.outputs))


def _kind(spec: TensorSpec) -> tuple[tuple[int, ...], torch.dtype]:
    return spec.shape, spec.dtype


def _ops(graph: Graph) -> list[Op]:
    """Return all operators of a graph in order, those of its outputs last."""
    return [*graph.prelude, *graph.ops, *(graph.outputs.ops if graph.outputs else ())]


def _leaves(graph: Graph) -> list[Input | Parameter | Buffer]:
    leaves: list[Input | Parameter | Buffer] = [*graph.inputs, *graph.parameters, *graph.buffers]
    return leaves if graph.outputs is None else [*leaves, *graph.outputs.parameters, *graph.outputs.buffers]


def _is_constant_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _equal_leaves(training: Graph, other: Graph) -> Iterator[tuple[Ref, Ref]]:
    """Yield the inputs, parameters and buffers of ``other`` with those of the training graph; constants are found by their values."""
    named = {_key(leaf): Ref(leaf.name) for leaf in reversed(_leaves(training))}
    constants = [leaf for leaf in _leaves(training) if isinstance(leaf, Buffer) and not leaf.fqn]
    for leaf in _leaves(other):
        key = _key(leaf)
        equal = named.get(key) if key else None
        if isinstance(leaf, Buffer) and not key:
            equal = next((Ref(one.name) for one in constants if _is_constant_equal(one.value, leaf.value)), None)
        if equal is not None:
            yield Ref(leaf.name), equal


def _returned(outputs: Outputs | None) -> object:
    """Return the structure that a model returns, and which of its tensors can be computed."""
    if outputs is None:
        return None

    def without_twice(place: Structure) -> object:
        return replace(place, twice=None, items=()), tuple(map(without_twice, place.items))

    return without_twice(outputs.structure), [(leaf.name, leaf.ref is None) for leaf in outputs.leaves]


def _key(leaf: Input | Parameter | Buffer) -> tuple[str, str] | None:
    """Return the kind and the name in the model of a leaf; None for a constant."""
    if isinstance(leaf, Input):
        return "input", leaf.name
    if isinstance(leaf, Parameter):
        return "parameter", leaf.key
    return ("buffer", leaf.fqn) if leaf.fqn else None
