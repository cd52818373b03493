"""What a graph keeps of a model's outputs: each tensor by the value of the graph that it is, or by operators that make it of such.

Passes fold, fuse and cut what the loss alone needs. Where a value of the program is none of the finished graph, the calls that made it
are taken as they stand in the program, back to values that are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.export.graph_signature import InputKind

from autopar.graph.elements import Leaf, Outputs, same_calls
from autopar.graph.graph import Argument, Buffer, Graph, Op, Parameter, Ref, TensorSpec, map_refs
from autopar.tracing.builder import Builder, Value
from autopar.tracing.outputs.calls import Calls, is_random
from autopar.tracing.outputs.structure import Kept

_SAME = frozenset(
    f"aten.{name}"
    for name in [
        "view.default", "reshape.default", "_unsafe_view.default", "alias.default", "detach.default", "clone.default",
        "contiguous.default", "_to_copy.default", "to.dtype", "to.device", "to.dtype_layout", "expand.default", "lift_fresh_copy.default",
    ]
)  # fmt: skip
"""Operators that give their operand where shape and dtype are the same."""


def kept(
    graph: Graph,
    builder: Builder,
    calls: Calls,
    found: Kept,
    *,
    program: torch.export.ExportedProgram,
    env: Mapping[str, Value],
    model: torch.nn.Module,
) -> Outputs:
    """The outputs of a traced model.

    Args:
        graph: finished.
        calls: of the exported program.
        found: what forward has returned.
        env: values of the program's nodes while the graph was built.
    """
    search = _Search(graph, builder, calls, env)
    search.held = _held(program, model)
    made = [search.leaf(name, value) for name, value in zip(found.names, calls.leaves, strict=True)]
    return Outputs(
        structure=found.structure,
        leaves=tuple(made),
        batch_size=graph.batch_size,
        taps=tuple((ref, graph.spec(ref)) for ref in search.taps),
        ops=tuple(search.ops.values()),
        parameters=tuple(search.parameters.values()),
        buffers=tuple(search.buffers.values()),
    )


def with_counts(outputs: Outputs, twice: Outputs) -> Outputs:
    """``outputs`` with the numbers of a trace at twice the batch size; what cannot be told apart has no value."""
    if same_calls(outputs.ops, twice.ops):
        return replace(outputs, twice=twice.ops)
    names = {op.name for op in outputs.ops}
    reason = "its operators differ from batch size to batch size"
    leaves = tuple(
        replace(leaf, ref=None, reason=reason) if leaf.ref is not None and leaf.ref.name in names else leaf
        for leaf in outputs.leaves
    )
    return replace(outputs, leaves=leaves, ops=())


def counts_samples(outputs: Outputs) -> bool:
    """Whether numbers in it may depend on the batch size: all but small ones, such as dims."""

    def large(argument: Argument) -> bool:
        if isinstance(argument, tuple):
            return any(map(large, argument))
        return type(argument) in (int, float) and argument >= 2  # type: ignore[operator]

    return outputs.structure.numbers or any(
        large(argument) for op in outputs.ops for argument in (*op.args, *(value for _, value in op.kwargs))
    )


def _held(program: torch.export.ExportedProgram, model: torch.nn.Module) -> dict[str, Parameter | Buffer]:
    """Placeholders of parameters and buffers, as the model has them."""
    found: dict[str, Parameter | Buffer] = {}
    parameters, buffers = (
        dict(model.named_parameters(remove_duplicate=False)),
        dict(model.named_buffers(remove_duplicate=False)),
    )
    for spec in program.graph_signature.input_specs:
        name, fqn = getattr(spec.arg, "name", ""), (spec.target or "").removeprefix("model.")
        if spec.kind == InputKind.PARAMETER and fqn in parameters:
            tensor = parameters[fqn]
            held = TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype)
            found[name] = Parameter(name=f"output_{name}", fqn=fqn, spec=held)
        elif spec.kind == InputKind.BUFFER and fqn in buffers:
            buffer = buffers[fqn]
            value = None if buffer.device.type == "meta" else buffer.detach().cpu()
            held = TensorSpec(shape=tuple(buffer.shape), dtype=buffer.dtype)
            found[name] = Buffer(name=f"output_{name}", fqn=fqn, spec=held, value=value)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            constant = program.constants.get(spec.target or "")
            if isinstance(constant, torch.Tensor) and constant.device.type != "meta":
                value = constant.detach().cpu()
                held = TensorSpec(shape=tuple(value.shape), dtype=value.dtype)
                found[name] = Buffer(name=f"output_{name}", fqn="", spec=held, value=value)
    return found


class _UnavailableError(Exception):
    """Says why a value cannot be made."""


@dataclass(slots=True)
class _Search:
    """One search for where outputs come from.

    Attributes:
        env: values of nodes while the graph was built.
        held: parameters, buffers and constants of the model by placeholder.
    """

    graph: Graph
    builder: Builder
    calls: Calls
    env: Mapping[str, Value]
    held: dict[str, Parameter | Buffer] = field(default_factory=dict)
    taps: dict[Ref, None] = field(default_factory=dict)
    ops: dict[str, Op] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    known: dict[Ref, Ref] = field(default_factory=dict)
    reads: defaultdict[str, frozenset[str]] = field(default_factory=lambda: defaultdict(frozenset))

    def leaf(self, name: str, value: Argument) -> Leaf:
        if not isinstance(value, Ref):
            return Leaf(name=name, ref=None, reason="it is no tensor of the traced program")
        before = dict(self.taps), dict(self.ops), dict(self.parameters), dict(self.buffers), dict(self.known)
        try:
            ref = self.value(value)
        except (_UnavailableError, RecursionError) as error:
            self.taps, self.ops, self.parameters, self.buffers, self.known = before
            return Leaf(name=name, ref=None, reason=str(error))
        return Leaf(name=name, ref=ref, reads=tuple(sorted(self.inputs()[ref.name])))

    def value(self, ref: Ref) -> Ref:
        """Where the value of a node is found; adds what it takes."""
        if ref not in self.known:
            self.known[ref] = self._found(ref)
        return self.known[ref]

    def _found(self, ref: Ref) -> Ref:
        made = self.env.get(ref.name)
        if isinstance(made, tuple):
            made = made[ref.index] if ref.index < len(made) else None
        elif ref.index:
            made = None
        if isinstance(made, Ref) and self._is_live(made):
            self.taps[made] = None
            return made
        if isinstance(made, Ref) and any(leaf.name == made.name for leaf in self.graph.inputs):
            return made
        if ref.name in self.held:
            held = self.held[ref.name]
            if isinstance(held, Parameter):
                self.parameters[held.name] = held
            else:
                if any(
                    m.buffer == b.name
                    for m in self.graph.mutations
                    for b in self.graph.buffers
                    if b.fqn and b.fqn == held.fqn
                ):
                    raise _UnavailableError(f"it reads the buffer {held.fqn}, which training changes")
                self.buffers[held.name] = held
            return Ref(held.name)
        op = self.calls.ops.get(ref.name)
        if op is None:
            constant = self.builder.values.get(made) if isinstance(made, Ref) else None
            if constant is None or not isinstance(made, Ref):
                raise _UnavailableError("it is made by code that only the original model has")
            name = f"output_{ref.name}"
            spec = self.builder.specs[made]
            self.buffers[name] = Buffer(name=name, fqn="", spec=spec, value=constant.expand(spec.shape).contiguous())
            return Ref(name)
        return self._called(op, ref)

    def _called(self, op: Op, ref: Ref) -> Ref:
        if is_random(op):
            raise _UnavailableError(f"it draws random numbers ({op.target})")
        if op.target.startswith("autopar.opaque"):
            raise _UnavailableError("it is made by a module that runs as it is written")
        operands = {operand: self.value(operand) for operand in op.operands}
        if op.target in _SAME and operands:
            (first, *_) = op.operands
            if self._spec(first) == (op.spec.shape, op.spec.dtype):
                return operands[first]
        name = f"output_{op.name.replace('.', '_')}"
        if name not in self.ops:
            args = tuple(map_refs(argument, operands.__getitem__) for argument in op.args)
            kwargs = tuple((key, map_refs(argument, operands.__getitem__)) for key, argument in op.kwargs)
            self.ops[name] = replace(op, name=name, args=args, kwargs=kwargs)
        return Ref(name, ref.index)

    def _spec(self, ref: Ref) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Of a node."""
        op = self.calls.ops.get(ref.name)
        if op is not None and ref.index < len(op.outputs):
            return op.outputs[ref.index].shape, op.outputs[ref.index].dtype
        held = self.held.get(ref.name)
        return None if held is None else (held.spec.shape, held.spec.dtype)

    def _is_live(self, ref: Ref) -> bool:
        producer = self.graph.producer(ref)
        return producer is not None and not self.graph.is_prelude(ref) and ref.index < len(producer.outputs)

    def inputs(self) -> dict[str, frozenset[str]]:
        """Of all values the names of the batch's inputs that they depend on."""
        if not self.reads:
            self.reads = defaultdict(frozenset, {leaf.name: frozenset({leaf.name}) for leaf in self.graph.inputs})
            self._follow((*self.graph.prelude, *self.graph.ops))
        self._follow(op for op in self.ops.values() if op.name not in self.reads)
        return self.reads

    def _follow(self, ops: Iterable[Op]) -> None:
        for op in list(ops):
            self.reads[op.name] = frozenset().union(*(self.reads[ref.name] for ref in op.operands))
