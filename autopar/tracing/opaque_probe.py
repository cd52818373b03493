"""What a region of unknown code does, found by running it on small random inputs on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from autopar.errors import first_line
from autopar.graph.graph import TensorSpec
from autopar.ops.kernels import Region
from autopar.ops.opaque import run, tensors_of
from autopar.tracing.failures import FAILURES
from autopar.tracing.opaque_trials import (
    DRAWS,
    Call,
    Samples,
    Subject,
    Unclear,
    gradients_of,
    is_integer,
    samples_apart,
)
from autopar.util.formatting import some

MAX_BYTES = 2**32
"""Of parameters: larger regions are not run while tracing."""


def apart_from_trace(function: Callable[[], Any], modes: Sequence[TorchFunctionMode]) -> Any:
    """Runs ``function`` where the tracer does not see it: modes are those of a thread, flags and random numbers are set back.

    ``modes``: those that the caller of the trace had entered, and under which the model runs as well.
    """

    def under_modes() -> Any:
        with torch.random.fork_rng(devices=[]), ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            return function()

    with (
        mock.patch.object(torch.compiler, "_is_exporting_flag", new=False),
        mock.patch.object(torch.compiler, "_is_compiling_flag", new=False),
        ThreadPoolExecutor(1) as pool,
    ):
        return pool.submit(under_modes).result()


def runs(parameters: Sequence[Tensor]) -> bool:
    """Whether a region of these parameters is run on random inputs."""
    return sum(p.numel() * p.itemsize for p in parameters) <= MAX_BYTES


def examine(subject: Subject, batch_size: int, alike: dict[object, Samples]) -> tuple[Region, Any]:
    """The region with what its code was seen to do, and an example of what it returns: its structure, with tensors of no elements.

    Args:
        alike: as of :func:`samples_apart`.

    Raises:
        Unclear: it runs neither on random nor on fake tensors, or changes its inputs.
    """
    if not runs(subject.parameters):
        return _on_fake(subject, f"its parameters are more than {MAX_BYTES >> 30} GiB, so that it was not run")
    try:
        with _kernels_of_halves(subject):
            subject, output = _run(subject)
    except FAILURES as error:
        return _on_fake(subject, f"on random inputs it raised {type(error).__name__}: {first_line(error)}")
    splits, why, linear = samples_apart(subject, batch_size, alike)
    return replace(subject.region, splits=splits, why=why, is_linear_backward=linear), _structure(output)


@contextmanager
def _kernels_of_halves(subject: Subject) -> Iterator[None]:
    """Products of halves by oneDNN, which an export turns off: torch's own are a hundred times slower.

    Not of an LSTM: oneDNN has one that is one operator, whose FLOPs nothing counts.
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


def _structure(output: Any) -> Any:
    """Without values, and what is saved for their gradients."""
    return pytree.tree_map_only(Tensor, lambda _: torch.empty(0), output)


def _on_fake(subject: Subject, why: str) -> tuple[Region, Any]:
    """Shapes alone."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(spec: TensorSpec | Tensor) -> Tensor:
        return torch.empty(tuple(spec.shape), dtype=spec.dtype, requires_grad=spec.dtype.is_floating_point)

    try:
        with mode:
            operands = [[fake(x) for x in group] for group in (subject.inputs, subject.parameters, subject.buffers)]
            output = run(subject.region, subject.call, *operands)
    except FAILURES as error:
        raise Unclear(f"{why}; on fake tensors it raised {type(error).__name__}: {first_line(error)}") from error
    region = replace(subject.region, outputs=_described(output), why=why, is_linear_backward=False)
    return region, _structure(output)


def _described(output: Any) -> tuple[tuple[tuple[int, ...], str, bool], ...]:
    found = tensors_of(output)
    if not found:
        raise Unclear("it returns no tensor")
    return tuple((tuple(t.shape), str(t.dtype).removeprefix("torch."), t.requires_grad) for t in found)


def _run(subject: Subject) -> tuple[Subject, Any]:
    """What :func:`_measured` finds, with random integers from 0, or from 1 where the code does not take those."""
    try:
        return _measured(subject)
    except FAILURES:
        if any(is_integer(spec) for spec in subject.inputs):
            with suppress(*FAILURES):
                return _measured(replace(subject, least=1))
        raise


def _measured(subject: Subject) -> tuple[Subject, Any]:
    """One run, forward and backward: the region with what it costs, and what it returns."""
    inputs = subject.draw(0)
    before = [x.detach().clone() for x in inputs]
    buffers = [b.clone() for b in subject.buffers]
    parameters = [p.detach().clone() for p in subject.parameters]
    trained = [p.requires_grad for p in subject.parameters]
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
        output = run(subject.region, subject.call, inputs, subject.parameters, buffers)
    outputs = _described(output)
    with _counter() as backward:
        gradients_of(tensors_of(output), (*inputs, *subject.parameters))
    if any(not torch.equal(a, b) for a, b in zip(before, inputs, strict=True)):
        raise Unclear("it changes its inputs in place")
    if trained != [p.requires_grad for p in subject.parameters]:
        raise Unclear("it changes requires_grad of a parameter, which has to be set before training")
    if any(x.grad is not None for x in (*inputs, *subject.parameters)):
        raise Unclear("its backward adds to gradients by itself")
    after = [assigned.get(name, b) for name, b in zip(subject.region.buffers, buffers, strict=True)]
    _check_kept("buffers", subject.region.buffers, subject.buffers, after, "only modules that are traced may")
    _check_kept("parameters", subject.region.parameters, parameters, subject.parameters, "only an optimizer may")
    _check_numbers(subject, output)
    region = replace(
        subject.region,
        outputs=outputs,
        flops=float(forward.get_total_flops()),
        backward_flops=float(backward.get_total_flops()),
        saved_bytes=sum(saved.values()),
        numel=max(1, sum(spec.numel for spec in subject.inputs)),
    )
    return replace(subject, region=region), output


def _counter() -> FlopCounterMode:
    """Does not sort FLOPs by module, as torch does by hooks on gradients that a gradient taken in forward does not bear."""
    counter: Any = FlopCounterMode(display=False)
    counter.mod_tracker = nullcontext()
    counter.mod_tracker.parents = {"Global"}
    return cast("FlopCounterMode", counter)


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


def _check_kept(what: str, names: Sequence[str], before: Sequence[Tensor], after: Sequence[Tensor], who: str) -> None:
    """What it writes to would stay as it is: a call is given tensors that ranks have put together."""
    changed = [name for name, a, b in zip(names, before, after, strict=True) if not torch.equal(a, b)]
    if changed:
        raise Unclear(f"it changes {what} ({some(changed)}), which {who}")


def _check_numbers(subject: Subject, output: Any) -> None:
    """What it returns beside tensors becomes part of the plan, so that it must not depend on what it is given."""
    leaves = _leaves(output)
    if numbers_of(output):
        for number in range(1, DRAWS):
            inputs = subject.draw(number)
            inputs = [(10.0 ** (number % 4 - 1) * x).detach() if x.is_floating_point() else x for x in inputs]
            found = _leaves(subject.run(inputs))
            if found != leaves:
                shown = next(((a, b) for a, b in zip(leaves, found, strict=False) if a != b), (len(leaves), len(found)))
                raise Unclear(f"it returns numbers that depend on values ({shown[0]} and {shown[1]})")


def numbers_of(output: Any) -> list[bool | int | float]:
    """The numbers and truth values in what a region returns."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, (bool, int, float))]


def _leaves(output: Any) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves(output) if not isinstance(leaf, Tensor)]
