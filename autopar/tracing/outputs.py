"""The outputs of a traced model besides its loss.

Each output is a value of the finished graph if that has it. But the passes over a graph fold, fuse and cut operators, and
only the loss determines which operators it has. So the calls of the program that compute an output are recorded as well, back to
values that the graph has.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import fx
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from autopar.graph.elements import Leaf, Outputs, same_calls
from autopar.graph.graph import Argument, Buffer, Graph, Op, Parameter, Ref, TensorSpec, map_refs
from autopar.graph.operator_kinds import draws_random, without_dropout
from autopar.tracing.builder import Builder, Value
from autopar.tracing.program_ends import Kept, grad_region_of
from autopar.tracing.side_effects import writes

Calls: TypeAlias = tuple[dict[str, Op], list[Argument]]
"""The calls of an exported program by the names of their nodes, in order, and its outputs besides the loss and the new values of buffers.

The names of operands are names of nodes too."""


def num_loss_outputs(program: torch.export.ExportedProgram) -> int:
    """Return the number of outputs up to and including the loss: new values of buffers come first, other tensors after it."""
    kinds = [spec.kind for spec in program.graph_signature.output_specs]
    return kinds.index(OutputKind.USER_OUTPUT) + 1 if OutputKind.USER_OUTPUT in kinds else len(kinds)


def needed_nodes(program: torch.export.ExportedProgram) -> set[str]:
    """Return the names of the nodes on which the loss and new values of buffers depend, and of those that write in place."""
    returned = program.graph.output_node().args[0][: num_loss_outputs(program)]
    wanted = {value.name for value in returned if isinstance(value, fx.Node)}
    for node in reversed(program.graph.nodes):
        if node.op != "output" and (node.name in wanted or (node.op == "call_function" and writes(node))):
            wanted.add(node.name)
            wanted |= {source.name for source in node.all_input_nodes}
    return wanted


def calls_of(program: torch.export.ExportedProgram) -> Calls:
    """Return all calls of a program, including those of its regions, and its outputs."""
    calls: dict[str, Op] = {}
    outputs = _read(calls, program.graph_module, "", {})
    return calls, outputs[num_loss_outputs(program) :]


def cut(program: torch.export.ExportedProgram) -> None:
    """Remove in place all outputs after the loss and what only they need, as if the model returned only its loss."""
    count = num_loss_outputs(program)
    output = program.graph.output_node()
    output.args = (tuple(output.args[0][:count]),)
    del program.graph_signature.output_specs[count:]
    # torch.export leaves an unused line before an autocast block of which its operands do not know that they are used
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)
    program.graph.eliminate_dead_code()


def _read(calls: dict[str, Op], module: fx.GraphModule, prefix: str, aliases: dict[str, Argument]) -> list[Argument]:
    """Add the calls of a module to ``calls`` and return its outputs.

    Args:
        calls: The calls of the program so far.
        module: The module of the program or of a region.
        prefix: The prefix of the names of its calls, which makes them unique in the program.
        aliases: The values of nodes that are not calls with a name of their own: the placeholders of a region at first. The items
            of tuples and the outputs of inner regions are added.
    """

    def argument(value: object) -> Argument:
        """Return an argument of a node with references in place of other nodes."""
        if isinstance(value, fx.Node):
            return aliases.get(value.name, Ref(prefix + value.name))
        return tuple(map(argument, value)) if isinstance(value, list | tuple) else value  # type: ignore[return-value]

    for node in module.graph.nodes:
        if node.op == "output":
            return [argument(value) for value in node.args[0]]
        if node.op != "call_function":
            continue
        name, target = prefix + node.name, node.target
        if target is operator.getitem:
            source, index = argument(node.args[0]), node.args[1]
            aliases[node.name] = source[index] if isinstance(source, tuple) else Ref(prefix + node.args[0].name, index)
        elif (region := grad_region_of(node, module)) is not None:
            placeholders = [n.name for n in region[0].graph.nodes if n.op == "placeholder"]
            inner_aliases = dict(zip(placeholders, map(argument, node.args[2:]), strict=False))
            aliases[node.name] = tuple(_read(calls, region[0], f"{name}.", inner_aliases))
        elif (specs := _specs(node.meta.get("val"))) and isinstance(target, torch._ops.OpOverload):
            kwargs = tuple((key, argument(value)) for key, value in node.kwargs.items() if key != "device")
            op = Op(name=name, target=str(target), args=tuple(map(argument, node.args)), kwargs=kwargs, outputs=specs)
            calls[name] = without_dropout(op)
    return []


def _specs(value: object) -> tuple[TensorSpec, ...]:
    """Return the specs of the tensors in the fake result of a call, without those of which a size is not known."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    known = [tensor for tensor in tensors if all(isinstance(size, int) for size in tensor.shape)]
    return tuple(TensorSpec.of(tensor) for tensor in known)


