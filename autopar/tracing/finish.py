"""From a builder to a finished graph: dead code, constants, prelude, identity."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from autopar.graph.graph import (
    Buffer,
    Graph,
    Input,
    Mutation,
    Op,
    Parameter,
    Ref,
    TensorSpec,
    digest,
    map_refs,
)
from autopar.graph.operator_kinds import draws_random
from autopar.ops.kernels import aten_targets, region_of
from autopar.tracing.blocks import find_blocks
from autopar.tracing.builder import FOLD_LIMIT, SKIPPED_KWARGS, Builder
from autopar.tracing.constants import LOGICAL
from autopar.tracing.forms.fusion import cut_parameters, fuse_gelu, unfuse

_SMALL = 2**16
"""Elements up to which equal constants are shared."""

_ADDS_UP = aten_targets(
    "sum.default sum.dim_IntList mean.default mean.dim linear.default matmul.default mm.default bmm.default mv.default"
    " dot.default einsum.default addmm.default index_add.default scatter_add.default"
) | {"autopar.linear_t"}
"""Operators that can contract the dim of samples."""


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
    """The graph of what ``loss`` and the new values of buffers need.

    Identical calls of the prelude are made once. Buffers and parameters that nothing reads go.
    """
    mutations = _without_gradient(builder, mutations)
    roots = frozenset((loss, *(m.value for m in mutations)))
    builder.ops = _alive(builder.ops, roots)
    parameters = cut_parameters(builder, unfuse(builder, parameters, roots), roots)
    fuse_gelu(builder, roots)
    _drop_identities(builder, roots)
    ops = _alive(builder.ops, roots)
    if mutations:
        ops, mutations = _with_totals(builder, ops, mutations, {i.name for i in inputs}, {b.name for b in buffers})
    ops, constants, mutations = _with_constants(builder, ops, mutations)
    free = {i.name for i in inputs} | {b.name for b in (*buffers, *constants)}
    prelude, live = _split_prelude(ops, free)
    prelude, live, mutations = _merged(prelude, live, mutations)
    roots = frozenset((loss, *(m.value for m in mutations)))
    prelude = _alive((*prelude, *live), roots)[: -len(live) or None]
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


def _with_totals(
    builder: Builder, ops: Sequence[Op], mutations: tuple[Mutation, ...], inputs: set[str], buffers: set[str]
) -> tuple[list[Op], tuple[Mutation, ...]]:
    """``ops`` with ``autopar.total`` behind what adds up without gradient, for new values of buffers, over samples.

    What inputs and buffers alone determine is left out: the prelude's sums are totalled before a step.

    Args:
        inputs, buffers: names.
    """
    wanted = {op.name for op in _alive(ops, (m.value for m in mutations))}
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
            total = replace(op, name=name, target="autopar.total", args=(Ref(op.name),), kwargs=())
            result.append(total)
            builder.producers[name] = total
            builder.specs[Ref(name)] = total.spec
            renamed[Ref(op.name)] = Ref(name)
    return result, tuple(replace(m, value=renamed.get(m.value, m.value)) for m in mutations)


def _drop_identities(builder: Builder, roots: frozenset[Ref]) -> None:
    """Removes views to the same shape that other passes left, renaming what reads them."""
    renamed: dict[Ref, Ref] = {}
    kept: list[Op] = []
    for op in builder.ops:
        op = op.with_operands(tuple(renamed.get(ref, ref) for ref in op.operands)) if renamed else op
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


def _alive(ops: Iterable[Op], roots: Iterable[Ref]) -> list[Op]:
    """Operators that ``roots`` need, in order."""
    wanted = {ref.name for ref in roots}
    kept: list[Op] = []
    for op in reversed(list(ops)):
        if op.name in wanted:
            kept.append(op)
            wanted.update(ref.name for ref in op.operands)
    return kept[::-1]


def _split_prelude(ops: Iterable[Op], free: set[str]) -> tuple[list[Op], list[Op]]:
    """Operators that inputs and buffers alone determine, and the others.

    Args:
        free: names of inputs and buffers; not changed.
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
    """Constants that are read become buffers, expanded to their shape where they are kept smaller."""
    buffers: list[Buffer] = []
    made: dict[Ref, Ref] = {}
    shared: dict[tuple[object, ...], Ref] = {}
    expands: list[Op] = []

    def materialise(ref: Ref) -> Ref:
        if ref in made:
            return made[ref]
        lazy = builder.lazies.get(ref)
        if lazy is not None and lazy.numel > FOLD_LIMIT:
            made[ref] = _emitted(builder, ref, expands, materialise)
            return made[ref]
        value = builder.values.get(ref) if lazy is None else lazy.whole()
        if value is None:
            return ref
        held = _held(builder, ref, value, buffers, shared)
        made[ref] = _expanded(builder, held, builder.specs[ref], ref.name, expands)
        return made[ref]

    result = [op.with_operands(tuple(map(materialise, op.operands))) for op in ops]
    changed = tuple(replace(mutation, value=materialise(mutation.value)) for mutation in mutations)
    return [*expands, *result], buffers, changed


