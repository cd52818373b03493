"""The ends of an exported program: inputs, parameters, buffers that training may change, constants, the loss and what is returned besides.

Of the buffers that training changes a traced step gives the new values as further results. Each is a value like any other, without
gradient, and must be the same for every sample: what is added up over the batch on the way is summed over all of its samples by
``autopar.total``, an operator that is put in behind sums that no loss reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from autopar.errors import TraceError
from autopar.graph.elements import Structure
from autopar.graph.graph import Buffer, Input, Mutation, Parameter, Ref, TensorSpec
from autopar.tracing.builder import Builder, Value
from autopar.tracing.convert import WRAPPER
from autopar.tracing.no_grad_regions import written_parameter


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
    """A buffer of the model with its value, where it has one: none on meta."""
    ref = builder.leaf(builder.unique(f"b_{fqn}"), TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype))
    value = None if tensor.is_meta else tensor.detach().cpu()
    if value is not None:
        builder.hints[ref] = value
    return Buffer(name=ref.name, fqn=fqn, spec=builder.specs[ref], value=value)


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


@contextmanager
def written_back(model: torch.nn.Module) -> Iterator[None]:
    """Buffers that forward replaces (``self.mean = new``) are written into instead: export drops what is replaced.

    Raises:
        TraceError: a buffer is removed, or replaced by one of another shape.
    """
    before = [(path, module, dict(module._buffers)) for path, module in model.named_modules()]
    yield
    for path, module, buffers in before:
        for name, old in buffers.items():
            new = module._buffers.get(name)
            if new is old:
                continue
            if old is None or new is None or new.shape != old.shape:
                raise TraceError(
                    f"The buffer changes its shape in training, from {_shape(old)} to {_shape(new)}",
                    where=f"{path}.{name}" if path else name,
                    fix="Make it in __init__ with the shape that it has in training",
                )
            with torch.no_grad():
                old.copy_(new)
            module._buffers[name] = old


def _shape(buffer: torch.Tensor | None) -> str:
    return "None" if buffer is None else str(tuple(buffer.shape))


def mutations_of(
    program: torch.export.ExportedProgram, outputs: Sequence[Value], env: Mapping[str, Value]
) -> tuple[Mutation, ...]:
    """The buffers that a traced step changes, with their new values.

    Args:
        outputs: values of the program's outputs, in order.
        env: values of its placeholders by name.

    Raises:
        TraceError: the step changes a parameter, or a buffer to something that is no tensor of the graph.
    """
    places = {
        spec.target: getattr(spec.arg, "name", "")
        for spec in program.graph_signature.input_specs
        if spec.kind == InputKind.BUFFER
    }
    written = getattr(OutputKind, "PARAMETER_MUTATION", None)  # not every torch has it
    found: list[Mutation] = []
    for spec, value in zip(program.graph_signature.output_specs, outputs, strict=True):
        if spec.kind is written:
            raise written_parameter((spec.target or "").removeprefix("model."))
        if spec.kind != OutputKind.BUFFER_MUTATION:
            continue
        buffer = env[places[spec.target]]
        if not isinstance(value, Ref) or not isinstance(buffer, Ref):
            raise TraceError(
                f"Forward sets the buffer to something that is no traced tensor ({value})",
                where=(spec.target or "").removeprefix("model."),
                fix="Keep the buffer out of forward, or set it to a tensor",
            )
        if value != buffer:
            found.append(Mutation(buffer=buffer.name, value=value))
    return tuple(found)


_DROPPED = frozenset({"past_key_values", "cross_attention_cache", "cache_params", "mems"})
"""Names of what a model keeps for the next token: nothing that a plan of training has."""
_DEPTH = 16


class Kept:
    """What the last forward pass has returned; held by the module that is traced, which may set no attributes."""

    def __init__(self) -> None:
        self.structure, self.names = Structure(kind="value"), list[str]()

    def take(self, output: Any, loss: torch.Tensor) -> list[torch.Tensor]:
        """Its tensors but the loss, in order, each once."""
        found: dict[int, tuple[int, str, torch.Tensor]] = {}
        self.structure = _taken(output, loss, found, "", 0)
        self.names = [name for _, name, _ in found.values()]
        return [tensor for _, _, tensor in found.values()]


def _taken(
    value: Any, loss: torch.Tensor, found: dict[int, tuple[int, str, torch.Tensor]], name: str, depth: int
) -> Structure:
    if value is loss:
        return Structure(kind="loss")
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested:
        index, _, _ = found.setdefault(id(value), (len(found), name, value))
        return Structure(kind="tensor", index=index)
    if value is None or isinstance(value, bool | int | float | str) or depth == _DEPTH:
        is_plain = isinstance(value, bool | int | float | str)
        return Structure(kind="value", value=value if is_plain else None)

    def inside(items: Iterable[tuple[Any, Any]]) -> tuple[Structure, ...]:
        return tuple(
            Structure(kind="value")
            if key in _DROPPED
            else _taken(item, loss, found, f"{name}.{key}" if name else str(key), depth + 1)
            for key, item in items
        )

    place = (type(value).__module__, type(value).__qualname__)
    names = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    if dataclasses.is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value) if field.init)
    if names is not None:
        items = inside((name, getattr(value, name, None)) for name in names)
        return Structure(kind="fields", type=place, names=names, items=items)
    if isinstance(value, list | tuple):
        items = inside(enumerate(value))
        return Structure(kind="list" if isinstance(value, list) else "tuple", items=items)
    if isinstance(value, Mapping):
        known = {key: item for key, item in value.items() if isinstance(key, str | int | bool | float)}
        own = ("", "") if type(value) is dict else place
        return Structure(kind="mapping", type=own, names=tuple(known), items=inside(known.items()))
    return Structure(kind="value")


def with_twice(one: Structure, two: Structure) -> Structure:
    """``one`` with the values of ``two``, the same at twice the batch size."""
    if (one.kind, one.names, len(one.items)) != (two.kind, two.names, len(two.items)):
        return one
    items = tuple(with_twice(a, b) for a, b in zip(one.items, two.items, strict=True))
    return dataclasses.replace(one, items=items, twice=two.value)
