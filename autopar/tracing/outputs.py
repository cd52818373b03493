"""What a graph keeps of a model's outputs: each tensor by the value of the graph that it is, or by the operators that make it of such.

Passes fold, fuse and cut what the loss alone needs. Where a value of the program is none of the finished graph, the calls that made it
are taken as they stand in the program, back to values that are.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx
from torch.export.graph_signature import OutputKind

from autopar.graph.elements import Leaf, Outputs, same_calls
from autopar.graph.graph import Argument, Buffer, Graph, Op, Parameter, Ref, TensorSpec, map_refs
from autopar.graph.operator_kinds import draws_random, without_dropout
from autopar.ops.kernels import aten_targets
from autopar.tracing.builder import Builder, Value
from autopar.tracing.no_grad_regions import region_of
from autopar.tracing.program_ends import Kept
from autopar.tracing.side_effects import writes


@dataclass(slots=True)
class Calls:
    """The calls of one program.

    Attributes:
        ops: by name, in order; operands have names of nodes.
        leaves: what the program returns besides the loss.
    """

    ops: dict[str, Op] = field(default_factory=dict)
    leaves: tuple[Argument, ...] = ()


def extra_outputs(program: torch.export.ExportedProgram) -> int:
    """How many outputs a program has before the tensors that a model returns besides its loss: the loss is the last of them."""
    kinds = [spec.kind for spec in program.graph_signature.output_specs]
    return kinds.index(OutputKind.USER_OUTPUT) + 1 if OutputKind.USER_OUTPUT in kinds else len(kinds)


def needed_nodes(program: torch.export.ExportedProgram) -> set[str]:
    """Names of the nodes that the loss and changed buffers need, and of those that have effects."""
    returned = program.graph.output_node().args[0][: extra_outputs(program)]
    wanted = {value.name for value in returned if isinstance(value, fx.Node)}
    for node in reversed(program.graph.nodes):
        if node.op != "output" and (node.name in wanted or (node.op == "call_function" and writes(node))):
            wanted.add(node.name)
            wanted |= {source.name for source in node.all_input_nodes}
    return wanted


def calls_of(program: torch.export.ExportedProgram) -> Calls:
    """All calls of a program."""
    calls = Calls()
    given = _read(calls, program.graph_module, "", {})
    calls.leaves = tuple(given[extra_outputs(program) :])
    return calls


def cut(program: torch.export.ExportedProgram) -> None:
    """Takes out of the program, in place, what only outputs need: it is as if the model had returned its loss alone."""
    count = extra_outputs(program)
    output = program.graph.output_node()
    output.args = (tuple(output.args[0][:count]),)
    del program.graph_signature.output_specs[count:]
    program.graph.eliminate_dead_code()


def _read(calls: Calls, module: fx.GraphModule, prefix: str, known: dict[str, Argument]) -> list[Argument]:
    """Adds the calls of a module and returns its outputs.

    Args:
        known: values of nodes that are not named by them: placeholders that are given, what tuples hold, what regions give; grows.
    """
    for node in module.graph.nodes:
        if node.op == "output":
            return [_argument(value, prefix, known) for value in node.args[0]]
        elif node.op == "call_function" and node.target is operator.getitem:
            held, index = _argument(node.args[0], prefix, known), node.args[1]
            known[node.name] = held[index] if isinstance(held, tuple) else Ref(prefix + node.args[0].name, index)
        elif node.op == "call_function":
            _call(calls, module, prefix, known, node)
    return []


def _call(calls: Calls, module: fx.GraphModule, prefix: str, known: dict[str, Argument], node: fx.Node) -> None:
    name, target = prefix + node.name, node.target
    if (region := region_of(node, module)) is not None:
        places = [n.name for n in region[0].graph.nodes if n.op == "placeholder"]
        operands = [_argument(value, prefix, known) for value in node.args[2:]]
        known[node.name] = tuple(_read(calls, region[0], f"{name}.", dict(zip(places, operands, strict=False))))
        return
    specs = tuple(_specs(node.meta.get("val")))
    if specs and isinstance(target, torch._ops.OpOverload):
        kwargs = tuple((key, _argument(v, prefix, known)) for key, v in node.kwargs.items() if key != "device")
        args = tuple(_argument(value, prefix, known) for value in node.args)
        op = Op(name=name, target=str(target), args=args, kwargs=kwargs, outputs=specs)
        calls.ops[name] = without_dropout(op)


def _argument(value: object, prefix: str, known: Mapping[str, Argument]) -> Argument:
    if isinstance(value, fx.Node):
        return known.get(value.name, Ref(prefix + value.name))
    if isinstance(value, list | tuple):
        return tuple(_argument(item, prefix, known) for item in value)
    return value  # type: ignore[return-value]


def _specs(value: object) -> Iterator[TensorSpec]:
    if isinstance(value, torch.Tensor):
        if all(isinstance(n, int) for n in value.shape):
            yield TensorSpec(shape=tuple(value.shape), dtype=value.dtype)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _specs(item)


_SAME = aten_targets(
    "view.default reshape.default _unsafe_view.default alias.default detach.default clone.default contiguous.default"
    " _to_copy.default to.dtype to.device to.dtype_layout expand.default lift_fresh_copy.default"
)
"""Operators that give their operand where shape and dtype are the same."""


def kept(
    graph: Graph,
    builder: Builder,
    calls: Calls,
    found: Kept,
    *,
    env: Mapping[str, Value],
    declared: Sequence[Parameter | Buffer],
) -> Outputs:
    """The outputs of a traced model.

    Args:
        graph: finished.
        calls: of the exported program.
        found: what forward has returned.
        env: values of the program's nodes while the graph was built.
        declared: all parameters and buffers of the model, under the names that the builder has given them.
    """
    search = _Search(graph, builder, calls, env, {leaf.name: leaf for leaf in declared})
    made = [search.leaf(name, value) for name, value in zip(found.names, calls.leaves, strict=True)]
    reads = defaultdict(frozenset, {leaf.name: frozenset({leaf.name}) for leaf in graph.inputs})
    for op in (*graph.prelude, *graph.ops, *search.ops.values()):
        reads[op.name] = frozenset().union(*(reads[ref.name] for ref in op.operands))
    return Outputs(
        structure=found.structure,
        leaves=tuple(
            leaf if leaf.ref is None else replace(leaf, reads=tuple(sorted(reads[leaf.ref.name]))) for leaf in made
        ),
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


class _UnavailableError(Exception):
    """Says why a value cannot be made."""


@dataclass(slots=True)
class _Search:
    """One search for where outputs come from.

    Attributes:
        env: values of nodes while the graph was built.
        declared: parameters and buffers of the model, by the names that they had while the graph was built.
    """

    graph: Graph
    builder: Builder
    calls: Calls
    env: Mapping[str, Value]
    declared: Mapping[str, Parameter | Buffer]
    taps: dict[Ref, None] = field(default_factory=dict)
    ops: dict[str, Op] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    known: dict[Ref, Ref] = field(default_factory=dict)

    def leaf(self, name: str, value: Argument) -> Leaf:
        """Where an output is found, or why it is not."""
        if not isinstance(value, Ref):
            return Leaf(name=name, ref=None, reason="it is no tensor of the traced program")
        before = dict(self.taps), dict(self.ops), dict(self.parameters), dict(self.buffers), dict(self.known)
        try:
            return Leaf(name=name, ref=self.value(value))
        except (_UnavailableError, RecursionError) as error:
            self.taps, self.ops, self.parameters, self.buffers, self.known = before
            return Leaf(name=name, ref=None, reason=str(error))

    def value(self, ref: Ref) -> Ref:
        """Where the value of a node is found; adds what it takes."""
        if ref not in self.known:
            self.known[ref] = self._found(ref)
        return self.known[ref]

    def _found(self, ref: Ref) -> Ref:
        made = self._made(ref)
        if made is not None and self._is_live(made):
            self.taps[made] = None
            return made
        if made is not None and any(leaf.name == made.name for leaf in self.graph.inputs):
            return made
        op = self.calls.ops.get(ref.name)
        if op is not None:
            return self._called(op, ref)
        held = self._held(ref)
        if held is None:
            raise _UnavailableError("it is made by code that only the original model has")
        if isinstance(held, Parameter):
            self.parameters[held.name] = held
        elif held.fqn and any(made == Ref(mutation.buffer) for mutation in self.graph.mutations):
            raise _UnavailableError(f"it reads the buffer {held.fqn}, which training changes")
        else:
            self.buffers[held.name] = held
        return Ref(held.name)

    def _made(self, ref: Ref) -> Ref | None:
        """The tensor that the value of a node was while the graph was built; None where it was none."""
        made = self.env.get(ref.name)
        if isinstance(made, tuple):
            made = made[ref.index] if ref.index < len(made) else None
        elif ref.index:
            made = None
        return made if isinstance(made, Ref) else None

    def _held(self, ref: Ref) -> Parameter | Buffer | None:
        """The parameter, buffer or constant that a node is which calls nothing; None where it is none of them."""
        made = self._made(ref)
        if made is None:
            return None
        name, spec = f"output_{ref.name}", replace(self.builder.specs[made], requires_grad=False)
        declared = self.declared.get(made.name)
        if isinstance(declared, Parameter):
            return Parameter(name=name, fqn=declared.fqn, spec=spec)
        if declared is not None and declared.fqn:
            return replace(declared, name=name)
        value = self.builder.values.get(made)
        return (
            None if value is None else Buffer(name=name, fqn="", spec=spec, value=value.expand(spec.shape).contiguous())
        )

    def _called(self, op: Op, ref: Ref) -> Ref:
        if draws_random(op.target) and "dropout" not in op.target:
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
        held = self._held(ref)
        return None if held is None else (held.spec.shape, held.spec.dtype)

    def _is_live(self, ref: Ref) -> bool:
        producer = self.graph.producer(ref)
        return producer is not None and not self.graph.is_prelude(ref) and ref.index < len(producer.outputs)