def kept(
    graph: Graph,
    builder: Builder,
    calls: Calls,
    returned: Kept,
    *,
    env: Mapping[str, Value],
    declared: Sequence[Parameter | Buffer],
) -> Outputs:
    """Return the outputs of a traced model.

    Args:
        graph: The finished graph.
        builder: Has the specs and constants of the graph while it was built.
        calls: The calls and outputs of the exported program (:func:`calls_of`).
        returned: The outputs of forward.
        env: The values of the program's nodes while the graph was built.
        declared: All parameters and buffers of the model under their names in the builder.
    """
    search = _Search(graph, builder, calls[0], env, {leaf.name: leaf for leaf in declared})
    leaves = [search.leaf(name, value) for name, value in zip(returned.names, calls[1], strict=True)]
    reads = defaultdict(frozenset, {leaf.name: frozenset({leaf.name}) for leaf in graph.inputs})
    for op in (*graph.prelude, *graph.ops, *search.ops.values()):
        reads[op.name] = frozenset().union(*(reads[ref.name] for ref in op.operands))
    return Outputs(
        structure=returned.structure,
        leaves=tuple(
            leaf if leaf.ref is None else replace(leaf, reads=tuple(sorted(reads[leaf.ref.name]))) for leaf in leaves
        ),
        batch_size=graph.batch_size,
        taps=tuple((ref, graph.spec(ref)) for ref in search.taps),
        ops=tuple(search.ops.values()),
        parameters=tuple(search.parameters.values()),
        buffers=tuple(search.buffers.values()),
    )


def with_counts(outputs: Outputs, twice: Outputs) -> Outputs:
    """Return ``outputs`` with the operators of a trace at twice the batch size, which tell how numbers depend on the batch size.

    If the two traces have different operators, the outputs that these compute become unavailable.
    """
    if same_calls(outputs.ops, twice.ops):
        return replace(outputs, twice=twice.ops)
    names = {op.name for op in outputs.ops}
    reason = "its operators differ from batch size to batch size"
    leaves = tuple(
        replace(leaf, ref=None, reason=reason) if leaf.ref is not None and leaf.ref.name in names else leaf
        for leaf in outputs.leaves
    )
    return replace(outputs, leaves=leaves, ops=())


def rows_restored(outputs: Outputs, orders: Mapping[Ref, tuple[int, int, int]], *, is_exact: bool) -> Outputs:
    """Return the outputs of a graph some of whose values have their rows in another order, with operators that put them as traced.

    Args:
        outputs: The outputs by the values as traced.
        orders: For each tap that is reordered a dim, and the elements before and after the samples in it as traced. The value has the
            elements of each sample together.
        is_exact: Whether there is only the batch size of the trace.
    """
    ops: list[Op] = []
    twice: list[Op] = []
    renamed: dict[Ref, Ref] = {}
    for ref, spec in outputs.taps:
        if ref in orders:
            ops += _restoring(ref, spec, orders[ref], outputs.batch_size)
            twice += _restoring(ref, spec, orders[ref], 2 * outputs.batch_size)
            renamed[ref] = Ref(ops[-1].name)

    def after(readers: Sequence[Op]) -> tuple[Op, ...]:
        return tuple(op.renamed(renamed) for op in readers)

    if not renamed:
        return outputs
    leaves = (
        leaf if leaf.ref is None else replace(leaf, ref=renamed.get(leaf.ref, leaf.ref)) for leaf in outputs.leaves
    )
    return replace(
        outputs,
        leaves=tuple(leaves),
        ops=(*ops, *after(outputs.ops)),
        twice=() if is_exact else (*twice, *after(outputs.twice or outputs.ops)),
    )


def _restoring(ref: Ref, spec: TensorSpec, order: tuple[int, int, int], samples: int) -> list[Op]:
    """Return operators that put the rows of a tap as traced, for a number of samples."""
    dim, outer, inner = order
    before, behind = spec.shape[:dim], spec.shape[dim + 1 :]
    split, swapped = (*before, samples, outer, inner, *behind), (*before, outer, samples, inner, *behind)
    shape = (*before, outer * samples * inner, *behind)

    def step(part: str, target: str, args: tuple[Argument, ...], sizes: tuple[int, ...]) -> Op:
        outputs = (replace(spec, shape=sizes, requires_grad=False),)
        return Op(name=f"output_{ref.name}_{ref.index}_{part}", target=target, args=args, outputs=outputs)

    view = step("split", "aten.view.default", (ref, split), split)
    transposed = step("swapped", "aten.transpose.int", (Ref(view.name), dim, dim + 1), swapped)
    return [view, transposed, step("traced", "aten.reshape.default", (Ref(transposed.name), shape), shape)]


def counts_samples(outputs: Outputs) -> bool:
    """Return whether numbers in the outputs may depend on the batch size. Numbers below 2, such as dims, are assumed not to."""

    def large(argument: Argument) -> bool:
        if isinstance(argument, tuple):
            return any(map(large, argument))
        return type(argument) in (int, float) and argument >= 2  # type: ignore[operator]

    return outputs.structure.numbers or any(
        large(argument) for op in outputs.ops for argument in (*op.args, *(value for _, value in op.kwargs))
    )


