"""What a region of unknown code does, found by running it on small random inputs on this machine; whether it treats samples apart.

Samples are apart when halves of a batch give the halves of the outputs and of every input's gradient, and parameters'
gradients add up. The two halves are drawn from distributions far apart in mean and scale, so that a branch on a
statistic of the batch (its mean, its largest value) goes another way for a half than for the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from autopar.errors import first_line
from autopar.graph.graph import TensorSpec
from autopar.ops.kernels import Region
from autopar.ops.opaque import run, tensors_of
from autopar.tracing.failures import FAILURES
from autopar.tracing.modes import in_double
from autopar.tracing.opaque_trials import Call, Subject, Unclear, are_same, draw, gradients_of, is_integer, outcomes

DRAWS = 8
"""Batches on which samples must be apart."""

MAX_CHOICES = 8


def samples_apart(
    subject: Subject, batch_size: int
) -> tuple[tuple[tuple[int | None, ...], tuple[int, ...]] | None, str, bool]:
    """Dims along which samples lie, or why they are not apart; and whether backward is linear."""
    try:
        with in_double():
            return _splits_in(subject.wide(), batch_size)
    except (Unclear, *FAILURES) as error:
        wide = first_line(error)
    try:
        return _splits_in(subject, batch_size)
    except (Unclear, *FAILURES):
        return None, wide, False


def _splits_in(
    precision: Subject, batch_size: int
) -> tuple[tuple[tuple[int | None, ...], tuple[int, ...]] | None, str, bool]:
    """In one dtype.

    Raises:
        Unclear, FAILURES: it does not run in it.
    """
    trial, one = _within_its_domain(precision)
    first, second = (outcomes(trial, one, seed=seed) for seed in (1, 2))
    if not are_same(first[0], second[0]):
        again = outcomes(trial, one, seed=1)
        drawn = "it draws random numbers of its own" if are_same(first[0], again[0]) else ""
        return None, drawn or "it gives other results on the same inputs", False
    linear, why = _is_linear(trial, one), ""  # why not: the first reason is that of samples in dim 0 of every input
    for dims in choices(trial.inputs, batch_size):
        try:
            return (dims, _apart(trial, dims)), "", linear
        except (Unclear, *FAILURES) as error:
            why = why or first_line(error)
    return None, why or _NO_BATCH, linear


def _within_its_domain(subject: Subject) -> tuple[Subject, list[Tensor]]:
    """The subject with a span in which what it returns is finite, and inputs in it.

    Raises:
        Unclear: no span is known.
    """
    for span in _SPANS:
        found = replace(subject, span=span)
        inputs = draw(found.inputs, (None,) * len(found.inputs), 1, span=span, least=found.least)
        if all(y.isfinite().all() for y in outcomes(found, inputs, seed=1)[0] if y.is_floating_point()):
            return found, inputs
    raise Unclear("random inputs give values that are not finite")


_SPANS = (None, 1.0, 0.01)
_NO_BATCH = "no input has a batch dim"


def choices(inputs: Sequence[TensorSpec], batch_size: int) -> Iterator[tuple[int | None, ...]]:
    """Where samples may lie: in dim 0 of all inputs that it fits, or of some; then in dim 1."""

    def fits(spec: TensorSpec, dim: int) -> bool:
        return len(spec.shape) > dim and spec.shape[dim] > 0 and spec.shape[dim] % batch_size == 0

    count = 0
    for dim in (0, 1):
        options: list[tuple[int | None, ...]] = [(dim, None) if fits(spec, dim) else (None,) for spec in inputs]
        for chosen in product(*options):
            if any(d is not None for d in chosen) and count < MAX_CHOICES:
                count += 1
                yield chosen


def _apart(subject: Subject, dims: tuple[int | None, ...]) -> tuple[int, ...]:
    """Dims of the outputs along which the samples of two batches lie side by side.

    Raises:
        Unclear: they do not.
    """
    found: tuple[int, ...] | None = None
    for number in range(DRAWS):
        whole = draw(subject.inputs, dims, number, span=subject.span, least=subject.least)
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


def _is_linear(subject: Subject, inputs: Sequence[Tensor]) -> bool:
    """Whether a multiple of the gradient gives the multiple of every gradient."""
    taken = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    results = {}
    for factor in (1.0, -3.0, 1e4):
        outputs = run(subject.region, subject.call, taken, subject.parameters, [b.clone() for b in subject.buffers])
        results[factor] = gradients_of(outputs, (*taken, *subject.parameters), factor)
    return all(are_same([factor * g for g in results[1.0]], made) for factor, made in results.items())


MAX_BYTES = 2**32
"""Of parameters: larger regions are not run while tracing."""


def apart_from_trace(function: Callable[[], Any], modes: Sequence[TorchFunctionMode] = ()) -> Any:
    """Runs ``function`` where the tracer does not see it: modes are those of a thread, flags are set back.

    ``modes``: those that the caller of the trace had entered, and under which the model runs as well.
    """

    def under_modes() -> Any:
        with ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            return function()

    with (
        mock.patch.object(torch.compiler, "_is_exporting_flag", new=False),
        mock.patch.object(torch.compiler, "_is_compiling_flag", new=False),
        ThreadPoolExecutor(1) as pool,
    ):
        return pool.submit(under_modes).result()


def examine(subject: Subject, batch_size: int) -> tuple[Region, Any]:
    """The region with what its code was seen to do, and an example of what it returns (for its structure).

    Raises:
        Unclear: it runs neither on random nor on fake tensors, or changes its inputs.
    """
    if sum(p.numel() * p.itemsize for p in subject.parameters) > MAX_BYTES:
        return _on_fake(subject, f"its parameters are more than {MAX_BYTES >> 30} GiB, so that it was not run")
    try:
        subject, region, output = _run(subject)
    except FAILURES as error:
        return _on_fake(subject, f"on random inputs it raised {type(error).__name__}: {first_line(error)}")
    subject = replace(subject, region=region)
    splits, why, linear = samples_apart(subject, batch_size)
    return replace(region, splits=splits, why=why, is_linear_backward=linear), output


def _on_fake(subject: Subject, why: str) -> tuple[Region, Any]:
    """Shapes alone."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(spec: TensorSpec | Tensor) -> Tensor:
        return torch.empty(tuple(spec.shape), dtype=spec.dtype, requires_grad=spec.dtype.is_floating_point)

    try:
        with mode:
            operands = [[fake(x) for x in group] for group in (subject.inputs, subject.parameters, subject.buffers)]
            output = _output(subject, *operands)
    except FAILURES as error:
        raise Unclear(f"{why}; on fake tensors it raised {type(error).__name__}: {first_line(error)}") from error
    return replace(subject.region, outputs=_described(output), why=why, is_linear_backward=False), output


