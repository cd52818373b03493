"""Runs of a region of unknown code on small random inputs: what they give, and whether its own backward is autograd's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.graph.graph import TensorSpec
from autopar.ops.kernels import Region
from autopar.ops.opaque import run
from autopar.tracing.failures import FAILURES

_TOLERANCE = {torch.float64: 1e-9}
_COARSE = 1e-4
"""Relative, where the code computes in less than float64."""

Call = Callable[..., Any]
Gradients = tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]


class Unclear(Exception):  # noqa: N818  no error yet: it becomes a reason
    """The region cannot be run or followed; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A region, its code, and what it is run on.

    Attributes:
        inputs: shapes and dtypes as traced.
        parameters, buffers: values; random ones for those on meta.
        span: random inputs lie between 0 and this, or anywhere: some code takes roots and logarithms, or arc cosines of
            products.
        least: of random integers: 1 where code refuses 0 (lengths of sequences).
    """

    region: Region
    call: Call
    inputs: tuple[TensorSpec, ...]
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    span: float | None = None
    least: int = 0

    def wide(self) -> Subject:
        """The same in float64."""

        def widened(x: Tensor) -> Tensor:
            return x.double() if x.is_floating_point() else x

        inputs = (replace(s, dtype=torch.float64) if s.dtype.is_floating_point else s for s in self.inputs)
        return replace(
            self,
            inputs=tuple(inputs),
            parameters=tuple(map(widened, self.parameters)),
            buffers=tuple(map(widened, self.buffers)),
        )


def outcomes(subject: Subject, inputs: Sequence[Tensor], *, seed: int) -> Gradients:
    """Outputs, and gradients of inputs and parameters under :func:`_direction`."""
    taken = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    torch.manual_seed(seed)
    outputs = run(subject.region, subject.call, taken, subject.parameters, [b.clone() for b in subject.buffers])
    gradients = gradients_of(outputs, (*taken, *subject.parameters))
    return tuple(y.detach() for y in outputs), gradients[: len(taken)], gradients[len(taken) :]


def gradients_of(outputs: Sequence[Tensor], sources: Sequence[Tensor], factor: float = 1.0) -> list[Tensor]:
    """Of what backward gives to ``sources`` under ``factor`` times :func:`_direction`; zeros where nothing flows."""
    flows = [y for y in outputs if y.requires_grad]
    wanted = [x for x in sources if x.requires_grad]
    if not flows or not wanted:
        return [torch.zeros_like(x) for x in sources]
    given = [factor * _direction(y.detach()) for y in flows]
    made = iter(torch.autograd.grad(flows, wanted, given, allow_unused=True))
    found = [next(made) if x.requires_grad else None for x in sources]
    return [torch.zeros_like(x) if g is None else g for x, g in zip(sources, found, strict=True)]


def _direction(y: Tensor) -> Tensor:
    """A gradient for ``y`` that each element determines by itself, however a batch is cut."""
    return 0.5 + y / (1.0 + y.abs())


def draw(
    specs: Sequence[TensorSpec],
    dims: Sequence[int | None],
    number: int,
    *,
    span: float | None = None,
    least: int = 0,
) -> list[Tensor]:
    """Random inputs; along a batch dim two batches, the second far from the first; ``span``, ``least``: as in :class:`Subject`."""
    generator = torch.Generator().manual_seed(number)
    scale = 10.0 ** (number % 4 - 1)
    found = []
    for spec, dim in zip(specs, dims, strict=True):
        shape = [2 * n if d == dim else n for d, n in enumerate(spec.shape)]
        if not spec.dtype.is_floating_point:
            lowest = least if is_integer(spec) else 0
            found.append(torch.randint(lowest, lowest + 2, shape, generator=generator).to(spec.dtype))
            continue
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        if dim is not None:
            half = shape[dim] // 2
            sign = 1.0 if number % 2 else -1.0
            x.narrow(dim, 0, half).mul_(scale).add_(sign * scale)
            x.narrow(dim, half, half).mul_(0.3).sub_(0.7 * sign * scale)
        found.append((x if span is None else span * x.sigmoid()).to(spec.dtype).requires_grad_())
    return found


def is_integer(spec: TensorSpec) -> bool:
    """Whether values are whole numbers; truth values are none."""
    return not spec.dtype.is_floating_point and not spec.dtype.is_complex and spec.dtype != torch.bool


def are_same(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Equal to rounding, all of them."""
    for a, b in zip(found, wanted, strict=True):
        if a.shape != b.shape:
            return False
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return False
            continue
        size = float(b.abs().max()) if b.numel() else 0.0
        if b.numel() and not float((a - b).abs().max()) <= _TOLERANCE.get(b.dtype, _COARSE) * max(size, 1e-6):
            return False
    return True


def digest_of(tensors: Sequence[Tensor]) -> str:
    """The same for tensors of the same shapes, dtypes and bits alone."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class _Context:
    """Stands for the context of an autograd function whose forward is run by itself."""

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (True,) * count
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Tensor) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise Unclear("it changes its inputs in place")

    def set_materialize_grads(self, value: bool) -> None:
        pass


def is_plain(function: type[torch.autograd.Function], subject: Subject) -> bool:
    """Whether a function's own backward is what autograd makes of its forward: then it is traced like any code."""

    def forward(state: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function.setup_context is not torch.autograd.Function.setup_context:
            return function.forward(*args, **kwargs)
        return function.forward(_Context(len(args)), *args, **kwargs)

    wide = subject.wide()
    for number in range(4):
        inputs = draw(wide.inputs, (None,) * len(wide.inputs), number)
        try:
            own = outcomes(wide, inputs, seed=number)
            plain = outcomes(replace(wide, call=forward), inputs, seed=number)
        except (Unclear, *FAILURES):
            return False
        if not (are_same(own[0], plain[0]) and are_same(own[1], plain[1])):
            return False
    return True