class _UnavailableError(Exception):
    """An output cannot be computed; the message is the reason."""


@dataclass(slots=True)
class _Search:
    """The search for the values and calls that compute outputs.

    Attributes:
        env: The values of nodes while the graph was built.
        declared: The parameters and buffers of the model by their names in the builder.
        taps: The values of the graph's operators that outputs read, in order.
        ops: The additional operators by name, in order.
        parameters: The parameters that outputs read, by name.
        buffers: The buffers and constants that outputs read, by name.
        resolved: The values of nodes that have been found so far.
    """

    graph: Graph
    builder: Builder
    calls: Mapping[str, Op]
    env: Mapping[str, Value]
    declared: Mapping[str, Parameter | Buffer]
    taps: dict[Ref, None] = field(default_factory=dict)
    ops: dict[str, Op] = field(default_factory=dict)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    resolved: dict[Ref, Ref] = field(default_factory=dict)

    def leaf(self, name: str, value: Argument) -> Leaf:
        """Return an output with the value that it is, or the reason why it is unavailable."""
        if not isinstance(value, Ref):
            return Leaf(name=name, ref=None, reason="it is no tensor of the traced program")
        before = dict(self.taps), dict(self.ops), dict(self.parameters), dict(self.buffers), dict(self.resolved)
        try:
            return Leaf(name=name, ref=self.value(value))
        except (_UnavailableError, RecursionError) as error:
            self.taps, self.ops, self.parameters, self.buffers, self.resolved = before
            return Leaf(name=name, ref=None, reason=str(error))

    def value(self, ref: Ref) -> Ref:
        """Return the value of a node, after adding the operators and leaves that compute it."""
        if ref not in self.resolved:
            self.resolved[ref] = self._resolve(ref)
        return self.resolved[ref]

    def _resolve(self, ref: Ref) -> Ref:
        built = self._built(ref)
        if built is not None and self._is_live(built):
            self.taps[built] = None
            return built
        if built is not None and any(leaf.name == built.name for leaf in self.graph.inputs):
            return built
        op = self.calls.get(ref.name)
        if op is not None:
            return self._resolve_call(op, ref)
        leaf = self._leaf(ref)
        if leaf is None:
            raise _UnavailableError("it is made by code that only the original model has")
        if isinstance(leaf, Parameter):
            self.parameters[leaf.name] = leaf
        elif leaf.fqn and any(built == Ref(mutation.buffer) for mutation in self.graph.mutations):
            raise _UnavailableError(f"it reads the buffer {leaf.fqn}, which training changes")
        else:
            self.buffers[leaf.name] = leaf
        return Ref(leaf.name)

    def _built(self, ref: Ref) -> Ref | None:
        """Return the tensor that a node was while the graph was built; None if it was not converted or was no tensor."""
        built = self.env.get(ref.name)
        if isinstance(built, tuple):
            built = built[ref.index] if ref.index < len(built) else None
        elif ref.index:
            built = None
        return built if isinstance(built, Ref) else None

    def _leaf(self, ref: Ref) -> Parameter | Buffer | None:
        """Return the parameter, buffer or constant that a node without a call stands for; None if it stands for none of them."""
        built = self._built(ref)
        if built is None:
            return None
        name, spec = f"output_{ref.name}", replace(self.builder.specs[built], requires_grad=False)
        declared = self.declared.get(built.name)
        if isinstance(declared, Parameter):
            return Parameter(name=name, fqn=declared.fqn, spec=spec)
        if declared is not None and declared.fqn:
            return replace(declared, name=name)
        value = self.builder.values.get(built)
        return (
            None if value is None else Buffer(name=name, fqn="", spec=spec, value=value.expand(spec.shape).contiguous())
        )

    def _resolve_call(self, op: Op, ref: Ref) -> Ref:
        """Return the value of output ``ref`` of a call, after adding the call and its operands."""
        if draws_random(op.target) and "dropout" not in op.target:
            raise _UnavailableError(f"it draws random numbers ({op.target})")
        if op.target.startswith("autopar.opaque"):
            raise _UnavailableError("it is made by a module that runs as it is written")
        operands = {operand: self.value(operand) for operand in op.operands}
        name = f"output_{op.name.replace('.', '_')}"
        if name not in self.ops:
            args = tuple(map_refs(argument, operands.__getitem__) for argument in op.args)
            kwargs = tuple((key, map_refs(argument, operands.__getitem__)) for key, argument in op.kwargs)
            self.ops[name] = replace(op, name=name, args=args, kwargs=kwargs)
        return Ref(name, ref.index)

    def _is_live(self, ref: Ref) -> bool:
        """Return whether a value is an output of an operator of the finished graph outside of its prelude."""
        producer = self.graph.producer(ref)
        return producer is not None and not self.graph.is_prelude(ref) and ref.index < len(producer.outputs)
