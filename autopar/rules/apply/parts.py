"""What one rank of an axis has of a tensor, and of which types a tensor is on the axes before."""

from __future__ import annotations

from autopar.errors import RuleError
from autopar.graph.graph import Graph, Layout, Ref, TensorSpec
from autopar.plan.mesh import I, R, S, Type
from autopar.rules.strategy import Typing

BATCH = "batch"
"""The axis of samples: micro-batches and data ranks together."""

_OTHER = "Choose another degree, or another strategy here"


def layout_before(graph: Graph, ref: Ref) -> Layout:
    """Types on the axes applied before, where the value is used: R of parameters whose gradient is summed later."""
    producer = graph.producer(ref)
    if producer is not None:
        return producer.layouts[ref.index] if producer.layouts else ()
    if graph.is_parameter(ref):
        parameter = graph.parameter(ref.name)
        pending = (*parameter.gradient_sum_axes, BATCH)
        return tuple((a, R if a in pending and kind == I else kind) for a, kind in parameter.layout)
    by_samples = any(axis == BATCH for p in graph.parameters[:1] for axis, _ in p.layout)
    leaf = next((leaf for leaf in graph.inputs if leaf.name == ref.name), None)
    return ((BATCH, S(leaf.batch_dim)),) if by_samples and leaf and leaf.batch_dim is not None else ()


def part_of(spec: TensorSpec, kind: Type, typing: Typing, place: str) -> TensorSpec:
    """What one rank of the typing's axis has of a tensor of a type.

    Raises:
        RuleError: the dim does not exist or does not divide.
    """
    if not kind.is_split:
        return spec
    if kind.dim >= len(spec.shape):
        raise RuleError(
            f"A tensor of shape {spec.shape} has no dim {kind.dim} to split ({kind})", where=place, fix=_OTHER
        )
    part, rest = divmod(spec.shape[kind.dim] * typing.size.denominator, typing.size.numerator)
    if rest:
        raise RuleError(
            f"A tensor of shape {spec.shape} cannot be split as {kind}: the dim does not divide by {typing.axis}={typing.size}",
            where=place,
            fix=_OTHER,
        )
    shape = (*spec.shape[: kind.dim], part, *spec.shape[kind.dim + 1 :])
    return TensorSpec(shape=shape, dtype=spec.dtype, requires_grad=spec.requires_grad)
