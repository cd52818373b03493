"""The passes that turn the operators of a builder into a finished graph.

They remove dead code, split fused parameters, turn constants into buffers and separate the prelude from the other operators. The
prelude has the operators that only depend on inputs and buffers.

New values of buffers must be the same for all samples. A sum over samples in their computation becomes one over the whole batch
by ``autopar.total``, an operator that is inserted after sums on which no gradient depends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from autopar.graph.elements import ancestors
from autopar.graph.graph import Buffer, Graph, Input, Mutation, Op, Parameter, Ref, TensorSpec, digest, map_refs
from autopar.graph.operator_kinds import draws_random
from autopar.ops.kernels import aten_targets, region_of
from autopar.tracing.blocks import find_blocks
from autopar.tracing.builder import FOLD_LIMIT, SKIPPED_KWARGS, Builder, Call
from autopar.tracing.constants import LOGICAL
from autopar.tracing.forms.fusion import cut_parameters, fuse_gelu, unfuse

_MAX_SHARED_NUMEL = 2**16
"""Number of elements up to which constants are compared, so that equal ones become one buffer."""

_ADDS_UP = aten_targets(
    "sum.default sum.dim_IntList mean.default mean.dim linear.default matmul.default mm.default bmm.default mv.default"
    " dot.default einsum.default addmm.default index_add.default scatter_add.default"
) | {"autopar.linear_t"}
"""Operators that can sum over the dim of samples."""


def finish(
    builder: Builder,
    *,
    name: str,
    batch_size: int,
    inputs: tuple[Input, ...],
    parameters: tuple[Parameter, ...],
    buffers: tuple[Buffer, ...],
    loss: Ref,
    mutations: tuple[Mutation, ...] = (),
) -> Graph:
    """Return the graph that computes ``loss`` and the new values of buffers.

    Its parameters and buffers are those that an operator reads.

    Args:
        builder: Has the operators. They are changed.
        name: The name of the model.
        batch_size: The number of samples in the example batch.
        inputs: The inputs of the graph.
        parameters: The parameters of the model.
        buffers: The buffers of the model, and constants without a value.
        loss: The scalar loss.
        mutations: The buffers that a training step changes, with their new values.
    """
    mutations = _without_gradient(builder, mutations)
    roots = frozenset((loss, *(m.value for m in mutations)))
    builder.ops = ancestors(builder.ops, roots)
    parameters = cut_parameters(builder, unfuse(builder, parameters, roots), roots)
    fuse_gelu(builder, roots)
    _drop_identities(builder, roots)
    ops = ancestors(builder.ops, roots)
    ops, mutations = _with_totals(builder, ops, mutations, {i.name for i in inputs}, {b.name for b in buffers})
    ops, constants, mutations = _with_constants(builder, ops, mutations)
    free = {i.name for i in inputs} | {b.name for b in (*buffers, *constants)}
    prelude, live = split_prelude(ops, free)
    prelude, live, mutations = _merged(prelude, live, mutations)
    roots = frozenset((loss, *(m.value for m in mutations)))
    prelude = ancestors((*prelude, *live), roots)[: -len(live) or None]
    used = {ref.name for op in (*prelude, *live) for ref in op.operands}
    used |= {name for m in mutations for name in (m.buffer, m.value.name)}
    unread = [p.fqn for p in parameters if p.name not in used]
    if unread:
        builder.notes.append(f"parameters without influence on the loss: {', '.join(unread[:5])}"[:300])
    kept = tuple(p for p in parameters if p.name in used)
    return Graph(
        name=name,
        batch_size=batch_size,
        inputs=inputs,
        parameters=kept,
        buffers=tuple(b for b in (*buffers, *constants) if b.name in used),
        prelude=tuple(prelude),
        ops=tuple(live),
        blocks=find_blocks(live, builder.specs, frozenset(p.name for p in kept), loss),
        loss=loss,
        mutations=mutations,
        fingerprint=_fingerprint(inputs, kept, live, mutations),
        notes=tuple(builder.notes),
    )


def _without_gradient(builder: Builder, mutations: Sequence[Mutation]) -> tuple[Mutation, ...]:
    """Detach new values of buffers that require a gradient.

    A value that is a parameter is detached even if it requires none, because an operator must read each parameter.
    """
    result = []
    for mutation in mutations:
        value = mutation.value
        spec = builder.specs[value]
        if spec.requires_grad or value.name in builder.parameters:
            name, producer = builder.unique(f"new_{mutation.buffer}"), builder.producers.get(value.name)
            outputs, module = (replace(spec, requires_grad=False),), producer.module if producer is not None else ""
            detached = Op(name=name, target="aten.detach.default", args=(value,), outputs=outputs, module=module)
            mutation = replace(mutation, value=builder.append(detached))
        result.append(mutation)
    return tuple(result)


def _with_totals(
    builder: Builder, ops: Sequence[Op], mutations: tuple[Mutation, ...], inputs: set[str], buffers: set[str]
) -> tuple[list[Op], tuple[Mutation, ...]]:
    """Insert ``autopar.total`` after each sum over samples that requires no gradient and on which a new value of a buffer depends.

    Sums that only depend on inputs and buffers are excluded: they belong to the prelude and are totalled before a step.

    Args:
        builder: Has the specs and constants.
        ops: The operators in order.
        mutations: The changed buffers with their new values.
        inputs: The names of the inputs.
        buffers: The names of the buffers.

    Returns:
        The operators with the new ones, and the mutations with the totals as their values.
    """
    wanted = {op.name for op in ancestors(ops, (m.value for m in mutations))}
    of_samples, of_prelude = set(inputs), inputs | buffers
    result: list[Op] = []
    renamed: dict[Ref, Ref] = {}
    for op in ops:
        result.append(op.renamed(renamed))
        operands = [ref for ref in op.operands if ref not in builder.values and ref not in builder.lazies]
        if any(ref.name in of_samples for ref in operands):
            of_samples.add(op.name)
        if all(ref.name in of_prelude for ref in operands):
            of_prelude.add(op.name)
        elif op.name in wanted & of_samples and op.target in _ADDS_UP and not op.spec.requires_grad:
            name = builder.unique(f"{op.name}_total")
            total = replace(op, name=name, target="autopar.total", args=(Ref(op.name),), kwargs=())
            result.append(total)
            renamed[Ref(op.name)] = builder.append(total)
    return result, tuple(replace(m, value=renamed.get(m.value, m.value)) for m in mutations)


def _drop_identities(builder: Builder, roots: frozenset[Ref]) -> None:
    """Merge each view of a view into one, and remove views to the same shape, which other passes leave."""
    renamed: dict[Ref, Ref] = {}
    kept: list[Op] = []
    for op in builder.ops:
        op = op.renamed(renamed)
        if op.target == "aten.view.default":
            source = op.operands[0]
            producer = builder.producers.get(source.name)
            if producer is not None and producer.target == "aten.view.default":
                op = op.with_operands((producer.operands[0],))
                source = op.operands[0]
            if builder.specs[source].shape == op.spec.shape and Ref(op.name) not in roots:
                renamed[Ref(op.name)] = source
                continue
        builder.producers[op.name] = op
        kept.append(op)
    builder.ops = kept


def split_prelude(ops: Iterable[Op], free: set[str]) -> tuple[list[Op], list[Op]]:
    """Return the operators of the prelude, which only depend on the inputs and buffers ``free``, and all others.

    An operator that draws random numbers is never one of the prelude.
    """
    known = set(free)
    prelude: list[Op] = []
    live: list[Op] = []
    for op in ops:
        if not draws_random(op.target) and all(ref.name in known for ref in op.operands):
            known.add(op.name)
            prelude.append(op)
        else:
            live.append(op)
    return prelude, live


def _with_constants(
    builder: Builder, ops: list[Op], mutations: tuple[Mutation, ...]
) -> tuple[list[Op], list[Buffer], tuple[Mutation, ...]]:
    """Turn the constants that operators read into buffers.

    A constant whose compact value is smaller than its shape is expanded by an operator. One that is too large to store is computed
    by an operator.

    Returns:
        The operators, those that expand or compute constants first, the new buffers, and the mutations.
    """
    buffers: list[Buffer] = []
    materialised: dict[Ref, Ref] = {}
    shared: dict[tuple[object, ...], Ref] = {}
    builder.ops = []  # gets the operators that expand or compute constants

    def materialise(ref: Ref) -> Ref:
        if ref in materialised:
            return materialised[ref]
        lazy = builder.lazies.get(ref)
        if lazy is not None and lazy.numel > FOLD_LIMIT:
            source = _emitted(builder, lazy.call, builder.specs[ref], materialise)
            name = source.name
        else:
            value = builder.values.get(ref) if lazy is None else lazy.evaluate()
            if value is None:
                return ref
            source, name = _buffer_of(builder, ref, value, buffers, shared), ref.name
        materialised[ref] = _expanded(builder, source, builder.specs[ref], name)
        return materialised[ref]

    result = [op.with_operands(tuple(map(materialise, op.operands))) for op in ops]
    mutations = tuple(replace(mutation, value=materialise(mutation.value)) for mutation in mutations)
    return [*builder.ops, *result], buffers, mutations


def _emitted(builder: Builder, call: Call, spec: TensorSpec, materialise: Callable[[Ref], Ref]) -> Ref:
    """Append the operator ``call`` of an unevaluated constant with ``spec`` and return its value, in the shape of the call."""
    args = tuple(map_refs(arg, materialise) for arg in call.args)
    kwargs = {key: value for key, value in call.kwargs.items() if key not in SKIPPED_KWARGS}
    target, spec = LOGICAL.get(call.target, call.target), replace(spec, shape=call.spec.shape)
    return builder.emit(call, target, args, spec, kwargs=kwargs)


def _expanded(builder: Builder, source: Ref, spec: TensorSpec, name: str) -> Ref:
    """Return ``source`` in the shape of ``spec``, after appending an expansion if it has another shape."""
    if builder.specs[source].shape == spec.shape:
        return source
    name = builder.unique(f"{name}_full")
    return builder.append(Op(name=name, target="aten.expand.default", args=(source, spec.shape), outputs=(spec,)))


def _buffer_of(
    builder: Builder, ref: Ref, value: torch.Tensor, buffers: list[Buffer], shared: dict[tuple[object, ...], Ref]
) -> Ref:
    """Return the buffer with the value of a constant: an equal one of ``shared``, or a new one that is appended to ``buffers``."""
    value = value.contiguous()
    if value.untyped_storage().nbytes() > value.numel() * value.itemsize:  # a slice, which would keep its base alive
        value = value.clone()
    key: tuple[object, ...] = (ref,)
    if value.numel() <= _MAX_SHARED_NUMEL and not value.is_complex():
        raw = value.as_strided((value.numel(),), (1,)).view(torch.uint8) if value.numel() else value
        key = (tuple(value.shape), value.dtype, bytes(raw.tolist()))
    if key not in shared:
        name = builder.unique(f"c_{ref.name}")
        spec = TensorSpec.of(value)
        shared[key] = builder.leaf(name, spec)
        buffers.append(Buffer(name=name, fqn="", spec=spec, value=value))
    return shared[key]


def _merged(
    prelude: list[Op], live: list[Op], mutations: tuple[Mutation, ...]
) -> tuple[list[Op], list[Op], tuple[Mutation, ...]]:
    """Merge equal calls of the prelude.

    Returns:
        The prelude, the other operators and the mutations, which read the calls that remain.
    """
    renamed: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}

    def current(op: Op) -> Op:
        return op.with_operands(tuple(Ref(renamed.get(r.name, r.name), r.index) for r in op.operands))

    distinct = []
    for op in map(current, prelude):
        key = (op.target, op.args, op.kwargs)
        if key in seen:
            renamed[op.name] = seen[key]
        else:
            seen[key] = op.name
            distinct.append(op)
    mutations = tuple(replace(m, value=Ref(renamed.get(m.value.name, m.value.name), m.value.index)) for m in mutations)
    return distinct, [current(op) for op in live], mutations


def _fingerprint(
    inputs: tuple[Input, ...], parameters: tuple[Parameter, ...], ops: Iterable[Op], mutations: tuple[Mutation, ...]
) -> str:
    """Return a hash that identifies a traced model by its parameters, inputs up to the batch size, operators and changed buffers."""
    lines = [f"{p.key} {p.spec.shape} {p.spec.dtype} {p.spec.requires_grad} {p.aliases}" for p in parameters]
    lines += [
        f"{i.name} {tuple(n for d, n in enumerate(i.spec.shape) if d != i.batch_dim)} {i.spec.dtype}" for i in inputs
    ]
    return digest("\n".join([*lines, *(_identity(op) for op in ops), *(m.buffer for m in mutations)]))


def _identity(op: Op) -> str:
    """Return the target of an operator, with the kind and the name of the region if it is an opaque one."""
    if op.target != "autopar.opaque":
        return op.target
    region = region_of(str(op.args[0]))
    return f"{op.target} {region.kind} {region.name}"
