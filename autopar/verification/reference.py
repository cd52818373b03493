"""What is compared, a model with its batches in float64, and by what: a few steps of AdamW, and how far apart two such runs are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import TraceError, VerificationError, first_line
from autopar.graph.graph import Graph
from autopar.lower.emit import OPAQUE
from autopar.ops.kernels import MODULE, region_of
from autopar.plan.plan import FP32, Precision
from autopar.runtime.parallel_model import ParallelModel
from autopar.tracing.batch import arguments, tensors_of
from autopar.tracing.failures import FAILURES, explained
from autopar.tracing.modes import in_double
from autopar.tracing.trace import LossFunction, pick_loss, trace
from autopar.verification.results import RankErrors

LEARNING_RATE = 1e-3
ADAM_EPSILON = 1e-5
"""Larger than rounding noise: a gradient that is zero but for rounding (of a key's bias) must not become a step."""


def adamw(parameters: Any) -> torch.optim.AdamW:
    """The optimizer of both sides."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=ADAM_EPSILON)


def loss_of(output: Any) -> Tensor:
    """The loss in what a model returns: itself, its ``loss``, or its first scalar, as a trace takes it."""
    return pick_loss(output, "verify")


class Trained(TypedDict):
    """What a run leaves to compare."""

    losses: tuple[float, ...]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def trained_alone(model: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> Trained:
    """One device's run.

    Raises:
        VerificationError: the model cannot make these steps; names its line.
    """
    try:
        return _trained(model, batches)
    except FAILURES as failure:
        raise VerificationError(
            "One device alone cannot train the model",
            where=explained(failure, model).where,
            got=f"{type(failure).__name__}: {first_line(failure)}",
            fix="Correct that line, or give inputs and settings that fit the model",
        ) from failure


def _trained(model: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> Trained:
    optimizer = adamw(model.parameters())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(model(**batch))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.grad is not None}
    parameters |= {name: new for name, new in model.named_buffers() if not torch.equal(new, buffers[name])}
    return {"losses": tuple(losses), "gradients": gradients, "parameters": parameters}


def trained_in_parallel(parallel: ParallelModel, batches: Sequence[Mapping[str, Tensor]]) -> Trained:
    """One rank's run."""
    optimizer = adamw(parallel.parameters())
    found: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        found.append(parallel.train_step(tensors_of(batch)).item())
        if step == 0:
            gradients = parallel.full_gradients()
        optimizer.step()
    return {"losses": tuple(found), "gradients": gradients, "parameters": parallel.full_state_dict()}


def errors(rank: int, found: Trained, reference: Trained, precision: Precision = FP32) -> RankErrors:
    """How far one rank's run is from one device's."""
    gradient_name, gradient = worst(found["gradients"], reference["gradients"])
    parameter_name, parameter = worst(found["parameters"], reference["parameters"])
    return RankErrors(
        rank=rank,
        losses=found["losses"],
        loss=max(_relative(abs(a - b), abs(b)) for a, b in zip(found["losses"], reference["losses"], strict=True)),
        gradient=gradient,
        gradient_name=gradient_name,
        parameter=parameter,
        parameter_name=parameter_name,
        precision=precision.name,
    )


def worst(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[str, float]:
    """The tensor with the largest relative error; one that is missing counts as infinitely wrong.

    A tensor that is nothing but rounding beside the others (1e-6 of the largest) is measured against that.
    """
    reference = {name: tensor for name, tensor in reference.items() if tensor.numel()}
    floor = 1e-6 * max((float(tensor.abs().max()) for tensor in reference.values()), default=0.0)
    off = {
        name: _relative(float((found[name] - tensor).abs().max()), max(float(tensor.abs().max()), floor))
        if name in found
        else float("inf")
        for name, tensor in reference.items()
    }
    name = max(off, key=lambda name: off[name])
    return name, off[name]


def _relative(difference: float, size: float) -> float:
    """Their ratio; infinity for what is not a number."""
    if difference == 0.0:
        return 0.0
    ratio = difference / size if size else float("inf")
    return float("inf") if math.isnan(ratio) else ratio


class Subject(Protocol):
    """What is verified; picklable, the same in every process."""

    def build(self, *, drops: bool = False) -> nn.Module:
        """The model on CPU with real weights, always the same ones; without dropout, unless it ``drops`` as plans are made for."""

    def make_batch(self, batch_size: int, *, seed: int) -> dict[str, Tensor]:
        """Inputs by name; samples of different lengths, with ignored labels where they end, where the model knows such."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A subject as it is compared; modules and parameters keep their names. Picklable if its parts are.

    Attributes:
        loss_fn: ``loss_fn(output, batch)``, in place of what the model returns; a function that can be imported.
        is_double: parameters, buffers and inputs are the float32 ones, held in float64.
    """

    subject: Subject
    loss_fn: LossFunction | None = None
    is_double: bool = False

    def build(self, *, drops: bool = False) -> nn.Module:
        """The model on CPU; its forward takes all of a batch."""
        model = self.subject.build(drops=drops)
        if self.loss_fn is not None:
            model.forward = partial(_loss, model.forward, self.loss_fn)
        return model.double() if self.is_double else model

    def make_batch(self, batch_size: int, *, seed: int) -> dict[str, Tensor]:
        """Inputs by name, those of the loss among them."""
        batch = self.subject.make_batch(batch_size, seed=seed)
        return widened(batch) if self.is_double else batch


def _loss(forward: Callable[..., Any], loss_fn: LossFunction, **batch: Any) -> Tensor:
    positional, named = arguments(forward, batch)
    return loss_fn(forward(*(batch[k] for k in positional), **{k: batch[k] for k in named}), batch)


def widened(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch with its floating point numbers in float64."""
    wide: dict[str, Tensor] = pytree.tree_map_only(
        Tensor, lambda value: value.double() if value.is_floating_point() else value, dict(batch)
    )
    return wide


def traced_in_double(subject: Compared, graph: Graph) -> Graph | None:
    """The subject in float64 as the operators, names and blocks of ``graph``, so that its plans fit; None: they differ.

    Traced anew: constants that were folded in float32 are rounded.
    """
    batch = subject.make_batch(max(graph.batch_size, 2), seed=0)
    example = pytree.tree_map_only(Tensor, lambda value: value.to("meta"), batch)
    model = subject.build(drops=any(op.target == "autopar.dropout" for op in graph.ops))
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
