"""What is compared: a model with its batches, with a loss beside it, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import TraceError
from autopar.graph.graph import Graph
from autopar.lower.emit import OPAQUE
from autopar.ops.kernels import MODULE, region_of
from autopar.tracing.batch import arguments
from autopar.tracing.modes import in_double
from autopar.tracing.trace import LossFunction, trace

DROPOUT = "autopar.dropout"


@dataclass(frozen=True, slots=True)
class WithLoss:
    """``loss_fn(output, batch)`` in place of what the model returns; modules and parameters keep their names.

    Picklable if both are: a function that can be imported.
    """

    subject: Subject
    loss_fn: LossFunction

    def build(self) -> nn.Module:
        """The model on CPU; its forward takes all of a batch."""
        model = self.subject.build()
        model.forward = partial(_loss, model.forward, self.loss_fn)
        return model

    def as_traced(self) -> nn.Module:
        """The model with what it drops."""
        model = as_traced(self.subject)
        model.forward = partial(_loss, model.forward, self.loss_fn)
        return model

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = False) -> dict[str, Tensor]:
        """Inputs by name, those of the loss among them."""
        return self.subject.make_batch(batch_size, seed=seed, padded=padded)


def _loss(forward: Callable[..., Any], loss_fn: LossFunction, **batch: Any) -> Tensor:
    positional, named = arguments(forward, batch)
    return loss_fn(forward(*(batch[k] for k in positional), **{k: batch[k] for k in named}), batch)


@dataclass(frozen=True, slots=True)
class DoubleSubject:
    """A subject whose parameters, buffers and inputs are the float32 ones, held in float64."""

    subject: Subject

    def build(self) -> nn.Module:
        """The model on CPU."""
        return self.subject.build().double()

    def as_traced(self) -> nn.Module:
        """The model with what it drops."""
        return as_traced(self.subject).double()

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = False) -> dict[str, Tensor]:
        """Inputs by name."""
        batch = self.subject.make_batch(batch_size, seed=seed, padded=padded)
        wide: dict[str, Tensor] = pytree.tree_map_only(
            Tensor, lambda x: x.double() if x.is_floating_point() else x, batch
        )
        return wide


def traced_in_double(subject: DoubleSubject, graph: Graph) -> Graph | None:
    """The subject in float64 as the operators, names and blocks of ``graph``, so that its plans fit; None: they differ.

    Traced anew: constants that were folded in float32 are rounded.
    """
    batch = subject.make_batch(max(graph.batch_size, 2), seed=0, padded=True)
    example = pytree.tree_map_only(Tensor, lambda value: value.to("meta"), batch)
    drops = any(op.target == DROPOUT for op in graph.ops)
    model = subject.as_traced() if drops else subject.build()
    try:
        with in_double():
            found = trace(model, (), example, name=graph.name, opaque=_opaque_modules(graph), exact=graph.exact)
    except TraceError:
        return None
    if _outline(found) != _outline(graph):
        return None
    return replace(found, fingerprint=graph.fingerprint, blocks=graph.blocks, mixing=graph.mixing)


def _opaque_modules(graph: Graph) -> tuple[str, ...]:
    """Paths of the modules that run as they are written."""
    regions = (region_of(str(op.args[0])) for op in (*graph.prelude, *graph.ops) if op.target == OPAQUE)
    return tuple(dict.fromkeys(region.name for region in regions if region.kind == MODULE))


def _outline(graph: Graph) -> tuple[object, ...]:
    """What two graphs share that differ by dtypes alone."""
    ops = (*graph.prelude, *graph.ops)
    return (
        tuple(p.name for p in graph.parameters),
        tuple((op.name, op.target, op.operands, tuple(o.shape for o in op.outputs)) for op in ops),
        tuple((b.index, b.label) for b in graph.blocks),
    )


@runtime_checkable
class Dropping(Protocol):
    """A subject whose plans are made for a model that drops something."""

    def as_traced(self) -> nn.Module:
        """The model on CPU, with what it drops."""


def as_traced(subject: Subject) -> nn.Module:
    """The model as plans are made for it."""
    return subject.as_traced() if isinstance(subject, Dropping) else subject.build()


class Subject(Protocol):
    """What is verified; picklable, the same in every process."""

    def build(self) -> nn.Module:
        """The model on CPU with real weights, without dropout, always the same ones."""

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = False) -> dict[str, Tensor]:
        """Inputs by name; ``padded``: samples of different lengths, with ignored labels where they end."""
