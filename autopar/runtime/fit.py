"""A training loop that resumes from the last checkpoint, saves, and ends in a consistent state, also after SIGTERM."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from autopar.errors import NonFiniteError, UsageError, check_counts
from autopar.runtime.checkpoint.series import Checkpoints
from autopar.runtime.checks import check_max_norm, check_model, is_out_of_memory
from autopar.runtime.job import on_sigterm
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.step.gradients import clip
from autopar.runtime.step.runner import Batch

_LOGGER = logging.getLogger("autopar")

_AGREE_EVERY_S = 1.0
"""Seconds, about, between exchanges in which ranks find out whether one was told to end."""

MAX_SKIPPED = 10
"""Steps in a row that may be skipped: after so many, later ones would not be finite either."""

OnNonFinite = Literal["stop", "skip", "ignore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """What a step of the optimizer did.

    ``loss`` is the mean over its batches. ``grad_norm`` is the norm of all gradients before clipping, None if it was not computed.
    ``is_skipped``:
    parameters are unchanged, as ``loss`` or ``grad_norm`` is not finite.
    """

    step: int
    loss: float
    grad_norm: float | None
    learning_rate: float
    is_skipped: bool = False


def fit(  # noqa: PLR0913  keywords of the public call
    par: ParallelModel,
    optimizer: Optimizer,
    batches: Iterable[Batch],
    *,
    steps: int,
    scheduler: Any = None,
    checkpoints: Checkpoints | None = None,
    save_every: int = 1000,
    accumulate: int = 1,
    max_norm: float | None = None,
    on_non_finite: OnNonFinite = "stop",
    on_step: Callable[[StepDone], object] | None = None,
) -> int:
    """Train until the optimizer has made ``steps`` steps, including those of earlier runs; every rank calls it.

    It begins at the newest of ``checkpoints``, and saves every ``save_every`` steps and at the end. So under a launcher that restarts ranks
    (``torchrun --max-restarts``) a job whose ranks die continues from its last checkpoint. If a rank receives SIGTERM, as before a
    preemption, all ranks finish their step, save, and end with exit code 0.

    Args:
        batches: iterated again when they are exhausted. If they have ``state_dict`` and ``load_state_dict``, as ``par.dataloader`` does,
            their position is saved and restored; otherwise as many batches are skipped as were trained on. ``set_epoch(n)`` is called if it
            exists.
        scheduler: stepped after each step of the optimizer that is not skipped.
        accumulate: batches of one step of the optimizer; the gradient is their mean.
        max_norm: the norm to which gradients are clipped.
        on_non_finite: what to do if the loss or the norm of the gradients is infinite or NaN: ``stop`` with an error that names parameters,
            ``skip`` the step (at most :data:`MAX_SKIPPED` in a row), or ``ignore`` it. In fp16 the scaler skips steps by itself.
        on_step: called after each step, on every rank.

    Returns:
        The number of steps made.

    Raises:
        NonFiniteError: see ``on_non_finite``.
        OutOfMemoryError: a device has no memory left; compares what was predicted with what is used.
        UsageError: a number is out of range, ``batches`` is empty, or another loop saved the newest of ``checkpoints``.
    """
    check_counts(steps=steps, save_every=save_every, accumulate=accumulate)
    _check_parts(par, optimizer, batches, scheduler, checkpoints, on_step)
    if max_norm is not None:
        check_max_norm(max_norm)
    if on_non_finite not in get_args(OnNonFinite):
        raise UsageError(f"There is no on_non_finite={on_non_finite!r}", fix="Give stop, skip or ignore")
    loop = _Loop(par, optimizer, batches, scheduler, checkpoints, accumulate, max_norm, on_non_finite)
    loop.resume()
    end_requests = list[bool]()
    with on_sigterm(lambda: end_requests.append(True)):
        while loop.step < steps:
            done = loop.make_step()
            if on_step is not None:
                on_step(done)
            is_last = loop.step == steps
            if loop.step % save_every == 0 or is_last:
                loop.save()
            if not is_last and loop.is_to_end(is_asked=bool(end_requests)):
                loop.save()
                loop.finish()
                if par.is_main_process:
                    _LOGGER.warning("%s", loop.end_message())
                sys.exit(0)
    loop.finish()
    return loop.step


def _check_parts(par: Any, optimizer: Any, batches: Any, scheduler: Any, checkpoints: Any, on_step: Any) -> None:
    """Check what :func:`fit` puts together, before the first step.

    Raises:
        UsageError: one of them is of another kind, or the optimizer is of another model.
    """
    check_model(par, "fit")
    has_step = callable(getattr(scheduler, "step", None)) and not isinstance(scheduler, ReduceLROnPlateau)
    steps_alone = scheduler is None or has_step
    for name, given, is_right, fix in (
        ("optimizer", optimizer, hasattr(optimizer, "param_groups"), "Give one of torch.optim"),
        ("batches", batches, hasattr(batches, "__iter__"), "Give par.dataloader(dataset), or a list of batches"),
        ("scheduler", scheduler, steps_alone, "Give one whose step() takes nothing, or step it in on_step"),
        ("checkpoints", checkpoints, isinstance(checkpoints, Checkpoints | None), "Give autopar.Checkpoints('folder')"),
        ("on_step", on_step, on_step is None or callable(on_step), "Give a function of a StepDone"),
    ):
        if not is_right:
            raise UsageError(f"The {name} of fit is a {type(given).__name__}", fix=fix)
    par._checkpointed.check_optimizer(optimizer)


@dataclass
class _Loop:
    """The arguments and the state of one :func:`fit`."""

    par: ParallelModel
    optimizer: Optimizer
    batches: Iterable[Batch]
    scheduler: Any
    checkpoints: Checkpoints | None
    accumulate: int
    max_norm: float | None
    on_non_finite: OnNonFinite

    def __post_init__(self) -> None:
        self.step, self.saved, self.skipped, self.epoch = 0, 0, 0, 0
        has_state = hasattr(self.batches, "state_dict") and hasattr(self.batches, "load_state_dict")
        self.loader = self.batches if has_state else None
        self.scaler = self.par.grad_scaler() if self.par.plan.precision.scales_loss else None
        self.iterator: Iterator[Batch] | None = None
        self.agreed, self.next_agreement, self.agreed_at = 0, 1, time.monotonic()

    def resume(self) -> None:
        """Continue at the step of the newest checkpoint, if there is one.

        Raises:
            UsageError: another loop saved it, which may count steps and batches differently.
        """
        if self.checkpoints is None:
            return
        if self.checkpoints.load(self.par, self.optimizer, scheduler=self.scheduler, dataloader=self.loader) is None:
            return
        extra = self.checkpoints.extra
        if not isinstance(extra, dict) or "fit" not in extra:
            raise UsageError(
                f"The newest checkpoint in {self.checkpoints.root} was not saved by autopar.fit",
                fix="Name another folder in Checkpoints(...), and call par.load(DIR, optimizer) before fit to begin with that one",
            )
        progress = extra["fit"]
        self.step, self.epoch = int(progress["step"]), int(progress["epoch"])
        self.saved, self.skipped = self.step, int(progress["skipped"])
        self.agreed, self.next_agreement = self.step, self.step + 1
        if self.loader is None:
            self.epoch = 0
            for _ in range(self.step * self.accumulate):
                self.next_batch()
        if self.par.is_main_process:
            _LOGGER.info("training goes on at step %d", self.step)

    def next_batch(self) -> Batch:
        """Return the next batch; begins the next epoch if the current one is exhausted."""
        for _ in range(2):
            if self.iterator is None:
                if callable(set_epoch := getattr(self.batches, "set_epoch", None)):
                    set_epoch(self.epoch)
                self.iterator = iter(self.batches)
            for batch in self.iterator:
                return batch
            self.iterator, self.epoch = None, self.epoch + 1
        raise UsageError("There is no batch to train on", fix="Give batches that can be gone through more than once")

    def make_step(self) -> StepDone:
        """Make one step of the optimizer."""
        try:
            return self._make_step()
        except Exception as error:
            if is_out_of_memory(error):
                raise self.par._memory_report.error() from error
            raise

    def _make_step(self) -> StepDone:
        par, optimizer = self.par, self.optimizer
        losses = [par.train_step(self.next_batch()) for _ in range(self.accumulate)]
        if self.accumulate > 1:
            for parameter in par.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self.accumulate)
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        norm = None
        if self.max_norm is not None or (self.on_non_finite != "ignore" and self.scaler is None):
            norm = par.grad_norm()
        loss = sum(value.item() for value in losses) / self.accumulate
        grad_norm = None if norm is None else norm.item()
        is_skipped = self._is_to_skip(loss, grad_norm)
        if norm is not None and self.max_norm is not None and not is_skipped:
            clip(par._assembly.held, norm, self.max_norm)
        rate = float(optimizer.param_groups[0]["lr"]) if optimizer.param_groups else 0.0
        if self.scaler is not None:
            scale = self.scaler.get_scale()
            self.scaler.step(optimizer)
            self.scaler.update()
            is_skipped = self.scaler.get_scale() < scale
        elif not is_skipped:
            optimizer.step()
        optimizer.zero_grad()
        if self.scheduler is not None and not is_skipped:
            self.scheduler.step()
        self.step += 1
        return StepDone(step=self.step, loss=loss, grad_norm=grad_norm, learning_rate=rate, is_skipped=is_skipped)

    def _is_to_skip(self, loss: float, norm: float | None) -> bool:
        """Return whether to leave parameters unchanged. The answer is the same on all ranks, as the loss and the norm are.

        Raises:
            NonFiniteError: training has to stop.
        """
        if self.on_non_finite == "ignore" or self.scaler is not None:
            return False
        if math.isfinite(loss) and (norm is None or math.isfinite(norm)):
            self.skipped = 0
            return False
        self.skipped += 1
        if self.on_non_finite == "skip" and self.skipped <= MAX_SKIPPED:
            if self.par.is_main_process:
                _LOGGER.warning(
                    "step %d is skipped: the loss is %g, the norm of its gradients %s", self.step + 1, loss, norm
                )
            return True
        named = _non_finite_gradients(self.par)
        count = f" in {self.skipped} steps in a row" if self.on_non_finite == "skip" else ""
        raise NonFiniteError(
            f"The loss or a gradient is not finite{count}, at step {self.step + 1}",
            got=f"a loss of {loss:g}, "
            + (f"no finite gradient of {', '.join(named)}" if named else "finite gradients"),
            fix=("Parameters are those of the step before. " if self.on_non_finite == "stop" else "")
            + 'Lower the learning rate, clip by max_norm=, or leave such steps out by on_non_finite="skip"',
        )

    def is_to_end(self, *, is_asked: bool) -> bool:
        """Return whether any rank was told to end. The answer is the same on all ranks, which exchange theirs about once a second."""
        if self.step < self.next_agreement:
            return False
        step_time_s = (time.monotonic() - self.agreed_at) / max(self.step - self.agreed, 1)
        with self.par._calls.at_once("largest", meets=False):
            of_ranks = self.par._checkpointed.peers.all_gather((is_asked, step_time_s))
        is_any_asked, slowest_s = map(max, zip(*of_ranks, strict=True))
        self.agreed, self.agreed_at = self.step, time.monotonic()
        self.next_agreement = self.step + max(1, int(_AGREE_EVERY_S / max(slowest_s, 1e-3)))
        return bool(is_any_asked)

    def save(self) -> None:
        """Save a checkpoint of this step, unless there is one."""
        if self.checkpoints is None or self.saved == self.step:
            return
        state = {"fit": {"step": self.step, "epoch": self.epoch, "skipped": self.skipped}}
        self.checkpoints.save(self.par, self.optimizer, scheduler=self.scheduler, dataloader=self.loader, extra=state)
        self.saved = self.step

    def finish(self) -> None:
        """Wait until all checkpoints are written."""
        if self.checkpoints is not None:
            self.checkpoints.wait()

    def end_message(self) -> str:
        """Return the message at an end before the last step."""
        if self.checkpoints is None:
            return f"SIGTERM: training ends after step {self.step}. Nothing is saved, as fit was given no checkpoints"
        return f"SIGTERM: training ends after step {self.step}, which is saved in {self.checkpoints.root}; a new start goes on there"


def _non_finite_gradients(par: ParallelModel) -> list[str]:
    """Name parameters with infinite or NaN gradients, up to three from each rank; the same on every rank, all of which call it."""
    here = [h.key for h in par._assembly.held if h.gradient is not None and not bool(h.gradient.isfinite().all())]
    with par._calls.at_once("non_finite_gradients"):
        of_ranks = par._checkpointed.peers.all_gather(here[:3])
    return sorted({name for names in of_ranks for name in names})
