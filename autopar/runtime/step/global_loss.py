"""The loss of the global batch, of which each rank has a part or none, and its scale in float16, whose infinities are those of all.

Gradients of activations lie below what float16 can hold, so backward begins at a number of thousands instead of one. Who
holds the loss multiplies there (``train_step`` by itself, since its backward has run when it returns; a loss of ``par(**batch)``
is given to ``scaler.scale``); whoever steps divides, and skips the step where a gradient is not finite. A rank sees the
gradients that it holds, and so asks all others: a step is made on all of them or on none, and the scale is the same everywhere.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.errors import UsageError
from autopar.plan.mesh import DATA_AXES
from autopar.plan.plan import Plan, Precision
from autopar.plan.run_log import DATA, PIPELINE
from autopar.runtime.failure_watch import Calls
from autopar.runtime.monitor import Monitor
from autopar.runtime.step.gradients import Held
from autopar.runtime.world import World


class GlobalLoss:
    """Sums the parts of all ranks; all of them make one and call the same methods."""

    def __init__(self, plan: Plan, world: World, monitor: Monitor) -> None:
        self._device, self._monitor = world.device, monitor
        self._part = PIPELINE if plan.mesh.pp > 1 else DATA
        self._group = world.axis_group(("pp", *DATA_AXES))
        self.dtype = torch.float64 if plan.precision.compute == "float64" else torch.float32

    def of(self, part: Tensor | None) -> Tensor:
        """The sum, from this rank's part if it has one: a scalar without a gradient, the same on every rank."""
        none = torch.zeros((), device=self._device, dtype=self.dtype)
        return self.summed(none if part is None else part.to(self.dtype))

    def called(
        self, part: Tensor, begin: Callable[[], None], finish: Callable[[], None], parameters: Iterable[Tensor]
    ) -> Tensor:
        """The sum, whose ``backward()`` is that of the part; it calls ``begin`` before it and ``finish`` after it.

        Args:
            parameters: for which nobody may ask by ``torch.autograd.grad``.
        """
        engine = torch.autograd.Variable._execution_engine

        def passed_on(gradient: Tensor) -> Tensor:
            begin()
            # Twice, so that it comes after the callback that FSDP queues in the course of this backward.
            engine.queue_callback(lambda: engine.queue_callback(finish))
            return gradient

        return with_backward(self.summed(part.detach().clone()), passed_on, parameters, part)

    def summed(self, loss: Tensor) -> Tensor:
        """In place."""
        if self._group is not None:
            # the ranks of a pipeline end at different times, and wait for the last one here
            with self._monitor.part(self._part):
                dist.all_reduce(loss, group=self._group)
        return loss


def with_backward(
    value: Tensor, act: Callable[[Tensor], Tensor | None], parameters: Iterable[Tensor], part: Tensor | None = None
) -> Tensor:
    """The value as a loss whose ``backward()`` calls ``act`` with the gradient that it was given.

    Args:
        parameters: for which nobody may ask by ``torch.autograd.grad``.
        part: gets the gradient that ``act`` returns; without one ``act`` does all there is to do.
    """
    start = torch.zeros((), device=value.device, requires_grad=part is None or part.requires_grad)
    return cast("Tensor", _Loss.apply(start, part, value, act, *parameters))  # type: ignore[no-untyped-call]


def _check_plain(node: Any, gradient: Tensor) -> None:
    """Nothing, where the ``backward`` of a loss was called as it stands.

    Args:
        node: of the loss in the graph of autograd; its first input is a leaf that nobody else has.

    Raises:
        UsageError: gradients are asked for in a way by which they would not be those of all ranks.
    """
    if torch.is_grad_enabled():
        raise UsageError.unsupported(
            "A gradient of gradients (create_graph=True)",
            instead="Leave it out: a plan has no backward of its backward pass. A penalty of the weights or outputs themselves "
            "goes into the loss, in the model's forward or in loss_fn",
        )
    if not torch._C._will_engine_execute_node(node.next_functions[0][0]):
        raise UsageError.unsupported(
            "A gradient by torch.autograd.grad or backward(inputs=...) of a loss of a parallel model",
            instead="Call loss.backward() and read p.grad of par.parameters(), or par.full_gradients()",
        )
    if isinstance(gradient, DTensor):  # torch adds the loss to the parts of a sum, as if it were one of them
        raise UsageError(
            "The loss was added to a DTensor, as a penalty of par.parameters() is",
            fix="Compute the penalty in the model's forward or in loss_fn, as a part of the loss, or add its .full_tensor()",
        )


