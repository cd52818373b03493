"""Steps, evaluations and predictions of a parallel model: the methods by which all ranks compute together."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from autopar.errors import UsageError, check_flags
from autopar.lower.program import Program
from autopar.runtime import checks
from autopar.runtime.assemble import Assembly, assemble, forget_gathered, uses_fsdp
from autopar.runtime.failure_watch import Alarm, Calls, launched_on, ordinary
from autopar.runtime.local_optimizer import LocalSteps
from autopar.runtime.model_outputs import ModelOutputs
from autopar.runtime.module import Given, PlannedModule
from autopar.runtime.monitor import Monitor
from autopar.runtime.same_values import Replicas
from autopar.runtime.state_dict import State
from autopar.runtime.step.global_loss import GlobalLoss, ParallelScaler, StepLoss
from autopar.runtime.step.gradients import Norm, clip, refuse_clipping, unshare_gradients
from autopar.runtime.step.local_batch import Batches, SharedSamples
from autopar.runtime.step.other_runs import BatchSplit
from autopar.runtime.step.runner import Accumulation, Batch, Pipeline, StepGradients, micro_batches
from autopar.runtime.weights import ModelWeights
from autopar.runtime.world import World
from autopar.tracing.batch import positional, with_names

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _not_compiled(method: _Method) -> _Method:
    """Exclude a method from ``torch.compile``, which would compile its counters and random seeds as constants."""
    reason = "steps are programs that a plan has made, with collectives between them"
    return cast("_Method", torch.compiler.disable(method, reason=reason))  # type: ignore[no-untyped-call]


class TrainedModule(PlannedModule):
    """A module that runs the stages of one rank; every rank of the job makes one and calls the same methods.

    The methods check their arguments, keep ranks together (:class:`~autopar.runtime.failure_watch.Calls`) and call the parts of the runtime
    that do the work.

    Attributes:
        seed, step_count: see :class:`~autopar.runtime.parallel_model.ParallelModel`.
        monitor: compares the first steps with the plan's prediction.

    Raises:
        RuntimeMismatchError: the plan's precision can be planned, but not run.
    """

    def __init__(
        self, program: Program, world: World, weights: ModelWeights, *, seed: int, log_dir: Path | None
    ) -> None:
        checks.check_can_run(program.plan.precision)
        super().__init__(program.plan, world)
        self._program = program
        self.monitor = Monitor(program.plan, world, log_dir=log_dir)
        self._assembly: Assembly = assemble(program, world, weights)
        self.seed, self.step_count = seed, 0
        held, stages = self._assembly.held, self._assembly.stages
        self._parameter_checks = checks.Parameters(held)
        self._gradients = StepGradients(self._assembly, program, self.monitor, world.host_group())
        self._loss = GlobalLoss(self.plan, world, self.monitor)
        self._norm = Norm(held, world.sums_group(), world.device, self._loss.dtype)
        self._replicas = Replicas(held, world)
        recovers, launched = not uses_fsdp(self.plan), launched_on(world.device)
        self._alarm = Alarm(world.rank, self.plan.mesh.world_size, recovers=recovers, launched=launched)
        weakref.finalize(self, self._alarm.close)
        self._calls = Calls(world, self._alarm, world.meeting_group(), self._gradients)
        # no attribute refers back to self, so that an unused model is freed at once, with its hooks
        self._shared = SharedSamples(world, program.graph.inputs, self._alarm, held)
        self._batches = Batches(program, world, self._shared, self._calls)
        self._scaler = scaler = ParallelScaler(self.plan.precision, held, self._calls, self._norm.group, world.device)
        self._changing_buffers = State(program, world, weights, stages)
        inputs, has_one_stage = program.graph.inputs, len(program.stages) == 1
        self._accumulation = Accumulation(stages[0], self.plan, inputs, scaler.of) if has_one_stage else None
        self._runner = self._accumulation or Pipeline(stages, program, world, self.monitor, scaler.of)
        self._original = Given(weights.model)
        self._local_steps = LocalSteps(
            (h.parameter for h in held),
            on_host="optimizer" in self.plan.offload,
            is_staged=self.plan.mesh.pp > 1,
            parts=((h.parameter, h.key, h.padding is not None) for h in held if h.key.endswith("]") or h.padding),
            check=scaler.check_step,
            check_other=self._original.check_optimizer,
            timed=self.monitor.optimizer_step,
            threads=world.host_threads() if "optimizer" in self.plan.offload else None,
        )
        weakref.finalize(self, self._local_steps.remove)
        self._memory_report = self._calls.memory = checks.MemoryReport(self.plan, world, held, self._local_steps)
        self._evaluates = False  # as far as was checked
        self._num_evaluations = 0
        self._names_of_inputs = positional(weights.model)
        self._outputs = ModelOutputs(program, world, weights, stages, held)
        if self.plan.mesh.pp > 1 or self.plan.mesh.ep_data > 1:
            refuse_clipping(h.parameter for h in held)
        self._show(held)
        self._show_buffers(self._changing_buffers.named())

    @_not_compiled
    def train_step(self, batch: Batch) -> Tensor:
        """Run forward and backward of one step, which adds gradients to those that the parameters have.

        In fp16 they are those of the loss times the scale, until :meth:`grad_scaler` has unscaled them.

        Args:
            batch: the inputs by name (lists and dicts of tensors as the model takes them), with the global batch (the same on every rank,
                of which each takes its part) or only this rank's samples. Floating inputs are cast to the plan's compute dtype.

        Returns:
            The loss of the global batch, a scalar, the same on every rank.

        Raises:
            UsageError: the batch has other inputs or another size than the plan, or an input that requires a gradient; ranks that share
                samples were given different ones (checked in the first step, and rarely later); autocast is on, or gradients are off.
            RankFailedError: another rank failed (see :mod:`autopar.runtime.failure_watch`).
        """
        with self._calls.together("train_step"):
            if not self.training:
                raise UsageError(
                    "A training step was asked for in par.eval()",
                    fix="Call par.train() before par.train_step(batch). par.evaluate(batch) has no dropout in either mode",
                )
            return self._train_step(batch).as_subclass(StepLoss)

    def _train_step(self, batch: Batch) -> Tensor:
        """Return the step itself, inside the context of all ranks; return the loss of the global batch."""
        checks.check_modes(self.plan, self._world.device, learns=True)
        self._scaler.check()
        self._local_steps.restore()
        split = self._begin_step(batch, "train_step")
        local = self._batches.local(batch, split)
        self._begin_forward(local, split)
        self._gradients.begin(len(split.micro_batches))
        loss = self._runner.run(local, len(split.micro_batches))
        self._gradients.finish()
        self._scaler.done()
        self._commit()
        self.step_count += 1
        total = self._loss.of(loss)
        self.monitor.end_step()
        return total

    @_not_compiled
    def evaluate(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, as :meth:`train_step` takes it, without gradients and as in ``eval()``; all ranks call it.

        Dropout is off, batch norms read their running statistics, and what only training does is left out
        (:mod:`autopar.tracing.in_eval`). Random numbers that ``eval()`` draws as well are new at each evaluation. Parameters, gradients,
        buffers and counters do not change. Opaque regions, which run as written, are in ``eval()``.

        Raises:
            UsageError: the batch does not fit the plan; in ``eval()`` the model calls operators that training does not, or changes buffers.
        """
        with ordinary(), self._calls.together("evaluate"):
            self._calls.meet("evaluate")
            return self._loss.of(self._evaluation_forward(batch, "evaluate")[0])

    def _evaluation_forward(self, batch: Batch, purpose: str) -> tuple[Tensor | None, BatchSplit]:
        """Return this rank's part of the loss (None if its stages do not compute it), with all stages in ``eval()`` meanwhile."""
        if not self._evaluates:
            checks.check_evaluates(self._program)
            self._evaluates = True
        checks.check_modes(self.plan, self._world.device, learns=False)
        self._local_steps.restore()
        stages = self._assembly.stages
        with torch.no_grad():
            split = self._batches.split(batch, purpose)
            local = self._batches.local(batch, split)
        try:
            for stage in stages:
                stage.eval()
            self._num_evaluations += 1
            self._begin_forward(local, split, evaluation=self._num_evaluations)
            return self._runner.evaluate(local, len(split.micro_batches)), split
        finally:
            for stage in stages:
                stage.train()

    @_not_compiled
    def predict(self, batch: Batch, *, gather: bool = True) -> Any:
        """Return the output of the model for a batch as in ``eval()``, without gradients, under any plan; all ranks call it.

        Parameters, gradients, buffers, counters and ``training`` do not change.

        Args:
            batch: as for :meth:`evaluate`. Inputs that only the loss needs (labels) may be left out: then the loss is None.
            gather: whether tensors are complete for the batch that was given: the global batch, on every rank, or this rank's samples. If
                not, tensors of the global batch stay split, as DTensors on the plan's mesh.

        Returns:
            The model's own structure, with the loss of the global batch if the model returns one. Anything in it but tensors and plain
            values is None, such as caches.

        Raises:
            UsageError: as :meth:`evaluate`.
        """
        with ordinary(), self._calls.together("predict"):
            check_flags(gather=gather)
            self._calls.meet("predict")
            full, missing = self._outputs.filled(batch)
            if self._outputs.is_loss_alone:
                return self._loss.of(self._evaluation_forward(full, "predict")[0])
            with self._outputs.taking():
                loss, split = self._evaluation_forward(full, "predict")
                total = self._loss.of(loss)
                given = None if missing else total
                return self._outputs.made(batch, split, loss=given, missing=missing, gather=gather)

    @_not_compiled
    def forward(self, *given: Any, **batch: Any) -> Any:
        """Return the result of ``par(**batch)``: the output of the model. After ``par.eval()`` it is :meth:`predict`, under any plan.

        In training its loss is that of the global batch, whose ``backward()`` leaves summed gradients. This requires a plan of one pipeline
        stage; others have :meth:`train_step`. Activations of all micro-batches are kept until backward, unlike in :meth:`train_step`. Other
        tensors have no gradient. They are DTensors if this rank does not have all of one for the samples that it was given. If ``loss_fn``
        computes the loss, the result is the loss.

        Raises:
            UsageError: the model is in training and the plan has several pipeline stages; the batch does not fit the plan, or has no names.
        """
        batch = with_names(given, batch, self._names_of_inputs)
        if not self.training:
            return self.predict(batch)
        with ordinary(), self._calls.together("call"):
            if not torch.is_grad_enabled():
                self._calls.meet("call without gradients")
            if self._outputs.is_loss_alone or not self._outputs.has_loss:
                return self._called_loss(batch)[0]
            with self._outputs.taking():
                loss, split = self._called_loss(batch)
                return self._outputs.made(batch, split, loss=loss, gather=False, communicates=False)

    def _called_loss(self, batch: Batch) -> tuple[Tensor, BatchSplit]:
        """Return the loss of the global batch, whose backward the user calls; if gradients are on, a step begins here and ends with it."""
        if self._accumulation is None:
            raise UsageError(
                f"A model of {len(self._program.stages)} pipeline stages cannot be called in training: forward and backward run together",
                fix="Replace `loss = par(**batch); loss.backward()` by `loss = par.train_step(batch)`, or the call by "
                "autopar.integrations.loss.step_loss(par, batch). par.predict(batch) has the outputs",
            )
        checks.check_modes(self.plan, self._world.device, learns=False)
        if torch.is_grad_enabled():
            self._scaler.check()
            split = self._begin_step(batch, "call")
        else:
            split = self._batches.split(batch, "call")
        local = self._batches.local(batch, split)
        count = len(split.micro_batches)
        self._begin_forward(local, split)
        parts = micro_batches(local, self._program.graph.inputs, count)
        losses = [self._accumulation.forward(part, number) for number, part in enumerate(parts)]
        loss = losses[0] if count == 1 else torch.stack(losses).sum()
        self._commit()
        if loss.requires_grad:
            self.step_count += 1
        begin = functools.partial(self._begin_backward, self._parameter_checks.versions())
        return self._loss.called(loss, begin, self._finish_backward, self.parameters()), split

    def grad_scaler(self, **options: Any) -> ParallelScaler:
        """Return the ``torch.amp.GradScaler`` of this model, made once; it is disabled unless the plan is in fp16.

        It differs from torch's in two ways. All ranks skip a step if a gradient of any rank is not finite. :meth:`train_step` scales its
        loss by itself, so ``scaler.scale(...)`` is only for the loss of ``par(**batch)``. As usual, call ``scaler.unscale_(optimizer)``
        before :meth:`clip_grad_norm_`, ``scaler.step(optimizer)`` and ``scaler.update()``. :meth:`save` and :meth:`load` keep its state.

        Args:
            options: of ``torch.amp.GradScaler``: ``init_scale`` (65536), ``growth_factor`` (2), ``backoff_factor`` (0.5),
                ``growth_interval`` (2000), ``enabled``.

        Raises:
            UsageError: there is one already.
        """
        return self._scaler.make(**options)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their 2-norm over the complete model is at most ``max_norm``; return the norm.

        Torch's function of this name computes the norm of one rank's parameters: with pipeline stages, or experts split over data ranks,
        ranks would scale by different norms.

        Raises:
            UsageError: gradients are still those of a scaled loss, or the norm is no number from 0 or another than the 2-norm.
        """
        checks.check_max_norm(max_norm)
        if norm_type != 2:
            raise UsageError.unsupported(
                f"A clipping by norm_type={norm_type!r}", instead="Leave it out for the 2-norm"
            )
        norm = self._norm_of("clip_grad_norm_")
        clip(self._assembly.held, norm, max_norm)
        return norm

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of all gradients of the model, a scalar, the same on every rank; all ranks call it.

        Raises:
            UsageError: gradients are still those of a scaled loss.
        """
        return self._norm_of("grad_norm")

    def _norm_of(self, call: str) -> Tensor:
        """Return the norm of all gradients, for a call of this name."""
        self._scaler.check_unscaled()
        with self._calls.at_once(call, meets=False):  # the norm's sum synchronises the ranks
            return self._norm()

    # --- inside a step

    def _commit(self) -> None:
        """Give the buffers that a step changes their new values, after its last micro-batch."""
        self._changing_buffers.commit()
        self._show_buffers(self._changing_buffers.named())

    def _begin_forward(self, local: Batch, split: BatchSplit, *, evaluation: int = 0) -> None:
        """Check parameters, compute totals of the global batch and set the random streams, before the first micro-batch.

        Args:
            evaluation: the number of the evaluation, which draws from a stream of its own; 0 in training.
        """
        self._parameter_checks.check()
        self._original.check(self.step_count)
        self._alarm.runs()
        self._replicas.check(self.step_count)
        totals = self._batches.totals(local, split, self._changing_buffers.values)
        number = -evaluation if evaluation else self.step_count
        first_seed = (self.seed * 1_000_003 + number) * (self.plan.num_micro_batches + 1)
        for stage in self._assembly.stages:
            forget_gathered(stage)
            stage.totals, stage.seed = totals, first_seed  # each micro-batch adds its number to the seed
            stage.share, stage.weights = split.share, split.weights

    def _begin_backward(self, versions: Sequence[int]) -> None:
        """Begin a backward that the user called on a loss of :meth:`forward`, at which parameters had these versions."""
        self._scaler.check_called()
        self._parameter_checks.check_unwritten(versions)
        if not self._gradients.is_open:
            self._alarm.begin("backward")
        self._gradients.begin(1)

    def _finish_backward(self) -> None:
        """End a backward that the user called, and with it the step."""
        for stage in self._assembly.stages:
            unshare_gradients(stage.parameters())
        self._gradients.finish()
        self._scaler.done()
        self._alarm.end()
        self.monitor.end_step()

    def _begin_step(self, batch: Batch, purpose: str) -> BatchSplit:
        """Begin a step with gradients; return how its batch is computed.

        Only steps of the plan's size are timed, as the prediction is of these.
        """
        split = self._batches.split(batch, purpose)
        self.monitor.begin_step(is_timed=split.is_full)
        return split
