"""Examination of an opaque region: what its code does is found by running it on random inputs on this machine.

:func:`examine` completes the description of a region (:class:`~autopar.ops.kernels.Region`) by its outputs, FLOPs and saved bytes, and
by what it does to samples (:mod:`autopar.tracing.opaque_trials`). It refuses code that changes its inputs, parameters or buffers, because
such changes would be lost: a call in a program gets tensors that ranks have put together from their shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from autopar.errors import first_line
from autopar.graph.graph import TensorSpec
from autopar.ops.kernels import Region
from autopar.ops.opaque import pick_loss, run, tensors_of
from autopar.tracing.failures import FAILURES
from autopar.tracing.modes import in_double
from autopar.tracing.opaque_trials import (
    DRAWS,
    Call,
    Samples,
    Subject,
    Unclear,
    are_close,
    gradients_of,
    halves,
    is_integer,
    is_linear,
    joined_gradients,
    outcome_of,
    output_gradient,
    samples_apart,
)
from autopar.util.formatting import some

Examined: TypeAlias = tuple[Region, Any]
"""A region and an example of what it returns, whose tensors have no elements."""

MAX_BYTES = 2**32
"""The largest size of the parameters of a region that is run while tracing, in bytes (4 GiB)."""


def may_run(parameters: Sequence[Tensor]) -> bool:
    """Return whether a region with these parameters is small enough to be run while tracing."""
    return sum(p.numel() * p.itemsize for p in parameters) <= MAX_BYTES


def examine(subject: Subject, batch_size: int, known: dict[object, Samples], *, tries_samples: bool = True) -> Examined:
    """Return the complete region and an example of what it returns, whose tensors have no elements.

    Args:
        subject: the region and its tensors.
        batch_size: the number of samples in its inputs.
        known: earlier results of :func:`samples_apart`. It grows.
        tries_samples: whether it is tried if the region keeps samples independent; otherwise it is not known to.

    Raises:
        Unclear: the region runs neither on random nor on fake tensors, or it changes its inputs, parameters or buffers.
    """
    if not may_run(subject.parameters):
        return _on_fake(subject, f"its parameters are more than {MAX_BYTES >> 30} GiB, so that it was not run")
    try:
        with _onednn_for_half_precision(subject):
            subject, output = _run(subject)
            subject = _with_all_gradients(subject)
    except FAILURES as error:
        if subject.examples:
            raise Unclear(f"on its example inputs it raised {type(error).__name__}: {first_line(error)}") from error
        return _on_fake(subject, f"on random inputs it raised {type(error).__name__}: {first_line(error)}")
    if not tries_samples:
        return subject.region, _without_values(output)
    if subject.region.is_loss:
        return loss_apart(subject, batch_size), _with_loss_alone(subject)
    splits, why, is_linear = samples_apart(subject, batch_size, known)
    return replace(subject.region, splits=splits, why=why, is_linear_backward=is_linear), _without_values(output)


def _with_loss_alone(subject: Subject) -> Any:
    """Return what the whole model returns, with an empty tensor for its loss and None for everything else."""
    output = replace(subject, region=replace(subject.region, is_loss=False)).run(subject.draw(0))
    loss = pick_loss(output, subject.region.name)
    return pytree.tree_map(lambda leaf: torch.empty(0) if leaf is loss else None, output)


def loss_apart(subject: Subject, batch_size: int) -> Region:
    """Return the region of a whole model, completed by how the loss of a batch is made of those of its halves.

    It is tried whether the losses and gradients of two batches have the mean that those of both together are, with equal weights or
    with the counts of elements that are not ignored. Which elements those may be is tried by putting numbers that code commonly
    ignores, or that the model has as identifiers, at random places of each input.
    """
    why = ""
    in_its_dtypes = (nullcontext(), subject)
    for context, trial in (in_its_dtypes,) if _is_long(subject) else ((in_double(), subject.wide()), in_its_dtypes):
        try:
            with context:
                return replace(subject.region, **_loss_apart(trial, batch_size))
        except (Unclear, *FAILURES) as error:
            why = why or first_line(error)
    return replace(subject.region, splits=None, why=why, is_linear_backward=False)


def _loss_apart(trial: Subject, batch_size: int) -> dict[str, Any]:
    """Do the work of :func:`loss_apart` in the dtypes of ``trial``; the result has fields of the region.

    Raises:
        Unclear, FAILURES: the model does not run in these dtypes.
    """
    inputs = trial.draw(1)
    outcome = outcome_of(trial, inputs, seed=1)
    is_random = not are_close(outcome.outputs, outcome_of(trial, inputs, seed=2).outputs)
    linear = {"is_linear_backward": is_linear(trial, inputs, outcome)}
    dims = tuple(0 if spec.shape[:1] == (batch_size,) else None for spec in trial.inputs)
    weights: list[Weight | None] = [None, *_weights(trial, dims)]
    for number in range(1, 2 if _is_long(trial) else DRAWS + 1):
        if not weights:
            break
        both = trial.draw(number, dims)
        whole, *parts = (outcome_of(trial, x, seed=3) for x in (both, *halves(both, dims)))
        values = [[loss := o.outputs[0], joined_gradients(o)[0] / output_gradient(loss)] for o in (whole, *parts)]
        weights = _fitting(weights, both, dims, values)
    for both in _unusual(trial, dims) if weights else ():
        try:
            with torch.no_grad():
                values = [list(outcome_of(trial, x, seed=3).outputs) for x in (both, *halves(both, dims))]
        except (Unclear, *FAILURES):  # no number for this input
            continue
        if all(loss.isfinite() for row in values for loss in row):
            weights = _fitting(weights, both, dims, values)
        if not weights:
            break
    if not weights:
        why = "it draws random numbers of its own for each sample" if is_random else ""
        return linear | {"why": why or "the loss of a batch is not the mean of those of its halves"}
    ((_, dtype, flows),) = trial.region.outputs
    outputs = (((batch_size,), dtype, flows),)
    return linear | {"splits": (dims, (0,)), "outputs": outputs, "weight": weights[0]}


_LONG_FLOPS = 1e11
"""FLOPs of one forward from which on a model is tried in its own dtypes and on fewer batches: a core takes seconds for one."""


def _is_long(subject: Subject) -> bool:
    return subject.region.flops >= _LONG_FLOPS


Weight: TypeAlias = tuple[int, int, int]
"""The weight of a sample in the loss of a batch (:attr:`Region.weight`)."""

_IGNORED = (-100, -1, 0, 1, 2)
"""Numbers that code commonly leaves out of a loss: torch's ignored class, and identifiers of padding."""