class _Loss(torch.autograd.Function):
    """Forward: the value. Backward: what is done with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        start: Tensor,
        part: Tensor | None,
        value: Tensor,
        act: Callable[[Tensor], Tensor | None],
        *parameters: Tensor,
    ) -> Tensor:
        ctx.act, ctx.count = act, len(parameters)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _check_plain(ctx, gradients[0])
        return None, ctx.act(gradients[0]), *[None] * (2 + ctx.count)


_MAKE = "scaler = par.grad_scaler()"
SCALER_NUMBERS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
"""The entries of ``GradScaler.state_dict()``."""
_WHOLE = frozenset({"growth_interval", "_growth_tracker"})


class ParallelScaler(GradScaler):
    """``torch.amp.GradScaler`` for one parallel model: where a gradient of any rank is not finite, all skip the step.

    Its interface and its numbers are torch's. ``unscale_``, or ``step`` where that has not been called, is a call that all ranks
    make; in it they sum one number. It is switched off until :meth:`make`; what stands before :meth:`scale` is for the model's steps.

    Args:
        held: of the model.
        calls: of the model: unscaling is one that all ranks make.
        group: of all ranks, for calls besides steps; None where there is one rank.

    Attributes:
        is_made: somebody has asked for it.
        is_stepping: inside of ``step``.
        has_been_asked: to ``scale`` something since the last ``update``.
    """

    def __init__(
        self,
        precision: Precision,
        held: Sequence[Held],
        calls: Calls,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        super().__init__(device.type, enabled=False)
        self._precision, self._held, self._calls, self._group = precision, held, calls, group
        self._model_device = device
        self._scaled: set[int] = set()
        self._loaded: dict[str, float] | None = None
        self.is_made = self.is_stepping = self.has_been_asked = False

    def make(self, **options: Any) -> Self:
        """Switches it on for a plan in fp16; what a checkpoint said of it before counts, as by ``load_state_dict``.

        Raises:
            UsageError: it has been made already.
        """
        if self.is_made:
            raise UsageError(
                "A second scaler was asked for by par.grad_scaler()",
                fix="Keep the first scaler: scaler.update(new_scale) or scaler.load_state_dict(...) set its scale",
            )
        super().__init__(self._model_device.type, **{"enabled": self._precision.scales_loss, **options})
        self.is_made, self._one = True, torch.ones((), device=self._model_device)
        super().scale(self._one)  # makes the scale, where it is on
        if self._loaded is not None:
            self.numbers = self._loaded
        return self

    @property
    def is_wanted(self) -> bool:
        """Whether steps are or will be scaled."""
        return self.is_enabled() if self.is_made else self._precision.scales_loss

    @property
    def numbers(self) -> dict[str, float] | None:
        """What a checkpoint keeps; None where there is no scale."""
        if not self.is_enabled():
            return self._loaded if self.is_wanted else None
        state = self.state_dict()
        return {name: float(state[name]) for name in SCALER_NUMBERS}

    @numbers.setter
    def numbers(self, numbers: Mapping[str, float]) -> None:
        self._loaded = {name: float(numbers[name]) for name in SCALER_NUMBERS}
        if self.is_enabled():
            self.load_state_dict({name: int(n) if name in _WHOLE else n for name, n in self._loaded.items()})

    def check(self) -> None:
        """Before a step whose gradients would be lost without a scale.

        Raises:
            UsageError: they would.
        """
        if self._precision.scales_loss and not self.is_made:
            raise UsageError(
                "Training in float16 needs a scaled loss, as most gradients would be zero without",
                fix=f"Write {_MAKE} before the first step, and scaler.step(optimizer) and scaler.update() after each. "
                "Clip after scaler.unscale_(optimizer), and pass enabled=False to train without a scale",
            )

    @property
    def factor(self) -> Tensor | None:
        """By what the gradients of a step are larger than those of its loss: a scalar in float32; None where they are these."""
        return super().scale(self._one) if self.is_enabled() else None

    def of(self, loss: Tensor) -> Tensor:
        """The loss itself, whose backward begins at the scale."""
        factor = self.factor
        return loss if factor is None else cast("Tensor", _Scaled.apply(loss, factor))  # type: ignore[no-untyped-call]

    def done(self) -> None:
        """After the backward of a step: its gradients are those of the scaled loss."""
        if self.is_enabled():
            self._scaled.update(id(h.parameter) for h in self._held if h.parameter.grad is not None)

    def check_called(self) -> None:
        """At the begin of a backward that the user called.

        Raises:
            UsageError: of a loss that this model's scaler has not scaled.
        """
        if self.is_enabled() and not self.has_been_asked:
            raise UsageError(
                "This is the backward() of a loss that the scaler of this model has not scaled",
                fix=f"Write {_MAKE}, then scaler.scale(loss).backward(), where loss is that of par(**batch) or of step_loss(par, batch)",
            )

    def check_unscaled(self) -> None:
        """Before all gradients are looked at, as one.

        Raises:
            UsageError: some are still those of the scaled loss.
        """
        first = next((h.key for h in self._held if self._is_scaled(h.parameter)), "")
        if first:
            raise UsageError(
                f"The gradient of {first} is still times the scale of the loss, so it cannot be clipped",
                fix="Call scaler.unscale_(optimizer) before, for every optimizer, and freeze parameters that none steps",
            )

    def check_step(self, optimizer: Optimizer) -> None:
        """Before any optimizer's step.

        Raises:
            UsageError: it would take gradients of the scaled loss for those of the loss.
        """
        if self.is_stepping:
            return
        if any(self._is_scaled(p) for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "A call of optimizer.step() would step by the gradients of the scaled loss",
                fix="Call scaler.step(optimizer) instead, which unscales them, and scaler.update() after it",
            )

    def _is_scaled(self, parameter: Tensor) -> bool:
        return parameter.grad is not None and id(parameter) in self._scaled

    def scale(self, outputs: Any) -> Any:
        """As torch's.

        Raises:
            UsageError: it is the loss of a ``train_step``.
        """
        if self.is_enabled() and isinstance(outputs, StepLoss):
            raise UsageError(
                "The loss of par.train_step(batch) has been scaled already, and its backward pass has run",
                fix="Leave scaler.scale(loss).backward() out, and keep what follows as it is",
            )
        self.has_been_asked = True
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """As torch's; all ranks call it."""
        super().unscale_(optimizer)
        self._scaled -= {id(p) for group in optimizer.param_groups for p in group["params"]}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As torch's; all ranks call it, and step or do not alike."""
        self.is_stepping = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            self.is_stepping = False
            self._scaled -= {id(p) for group in optimizer.param_groups for p in group["params"]}

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As torch's."""
        self.has_been_asked = False
        super().update(new_scale)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """What torch's unscales and looks at: here the elements that this rank has, and what the others found.

        DTensors would ask the ranks of their own mesh, those of the first of a list for all of it; no stage of a pipeline would
        know of the others. Torch's sharded scaler takes this place too (``torch.distributed.fsdp.sharded_grad_scaler``).
        """
        lists: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for grad in (p.grad for p in group["params"] if p.grad is not None):
                local = grad._local_tensor if isinstance(grad, DTensor) else grad
                lists[local.device, local.dtype].append(local)
        with torch.no_grad(), self._calls.at_once("unscale_", meets=False):  # what is found is a meeting of its own
            for (device, _), grads in lists.items():
                here = found_inf.to(device)
                torch._amp_foreach_non_finite_check_and_unscale_(grads, here, inv_scale.to(device))
                found_inf.copy_(torch.maximum(found_inf, here.to(found_inf.device)))
            if self._group is not None:
                dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=self._group)
        return {found_inf.device: found_inf}


