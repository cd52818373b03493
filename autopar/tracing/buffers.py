"""Buffers that training changes: running statistics, moving averages, power iterations, step counters.

A traced step gives the new value of each as one more result. It is a value like any other, without gradient, and must
be the same for every sample: what is added up over the batch on the way is summed over all of its samples by
``autopar.total``, an operator that is put in behind sums that no loss reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch.export.graph_signature import InputKind, OutputKind

from autopar.errors import TraceError
from autopar.graph.graph import Mutation, Op, Ref
from autopar.tracing.builder import Builder, Value
from autopar.tracing.guards.no_grad import written_parameter

TOTAL = "autopar.total"

_ADDS_UP = frozenset(
    f"aten.{name}"
    for name in [
        "sum.default", "sum.dim_IntList", "mean.default", "mean.dim", "linear.default", "matmul.default", "mm.default",
        "bmm.default", "mv.default", "dot.default", "einsum.default", "addmm.default", "index_add.default",
        "scatter_add.default",
    ]
) | {"autopar.linear_t"}  # fmt: skip
"""Operators that can contract the dim of samples."""


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


def without_gradient(builder: Builder, mutations: Sequence[Mutation]) -> tuple[Mutation, ...]:
    """New values cut off from backward; that of a parameter is read by an operator, as everything of parameters is."""
    result = []
    for mutation in mutations:
        value = mutation.value
        spec = builder.specs[value]
        if spec.requires_grad or value.name in builder.parameters:
            made = Op(
                name=builder.unique(f"new_{mutation.buffer}"),
                target="aten.detach.default",
                args=(value,),
                outputs=(replace(spec, requires_grad=False),),
                module=builder.producers[value.name].module if value.name in builder.producers else "",
            )
            mutation = replace(mutation, value=builder.append(made))
        result.append(mutation)
    return tuple(result)


def with_totals(
    builder: Builder, ops: Sequence[Op], mutations: tuple[Mutation, ...], inputs: set[str], buffers: set[str]
) -> tuple[list[Op], tuple[Mutation, ...]]:
    """``ops`` with ``autopar.total`` behind what adds up without gradient, for new values of buffers, over samples.

    What inputs and buffers alone determine is left out: the prelude's sums are totalled before a step.

    Args:
        inputs, buffers: names.
    """
    wanted = {m.value.name for m in mutations}
    for op in reversed(ops):
        if op.name in wanted:
            wanted.update(ref.name for ref in op.operands)
    of_samples, known = set(inputs), inputs | buffers
    result: list[Op] = []
    renamed: dict[Ref, Ref] = {}
    for op in ops:
        new = op.with_operands(tuple(renamed.get(ref, ref) for ref in op.operands)) if renamed else op
        result.append(new)
        operands = [ref for ref in op.operands if ref not in builder.values and ref not in builder.lazies]
        if any(ref.name in of_samples for ref in operands):
            of_samples.add(op.name)
        if all(ref.name in known for ref in operands):
            known.add(op.name)
        elif op.name in wanted & of_samples and op.target in _ADDS_UP and not op.spec.requires_grad:
            name = builder.unique(f"{op.name}_total")
            total = replace(op, name=name, target=TOTAL, args=(Ref(op.name),), kwargs=())
            result.append(total)
            builder.producers[name] = total
            builder.specs[Ref(name)] = total.spec
            renamed[Ref(op.name)] = Ref(name)
    return result, tuple(replace(m, value=renamed.get(m.value, m.value)) for m in mutations)
