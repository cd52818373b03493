"""One pipeline stage as a module: its blocks, run in order over named values, and what stages pass to each other.

The program gives shape, dtype and ``requires_grad`` of a value between two stages. torch 2.11 requires more
(``torch/distributed/pipelining/stage.py``): all received values require a gradient, so they have a floating-point dtype; backward leaves a
gradient on each; and sent values have the strides of a new tensor, also in dims of length 1. Later versions do not require this, but accept
it.

So a stage begins with :func:`enter` and ends with :func:`leave`. Between them values are as in the program. Outside integers are passed as
floats of the same bits, strides are those of a new tensor, and a gradient that backward does not produce is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias, cast

import spmd_types
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from autopar.graph.aliasing import contiguous
from autopar.graph.graph import Evaluation, Ref
from autopar.lower.emit import MICRO_BATCH_WEIGHT, SEED, SHARE, str_name
from autopar.lower.program import BlockProgram, Program, StageProgram
from autopar.ops import plain
from autopar.ops.collectives import on_meshes
from autopar.runtime.step.kept_for_backward import Mover, Tape, with_tape
from autopar.runtime.step.other_runs import variant

INPUT = "autopar_input_"
"""Prefix of the names of batch inputs, as torch's schedules have keywords of their own (``target``)."""


