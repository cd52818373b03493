"""What a model computes in ``eval()``: the values of its training graph, some of them in the places of others.

``par.evaluate`` runs the program of the training graph. A model that calls the same operators in ``eval()`` needs nothing else. Any other
is traced in ``eval()`` too, and its operators are looked for in the training graph, in order. An operator has a counterpart where training
does the same with the same values. Where training computes a value that ``eval()`` does not (a mask of stochastic depth, noise, a power
iteration), its readers may read another value instead. If all operators of ``eval()``, its loss and its outputs have counterparts, these
replacements are all that ``eval()`` changes.

Torch's batch norms, dropouts and recurrent networks stay in training here, as the runtime knows what they do in ``eval()``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
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
from autopar.graph.operator_kinds import without_dropout

_RUNNING = "autopar.batch_norm_running"
_ANY_REF = Ref("")


def put_in_eval(model: torch.nn.Module) -> None:
    """Put all modules in ``eval()`` but torch's batch norms, recurrent networks and dropouts, and those of classes made from them."""
    for module in model.modules():
        if not isinstance(module, (_BatchNorm, _DropoutNd, RNNBase)):
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
    names = {buffer.name: buffer.fqn for buffer in other.buffers}
    changed = [names[m.buffer] for m in other.mutations if names[m.buffer].rpartition(".")[0] not in norms]
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
        self._ops, self._place = _ops(training), 0
        self._calls = [*map(_call, self._ops)]
        self._specs = {Ref(op.name, i): spec for op in self._ops for i, spec in enumerate(op.outputs)}
        self._specs |= {Ref(leaf.name): leaf.spec for leaf in _leaves(training)}
        self._skipped: set[str] = set()

    def add(self, op: Op) -> bool:
        """Find the counterpart of the next operator of ``other``, and return whether there is one."""
        call = _call(op)
        for place in range(self._place, len(self._ops)):
            if self._calls[place] != call:
                continue
            match = self._ops[place]
            skipped = {passed.name for passed in self._ops[self._place : place]}
            replaced = self._replaced_in(zip(op.operands, match.operands, strict=True), skipped)
            if replaced is None:
                continue
            self.replaced |= replaced
            self._skipped |= skipped
            self._place = place + 1
            outputs = [(Ref(op.name, i), Ref(match.name, i)) for i in range(len(op.outputs))]
            self.same |= outputs
            return all((a in self.other.sums) == (b in self.training.sums) for a, b in outputs)
        return False

    def _replaced_in(self, pairs: Iterable[tuple[Ref, Ref]], skipped: Collection[str] = ()) -> dict[Ref, Ref] | None:
        """Return the replacements by which values of the training graph are equal to those of ``other``; None if there are none.

        Args:
            pairs: values of ``other`` and of the training graph.
            skipped: names of further operators of the training graph that ``eval()`` does not call.
        """
        replaced: dict[Ref, Ref] = {}
        for value, there in pairs:
            wanted = self.same.get(value)
            if wanted is None:
                return None
            if wanted == self._first.get(there, there):
                continue
            is_skipped = there.name in skipped or there.name in self._skipped
            before = self.replaced.get(there) or replaced.get(there, wanted)
            if not is_skipped or before != wanted or _kind(self._specs[wanted]) != _kind(self._specs[there]):
                return None
            replaced[there] = wanted
        return replaced

    def evaluation(self) -> Evaluation:
        """Return the result, after all operators of ``other`` were added."""
        self._skipped |= {op.name for op in self._ops[self._place :]}
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
        return Evaluation(replaced=tuple(self.replaced.items()))


def _call(op: Op) -> object:
    """Return what an operator does, without its operands and without dropout."""
    op = without_dropout(op)
    arguments = (op.args, *op.kwargs)
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
    return torch.equal(one, other) or (one.is_floating_point() and torch.equal(one.nan_to_num(), other.nan_to_num()))


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
