"""Trials of a region of unknown code on small random inputs, which find out whether it treats samples independently.

Samples are independent if the halves of a batch give the halves of the outputs and of the gradients of inputs, and if the gradients of
parameters of the two halves add up to those of the batch. The two halves are drawn from distributions whose mean and scale differ
widely, so that a branch on a statistic of the batch, such as its mean or maximum, goes another way for a half than for the batch.
:func:`samples_apart` runs these trials. :func:`has_usual_backward` compares the backward of a custom autograd function with the one that
autograd derives from its forward.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.errors import first_line
from autopar.graph.graph import TensorSpec
from autopar.ops.kernels import Region
from autopar.ops.opaque import run, tensors_of
from autopar.tracing.failures import FAILURES
from autopar.tracing.modes import in_double
from autopar.tracing.side_effects import state_of

_TOLERANCE, _COARSE = 1e-9, 1e-4
"""Differences up to this part of the largest element count as rounding, in float64 and in other dtypes."""

Call = Callable[..., Any]
"""The code of a region: ``call(state, args, kwargs)``."""


class Outcome(NamedTuple):
    """What one run of a region gives, forward and backward."""

    outputs: tuple[Tensor, ...]
    input_gradients: list[Tensor]
    parameter_gradients: list[Tensor]


class Unclear(Exception):  # noqa: N818  it becomes a reason in a note or in an error
    """A region cannot be run, or what it does cannot be part of a graph. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A region, its code, and the tensors that it is run on.

    Attributes:
        inputs: shapes and dtypes of the inputs in the trace.
        parameters, buffers: their values, which are random for tensors on meta.
        span: random inputs lie between 0 and this number. None: they are normally distributed. Some code is defined only for inputs in
            such a range, for example roots, logarithms and arc cosines.
        least: the smallest random integer. It is 1 for code that refuses 0, such as lengths of sequences.
        examples: values of inputs as the user gave them, of some samples in dim 0, or None for an input that is random. A whole model
            is tried on these, since it may accept few others.
    """

    region: Region
    call: Call
    inputs: tuple[TensorSpec, ...]
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    span: float | None = None
    least: int = 0
    examples: tuple[Tensor | None, ...] = ()

    def wide(self) -> Subject:
        """Return the subject in float64."""
        inputs = (replace(s, dtype=torch.float64) if s.dtype.is_floating_point else s for s in self.inputs)
        parameters, buffers = (
            tuple(x.double() if x.is_floating_point() else x for x in group)
            for group in (self.parameters, self.buffers)
        )
        return replace(self, inputs=tuple(inputs), parameters=parameters, buffers=buffers)

    def draw(self, number: int, dims: Sequence[int | None] | None = None) -> list[Tensor]:
        """Return random inputs, the same for the same ``number``.

        Args:
            number: seeds the generator and chooses the scale of the inputs.
            dims: the dim of samples of each input, or None. An input with such a dim gets twice the size in it: two batches in a row,
                whose distributions differ in mean and scale.
        """
        generator = torch.Generator().manual_seed(number)
        scale = 10.0 ** (number % 4 - 1)
        inputs = []
        given = self.examples or (None,) * len(self.inputs)
        for spec, example, dim in zip(self.inputs, given, dims or (None,) * len(self.inputs), strict=True):
            shape = [2 * n if d == dim else n for d, n in enumerate(spec.shape)]
            if example is not None:
                inputs.append(_drawn(example, shape, number).to(spec.dtype))
                continue
            if not spec.dtype.is_floating_point:
                lowest = self.least if is_integer(spec) else 0
                inputs.append(torch.randint(lowest, lowest + 2, shape, generator=generator).to(spec.dtype))
                continue
            x = torch.randn(shape, generator=generator, dtype=torch.float64)
            if dim is not None:
                half = shape[dim] // 2
                sign = 1.0 if number % 2 else -1.0
                x.narrow(dim, 0, half).mul_(scale).add_(sign * scale)
                x.narrow(dim, half, half).mul_(0.3).sub_(0.7 * sign * scale)
            inputs.append((x if self.span is None else self.span * x.sigmoid()).to(spec.dtype).requires_grad_())
        return inputs

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """Return what the code returns for ``inputs`` and copies of the buffers."""
        return run(self.region, self.call, inputs, self.parameters, [b.clone() for b in self.buffers])


def _drawn(example: Tensor, shape: Sequence[int], number: int) -> Tensor:
    """Return samples of an example, in another order for each ``number`` other than 0, which is the same for all inputs.

    The second half of numbers other than zeros and ones is half as large.
    """
    if example.shape == torch.Size(shape) and not number:
        return example.clone()
    if example.dim() == 0 or example.shape[1:] != torch.Size(shape[1:]):
        return example.clone()
    order = torch.randint(example.shape[0], shape[:1], generator=torch.Generator().manual_seed(number))
    drawn = example[order if number else torch.arange(shape[0]) % example.shape[0]]
    if number and drawn.is_floating_point() and not ((drawn == 0) | (drawn == 1)).all():
        drawn[shape[0] // 2 :] *= 0.5
    return drawn


def outcome_of(subject: Subject, inputs: Sequence[Tensor], *, seed: int, factor: float = 1.0) -> Outcome:
    """Run the region on ``inputs`` with random numbers from ``seed``, and its backward as :func:`gradients_of` does."""
    is_whole = bool(subject.examples)  # a batch requires no gradients
    leaves = [x.detach().requires_grad_(x.is_floating_point() and not is_whole) for x in inputs]
    # Trials run on the CPU; the generators of devices are the user's.
    torch.default_generator.manual_seed(seed)
    outputs = tensors_of(subject.run(leaves))
    gradients = gradients_of(outputs, (*leaves, *subject.parameters), factor)
    return Outcome(tuple(y.detach() for y in outputs), gradients[: len(leaves)], gradients[len(leaves) :])


def gradients_of(outputs: Sequence[Tensor], sources: Sequence[Tensor], factor: float = 1.0) -> list[Tensor]:
    """Return the gradients of ``sources``, or zeros, if those of ``outputs`` are ``factor`` times :func:`output_gradient`."""
    differentiable = [y for y in outputs if y.requires_grad]
    trained = [x for x in sources if x.requires_grad]
    if not differentiable or not trained:
        return [torch.zeros_like(x) for x in sources]
    output_gradients = [factor * output_gradient(y.detach()) for y in differentiable]
    gradients = iter(torch.autograd.grad(differentiable, trained, output_gradients, materialize_grads=True))
    return [next(gradients) if x.requires_grad else torch.zeros_like(x) for x in sources]


def output_gradient(y: Tensor) -> Tensor:
    """Return a gradient for the output ``y``. Each element depends on that of ``y`` only, so that halves of a batch get the same."""
    return 0.5 + y / (1.0 + y.abs())


def is_integer(spec: TensorSpec) -> bool:
    """Return whether the dtype is one of integers, bool excluded."""
    return not spec.dtype.is_floating_point and not spec.dtype.is_complex and spec.dtype != torch.bool


def are_close(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether all tensors are equal up to rounding. The tolerance is relative to the largest element of the expected tensor."""
    for a, b in zip(actual, expected, strict=True):
        if a.shape != b.shape:
            return False
        if not b.is_floating_point():
            if not torch.equal(a, b):
                return False
            continue
        tolerance = _TOLERANCE if b.dtype == torch.float64 else _COARSE
        if b.numel() and not float((a - b).abs().max()) <= tolerance * max(float(b.abs().max()), 1e-6):
            return False
    return True


