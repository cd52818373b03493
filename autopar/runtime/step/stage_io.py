"""What pipeline stages pass to each other, in a form that the pipelines of every torch since 2.11 take.

A program says of a value between two stages its shape, its dtype and whether it has a gradient. torch 2.11 asks for more
(``torch/distributed/pipelining/stage.py``): whatever a stage receives requires a gradient, so that it is of a floating-point
dtype; backward leaves one on each; and what is sent has the strides of a newly made tensor, those of dims of length 1
included. Later versions ask for none of it, and take what has it.

So stages begin in :func:`enter` and end in :func:`leave`. Between them is what the program says. Outside of them integers are
floats of the same bits, strides are those of a new tensor, and a gradient that backward does not make is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import spmd_types
import torch
from torch import Tensor

from autopar.graph.graph import Ref
from autopar.lower.emit import str_name
from autopar.lower.program import Program, StageProgram

_FLOATS = {1: torch.float8_e5m2, 2: torch.float16, 4: torch.float32, 8: torch.float64}
"""A dtype for the bits of one that has no gradient, by bytes of an element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """One value between two stages, or the loss.

    Attributes:
        shape: of one rank's part, for one micro-batch.
        dtype: in which stages compute.
        requires_grad: as in the program.
        returns: whether a gradient comes back, if only zero: of each that requires one, of one where none does, so that
            backward runs through every stage.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    returns: bool

    @property
    def carrier(self) -> torch.dtype:
        """The dtype under way: one that may have a gradient, with as many bytes."""
        return self.dtype if _is_differentiable(self.dtype) else _FLOATS[self.dtype.itemsize]

    def example(self) -> Tensor:
        """What is under way, on meta."""
        return torch.empty(self.shape, dtype=self.carrier, device="meta").requires_grad_(self.returns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What a stage receives and what it gives: ``receives`` and ``sends`` of its program, the loss for the last one."""

    receives: tuple[Passed, ...]
    gives: tuple[Passed, ...]


def _is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def ends_of(program: Program, stage: StageProgram) -> Ends:
    """The values of both ends of one stage of ``program``."""
    specs = {str_name(Ref(op.name, i)): spec for op in program.graph.ops for i, spec in enumerate(op.outputs)}

    def passed(names: Sequence[str]) -> tuple[Passed, ...]:
        dtypes = [specs[name].dtype for name in names]
        have = [
            specs[name].requires_grad and _is_differentiable(dtype) for name, dtype in zip(names, dtypes, strict=True)
        ]
        return tuple(
            Passed(
                shape=tuple(specs[name].shape),
                dtype=dtype,
                requires_grad=has,
                returns=has or (i == 0 and not any(have)),
            )
            for i, (name, dtype, has) in enumerate(zip(names, dtypes, have, strict=True))
        )

    return Ends(receives=passed(stage.receives), gives=passed((program.loss,) if stage.is_last else stage.sends))


Link: TypeAlias = Tensor | None
"""Ties the gradients at a stage's begin to those at its end: no elements; None where the stage receives nothing."""


def enter(ends: Ends, received: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Link]:
    """What a stage computes with, of what it received; the link goes to :func:`leave`."""
    if not received:
        return (), None
    link, *values = _Enter.apply(ends.receives, *received)  # type: ignore[no-untyped-call]
    return tuple(values), link


def leave(ends: Ends, link: Link, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What the stage gives, of what it computed. Their backward runs that of what it received, whatever they depend on."""
    if not values:
        return ()
    if link is None:
        link = values[0].new_empty(0, dtype=torch.float32).requires_grad_(torch.is_grad_enabled())
    given: tuple[Tensor, ...] = _Leave.apply(ends.gives, link, *map(_laid_out, values))  # type: ignore[no-untyped-call]
    return given


def _as(value: Tensor, before: torch.dtype, after: torch.dtype) -> Tensor:
    return value.detach() if before == after else value.detach().view(after)


def _laid_out(value: Tensor) -> Tensor:
    """With the strides of a new tensor: a contiguous one may have any in dims of length 1."""
    strides, step = [0] * value.ndim, 1
    for dim in reversed(range(value.ndim)):
        strides[dim], step = step, step * max(value.shape[dim], 1)
    return value if value.stride() == tuple(strides) else value.clone(memory_format=torch.contiguous_format)


class _Enter(torch.autograd.Function):
    """Values in their own dtypes, behind a link; each that asks for a gradient gets one."""

    @staticmethod
    def forward(ctx: Any, passed: Sequence[Passed], *received: Tensor) -> tuple[Tensor, ...]:
        ctx.passed, ctx.device = passed, received[0].device
        ctx.set_materialize_grads(False)
        values = [_as(x, p.carrier, p.dtype) for x, p in zip(received, passed, strict=True)]
        ctx.mark_non_differentiable(*(x for x, p in zip(values, passed, strict=True) if not p.requires_grad))
        return (received[0].new_empty(0, dtype=torch.float32), *values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return (
            None,
            *(
                None
                if not needed
                else torch.zeros(p.shape, dtype=p.carrier, device=ctx.device)
                if gradient is None or not p.requires_grad
                else gradient
                for p, gradient, needed in zip(ctx.passed, gradients[1:], ctx.needs_input_grad[1:], strict=True)
            ),
        )


class _Leave(torch.autograd.Function):
    """Values as they are under way; their gradients, and one of the link."""

    @staticmethod
    def forward(ctx: Any, passed: Sequence[Passed], link: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.passed, ctx.link = passed, (link.dtype, link.device)
        ctx.set_materialize_grads(False)
        given = [_as(x, p.dtype, p.carrier) for x, p in zip(values, passed, strict=True)]
        ctx.mark_non_differentiable(*(x for x, p in zip(given, passed, strict=True) if not p.returns))
        return tuple(given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        dtype, device = ctx.link
        own = (g if p.requires_grad else None for p, g in zip(ctx.passed, gradients, strict=True))
        return (None, torch.empty(0, dtype=dtype, device=device), *own)


spmd_types.register_local_autograd_function(_Enter)
spmd_types.register_local_autograd_function(_Leave)