def _output(subject: Subject, inputs: Sequence[Tensor], parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> Any:
    """What the code returns, with its structure."""
    kept: list[Any] = []

    def keep(*args: Any) -> Any:
        kept.append(subject.call(*args))
        return kept[0]

    run(subject.region, keep, inputs, parameters, buffers)
    return kept[0]


def _described(output: Any) -> tuple[tuple[tuple[int, ...], str, bool], ...]:
    found = tensors_of(output)
    if not found:
        raise Unclear("it returns no tensor")
    return tuple((tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad) for t in found)


def _run(subject: Subject) -> tuple[Subject, Region, Any]:
    """What :func:`_measured` finds, with random integers from 0, or from 1 where the code does not take those."""
    try:
        return subject, *_measured(subject)
    except FAILURES:
        if any(is_integer(spec) for spec in subject.inputs):
            counted = replace(subject, least=1)
            with suppress(*FAILURES):
                return counted, *_measured(counted)
        raise


def _measured(subject: Subject) -> tuple[Region, Any]:
    """One run, forward and backward, with what it costs."""
    inputs = draw(subject.inputs, (None,) * len(subject.inputs), 0, least=subject.least)
    before = [x.detach().clone() for x in inputs]
    buffers = [b.clone() for b in subject.buffers]
    saved: dict[int, int] = {}
    own = {p.data_ptr() for p in subject.parameters}

    def pack(x: Tensor) -> Tensor:
        if x.data_ptr() not in own:
            saved[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    with (
        _counter() as forward,
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        _assigned_buffers(subject.call) as assigned,
    ):
        output = _output(subject, inputs, subject.parameters, buffers)
    outputs = _described(output)
    with _counter() as backward:
        gradients_of(tensors_of(output), (*inputs, *subject.parameters))
    if any(not torch.equal(a, b) for a, b in zip(before, inputs, strict=True)):
        raise Unclear("it changes its inputs in place")
    if any(x.grad is not None for x in (*inputs, *subject.parameters)):
        raise Unclear("its backward adds to gradients by itself")
    after = [assigned.get(name, b) for name, b in zip(subject.region.buffers, buffers, strict=True)]
    _check_buffers(subject.region, subject.buffers, after)
    _check_numbers(subject, output)
    return replace(
        subject.region,
        outputs=outputs,
        flops=float(forward.get_total_flops()),
        backward_flops=float(backward.get_total_flops()),
        saved_bytes=sum(saved.values()),
        numel=max(1, sum(spec.numel for spec in subject.inputs)),
    ), output


class _NoModules(ModuleTracker):
    """Torch's counter sorts FLOPs by module, by hooks on gradients that a gradient taken in forward does not bear."""

    def __init__(self) -> None:
        self.parents = {"Global"}

    def __enter__(self) -> _NoModules:
        return self

    def __exit__(self, *args: Any) -> None:
        return


def _counter() -> FlopCounterMode:
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()
    return counter


@contextmanager
def _assigned_buffers(call: Call) -> Iterator[dict[str, Tensor]]:
    """Buffers of a module that its code sets by ``self.name = ...``: those that come with a call stay as they are."""
    module = getattr(call, "module", None)
    names = {} if module is None else {id(inner): path for path, inner in module.named_modules()}
    found: dict[str, Tensor] = {}

    def note(owner: torch.nn.Module, name: str, value: Tensor | None) -> None:
        if id(owner) in names:
            found[f"{names[id(owner)]}.{name}".lstrip(".")] = torch.empty(0) if value is None else value

    handle = torch.nn.modules.module.register_module_buffer_registration_hook(note)
    try:
        yield found
    finally:
        handle.remove()


def _check_buffers(region: Region, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Buffers that it writes to would stay as they are: only traced code changes them."""
    changed = [name for name, a, b in zip(region.buffers, before, after, strict=True) if not torch.equal(a, b)]
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise Unclear(f"it changes buffers ({', '.join(changed[:3])}{more}), which only modules that are traced may")


def _check_numbers(subject: Subject, output: Any) -> None:
    """What it returns beside tensors becomes part of the plan, so that it must not depend on what it is given."""
    leaves = _numbers(output)
    if any(isinstance(leaf, (bool, int, float)) for leaf in leaves):
        for number in range(1, DRAWS):
            inputs = draw(subject.inputs, (None,) * len(subject.inputs), number, least=subject.least)
            inputs = [(10.0 ** (number % 4 - 1) * x).detach() if x.is_floating_point() else x for x in inputs]
            found = _numbers(_output(subject, inputs, subject.parameters, [b.clone() for b in subject.buffers]))
            if found != leaves:
                shown = next(((a, b) for a, b in zip(leaves, found, strict=False) if a != b), (len(leaves), len(found)))
                raise Unclear(f"it returns numbers that depend on values ({shown[0]} and {shown[1]})")


def _numbers(output: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(output) if not isinstance(leaf, Tensor)]
