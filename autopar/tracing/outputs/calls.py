"""The calls of an exported program as operators, just as they stand there: for what only outputs need."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import fx
from torch.export.graph_signature import OutputKind

from autopar.graph.graph import Argument, Op, Ref, TensorSpec
from autopar.graph.operator_kinds import draws_random

_REGION = "wrap_with_set_grad_enabled"


@dataclass(slots=True)
class Calls:
    """The calls of one program.

    Attributes:
        ops: by name, in order; operands have names of nodes.
        names: other names of values: what a tuple holds, what a region without gradient takes and gives.
        leaves: what the program returns besides the loss.
        needed: names of the nodes that loss and changed buffers need.
    """

    ops: dict[str, Op] = field(default_factory=dict)
    names: dict[str, Argument] = field(default_factory=dict)
    leaves: tuple[Argument, ...] = ()

    def value(self, argument: Argument) -> Argument:
        """What a node's name stands for."""
        while isinstance(argument, Ref) and argument.name in self.names:
            held = self.names[argument.name]
            argument = held[argument.index] if isinstance(held, tuple) else held
        return argument


def extra_outputs(program: torch.export.ExportedProgram) -> int:
    """How many outputs a program has before the tensors that a model returns besides its loss: the loss is the last of them."""
    kinds = [spec.kind for spec in program.graph_signature.output_specs]
    return kinds.index(OutputKind.USER_OUTPUT) + 1 if OutputKind.USER_OUTPUT in kinds else len(kinds)


def needed_nodes(program: torch.export.ExportedProgram) -> set[str]:
    """Names of the nodes that the loss and changed buffers need, and of those that have effects."""
    count = extra_outputs(program)
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    roots = [value for value in output.args[0][:count] if isinstance(value, fx.Node)]
    wanted = {node.name for node in roots}
    for node in reversed(program.graph.nodes):
        if node.op != "output" and (node.name in wanted or (node.op == "call_function" and _has_effects(node))):
            wanted.add(node.name)
            wanted |= {source.name for source in node.all_input_nodes}
    return wanted


def _has_effects(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def calls_of(program: torch.export.ExportedProgram) -> Calls:
    """All calls of a program."""
    calls = Calls()
    given = _read(calls, program.graph_module, "", {})
    calls.leaves = tuple(given[extra_outputs(program) :])
    return calls


def cut(program: torch.export.ExportedProgram) -> None:
    """Takes out of the program, in place, what only outputs need: it is as if the model had returned its loss alone."""
    count = extra_outputs(program)
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    output.args = (tuple(output.args[0][:count]),)
    del program.graph_signature.output_specs[count:]
    program.graph.eliminate_dead_code()


def _read(calls: Calls, module: fx.GraphModule, prefix: str, given: Mapping[str, Argument]) -> list[Argument]:
    """Adds the calls of a module, whose placeholders are ``given``, and returns its outputs."""
    for node in module.graph.nodes:
        name = prefix + node.name
        if node.op == "placeholder" and node.name in given:
            calls.names[name] = given[node.name]
        elif node.op == "output":
            return [_argument(calls, prefix, value) for value in node.args[0]]
        elif node.op == "call_function" and node.target is operator.getitem:
            calls.names[name] = _item(calls, prefix + node.args[0].name, node.args[1])
        elif node.op == "call_function":
            _call(calls, module, prefix, node)
    return []


def _call(calls: Calls, module: fx.GraphModule, prefix: str, node: fx.Node) -> None:
    name, target = prefix + node.name, node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        head = node.args[1] if str(target._name) == _REGION else None
        if isinstance(head, fx.Node):
            inner = getattr(module, str(head.target))
            places = [n.name for n in inner.graph.nodes if n.op == "placeholder"]
            operands = [_argument(calls, prefix, value) for value in node.args[2:]]
            calls.names[name] = tuple(_read(calls, inner, f"{name}.", dict(zip(places, operands, strict=False))))
        return
    specs = tuple(_specs(node.meta.get("val")))
    if specs and isinstance(target, torch._ops.OpOverload):
        kwargs = tuple((key, _argument(calls, prefix, v)) for key, v in node.kwargs.items() if key != "device")
        args = tuple(_argument(calls, prefix, value) for value in node.args)
        calls.ops[name] = quiet(Op(name=name, target=str(target), args=args, kwargs=kwargs, outputs=specs))


def _argument(calls: Calls, prefix: str, value: object) -> Argument:
    if isinstance(value, fx.Node):
        return calls.value(Ref(prefix + value.name))
    if isinstance(value, list | tuple):
        return tuple(_argument(calls, prefix, item) for item in value)
    return value  # type: ignore[return-value]


def _item(calls: Calls, name: str, index: int) -> Argument:
    """One output of a call or region with several."""
    held = calls.names.get(name)
    return calls.value(held[index]) if isinstance(held, tuple) else Ref(name, index)


def quiet(op: Op) -> Op:
    """Without dropout."""
    if op.target in ("aten.dropout.default", "aten.native_dropout.default"):
        return replace(op, args=(op.args[0], 0.0, *op.args[2:]))
    if op.target == "aten.scaled_dot_product_attention.default" and len(op.args) > 4:
        return replace(op, args=(*op.args[:4], 0.0, *op.args[5:]))
    return op


def is_random(op: Op) -> bool:
    """Whether it draws numbers that no one can know."""
    return draws_random(op.target) and "dropout" not in op.target


def _specs(value: object) -> Iterator[TensorSpec]:
    if isinstance(value, torch.Tensor):
        if all(isinstance(n, int) for n in value.shape):
            yield TensorSpec(shape=tuple(value.shape), dtype=value.dtype)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _specs(item)