def weights_of(weight: Weight, inputs: Sequence[Tensor]) -> Tensor:
    """Return the weight of each sample (:attr:`Region.weight`), for inputs whose samples lie along dim 0."""
    number, ignored, start = weight
    counted = inputs[number] != ignored
    return counted[:, start:].flatten(1).sum(1) if counted.dim() > 1 else counted.to(torch.int64)


def _ignored_in(trial: Subject, spec: TensorSpec) -> tuple[int, ...]:
    """Return the numbers in an input that a loss may leave out."""
    if not is_integer(spec):
        return (0,)
    module = getattr(trial.call, "module", torch.nn.Identity())
    places = [
        vars(place) for m in module.modules() for place in (m, getattr(m, "config", None)) if hasattr(place, "__dict__")
    ]
    names = {
        value
        for place in places
        for name, value in place.items()
        if type(value) is int and name.endswith(("_id", "index", "_idx"))
    }
    return (*_IGNORED, *sorted(names - set(_IGNORED)))


def _weights(trial: Subject, dims: Sequence[int | None]) -> list[Weight]:
    """Return the weights that samples may have, with those of all positions and of all but the first one of each input."""
    return [
        (i, ignored, start)
        for i, (spec, dim) in enumerate(zip(trial.inputs, dims, strict=True))
        if dim is not None
        for ignored in _ignored_in(trial, spec)
        for start in range(min(len(spec.shape), 2))
    ]


