"""The ends of an exported program: inputs, parameters, buffers and constants that it reads, the loss that it gives."""

from __future__ import annotations

from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from autopar.errors import TraceError
from autopar.graph.graph import Buffer, Input, Parameter, Ref, TensorSpec
from autopar.tracing.builder import Builder, Value
from autopar.tracing.convert import WRAPPER


def declare(
    builder: Builder,
    env: dict[str, Value],
    program: torch.export.ExportedProgram,
    model: torch.nn.Module,
    inputs: tuple[Input, ...],
    batch: dict[str, Any],
) -> tuple[tuple[Parameter, ...], tuple[Buffer, ...]]:
    """Inputs, parameters, buffers and lifted constants of the program, in ``env`` under its names."""
    for entry in inputs:
        builder.leaf(entry.name, entry.spec)
    queue = iter(inputs)
    leaves = iter(pytree.tree_leaves(batch))
    aliases = _aliases(model)
    parameters: dict[str, Parameter] = {}
    buffers: list[Buffer] = []
    values = dict(model.named_buffers(remove_duplicate=False))
    changed = set(program.graph_signature.buffers_to_mutate.values())
    for spec in program.graph_signature.input_specs:
        place = getattr(spec.arg, "name", "")
        fqn = (spec.target or "").removeprefix(WRAPPER)
        if spec.kind == InputKind.USER_INPUT:
            leaf = next(leaves)
            env[place] = Ref(next(queue).name) if isinstance(leaf, torch.Tensor) else leaf
        elif spec.kind == InputKind.PARAMETER:
            parameter = _parameter(builder, model, aliases[fqn], parameters)
            env[place] = Ref(parameter.name)
        elif spec.kind == InputKind.BUFFER:
            buffers.append(_buffer(builder, fqn, values[fqn]))
            env[place] = Ref(buffers[-1].name)
            if spec.target in changed:  # what masks are recognised by must last
                builder.hints.pop(Ref(buffers[-1].name), None)
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            env[place] = _lifted(builder, place, program.constants[spec.target or ""], buffers)
        else:
            raise TraceError(
                f"The model takes something else than tensors ({spec.kind.name} {fqn})",
                fix="Remove custom class objects from it",
            )
    return tuple(parameters.values()), tuple(buffers)


def _aliases(model: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """For each name of a parameter all names of the same storage, the first one first."""
    groups: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(fqn)
    return {fqn: tuple(names) for names in groups.values() for fqn in names}


def _parameter(
    builder: Builder, model: torch.nn.Module, names: tuple[str, ...], known: dict[str, Parameter]
) -> Parameter:
    fqn, *others = names
    if fqn not in known:
        tensor = model.get_parameter(fqn)
        spec = TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype, requires_grad=tensor.requires_grad)
        identifier = builder.unique(f"p_{fqn}")
        builder.leaf(identifier, spec)
        builder.parameters.add(identifier)
        known[fqn] = Parameter(name=identifier, fqn=fqn, spec=spec, aliases=tuple(others))
    return known[fqn]


def _buffer(builder: Builder, fqn: str, tensor: torch.Tensor) -> Buffer:
    spec = TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype)
    ref = builder.leaf(builder.unique(f"b_{fqn}"), spec)
    value = None if tensor.device.type == "meta" else tensor.detach().cpu()
    if value is not None:
        builder.hints[ref] = value
    return Buffer(name=ref.name, fqn=fqn, spec=spec, value=value)


def _lifted(builder: Builder, place: str, value: Any, buffers: list[Buffer]) -> Ref:
    """A tensor that the code makes or holds outside parameters and buffers."""
    spec = TensorSpec(shape=tuple(value.shape), dtype=value.dtype)
    ref = builder.leaf(builder.unique(place), spec)
    if type(value) is torch.Tensor and value.device.type != "meta":
        builder.values[ref] = value.detach().cpu()
    else:
        buffers.append(Buffer(name=ref.name, fqn="", spec=spec))
        builder.notes.append(f"the constant {place} has no value: it was made on meta")
    return ref


def loss_output(program: torch.export.ExportedProgram, outputs: list[Value], builder: Builder) -> Ref:
    """The value of the loss.

    Raises:
        TraceError: it is a constant.
    """
    for spec, value in zip(program.graph_signature.output_specs, outputs, strict=True):
        if spec.kind == OutputKind.USER_OUTPUT:
            if isinstance(value, Ref) and value not in builder.values and value not in builder.lazies:
                return value
            break
    raise TraceError("The loss is a constant", fix="Return a loss that is computed from the parameters")
