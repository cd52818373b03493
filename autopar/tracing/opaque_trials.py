"""Runs of a region of unknown code on small random inputs: what they give, and whether it treats samples apart.

Samples are apart when halves of a batch give the halves of the outputs and of every input's gradient, and parameters'
gradients add up. The two halves are drawn from distributions far apart in mean and scale, so that a branch on a
statistic of the batch (its mean, its largest value) goes another way for a half than for the whole. A backward of the
region's own is told from autograd's by the same runs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor

from autopar.errors import first_line
from autopar.graph.graph import TensorSpec
from autopar.ops.kernels import Region
from autopar.ops.opaque import run, tensors_of
from autopar.tracing.failures import FAILURES
from autopar.tracing.modes import in_double
from autopar.tracing.side_effects import state_of

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

    def draw(self, number: int, dims: Sequence[int | None] | None = None) -> list[Tensor]:
        """Random inputs; along the dim of an input in ``dims`` two batches, the second far from the first."""
        generator = torch.Generator().manual_seed(number)
        scale = 10.0 ** (number % 4 - 1)
        found = []
        for spec, dim in zip(self.inputs, dims or (None,) * len(self.inputs), strict=True):
            shape = [2 * n if d == dim else n for d, n in enumerate(spec.shape)]
            if not spec.dtype.is_floating_point:
                lowest = self.least if is_integer(spec) else 0
                found.append(torch.randint(lowest, lowest + 2, shape, generator=generator).to(spec.dtype))
                continue
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            if dim is not None:
                half = shape[dim] // 2
                sign = 1.0 if number % 2 else -1.0
                x.narrow(dim, 0, half).mul_(scale).add_(sign * scale)
                x.narrow(dim, half, half).mul_(0.3).sub_(0.7 * sign * scale)
            found.append((x if self.span is None else self.span * x.sigmoid()).to(spec.dtype).requires_grad_())
        return found

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """What the code returns for ``inputs``; it is given copies of the buffers."""
        return run(self.region, self.call, inputs, self.parameters, [b.clone() for b in self.buffers])


def outcomes(subject: Subject, inputs: Sequence[Tensor], *, seed: int) -> Gradients:
    """Outputs, and gradients of inputs and parameters under :func:`_direction`."""
    taken = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    torch.default_generator.manual_seed(seed)  # of the CPU, where trials run: those of devices are the user's
    outputs = tensors_of(subject.run(taken))
    gradients = gradients_of(outputs, (*taken, *subject.parameters))
    return tuple(y.detach() for y in outputs), gradients[: len(taken)], gradients[len(taken) :]


def gradients_of(outputs: Sequence[Tensor], sources: Sequence[Tensor], factor: float = 1.0) -> list[Tensor]:
    """Of what backward gives to ``sources`` under ``factor`` times :func:`_direction`; zeros where nothing flows."""
    flows = [y for y in outputs if y.requires_grad]
    wanted = [x for x in sources if x.requires_grad]
    if not flows or not wanted:
        return [torch.zeros_like(x) for x in sources]
    given = [factor * _direction(y.detach()) for y in flows]
    made = iter(torch.autograd.grad(flows, wanted, given, materialize_grads=True))
    return [next(made) if x.requires_grad else torch.zeros_like(x) for x in sources]


def _direction(y: Tensor) -> Tensor:
    """A gradient for ``y`` that each element determines by itself, however a batch is cut."""
    return 0.5 + y / (1.0 + y.abs())


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


class _Context(torch.autograd.function.FunctionCtx):
    """Stands for the context of an autograd function whose forward is run by itself."""

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (True,) * count
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise Unclear("it changes its inputs in place")


LARGE = 1_000_000
"""Elements of inputs of which one draw is tried, and not four: a layer of BLOOM 7B takes seconds for each."""


def is_plain(function: type[torch.autograd.Function], subject: Subject) -> bool:
    """Whether a function's own backward is what autograd makes of its forward: then it is traced like any code."""

    def forward(state: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function.setup_context is not torch.autograd.Function.setup_context:
            return function.forward(*args, **kwargs)
        return function.forward(_Context(len(args)), *args, **kwargs)

    wide = subject.wide()
    is_large = sum(math.prod(spec.shape) for spec in wide.inputs) >= LARGE
    for number in range(1 if is_large else 4):
        inputs = wide.draw(number)
        try:
            own = outcomes(wide, inputs, seed=number)
            plain = outcomes(replace(wide, call=forward), inputs, seed=number)
        except (Unclear, *FAILURES):
            return False
        if not (are_same(own[0], plain[0]) and are_same(own[1], plain[1])):
            return False
    return True


DRAWS = 8
"""Batches on which samples must be apart."""

MAX_CHOICES = 8


Samples = tuple[tuple[tuple[int | None, ...], tuple[int, ...]] | None, str, bool]
"""Dims along which samples lie, or why they are not apart; and whether backward is linear."""


def samples_apart(subject: Subject, batch_size: int, alike: dict[object, Samples]) -> Samples:
    """What a region does to samples.

    Args:
        alike: what was found before, by :func:`_likeness`; grows.
    """
    try:
        with in_double():
            return _known_or_found(subject.wide(), batch_size, alike)
    except (Unclear, *FAILURES) as error:
        wide = first_line(error)
    try:
        return _known_or_found(subject, batch_size, alike)
    except (Unclear, *FAILURES):
        return None, wide, False


def _known_or_found(precision: Subject, batch_size: int, alike: dict[object, Samples]) -> Samples:
    """In one dtype; layers of a model that are built alike are tried once.

    Raises:
        Unclear, FAILURES: it does not run in it.
    """
    trial, one, first = _within_its_domain(precision)
    dims = next(choices(trial.inputs, batch_size), None)
    try:
        whole = () if dims is None else outcomes(trial, trial.draw(_FAR, dims), seed=3)
        key = _likeness(trial, (*first, *whole), batch_size)
    except (Unclear, *FAILURES):
        key = None
    if key is None:
        return _samples(trial, one, first, batch_size)
    if key not in alike:
        alike[key] = _samples(trial, one, first, batch_size)
    return alike[key]


_FAR = 2
"""The draw of two batches, far apart and from zero, by which modules are known to be alike."""


def _likeness(trial: Subject, gave: Sequence[Sequence[Tensor]], batch_size: int) -> object:
    """What a module is made of, and all that it gave for a batch, and for two that lie far apart; None where it is a function.

    Of two modules with the same likeness one stands for the other: they are of the same classes, do the same to the last bit,
    and have the same parameters, buffers and attributes, on all of which branches may depend. Only whole numbers among the
    attributes may differ: layers are numbered.
    """
    module = getattr(trial.call, "module", None)
    if module is None:
        return None
    inner = tuple(module.modules())
    attributes = {name: value for name, value in state_of(module).items() if type(value) is not int}
    constants = [value for part in inner for value in vars(part).values() if isinstance(value, Tensor)]
    digests = tuple(map(digest_of, (constants, trial.parameters, trial.buffers, *gave)))
    region = replace(trial.region, name="").dumps()
    return tuple(map(type, inner)), repr(attributes), region, trial.inputs, batch_size, trial.span, digests


def _samples(trial: Subject, one: Sequence[Tensor], first: Gradients, batch_size: int) -> Samples:
    """By trying; ``first``: what the batch ``one`` gave under seed 1.

    Raises:
        Unclear, FAILURES: it does not run.
    """
    second = outcomes(trial, one, seed=2)
    if not are_same(first[0], second[0]):
        again = outcomes(trial, one, seed=1)
        drawn = "it draws random numbers of its own" if are_same(first[0], again[0]) else ""
        return None, drawn or "it gives other results on the same inputs", False
    linear = _is_linear(trial, one, [*first[1], *first[2]])
    why = ""  # not: the first reason is that of samples in dim 0 of every input
    for dims in choices(trial.inputs, batch_size):
        try:
            return (dims, _apart(trial, dims)), "", linear
        except (Unclear, *FAILURES) as error:
            why = why or first_line(error)
    return None, why or _NO_BATCH, linear


def _within_its_domain(subject: Subject) -> tuple[Subject, list[Tensor], Gradients]:
    """The subject with a span in which what it returns is finite, inputs in it, and what they give under seed 1.

    Raises:
        Unclear: no span is known.
    """
    for span in _SPANS:
        found = replace(subject, span=span)
        inputs = found.draw(1)
        given = outcomes(found, inputs, seed=1)
        if all(y.isfinite().all() for y in given[0] if y.is_floating_point()):
            return found, inputs, given
    raise Unclear("random inputs give values that are not finite")


_SPANS = (None, 1.0, 0.01)
_NO_BATCH = "no input has a batch dim"


def choices(inputs: Sequence[TensorSpec], batch_size: int) -> Iterator[tuple[int | None, ...]]:
    """Where samples may lie: in dim 0 of all inputs that it fits, or of some; then in dim 1."""

    def fits(spec: TensorSpec, dim: int) -> bool:
        return len(spec.shape) > dim and spec.shape[dim] > 0 and spec.shape[dim] % batch_size == 0

    every = (
        chosen for dim in (0, 1) for chosen in product(*((dim, None) if fits(s, dim) else (None,) for s in inputs))
    )
    return islice((chosen for chosen in every if any(d is not None for d in chosen)), MAX_CHOICES)


def _apart(subject: Subject, dims: tuple[int | None, ...]) -> tuple[int, ...]:
    """Dims of the outputs along which the samples of two batches lie side by side.

    Raises:
        Unclear: they do not.
    """
    found: tuple[int, ...] | None = None
    for number in range(DRAWS):
        whole = subject.draw(number, dims)
        parts = [
            [x if d is None else x.narrow(d, half * x.shape[d] // 2, x.shape[d] // 2).detach() for x, d in zip(whole, dims, strict=True)]
            for half in (0, 1)
        ]  # fmt: skip
        outputs, of_inputs, of_parameters = outcomes(subject, whole, seed=3)
        halves = [outcomes(subject, part, seed=3) for part in parts]
        found = tuple(
            _dim(y, a, b, i) for i, (y, a, b) in enumerate(zip(outputs, *(h[0] for h in halves), strict=True))
        )
        _demand(outputs, halves[0][0], halves[1][0], found, "outputs")
        _demand(of_inputs, halves[0][1], halves[1][1], dims, "gradients of inputs")
        _demand(of_parameters, halves[0][2], halves[1][2], (None,) * len(of_parameters), "gradients of parameters")
    assert found is not None
    return found


def _dim(whole: Tensor, first: Tensor, second: Tensor, index: int) -> int:
    """The dim along which ``whole`` is twice as long as each of two equal halves."""
    if first.shape == second.shape and whole.dim() == first.dim():
        longer = [d for d, (n, m) in enumerate(zip(whole.shape, first.shape, strict=True)) if n != m]
        if len(longer) == 1 and whole.shape[longer[0]] == 2 * first.shape[longer[0]]:
            return longer[0]
    raise Unclear(
        f"output {index} of a batch of two halves has shape {tuple(whole.shape)}, of a half {tuple(first.shape)}"
    )


def _demand(
    whole: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], dims: Sequence[int | None], what: str
) -> None:
    joined = [a + b if d is None else torch.cat([a, b], d) for a, b, d in zip(first, second, dims, strict=True)]
    if not all(x.isfinite().all() for x in whole if x.is_floating_point()):
        raise Unclear("random inputs give values that are not finite")
    if not are_same(joined, whole):
        raise Unclear(f"the {what} of a batch are not those of its halves")


def _is_linear(subject: Subject, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> bool:
    """Whether a multiple of the gradient gives the multiple of every one of ``gradients``."""
    taken = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    results = {}
    for factor in (-3.0, 1e4):
        outputs = tensors_of(subject.run(taken))
        results[factor] = gradients_of(outputs, (*taken, *subject.parameters), factor)
    return all(are_same([factor * g for g in gradients], made) for factor, made in results.items())