def _unusual(trial: Subject, dims: Sequence[int | None]) -> Iterator[list[Tensor]]:
    """Yield batches, each two in a row, which the model may refuse.

    The numbers of some are random, with another mean and scale in each half. In the first half of others, half of the elements of one
    input are a number that code may ignore.
    """
    pairs = zip(trial.examples, trial.inputs, strict=True)
    examples = tuple(None if spec.dtype.is_floating_point else value for value, spec in pairs)
    if examples != trial.examples:
        draws = 1 if _is_long(trial) else DRAWS
        yield from (replace(trial, examples=examples).draw(number, dims) for number in range(draws))
    generator = torch.Generator().manual_seed(0)
    for i, (spec, dim) in enumerate(zip(trial.inputs, dims, strict=True)):
        for ignored in () if dim is None else _ignored_in(trial, spec):
            both = [x.detach() for x in trial.draw(1, dims)]
            half = both[i][: both[i].shape[0] // 2]
            half[torch.rand(half.shape, generator=generator) < 0.5] = ignored
            yield both


def _fitting(
    weights: Sequence[Weight | None],
    both: Sequence[Tensor],
    dims: Sequence[int | None],
    values: Sequence[Sequence[Tensor]],
) -> list[Weight | None]:
    """Return those of ``weights`` with which the values of a batch are the mean of those of its halves.

    Args:
        both: the inputs of the batch.
        values: the values of the batch and of its two halves.
    """
    found: list[Weight | None] = []
    inputs, (whole, *parts) = halves(both, dims), values
    for weight in weights:
        counts = [1.0 if weight is None else float(weights_of(weight, half).sum()) for half in inputs]
        if min(counts) <= 0:
            continue
        means = [(counts[0] * a + counts[1] * b) / sum(counts) for a, b in zip(*parts, strict=True)]
        if are_close(means, list(whole)):
            found.append(weight)
    return found


@contextmanager
def _onednn_for_half_precision(subject: Subject) -> Iterator[None]:
    """Enter a context in which oneDNN multiplies in half precision. An export turns it off, and the other kernels are a hundred times slower.

    It stays off for regions with an LSTM, which oneDNN runs as one operator whose FLOPs are not counted.
    """
    dtypes = {x.dtype for x in subject.inputs} | {x.dtype for x in (*subject.parameters, *subject.buffers)}
    inner = getattr(subject.call, "module", torch.nn.Identity()).modules()
    is_half = bool(dtypes & {torch.float16, torch.bfloat16})
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(before or (is_half and not any(isinstance(m, torch.nn.LSTM) for m in inner)))
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _without_values(output: Any) -> Any:
    """Return ``output`` with empty tensors, so that neither its values nor what is saved for backward stays in memory."""
    return pytree.tree_map_only(Tensor, lambda _: torch.empty(0), output)


def _on_fake(subject: Subject, why: str) -> Examined:
    """Return what :func:`examine` does for a region that does not run, from its shapes only; ``why`` says why it does not run.

    Raises:
        Unclear: the region does not run on fake tensors either.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(spec: TensorSpec | Tensor) -> Tensor:
        return torch.empty(tuple(spec.shape), dtype=spec.dtype, requires_grad=spec.dtype.is_floating_point)

    try:
        with mode:
            operands = [[fake(x) for x in group] for group in (subject.inputs, subject.parameters, subject.buffers)]
            output = run(subject.region, subject.call, *operands)
    except FAILURES as error:
        raise Unclear(f"{why}; on fake tensors it raised {type(error).__name__}: {first_line(error)}") from error
    region = replace(subject.region, outputs=_outputs_of(output), why=why, is_linear_backward=False)
    return region, _without_values(output)


def _outputs_of(output: Any) -> tuple[tuple[tuple[int, ...], str, bool], ...]:
    """Return the shape, the dtype and whether gradients flow of each tensor in ``output``, as :attr:`Region.outputs` has them.

    Raises:
        Unclear: there is no tensor.
    """
    tensors = tensors_of(output)
    if not tensors:
        raise Unclear("it returns no tensor")
    return tuple((tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad) for t in tensors)


def _run(subject: Subject) -> tuple[Subject, Any]:
    """Return what :func:`_measured` returns, with random integers from 0 or, if the code fails on these, from 1."""
    try:
        return _measured(subject)
    except FAILURES:
        if any(is_integer(spec) for spec in subject.inputs):
            with suppress(*FAILURES):
                return _measured(replace(subject, least=1))
        raise


def _measured(subject: Subject) -> tuple[Subject, Any]:
    """Run the region forward and backward once and check that it only computes.

    Returns:
        The subject, whose region has outputs, FLOPs and saved bytes, and what the code returned.

    Raises:
        Unclear: the code changes a tensor, or it returns numbers that depend on values.
    """
    inputs = subject.draw(0)
    inputs_before = [x.detach().clone() for x in inputs]
    buffers = [b.clone() for b in subject.buffers]
    parameters = [p.detach().clone() for p in subject.parameters]
    trained = [p.requires_grad for p in subject.parameters]
    saved_bytes: dict[int, int] = {}
    parameter_addresses = {p.data_ptr() for p in subject.parameters}

    def pack(x: Tensor) -> Tensor:
        if x.data_ptr() not in parameter_addresses:
            saved_bytes[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    def forward_under(watch: AbstractContextManager[object]) -> tuple[Any, FlopCounterMode, dict[str, Tensor]]:
        with _flop_counter() as counter, watch, _assigned_buffers(subject.call) as assigned:
            return run(subject.region, subject.call, inputs, subject.parameters, buffers), counter, assigned

    try:
        output, forward, assigned = forward_under(torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x))
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        output, forward, assigned = forward_under(_Made(pack))
    outputs = _outputs_of(output)
    with _flop_counter() as backward:
        gradients_of(tensors_of(output), (*inputs, *subject.parameters))
    if any(not torch.equal(a, b) for a, b in zip(inputs_before, inputs, strict=True)):
        raise Unclear("it changes its inputs in place")
    if trained != [p.requires_grad for p in subject.parameters]:
        raise Unclear("it changes requires_grad of a parameter, which has to be set before training")
    if any(x.grad is not None for x in (*inputs, *subject.parameters)):
        raise Unclear("its backward adds to gradients by itself")
    region = subject.region
    buffers_after = [assigned.get(name, b) for name, b in zip(region.buffers, buffers, strict=True)]
    _check_unchanged("buffers", region.buffers, subject.buffers, buffers_after, "only modules that are traced may")
    _check_unchanged("parameters", region.parameters, parameters, subject.parameters, "only an optimizer may")
    _check_numbers(subject, output)
    region = replace(
        region,
        outputs=outputs,
        flops=float(forward.get_total_flops()),
        backward_flops=float(backward.get_total_flops()),
        saved_bytes=sum(saved_bytes.values()),
        numel=max(1, sum(spec.numel for spec in subject.inputs)),
    )
    return replace(subject, region=region), output


def _with_all_gradients(subject: Subject) -> Subject:
    """Return the subject, whose region's outputs have a gradient if they have one on some inputs: on others a branch may leave it out."""
    outputs = subject.region.outputs
    for number in range(1, 2 if _is_long(subject) else DRAWS):
        if all(flows or not getattr(torch, dtype).is_floating_point for _, dtype, flows in outputs):
            break
        with suppress(*FAILURES):
            flows = [y.requires_grad for y in tensors_of(subject.run(subject.draw(number)))]
            outputs = tuple((*y[:2], y[2] or other) for y, other in zip(outputs, flows, strict=True))
    return replace(subject, region=replace(subject.region, outputs=outputs))


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes every tensor that operators make to a function: no more can be kept. For ``torch.func.grad``, which refuses hooks."""

    def __init__(self, take: Callable[[Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._take = take

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return pytree.tree_map_only(Tensor, self._take, func(*args, **(kwargs or {})))


def _flop_counter() -> FlopCounterMode:
    """Return a counter that does not assign FLOPs to modules. torch does so by hooks on gradients, which fail if forward takes any."""
    counter: Any = FlopCounterMode(display=False)
    counter.mod_tracker = nullcontext()
    counter.mod_tracker.parents = {"Global"}
    return cast("FlopCounterMode", counter)


@contextmanager
def _assigned_buffers(call: Call) -> Iterator[dict[str, Tensor]]:
    """Enter a context that records, by name, the buffers that a module replaces by ``self.name = ...``.

    A call gets its buffers as arguments, and these stay unchanged if the code replaces a buffer.
    """
    module = getattr(call, "module", None)
    path_of = {} if module is None else {id(inner): path for path, inner in module.named_modules()}
    assigned: dict[str, Tensor] = {}

    def record(owner: torch.nn.Module, name: str, value: Tensor | None) -> None:
        if id(owner) in path_of:
            assigned[f"{path_of[id(owner)]}.{name}".lstrip(".")] = torch.empty(0) if value is None else value

    handle = torch.nn.modules.module.register_module_buffer_registration_hook(record)
    try:
        yield assigned
    finally:
        handle.remove()


def _check_unchanged(
    what: str, names: Sequence[str], before: Sequence[Tensor], after: Sequence[Tensor], who: str
) -> None:
    """Check that the region has not changed its parameters or buffers; ``who`` ends the message and says what may change them.

    Raises:
        Unclear: a tensor has changed.
    """
    changed = [name for name, a, b in zip(names, before, after, strict=True) if not torch.equal(a, b)]
    if changed:
        raise Unclear(f"it changes {what} ({some(changed)}), which {who}")


def _check_numbers(subject: Subject, output: Any) -> None:
    """Check that the numbers that a region returns do not depend on the values of its inputs: they become constants of the graph.

    Raises:
        Unclear: they do.
    """
    leaves = _non_tensors(output)
    if any(isinstance(leaf, (bool, int, float)) for leaf in leaves):
        for number in range(1, DRAWS):
            inputs = subject.draw(number)
            inputs = [(10.0 ** (number % 4 - 1) * x).detach() if x.is_floating_point() else x for x in inputs]
            others = _non_tensors(subject.run(inputs))
            if others != leaves:
                lengths = len(leaves), len(others)
                a, b = next(((a, b) for a, b in zip(leaves, others, strict=False) if a != b), lengths)
                raise Unclear(f"it returns numbers that depend on values ({a} and {b})")


def _non_tensors(output: Any) -> list[Any]:
    """Return everything in what a region returns that is not a tensor."""
    return [leaf for leaf in pytree.tree_leaves(output) if not isinstance(leaf, Tensor)]