def _emitted(builder: Builder, ref: Ref, made: list[Op], materialise: Callable[[Ref], Ref]) -> Ref:
    """A constant too large to hold becomes an operator again."""
    call = builder.lazies[ref].call
    args = tuple(map_refs(arg, materialise) for arg in call.args)
    kwargs = tuple(sorted((k, v) for k, v in call.kwargs.items() if k not in SKIPPED_KWARGS))
    spec = builder.specs[ref]
    source = Op(
        name=builder.unique(call.name),
        target=LOGICAL.get(call.target, call.target),
        args=args,
        kwargs=kwargs,
        outputs=(replace(spec, shape=call.spec.shape),),
        module=call.module,
        source=call.source,
    )
    made.append(source)
    builder.specs[Ref(source.name)] = source.spec
    return _expanded(builder, Ref(source.name), spec, source.name, made)


def _expanded(builder: Builder, source: Ref, spec: TensorSpec, name: str, made: list[Op]) -> Ref:
    """``source`` in the shape of ``spec``; appends to ``made`` the expansion that this may take."""
    if builder.specs[source].shape == spec.shape:
        return source
    full = Ref(builder.unique(f"{name}_full"))
    made.append(Op(name=full.name, target="aten.expand.default", args=(source, spec.shape), outputs=(spec,)))
    builder.specs[full] = spec
    return full


def _held(
    builder: Builder, ref: Ref, value: torch.Tensor, buffers: list[Buffer], shared: dict[tuple[object, ...], Ref]
) -> Ref:
    value = value.contiguous()
    if value.untyped_storage().nbytes() > value.numel() * value.itemsize:
        value = value.clone()
    key: tuple[object, ...] = (ref,)
    if value.numel() <= _SMALL and not value.is_complex():
        raw = value.as_strided((value.numel(),), (1,)).view(torch.uint8) if value.numel() else value
        key = (tuple(value.shape), value.dtype, bytes(raw.tolist()))
    if key not in shared:
        name = builder.unique(f"c_{ref.name}")
        spec = TensorSpec(shape=tuple(value.shape), dtype=value.dtype)
        shared[key] = builder.leaf(name, spec)
        buffers.append(Buffer(name=name, fqn="", spec=spec, value=value))
    return shared[key]


def _merged(
    prelude: list[Op], live: list[Op], mutations: tuple[Mutation, ...]
) -> tuple[list[Op], list[Op], tuple[Mutation, ...]]:
    """Equal calls of the prelude made once."""
    renamed: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}

    def current(op: Op) -> Op:
        if not any(ref.name in renamed for ref in op.operands):
            return op
        return op.with_operands(tuple(Ref(renamed.get(r.name, r.name), r.index) for r in op.operands))

    kept = []
    for op in map(current, prelude):
        key = (op.target, op.args, op.kwargs)
        if key in seen:
            renamed[op.name] = seen[key]
        else:
            seen[key] = op.name
            kept.append(op)
    moved = tuple(replace(m, value=Ref(renamed.get(m.value.name, m.value.name), m.value.index)) for m in mutations)
    return kept, [current(op) for op in live], moved


def _fingerprint(
    inputs: tuple[Input, ...], parameters: tuple[Parameter, ...], ops: Iterable[Op], mutations: tuple[Mutation, ...]
) -> str:
    """Of a traced model: parameters, inputs (batch size aside), operators and buffers that change."""
    lines = [f"{p.key} {p.spec.shape} {p.spec.dtype} {p.spec.requires_grad} {p.aliases}" for p in parameters]
    lines += [
        f"{i.name} {tuple(n for d, n in enumerate(i.spec.shape) if d != i.batch_dim)} {i.spec.dtype}" for i in inputs
    ]
    return digest("\n".join([*lines, *(_identity(op) for op in ops), *(m.buffer for m in mutations)]))


def _identity(op: Op) -> str:
    """What an operator is; a region of unknown code by its name."""
    if op.target != "autopar.opaque":
        return op.target
    region = region_of(str(op.args[0]))
    return f"{op.target} {region.kind} {region.name}"
