"""The loss of the global batch, to which ranks contribute parts, and its scale in float16.

Many gradients of activations are smaller than float16 can represent, so backward starts from a scale of thousands instead of one. The scale
is applied where the loss is: ``train_step`` applies it by itself, as its backward has run when it returns; the loss of ``par(**batch)`` is
passed to ``scaler.scale``. The scaler's ``step`` divides the gradients by it, and skips the step if a gradient is not finite. A rank sees
only the gradients that it holds, so ranks sum what they find: all of them step or none does, and the scale is the same everywhere.
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
from autopar.runtime.step.gradients import RankParameter, local_part
from autopar.runtime.world import World


class GlobalLoss:
    """Sums the parts of all ranks; every rank makes one and calls the same methods."""

    def __init__(self, plan: Plan, world: World, monitor: Monitor) -> None:
        self._device, self._monitor = world.device, monitor
        self._part = PIPELINE if plan.mesh.pp > 1 else DATA
        self._group = world.axis_group(("pp", *DATA_AXES))
        self.dtype = torch.float64 if plan.precision.compute == "float64" else torch.float32

    def of(self, part: Tensor | None) -> Tensor:
        """Return the global loss, given this rank's part if it has one: a scalar without gradient, the same on every rank."""
        zero = torch.zeros((), device=self._device, dtype=self.dtype)
        return self.summed(zero if part is None else part.to(self.dtype))

    def called(
        self, part: Tensor, begin: Callable[[], None], finish: Callable[[], None], parameters: Iterable[Tensor]
    ) -> Tensor:
        """Return the global loss, whose ``backward()`` is that of the part; it calls ``begin`` before that backward and ``finish`` after it.

        Args:
            parameters: parameters whose gradients must not be requested by ``torch.autograd.grad``.
        """
        engine = torch.autograd.Variable._execution_engine

        def backward(gradient: Tensor) -> Tensor:
            begin()
            # Twice, so that it comes after the callback that FSDP queues in the course of this backward.
            engine.queue_callback(lambda: engine.queue_callback(finish))
            return gradient

        return with_backward(self.summed(part.detach().clone()), backward, parameters, part)

    def summed(self, loss: Tensor) -> Tensor:
        """Return the sum of ``loss`` over all ranks, in place."""
        if self._group is not None:
            # ranks of a pipeline finish at different times and wait here for the last one
            with self._monitor.part(self._part):
                dist.all_reduce(loss, group=self._group)
        return loss


def with_backward(
    value: Tensor, act: Callable[[Tensor], Tensor | None], parameters: Iterable[Tensor], part: Tensor | None = None
) -> Tensor:
    """Return the value as a loss whose ``backward()`` calls ``act`` with the gradient of the loss.

    Args:
        parameters: parameters whose gradients must not be requested by ``torch.autograd.grad``.
        part: receives the gradient that ``act`` returns; without a part, ``act`` does the complete backward.
    """
    start = torch.zeros((), device=value.device, requires_grad=part is None or part.requires_grad)
    return cast("Tensor", _Loss.apply(start, part, value, act, *parameters))  # type: ignore[no-untyped-call]