class BlockModule(nn.Module):
    """The emitted code of a block with its parameters: the unit of FSDP and of recompute. After ``eval()`` it runs in evaluation mode.

    Attributes:
        taps: inner values that outputs of the model need.
        taken: where the taps are stored, detached; None if they are not.
        frees_parameters: whether FSDP frees gathered parameters after the block, so that outputs that are views of them are copied.
    """

    def __init__(
        self,
        program: BlockProgram,
        meshes: Sequence[DeviceMesh],
        mover: Mover | None = None,
        evaluation: Evaluation | None = None,
    ) -> None:
        super().__init__()
        self._evaluation = evaluation or Evaluation()
        self.inputs, self.outputs = program.inputs, program.outputs
        self.recompute = program.recompute
        self.body = program.module
        self._meshes = meshes
        self._mover = mover
        self._tape: Tape | None = None
        self._code = program.module.graph
        self._variants: dict[tuple[bool, bool], Callable[..., Any]] = {}
        self.taps: tuple[Ref, ...] = ()
        self.taken: dict[Ref, Tensor] | None = None
        self.frees_parameters = False
        if self.recompute == "selective":
            self.body = with_tape(program.module, program.again, lambda: self._tape)

    def forward(self, *values: Any) -> tuple[Tensor, ...]:
        """Compute ``outputs`` from ``inputs``, both in order."""
        if self._mover is not None and torch.is_grad_enabled():
            with self._mover.block((*self.body.parameters(), *self.body.buffers())):
                return self._run(*values)
        return self._run(*values)

    def _run(self, *values: Any) -> tuple[Tensor, ...]:
        code = self._function()
        if self.training and self.recompute == "full" and torch.is_grad_enabled():
            # emitted code draws from its own streams, so no generator state has to be restored
            checkpointed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            outputs = cast("tuple[Tensor, ...]", checkpointed(partial(self._with_mesh, code), *values))
        elif self.training and self.recompute == "selective" and torch.is_grad_enabled():
            outputs = self._on_tape(code, values)
        else:
            outputs = cast("tuple[Tensor, ...]", code(*values))
        if self.frees_parameters and any(value._is_view() or not value.requires_grad for value in outputs):
            outputs = self._without_views(outputs)
        if self.taken is None or not self.taps:
            return outputs
        count = len(self.outputs)
        self.taken |= {ref: value.detach() for ref, value in zip(self.taps, outputs[count:], strict=True)}
        return outputs[:count]

    def _without_views(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the outputs, with copies of those in the memory of a parameter (learned queries, expanded to the batch)."""
        gathered = {plain.local(p).untyped_storage().data_ptr() for p in self.body.parameters()}
        return tuple(v.clone() if v.untyped_storage().data_ptr() in gathered else v for v in outputs)

    def _function(self) -> Callable[..., Any]:
        """Return the function that computes the outputs, and the taps if they are stored."""
        taps = self.taps if self.taken is not None else ()
        if self.training and not taps:
            return self.body
        key = self.training, bool(taps)
        if key not in self._variants:
            code = self.body.graph if self.training else self._code
            evaluation = None if self.training else self._evaluation
            self._variants[key] = variant(self.body, code, evaluation, taps=taps)
        return self._variants[key]

    def _on_tape(self, code: Callable[..., Any], values: Sequence[Any]) -> tuple[Tensor, ...]:
        tape = self._tape = Tape(partial(on_meshes, self._meshes))
        try:
            with tape.record():
                return cast("tuple[Tensor, ...]", code(*values))
        finally:
            self._tape = None

    def _with_mesh(self, code: Callable[..., Any], *values: Any) -> tuple[Tensor, ...]:
        with on_meshes(self._meshes):  # backward runs this again on another thread
            return cast("tuple[Tensor, ...]", code(*values))


class StageModule(nn.Module):
    """Runs one stage for one micro-batch: from received values and the batch to sent values, or the loss.

    Attributes:
        totals: values of ``Program.sums`` over the global batch, set before the step's first micro-batch.
        state: buffers that steps change, with their values at the beginning of the step.
        new_state: the new values of buffers that this stage changes, from the last micro-batch.
        taken: for each micro-batch the inner values that outputs of the model need; None if they are not stored.
        seed: of the step; every micro-batch draws from its own stream.
        micro_batch: number of the micro-batch of the next forward.
        passed_in, passed_on: the values that it receives, and that it sends (the loss, of the last stage).
        share: the share of the plan's global batch that the step computes.
        first_micro_batch: number of the first micro-batch in the current run of the pipeline's schedule.
        weights: weight of the loss of each micro-batch; None if all are one.
    """

    def __init__(self, program: StageProgram, full_program: Program, meshes: Sequence[DeviceMesh]) -> None:
        super().__init__()
        self._program, self.index, self.is_last = program, program.index, program.is_last
        self._sends = (full_program.loss,) if program.is_last else program.sends
        self.passed_in = passed_of(full_program, program.receives)
        self.passed_on = passed_of(full_program, self._sends)
        self._is_whole = len(full_program.stages) == 1
        self.mover = mover = Mover(meshes[-1].device_type) if any(b.offload for b in program.blocks) else None
        self._evaluation = full_program.graph.evaluation or Evaluation()
        blocks = ((block, mover if block.offload else None) for block in program.blocks)
        modules = (BlockModule(block, meshes, of_block, self._evaluation) for block, of_block in blocks)
        self.blocks = cast("Sequence[BlockModule]", nn.ModuleList(modules))
        self.prelude = None if program.prelude is None else program.prelude.module
        self._meshes = meshes
        self.totals: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}
        self.new_state: dict[str, Tensor] = {}
        self.taken: dict[int, dict[Ref, Tensor]] | None = None
        self.seed = self.micro_batch = self.first_micro_batch = 0
        self._num_streams = full_program.plan.num_micro_batches
        self.share = 1.0
        self.weights: Sequence[float] | None = None

    def forward(self, *received: Tensor, **batch: Any) -> Tensor | tuple[Tensor, ...]:
        """Run one micro-batch.

        Args:
            received: one tensor for each of :attr:`StageProgram.receives`, as the stage before sent it.
            batch: the micro-batch's inputs by name (with or without :data:`INPUT`).

        Returns:
            The loss on the last stage (this rank's part of the global sum), otherwise the tuple of :attr:`StageProgram.sends`, in the form
            in which they are sent.
        """
        program, prelude = self._program, self._program.prelude
        taken, link = enter(self.passed_in, received)
        values: dict[str, Any] = {name.removeprefix(INPUT): value for name, value in batch.items()}
        values.update(zip(program.receives, taken, strict=True))
        values.update(self.state)
        values.update(self.totals)
        weight = 1.0 if self.weights is None else self.weights[self.micro_batch]
        values[SHARE], values[MICRO_BATCH_WEIGHT] = self.share, weight
        for name in program.shared_parameters:
            values[name] = self._parameters[name]
        values[SEED] = self.seed + self.micro_batch % self._num_streams
        with on_meshes(self._meshes):
            if prelude is not None:
                with torch.no_grad():
                    code = prelude.module if self.training else self._prelude_at_rest
                    outputs = code(*[values[name] for name in prelude.inputs])
                values.update(zip(prelude.outputs, outputs, strict=True))
            if self.mover is not None:
                self.mover.begin(value for name, value in values.items() if name not in program.receives)
            taps = None if self.taken is None else self.taken.setdefault(self.micro_batch, {})
            for block in self.blocks:
                block.taken = taps
                outputs = block(*[values[name] for name in block.inputs])
                values.update(zip(block.outputs, outputs, strict=True))
        self.new_state = {buffer: values[name].detach() for buffer, name in program.mutations}
        results = [values[name] for name in self._sends]
        if self.is_last and weight != 1.0:
            results[0] = results[0] * weight
        if self._is_whole:
            return cast("Tensor", results[0])
        sent = leave(self.passed_on, link, results)
        return sent[0] if self.is_last else sent

    @cached_property
    def _prelude_at_rest(self) -> Callable[..., Any]:
        assert self.prelude is not None
        return variant(self.prelude, self.prelude.graph, self._evaluation)

    def keep(self, taps: Mapping[int, Sequence[Ref]]) -> None:
        """Set which inner values are stored, by the position of their block in this stage."""
        for position, block in enumerate(self.blocks):
            block.taps = tuple(taps.get(position, ()))

    def holders(self) -> dict[str, nn.Module]:
        """For each parameter name the module that has it registered under that name."""
        modules: dict[str, nn.Module] = {}
        for block in self.blocks:
            modules |= dict.fromkeys(block.body._parameters, block.body)
        return modules | dict.fromkeys(self._program.shared_parameters, self)


_FLOATS = {1: torch.float8_e5m2, 2: torch.float16, 4: torch.float32, 8: torch.float64}
"""The dtype that carries the bits of one without gradient, by bytes of an element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """One value between two stages, or the loss.

    Attributes:
        shape: of one rank's part, for one micro-batch.
        dtype: in which stages compute.
        requires_grad: as in the program.
        returns: whether a gradient (maybe zero) is sent back. It is for each value that requires one; if none does it is for the first, so
            that backward runs through every stage.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    returns: bool

    @property
    def carrier(self) -> torch.dtype:
        """The dtype in which the value is sent: one that may have a gradient, of as many bytes."""
        return self.dtype if _is_differentiable(self.dtype) else _FLOATS[self.dtype.itemsize]

    def example(self) -> Tensor:
        """Return the value as it is sent, on meta."""
        return torch.empty(self.shape, dtype=self.carrier, device="meta").requires_grad_(self.returns)


def _is_differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def passed_of(program: Program, names: Sequence[str]) -> tuple[Passed, ...]:
    """Return the values of these names, at one end of a stage of ``program``."""
    specs = {str_name(Ref(op.name, i)): spec for op in program.graph.ops for i, spec in enumerate(op.outputs)}
    selected = [specs[name] for name in names]
    have = [spec.requires_grad and _is_differentiable(spec.dtype) for spec in selected]
    return tuple(
        Passed(shape=tuple(spec.shape), dtype=spec.dtype, requires_grad=has, returns=has or (i == 0 and not any(have)))
        for i, (spec, has) in enumerate(zip(selected, have, strict=True))
    )


Link: TypeAlias = Tensor | None
"""An empty tensor that ties the gradients at a stage's beginning to those at its end; None if the stage receives nothing."""


def enter(passed: Sequence[Passed], received: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Link]:
    """Return the received values in the form in which the stage computes; the link must be passed to :func:`leave`."""
    if not received:
        return (), None
    link, *values = _Enter.apply(passed, *received)  # type: ignore[no-untyped-call]
    return tuple(values), link


def leave(passed: Sequence[Passed], link: Link, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the computed values in the form in which they are sent. Their backward runs that of all received values, whatever they depend on."""
    if not values:
        return ()
    if link is None:
        link = values[0].new_empty(0, dtype=torch.float32).requires_grad_(torch.is_grad_enabled())
    sent: tuple[Tensor, ...] = _Leave.apply(passed, link, *map(_laid_out, values))  # type: ignore[no-untyped-call]
    return sent


def _as(value: Tensor, before: torch.dtype, after: torch.dtype) -> Tensor:
    return value.detach() if before == after else value.detach().view(after)


def _laid_out(value: Tensor) -> Tensor:
    """Return the value with the strides of a new tensor: a contiguous tensor may have any in dims of length 1."""
    has_strides = value.stride() == contiguous(tuple(value.shape))
    return value if has_strides else value.clone(memory_format=torch.contiguous_format)


class _Enter(torch.autograd.Function):
    """Values in their own dtypes, after a link; backward gives a gradient to each received value that needs one."""

    @staticmethod
    def forward(ctx: Any, passed: Sequence[Passed], *received: Tensor) -> tuple[Tensor, ...]:
        ctx.passed, ctx.device = passed, received[0].device
        ctx.set_materialize_grads(False)
        values = [_as(x, p.carrier, p.dtype) for x, p in zip(received, passed, strict=True)]
        ctx.mark_non_differentiable(*(x for x, p in zip(values, passed, strict=True) if not p.requires_grad))
        return (received[0].new_empty(0, dtype=torch.float32), *values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        back: list[Tensor | None] = []
        for p, gradient, needed in zip(ctx.passed, gradients[1:], ctx.needs_input_grad[1:], strict=True):
            if gradient is None or not p.requires_grad:
                gradient = torch.zeros(p.shape, dtype=p.carrier, device=ctx.device) if needed else None
            back.append(gradient if needed else None)
        return (None, *back)


class _Leave(torch.autograd.Function):
    """Values as they are sent; backward gives their gradients, and one of the link."""

    @staticmethod
    def forward(ctx: Any, passed: Sequence[Passed], link: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.passed, ctx.link = passed, (link.dtype, link.device)
        ctx.set_materialize_grads(False)
        sent = [_as(x, p.dtype, p.carrier) for x, p in zip(values, passed, strict=True)]
        ctx.mark_non_differentiable(*(x for x, p in zip(sent, passed, strict=True) if not p.returns))
        return tuple(sent)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        dtype, device = ctx.link
        gradients_back = (g if p.requires_grad else None for p, g in zip(ctx.passed, gradients, strict=True))
        return (None, torch.empty(0, dtype=dtype, device=device), *gradients_back)


spmd_types.register_local_autograd_function(_Enter)
spmd_types.register_local_autograd_function(_Leave)