def _digest_of(tensors: Sequence[Tensor]) -> str:
    """Return a hash of the shapes, dtypes and bits of ``tensors``."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class _Context(torch.autograd.function.FunctionCtx):
    """The context for a call of the forward of an autograd function without ``apply``."""

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (True,) * count
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise Unclear("it changes its inputs in place")


LARGE = 1_000_000
"""The number of input elements from which on a backward is tried on one draw instead of four. A layer of BLOOM 7B takes seconds for one."""


def has_usual_backward(function: type[torch.autograd.Function], subject: Subject) -> bool:
    """Return whether the backward of ``function`` gives what autograd derives from its forward. If so, the forward can be traced as other code.

    The code of ``subject`` applies ``function``.
    """

    def forward(state: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function.setup_context is not torch.autograd.Function.setup_context:
            return function.forward(*args, **kwargs)
        return function.forward(_Context(len(args)), *args, **kwargs)

    wide = subject.wide()
    is_large = sum(math.prod(spec.shape) for spec in wide.inputs) >= LARGE
    for number in range(1 if is_large else 4):
        inputs = wide.draw(number)
        try:
            custom = outcome_of(wide, inputs, seed=number)
            derived = outcome_of(replace(wide, call=forward), inputs, seed=number)
        except (Unclear, *FAILURES):
            return False
        if not (
            are_close(custom.outputs, derived.outputs) and are_close(custom.input_gradients, derived.input_gradients)
        ):
            return False
    return True


DRAWS = 8
"""The number of random batches on which samples must be independent."""
_MAX_CHOICES = 8
"""The number of choices of sample dims that are tried."""
_SPANS = (None, 1.0, 0.01)
"""Spans of random inputs (:attr:`Subject.span`), of which the first is taken whose outputs are finite."""
_FAR_DRAW = 2
"""The number of the draw whose two batches lie far from each other and from zero (:meth:`Subject.draw`)."""

Samples = tuple[tuple[tuple[int | None, ...], tuple[int, ...]] | None, str, bool]
"""The dims of samples in inputs and in outputs, or None with the reason why samples are not independent; whether backward is linear."""


def samples_apart(subject: Subject, batch_size: int, known: dict[object, Samples]) -> Samples:
    """Return whether and where a region keeps samples independent, and whether its backward is linear.

    The region is tried in float64, or, if it does not run in that, in its own dtypes.

    ``known`` holds earlier results by :func:`_key_of`. It grows.
    """
    try:
        with in_double():
            return _known_or_tried(subject.wide(), batch_size, known)
    except (Unclear, *FAILURES) as error:
        reason = first_line(error)
    try:
        return _known_or_tried(subject, batch_size, known)
    except (Unclear, *FAILURES):
        return None, reason, False


def _known_or_tried(subject: Subject, batch_size: int, known: dict[object, Samples]) -> Samples:
    """Do the work of :func:`samples_apart` in the dtypes of ``subject``; equal layers of a model are tried once.

    Raises:
        Unclear, FAILURES: the region does not run in these dtypes.
    """
    trial, inputs, outcome = _within_its_domain(subject)
    dims = next(choices(trial.inputs, batch_size), None)
    try:
        far = () if dims is None else outcome_of(trial, trial.draw(_FAR_DRAW, dims), seed=3)
        key = _key_of(trial, (*outcome, *far), batch_size)
    except (Unclear, *FAILURES):
        key = None
    if key is None:
        return _samples(trial, inputs, outcome, batch_size)
    if key not in known:
        known[key] = _samples(trial, inputs, outcome, batch_size)
    return known[key]


def _key_of(trial: Subject, results: Sequence[Sequence[Tensor]], batch_size: int) -> object:
    """Return a key that is equal for modules of which one can stand for the other; None for a function.

    Modules with the same key are of the same classes, have given the same ``results`` to the last bit, and have the same parameters,
    buffers and attributes, on all of which branches may depend. Only integers among the attributes may differ, because layers are
    numbered.

    Args:
        results: what the module gave, forward and backward, for one batch and for two batches that lie far from each other.
    """
    module = getattr(trial.call, "module", None)
    if module is None:
        return None
    inner = tuple(module.modules())
    attributes = {name: value for name, value in state_of(module).items() if type(value) is not int}
    constants = [value for part in inner for value in vars(part).values() if isinstance(value, Tensor)]
    digests = tuple(map(_digest_of, (constants, trial.parameters, trial.buffers, *results)))
    region = replace(trial.region, name="").dumps()
    return tuple(map(type, inner)), repr(attributes), region, trial.inputs, batch_size, trial.span, digests


def _samples(trial: Subject, inputs: Sequence[Tensor], outcome: Outcome, batch_size: int) -> Samples:
    """Return the result of trials. ``outcome`` is what ``inputs``, a batch, gave with the random numbers of seed 1.

    Raises:
        Unclear, FAILURES: the region does not run.
    """
    why = ""  # the reason of the first choice is kept: samples in dim 0 of all inputs that have it are the usual case
    if not are_close(outcome.outputs, outcome_of(trial, inputs, seed=2).outputs):
        if not are_close(outcome.outputs, outcome_of(trial, inputs, seed=1).outputs):
            return None, "it gives other results on the same inputs", False
        why = "it draws random numbers of its own for each sample"  # unless halves draw the same as their batch
    linear = is_linear(trial, inputs, outcome)
    for dims in choices(trial.inputs, batch_size):
        try:
            return (dims, _output_dims(trial, dims)), "", linear
        except (Unclear, *FAILURES) as error:
            why = why or first_line(error)
    return None, why or "no input has a batch dim", linear


def _within_its_domain(subject: Subject) -> tuple[Subject, list[Tensor], Outcome]:
    """Return the subject with a span for which its outputs are finite, inputs of that span, and what they give with seed 1.

    Raises:
        Unclear: the outputs are finite for none of :data:`_SPANS`.
    """
    for span in _SPANS:
        trial = replace(subject, span=span)
        inputs = trial.draw(1)
        outcome = outcome_of(trial, inputs, seed=1)
        if all(y.isfinite().all() for y in outcome.outputs if y.is_floating_point()):
            return trial, inputs, outcome
    raise Unclear("random inputs give values that are not finite")


def choices(inputs: Sequence[TensorSpec], batch_size: int) -> Iterator[tuple[int | None, ...]]:
    """Give the dims of the inputs that samples may lie along: dim 0 of all inputs that it fits, then of some, then dim 1."""

    def fits(spec: TensorSpec, dim: int) -> bool:
        return len(spec.shape) > dim and spec.shape[dim] > 0 and spec.shape[dim] % batch_size == 0

    every = (dims for dim in (0, 1) for dims in product(*((dim, None) if fits(s, dim) else (None,) for s in inputs)))
    return islice((dims for dims in every if any(d is not None for d in dims)), _MAX_CHOICES)


def _output_dims(subject: Subject, dims: tuple[int | None, ...]) -> tuple[int, ...]:
    """Return the dims of samples in the outputs if samples lie along ``dims`` of the inputs and are independent.

    Raises:
        Unclear: samples are not independent.
    """
    output_dims: tuple[int, ...] | None = None
    for number in range(DRAWS):
        batch = subject.draw(number, dims)
        whole, first, second = (outcome_of(subject, x, seed=3) for x in (batch, *halves(batch, dims)))
        outputs = zip(whole.outputs, first.outputs, second.outputs, strict=True)
        output_dims = tuple(_joined_dim(y, a, b, i) for i, (y, a, b) in enumerate(outputs))
        _check_halves(whole.outputs, first.outputs, second.outputs, output_dims, "outputs")
        _check_halves(whole.input_gradients, first.input_gradients, second.input_gradients, dims, "gradients of inputs")
        total, part, rest = (outcome.parameter_gradients for outcome in (whole, first, second))
        _check_halves(total, part, rest, (None,) * len(total), "gradients of parameters")
    assert output_dims is not None
    return output_dims


def halves(both: Sequence[Tensor], dims: Sequence[int | None]) -> list[list[Tensor]]:
    """Return the two halves of two batches in a row (:meth:`Subject.draw`), whose samples lie along ``dims``."""
    pairs = [(x, x) if d is None else x.detach().chunk(2, d) for x, d in zip(both, dims, strict=True)]
    return [[pair[half] for pair in pairs] for half in (0, 1)]


def _joined_dim(whole: Tensor, first: Tensor, second: Tensor, index: int) -> int:
    """Return the dim in which ``whole``, output ``index`` of a batch, is twice as large as the outputs of its two halves.

    Raises:
        Unclear: there is no such dim, or several.
    """
    if first.shape == second.shape and whole.dim() == first.dim():
        longer = [d for d, (n, m) in enumerate(zip(whole.shape, first.shape, strict=True)) if n != m]
        if len(longer) == 1 and whole.shape[longer[0]] == 2 * first.shape[longer[0]]:
            return longer[0]
    raise Unclear(
        f"output {index} of a batch of two halves has shape {tuple(whole.shape)}, of a half {tuple(first.shape)}"
    )


def _check_halves(
    whole: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor], dims: Sequence[int | None], what: str
) -> None:
    """Check that the results of a batch are those of its halves, joined along ``dims``, or added where a dim is None.

    Raises:
        Unclear: they are not.
    """
    joined = [a + b if d is None else torch.cat([a, b], d) for a, b, d in zip(first, second, dims, strict=True)]
    if not all(x.isfinite().all() for x in whole if x.is_floating_point()):
        raise Unclear("random inputs give values that are not finite")
    if not are_close(joined, whole):
        raise Unclear(f"the {what} of a batch are not those of its halves")


def joined_gradients(outcome: Outcome) -> list[Tensor]:
    """Return the gradients of all parameters of a whole model as one vector, so that rounding is compared with the largest of them."""
    return [torch.cat([torch.zeros(0), *(gradient.flatten() for gradient in outcome.parameter_gradients)])]


def is_linear(subject: Subject, inputs: Sequence[Tensor], outcome: Outcome) -> bool:
    """Return whether backward of a multiple of the output gradients gives that multiple of the gradients in ``outcome``."""

    def gradients(of: Outcome) -> list[Tensor]:
        return joined_gradients(of) if subject.region.is_loss else [*of.input_gradients, *of.parameter_gradients]

    return all(
        are_close(
            [factor * g for g in gradients(outcome)],
            gradients(outcome_of(subject, inputs, seed=1, factor=factor)),
        )
        for factor in (-3.0, 1e4)
    )