def _check_plain(node: Any, gradient: Tensor) -> None:
    """Check that the ``backward`` of a loss was called without options that change what is computed.

    Args:
        node: the node of the loss in the autograd graph; its first input is a leaf that is used nowhere else.

    Raises:
        UsageError: gradients are requested in a way that would not give those of all ranks.
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
    """Forward returns the value; backward calls ``act`` with its gradient."""

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


_MAKE_SCALER = "scaler = par.grad_scaler()"
SCALER_NUMBERS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
"""The entries of ``GradScaler.state_dict()``."""
_INTEGERS = frozenset({"growth_interval", "_growth_tracker"})


class ParallelScaler(GradScaler):
    """``torch.amp.GradScaler`` for one parallel model: if a gradient of any rank is not finite, all ranks skip the step.

    Its interface and its numbers are those of torch. All ranks must call ``unscale_``, or ``step`` without it, as the ranks exchange one
    number in it. The scaler is disabled until :meth:`make`. The methods before :meth:`scale` serve the steps of the model.

    Args:
        held: the parameters of the model on this rank.
        calls: the calls of the model, to which unscaling belongs.
        group: all ranks, for calls outside of steps; None if there is one rank.

    Attributes:
        is_made: whether the user has called :meth:`make`.
        is_stepping: whether ``step`` is running.
        has_been_asked: whether ``scale`` was called since the last ``update``.
    """

    def __init__(
        self,
        precision: Precision,
        held: Sequence[RankParameter],
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
        """Enable the scaler for a plan in fp16; a state that a checkpoint loaded before applies, as by ``load_state_dict``.

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
        """Return the state that checkpoints keep; None if there is no scale."""
        self._loaded = {name: float(numbers[name]) for name in SCALER_NUMBERS}
        if self.is_enabled():
            self.load_state_dict({name: int(n) if name in _INTEGERS else n for name, n in self._loaded.items()})

    def check(self) -> None:
        """Refuse a step whose gradients would underflow without a scale.

        Raises:
            UsageError: the plan scales the loss, and no scaler was made.
        """
        if self._precision.scales_loss and not self.is_made:
            raise UsageError(
                "Training in float16 needs a scaled loss, as most gradients would be zero without",
                fix=f"Write {_MAKE_SCALER} before the first step, and scaler.step(optimizer) and scaler.update() after each. "
                "Clip after scaler.unscale_(optimizer), and pass enabled=False to train without a scale",
            )

    @property
    def factor(self) -> Tensor | None:
        """The scale of the step's gradients, a scalar in float32; None if they are not scaled."""
        return super().scale(self._one) if self.is_enabled() else None

    def of(self, loss: Tensor) -> Tensor:
        """Return the loss, whose value is unchanged and not rounded again, and whose backward starts from the scale."""
        factor = self.factor
        if factor is not None:
            loss.register_hook(lambda gradient: (gradient * factor).to(gradient.dtype))  # type: ignore[no-untyped-call]
        return loss

    def done(self) -> None:
        """Note after the backward of a step that its gradients are those of the scaled loss."""
        if self.is_enabled():
            self._scaled.update(id(h.parameter) for h in self._held if h.parameter.grad is not None)

    def check_called(self) -> None:
        """Check at the beginning of a backward that the user called that its loss was scaled.

        Raises:
            UsageError: the scaler of this model has not scaled the loss.
        """
        if self.is_enabled() and not self.has_been_asked:
            raise UsageError(
                "This is the backward() of a loss that the scaler of this model has not scaled",
                fix=f"Write {_MAKE_SCALER}, then scaler.scale(loss).backward(), where loss is that of par(**batch) or of step_loss(par, batch)",
            )

    def check_unscaled(self) -> None:
        """Check before an operation on all gradients together that none is scaled any more.

        Raises:
            UsageError: some gradients are still those of the scaled loss.
        """
        first = next((h.key for h in self._held if self._is_scaled(h.parameter)), "")
        if first:
            raise UsageError(
                f"The gradient of {first} is still times the scale of the loss, so it cannot be clipped",
                fix="Call scaler.unscale_(optimizer) before, for every optimizer, and freeze parameters that none steps",
            )

    def check_step(self, optimizer: Optimizer) -> None:
        """Check the gradients before the step of any optimizer.

        Raises:
            UsageError: the step would use gradients of the scaled loss as if they were not scaled.
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
        """As in torch.

        Raises:
            UsageError: ``outputs`` is the loss of a ``train_step``, which is scaled already.
        """
        if self.is_enabled() and isinstance(outputs, StepLoss):
            raise UsageError(
                "The loss of par.train_step(batch) has been scaled already, and its backward pass has run",
                fix="Leave scaler.scale(loss).backward() out, and keep what follows as it is",
            )
        self.has_been_asked = True
        return super().scale(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """As in torch; all ranks call it."""
        super().unscale_(optimizer)
        self._scaled -= {id(p) for group in optimizer.param_groups for p in group["params"]}

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As in torch; all ranks call it, and either all step or none does."""
        self.is_stepping = True
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            self.is_stepping = False
            self._scaled -= {id(p) for group in optimizer.param_groups for p in group["params"]}

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As in torch."""
        self.has_been_asked = False
        super().update(new_scale)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Override how torch unscales gradients and looks for infinities: on local elements, with the findings of all ranks.

        With DTensors torch would ask only the ranks of their mesh, for a list only those of its first tensor, and never other pipeline
        stages. Torch's sharded scaler overrides the same method (``torch.distributed.fsdp.sharded_grad_scaler``).
        """
        lists: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for group in optimizer.param_groups:
            for grad in (p.grad for p in group["params"] if p.grad is not None):
                lists[grad.device, grad.dtype].append(local_part(grad))
        with torch.no_grad(), self._calls.at_once("unscale_", meets=False):  # the reduction synchronises
            for (device, _), grads in lists.items():
                found = found_inf.to(device)
                torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inv_scale.to(device))
                found_inf.copy_(torch.maximum(found_inf, found.to(found_inf.device)))
            if self._group is not None:
                dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=self._group)
        return {found_inf.device: found_inf}


class StepLoss(Tensor):
    """The scalar loss of ``train_step``, without gradient, whose ``backward()`` says why.

    Divided by a number, as in loops that accumulate gradients, it keeps its class. Other results, saved tensors and copies are ordinary
    tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, *_: object, **__: object) -> NoReturn:
        """Refuse the call, which loops contain by habit.

        Raises:
            UsageError: always, as the backward pass has run already.
        """
        raise UsageError(
            "A loss.backward() was called after par.train_step(batch), which has already run the backward pass",
            fix="Leave backward() out (with one pipeline stage, that of the loss of par(**batch) does the same)",
        )

    def __truediv__(self, other: Any) -> Tensor:
        quotient: Tensor = super().__truediv__(other)
        return quotient.as_subclass(StepLoss) if isinstance(other, int | float) else quotient

    def __mul__(self, other: Any) -> Tensor:
        """As of a tensor.

        Raises:
            UsageError: ``torch.amp.GradScaler`` calls it: its ``step`` would divide gradients by a scale that was never applied to them.
                (The scaler of a plan in float16 raises its own error in :meth:`ParallelScaler.scale`.)
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