class _Scaled(torch.autograd.Function):
    """Forward: the loss as it is, so that what is reported is not rounded again. Backward: times the scale."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return (gradients[0] * ctx.factor).to(gradients[0].dtype), None


class StepLoss(Tensor):
    """A scalar without gradient that knows why, as it does divided by a number, which loops that accumulate do.

    What else is computed from it, saved or copied is an ordinary tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, *_: object, **__: object) -> NoReturn:
        """For loops that call it by habit.

        Raises:
            UsageError: always: the gradients are there.
        """
        raise UsageError(
            "A loss.backward() was called after par.train_step(batch), which has already run the backward pass",
            fix="Leave backward() out (with one pipeline stage, that of the loss of par(**batch) does the same)",
        )

    def __truediv__(self, other: Any) -> Tensor:
        quotient: Tensor = super().__truediv__(other)
        return quotient.as_subclass(StepLoss) if isinstance(other, int | float) else quotient

    def __mul__(self, other: Any) -> Tensor:
        """As a tensor's.

        Raises:
            UsageError: it is ``torch.amp.GradScaler`` that asks, whose ``step`` would divide gradients by what has not scaled them.
                (The scaler of a plan in float16 says so itself: :mod:`autopar.runtime.step.global_loss`.)
        """
        if sys._getframe(1).f_globals.get("__name__") == GradScaler.__module__:
            raise UsageError(
                "Torch's GradScaler cannot scale the loss of par.train_step(batch), which has already run the backward pass",
                fix="Leave the scaler out (GradScaler(enabled=False)), or use par.grad_scaler() for a plan in float16",
            )
        return super().__mul__(other)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).__deepcopy__(memo)  # type: ignore[no-untyped-call, no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))
