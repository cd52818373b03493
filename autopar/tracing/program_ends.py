"""The inputs and outputs of an exported program.

Its inputs are the tensors of the batch, parameters, buffers and constants. Its outputs are the new values of the buffers that a
training step changes, the loss, and the other tensors that the model returns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from autopar.errors import TraceError
from autopar.graph.elements import Structure
from autopar.graph.graph import Buffer, Input, Mutation, Parameter, Ref, TensorSpec
from autopar.tracing.builder import Builder, Value
from autopar.tracing.convert import WRAPPER
from autopar.tracing.failures import source_of
from autopar.tracing.side_effects import graph_modules, root_of, writes


def declare(
    builder: Builder,
    env: dict[str, Value],
    program: torch.export.ExportedProgram,
    model: torch.nn.Module,
    inputs: tuple[Input, ...],
    batch: dict[str, Any],
) -> tuple[tuple[Parameter, ...], tuple[Buffer, ...]]:
    """Register the inputs, parameters, buffers and constants of a program.

    Args:
        builder: Gets the spec of each of them.
        env: Gets the value of each placeholder of the program by its name.
        program: The exported program.
        model: The user's model, which has the values of parameters and buffers unless it is on meta.
        inputs: The inputs of the graph.
        batch: The fake batch from which they were taken.

    Returns:
        The parameters and the buffers. Constants without a value are among the buffers.

    Raises:
        TraceError: The program has an input of another kind.
    """
    for entry in inputs:
        builder.leaf(entry.name, entry.spec)
    remaining_inputs = iter(inputs)
    leaves = iter(pytree.tree_leaves(batch))
    aliases = _aliases(model)
    parameters: dict[str, Parameter] = {}
    buffers: list[Buffer] = []
    values = dict(model.named_buffers(remove_duplicate=False))
    changed = set(program.graph_signature.buffers_to_mutate.values())
    for spec in program.graph_signature.input_specs:
        placeholder = getattr(spec.arg, "name", "")
        fqn = (spec.target or "").removeprefix(WRAPPER)
        if spec.kind == InputKind.USER_INPUT:
            leaf = next(leaves)
            env[placeholder] = Ref(next(remaining_inputs).name) if isinstance(leaf, torch.Tensor) else leaf
        elif spec.kind == InputKind.PARAMETER:
            parameter = _parameter(builder, model, aliases[fqn], parameters)
            env[placeholder] = Ref(parameter.name)
        elif spec.kind == InputKind.BUFFER:
            buffers.append(_buffer(builder, fqn, values[fqn]))
            env[placeholder] = Ref(buffers[-1].name)
            if spec.target in changed:  # an attention mask that depends on it may be another one in the next step
                builder.hints.pop(Ref(buffers[-1].name), None)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            env[placeholder] = _lifted(builder, placeholder, program.constants[spec.target or ""], buffers)
        else:
            raise TraceError(
                f"The model takes something else than tensors ({spec.kind.name} {fqn})",
                fix="Remove custom class objects from it",
            )
    return tuple(parameters.values()), tuple(buffers)


def _aliases(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """For each name of a parameter, all names of the same parameter in the order of the model."""
    groups: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(fqn)
    return {fqn: tuple(names) for names in groups.values() for fqn in names}


def _parameter(
    builder: Builder, model: torch.nn.Module, names: tuple[str, ...], parameters: dict[str, Parameter]
) -> Parameter:
    """Return the parameter with these names, registered once; ``parameters`` has those registered so far by their first name."""
    fqn, *aliases = names
    if fqn not in parameters:
        tensor = model.get_parameter(fqn)
        spec = TensorSpec.of(tensor, requires_grad=tensor.requires_grad)
        identifier = builder.unique(f"p_{fqn}")
        builder.leaf(identifier, spec)
        builder.parameters.add(identifier)
        parameters[fqn] = Parameter(name=identifier, fqn=fqn, spec=spec, aliases=tuple(aliases))
    return parameters[fqn]


def _buffer(builder: Builder, fqn: str, tensor: torch.Tensor) -> Buffer:
    """Register a buffer of the model. It has a value unless it is on meta."""
    ref = builder.leaf(builder.unique(f"b_{fqn}"), TensorSpec.of(tensor))
    value = None if tensor.is_meta else tensor.detach().cpu()
    if value is not None:
        builder.hints[ref] = value
    return Buffer(name=ref.name, fqn=fqn, spec=builder.specs[ref], value=value)


def _lifted(builder: Builder, placeholder: str, value: Any, buffers: list[Buffer]) -> Ref:
    """Register a constant tensor of the code, which is neither a parameter nor a buffer. Without a value it is added to ``buffers``."""
    spec = TensorSpec.of(value)
    ref = builder.leaf(builder.unique(placeholder), spec)
    if type(value) is torch.Tensor and value.device.type != "meta":
        builder.values[ref] = value.detach().cpu()
    else:
        buffers.append(Buffer(name=ref.name, fqn="", spec=spec))
        builder.notes.append(f"the constant {placeholder} has no value: it was made on meta")
    return ref


def loss_output(outputs: list[Value], builder: Builder) -> Ref:
    """Return the value of the loss, which is the last output of a program that computes nothing else than it and new buffers.

    Args:
        outputs: The values of the program's outputs, in order.
        builder: Has the values of constants.

    Raises:
        TraceError: The loss is a constant.
    """
    loss = outputs[-1]
    if isinstance(loss, Ref) and loss not in builder.values and loss not in builder.lazies:
        return loss
    raise TraceError("The loss is a constant", fix="Return a loss that is computed from the parameters")


def mutations_of(
    program: torch.export.ExportedProgram, outputs: Sequence[Value], env: Mapping[str, Value]
) -> tuple[Mutation, ...]:
    """Return the buffers that a training step changes, with their new values.

    Args:
        program: The exported program.
        outputs: The values of its outputs, in order.
        env: The values of its placeholders by name.

    Raises:
        TraceError: The step changes a parameter, or sets a buffer to something other than a tensor of the graph.
    """
    placeholders = {
        spec.target: getattr(spec.arg, "name", "")
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.BUFFER
    }
    parameter_mutation = getattr(OutputKind, "PARAMETER_MUTATION", None)  # missing in some versions of torch
    mutations: list[Mutation] = []
    for spec, value in zip(program.graph_signature.output_specs, outputs, strict=True):
        if spec.kind is parameter_mutation:
            raise written_parameter((spec.target or "").removeprefix(WRAPPER))
        if spec.kind != OutputKind.BUFFER_MUTATION:
            continue
        buffer = env[placeholders[spec.target]]
        if not isinstance(value, Ref) or not isinstance(buffer, Ref):
            raise TraceError(
                f"Forward sets the buffer to something that is no traced tensor ({value})",
                where=(spec.target or "").removeprefix(WRAPPER),
                fix="Keep the buffer out of forward, or set it to a tensor",
            )
        if value != buffer:
            mutations.append(Mutation(buffer=buffer.name, value=value))
    return tuple(mutations)


_DROPPED = frozenset({"past_key_values", "cross_attention_cache", "cache_params", "mems"})
"""Names of outputs that cache values for generating the next token, which training does not use."""

_MAX_DEPTH = 16
"""Number of nested containers after which the contents of an output are ignored, because containers may contain themselves."""


class Kept:
    """The outputs of the last forward pass, stored outside of the traced module, on which export allows no new attributes.

    Attributes:
        structure: The containers in which the model returns its outputs.
        names: The names of the tensors in them, without the loss.
    """

    def __init__(self) -> None:
        self.structure, self.names = Structure(kind="value"), list[str]()

    def take(self, output: Any, loss: torch.Tensor) -> list[torch.Tensor]:
        """Record the structure of ``output`` and return its tensors in order, each once and without the loss."""
        tensors: dict[int, tuple[int, str, torch.Tensor]] = {}
        self.structure = _structure_of(output, loss, tensors, "", 0)
        self.names = [name for _, name, _ in tensors.values()]
        return [tensor for _, _, tensor in tensors.values()]


def _structure_of(
    value: Any, loss: torch.Tensor, tensors: dict[int, tuple[int, str, torch.Tensor]], name: str, depth: int
) -> Structure:
    """Return the structure of a value in the output of a model.

    Args:
        value: The value.
        loss: The tensor that is the loss.
        tensors: Gets the index and the name of each tensor by its identity.
        name: The name of the value, such as ``hidden_states.0``.
        depth: The number of containers around it.
    """
    if value is loss:
        return Structure(kind="loss")
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested:
        index, _, _ = tensors.setdefault(id(value), (len(tensors), name, value))
        return Structure(kind="tensor", index=index)
    if value is None or isinstance(value, bool | int | float | str) or depth == _MAX_DEPTH:
        is_plain = isinstance(value, bool | int | float | str)
        return Structure(kind="value", value=value if is_plain else None)

    def structures(items: Iterable[tuple[Any, Any]]) -> tuple[Structure, ...]:
        return tuple(
            Structure(kind="value")
            if key in _DROPPED
            else _structure_of(item, loss, tensors, f"{name}.{key}" if name else str(key), depth + 1)
            for key, item in items
        )

    class_name = (type(value).__module__, type(value).__qualname__)
    fields = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    if dataclasses.is_dataclass(value):
        fields = tuple(field.name for field in dataclasses.fields(value) if field.init)
    if fields is not None:
        items = structures((field, getattr(value, field, None)) for field in fields)
        return Structure(kind="fields", type=class_name, names=fields, items=items)
    if isinstance(value, list | tuple):
        items = structures(enumerate(value))
        return Structure(kind="list" if isinstance(value, list) else "tuple", items=items)
    if isinstance(value, Mapping):
        entries = {key: item for key, item in value.items() if isinstance(key, str | int | bool | float)}
        mapping_type = ("", "") if type(value) is dict else class_name
        return Structure(kind="mapping", type=mapping_type, names=tuple(entries), items=structures(entries.items()))
    return Structure(kind="value")


def with_twice(structure: Structure, twice: Structure) -> Structure:
    """Return ``structure`` with the plain values that it has at twice the batch size, which are those of ``twice``.

    Places at which the two differ in their containers are returned unchanged.
    """
    if (structure.kind, structure.names, len(structure.items)) != (twice.kind, twice.names, len(twice.items)):
        return structure
    items = tuple(with_twice(a, b) for a, b in zip(structure.items, twice.items, strict=True))
    return dataclasses.replace(structure, items=items, twice=twice.value)


# --- regions without gradients --------------------------------------------------------------------
# torch.export keeps a region in which the user's code switches gradients off as a graph that a higher-order operator calls. A graph of
# autopar is a flat list of operators, and ``run_decompositions`` drops the regions too, so that operators in them would get gradients.
# Therefore every tensor that enters a region passes through a ``detach``, which stays.

_REGION = "wrap_with_set_grad_enabled"
"""The name of the higher-order operator by which torch.export calls a region with gradients on or off."""
_DROPOUTS = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
)


def detach_in_no_grad(program: torch.export.ExportedProgram) -> None:
    """Detach, in place, every tensor that enters a region of ``program`` with gradients off; remove dropouts that drop nothing.

    Raises:
        TraceError: forward writes in place to a parameter, or to a tensor that has a gradient where gradients are off or through a
            detached view.
    """
    trained = {
        getattr(spec.arg, "name", ""): (spec.target or "").removeprefix(WRAPPER)
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.PARAMETER
    }
    for module in graph_modules(program):
        for node in list(module.graph.nodes):
            # In eval mode or with p=0 a dropout returns its argument itself. torch's decomposition returns a copy.
            if node.target in _DROPOUTS and not (node.args[1] and node.args[2]):
                node.replace_all_uses_with(node.args[0])
                module.graph.erase_node(node)
    _detach_in(program.graph_module, set(trained), trained, off=False)


def written_parameter(name: str, place: str = "") -> TraceError:
    """Return the error for a forward that writes to the parameter ``name`` at the line ``place``."""
    return TraceError(
        f"The parameter {name} is written to in forward",
        where=place,
        fix="Write to it after optimizer.step(), outside of the model, or make it a buffer",
    )


def _detach_in(module: fx.GraphModule, with_gradient: set[str], parameters: dict[str, str], *, off: bool) -> None:
    """Do the work of :func:`detach_in_no_grad` for the nodes of ``module`` and for the regions that it calls.

    Args:
        with_gradient: holds the names of the placeholders of ``module`` that have a gradient. Nodes that depend on them are added.
        parameters: holds the placeholders that are parameters, with their names in the model. Those of regions that receive them are added.
        off: says whether gradients are off in ``module``.
    """
    for node in list(module.graph.nodes):
        if node.op == "output":
            continue
        operands = [n for n in node.all_input_nodes if n.name in with_gradient]
        if node.op == "call_function" and writes(node):
            _check_write(node, with_gradient, parameters, off)
        region = grad_region_of(node, module)
        if region is not None:
            inner, is_on = region
            placeholders = [n for n in inner.graph.nodes if n.op == "placeholder"]
            arguments = [a for a in node.args if isinstance(a, fx.Node) and a.op != "get_attr"]
            bound = [(p.name, argument.name) for p, argument in zip(placeholders, arguments, strict=False)]
            entering = {name for name, argument in bound if argument in with_gradient}
            parameters |= {name: parameters[argument] for name, argument in bound if argument in parameters}
            if not is_on and not off:
                _detach(inner, placeholders)
            _detach_in(inner, entering, parameters, off=off or not is_on)
            if not is_on:
                continue
        if operands and not off:
            with_gradient.add(node.name)


def _check_write(node: fx.Node, with_gradient: set[str], parameters: Mapping[str, str], off: bool) -> None:
    """Raise the errors of :func:`detach_in_no_grad` for ``node``, which writes in place to its first argument."""
    written, detached = root_of(node.args[0])
    if written.op == "placeholder" and written.name in parameters:
        raise written_parameter(parameters[written.name], source_of(node))
    if written.name in with_gradient and (off or detached):
        raise TraceError(
            f"{node.target} writes in place to {written.name}, which has a gradient, where gradients are off",
            where=source_of(node) or node.name,
            fix="Write x = x.masked_fill(...) or the like, with gradients on, or detach a copy",
        )


def grad_region_of(node: fx.Node, module: fx.GraphModule) -> tuple[fx.GraphModule, bool] | None:
    """Return the graph that a call of ``torch.set_grad_enabled`` runs and whether gradients are on in it; None for any other call.

    Args:
        node: is any node of ``module``, whose attributes hold the graphs that it calls.
    """
    target = node.target
    if not isinstance(target, torch._ops.HigherOrderOperator) or str(target._name) != _REGION:
        return None
    head = node.args[1]
    assert isinstance(head, fx.Node)
    inner = getattr(module, str(head.target))
    assert isinstance(inner, fx.GraphModule)
    return inner, bool(node.args[0])


def _detach(inner: fx.GraphModule, placeholders: list[fx.Node]) -> None:
    """Let all nodes of ``inner`` read detached copies of its floating-point placeholders; its outputs still return the placeholders."""
    for placeholder in placeholders:
        if not (isinstance(placeholder.meta.get("val"), Tensor) and placeholder.meta["val"].is_floating_point()):
            continue
        for user in [user for user in placeholder.users if user.op != "output"]:
            with inner.graph.inserting_before(user):  # so that a weight is read in the block that uses it
                detached = inner.graph.call_function(torch.ops.aten.detach.default, (placeholder,))
            detached.meta = {**user.meta, "val": placeholder.meta["val"]}
            user.replace_input_with(placeholder, detached)
    inner.recompile()
