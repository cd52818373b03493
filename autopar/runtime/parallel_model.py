"""A model that trains in parallel: the class of the result of ``autopar.parallelize``."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from autopar.errors import AutoparError, UsageError
from autopar.lower.program import Program
from autopar.runtime.assemble import Assembly, assemble, forget_gathered, uses_fsdp
from autopar.runtime.checkpoint.export import Export, ModelFacts
from autopar.runtime.checkpoint.series import EXTRA, LOADER, SCHEDULER, CallerStates, Checkpointed
from autopar.runtime.checkpoint.write import Save
from autopar.runtime.checks import (
    MemoryReport,
    Parameters,
    check_can_run,
    check_evaluates,
    check_max_norm,
    check_modes,
    unknown_in_eval,
)
from autopar.runtime.failure_watch import Alarm, Calls, launched_on, ordinary
from autopar.runtime.local_optimizer import LocalSteps
from autopar.runtime.model_outputs import ModelOutputs
from autopar.runtime.module import Given, PlannedModule
from autopar.runtime.monitor import Monitor
from autopar.runtime.same_values import Replicas
from autopar.runtime.state_dict import EXTRA_STATE, ModuleState, State, Untrained, full_state_dict, names_of
from autopar.runtime.step.global_loss import SCALER_NUMBERS, GlobalLoss, ParallelScaler, StepLoss
from autopar.runtime.step.gradients import Norm, clip, refuse_clipping
from autopar.runtime.step.local_batch import Batches, SharedSamples
from autopar.runtime.step.other_runs import PartialBatch, partial_of
from autopar.runtime.step.runner import Accumulation, Batch, Pipeline, StepGradients, micro_batches
from autopar.runtime.weights import ModelWeights
from autopar.runtime.world import World
from autopar.tracing.batch import positional, with_names
from autopar.util.files import check_places

if TYPE_CHECKING:
    from autopar.runtime.data import PlannedLoader

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _not_compiled(method: _Method) -> _Method:
    """Exclude a method from ``torch.compile``, which would compile its counters and random seeds as constants."""
    reason = "steps are programs that a plan has made, with collectives between them"
    return cast("_Method", torch.compiler.disable(method, reason=reason))  # type: ignore[no-untyped-call]


class ParallelModel(PlannedModule):
    """One rank's part of a model under a plan; every rank of the job makes one and calls the same methods.

    It is a ``torch.nn.Module``; :mod:`autopar.runtime.module` says how it differs from others. The methods here check their arguments, keep
    ranks together (:class:`~autopar.runtime.failure_watch.Calls`) and call the parts of the runtime that do the work.

    Attributes:
        plan: the plan that it executes.
        data_rank, data_size: the part of the global batch that this rank takes, and the number of parts; for samplers.
        samples: the samples of the global batch in this part, ``samples.start`` to ``samples.stop - 1``.
        step_count: training steps done; it determines the random streams, together with ``seed``.
        monitor: compares the first steps with the plan's prediction.

    Args:
        log_dir: the folder of the log of :class:`~autopar.runtime.monitor.Monitor`; None for no log.

    Raises:
        RuntimeMismatchError: the plan's precision can be planned, but not run.
    """

    def __init__(
        self, program: Program, world: World, weights: ModelWeights, *, seed: int = 0, log_dir: Path | None = None
    ) -> None:
        check_can_run(program.plan.precision)
        super().__init__(program.plan, world)
        self._program = program
        self.monitor = Monitor(program.plan, world, log_dir=log_dir)
        self._assembly: Assembly = assemble(program, world, weights)
        self.seed, self.step_count = seed, 0
        self.data_rank, self.data_size = world.data_index, self.plan.mesh.data
        self.samples = self.plan.samples_of(self.data_rank)
        self._shared = SharedSamples(world, program.graph.inputs)
        held = self._assembly.held
        self._parameter_checks = Parameters(held)
        self._gradients = StepGradients(self._assembly, self.plan, self.monitor, program.graph.without_gradient())
        self._loss = GlobalLoss(self.plan, world, self.monitor)
        self._norm = Norm(held, world.sums_group(), world.device, self._loss.dtype)
        self._replicas = Replicas(held, world, self._norm.group)
        recovers, launched = not uses_fsdp(self.plan), launched_on(world.device)
        self._alarm = Alarm(world.rank, self.plan.mesh.world_size, recovers=recovers, launched=launched)
        weakref.finalize(self, self._alarm.close)
        self._calls = Calls(world, self._alarm, world.meeting_group(), self._gradients)
        # no attribute refers back to self, so that an unused model is freed at once, with its hooks
        self._batches = Batches(program, world, self._shared, self._alarm, self._calls)
        self._scaler = scaler = ParallelScaler(self.plan.precision, held, self._calls, self._norm.group, world.device)
        stages = self._assembly.stages
        self._changing_buffers = State(program, world, weights, stages)
        self._untrained = Untrained(program, world, weights)
        self._facts = ModelFacts.of(weights.model)
        self._checkpointed = Checkpointed(self.plan, world, held, self._changing_buffers, self._untrained)
        inputs, has_one_stage = program.graph.inputs, len(program.stages) == 1
        self._accumulation = Accumulation(stages[0], self.plan, inputs, scaler.of) if has_one_stage else None
        self._runner = self._accumulation or Pipeline(stages, program, world, self.monitor, scaler.of)
        self._local_steps = LocalSteps(
            (h.parameter for h in held),
            on_host="optimizer" in self.plan.offload,
            is_staged=self.plan.mesh.pp > 1,
            parts=((h.parameter, h.key) for h in held if h.key.endswith("]")),
            check=scaler.check_step,
            threads=world.host_threads() if "optimizer" in self.plan.offload else None,
        )
        weakref.finalize(self, self._local_steps.remove)
        self._memory_report = self._calls.memory = MemoryReport(self.plan, world, held, self._local_steps)
        self._original = Given(weights.model)
        self._unknown_in_eval = unknown_in_eval(program, weights.model)
        weakref.finalize(self, self._original.remove)
        self._module_state = ModuleState(program.graph.parameters, names_of(weights.model), held)
        self._names_of_inputs = positional(weights.model)
        self._outputs = ModelOutputs(program, world, weights, stages, held)
        if self.plan.mesh.pp > 1 or self.plan.mesh.ep_data > 1:
            refuse_clipping(h.parameter for h in held)
        self._show(held)
        self._show_buffers(self._changing_buffers.named())
        self.monitor.holds(p for h in held for p in (h.parameter, self._local_steps.plain(h.parameter)))

    @property
    def original_model(self) -> nn.Module | None:
        """The model that was given to ``autopar.parallelize``, while it exists; it has the config and the signature of forward."""
        return self._original.model

    # --- parameters

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the complete state dict of the model, on every rank's CPU: ``model.load_state_dict(par.full_state_dict())``.

        All ranks call it. Parameters that the loss does not use and buffers that no step changes are as they were given.

        It is for models that fit one rank; others are saved by :meth:`save` and :meth:`save_pretrained`.
        """
        self._original.knows_weights()
        with self._calls.at_once("full_state_dict"):
            self._parameter_checks.check_memory()
            buffers = self._changing_buffers.named(self._changing_buffers.own)
            trained = full_state_dict(self._program, self._world, self._assembly.held, buffers)
            return self._untrained.completed(trained, self._checkpointed.meeting.all_gather)

    def full_gradients(self) -> dict[str, Tensor]:
        """Return all gradients, complete, on every rank's CPU; of a scaled loss until they are unscaled. All ranks call it."""
        with self._calls.at_once("full_gradients"):
            return full_state_dict(self._program, self._world, self._assembly.held, gradients=True)

    # --- steps

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
        check_modes(self.plan, self._world.device, learns=True)
        self._scaler.check()
        self._local_steps.restore()
        partial = self._begin_step(batch, "train_step")
        local = self._batches.local(batch, partial)
        self._begin_forward(local, partial)
        self._gradients.begin(self._batches.count(partial))
        loss = self._runner.run(local, self._batches.count(partial))
        self._gradients.finish()
        self._scaler.done()
        self._commit()
        self.step_count += 1
        total = self._loss.of(loss)
        self.monitor.end_step()
        return total

    @_not_compiled
    def evaluate(self, batch: Batch) -> Tensor:
        """Return the loss of a batch, as :meth:`train_step` takes it, without gradients and dropout; all ranks call it.

        Batch norms read their running statistics. Parameters, gradients, buffers and counters do not change. Opaque regions, which run as
        written, are in ``eval()``. A plan does not know what else a model does only in ``eval()``, as it was traced in training.

        Raises:
            UsageError: the batch does not fit the plan; the model draws random numbers other than dropout, or training changes buffers that
                are no running statistics of a torch ``BatchNorm``.
        """
        with ordinary(), self._calls.together("evaluate"):
            self._calls.meet("evaluate")
            return self._loss.of(self._evaluation_forward(batch, "evaluate")[0])

    def _evaluation_forward(self, batch: Batch, purpose: str) -> tuple[Tensor | None, PartialBatch | None]:
        """Return this rank's part of the loss (None if its stages do not compute it), with all stages in ``eval()`` meanwhile."""
        check_evaluates(self._program, self._unknown_in_eval)
        check_modes(self.plan, self._world.device, learns=False)
        self._local_steps.restore()
        stages = self._assembly.stages
        with torch.no_grad():
            partial = self._batches.partial(batch, purpose)
            local = self._batches.local(batch, partial)
        try:
            for stage in stages:
                stage.eval()
            self._begin_forward(local, partial)
            return self._runner.evaluate(local, self._batches.count(partial)), partial
        finally:
            for stage in stages:
                stage.train()

    @_not_compiled
    def predict(self, batch: Batch, *, gather: bool = True) -> Any:
        """Return the output of the model for a batch, without gradients and dropout, under any plan; all ranks call it.

        Batch norms read their running statistics. Parameters, gradients, buffers, counters and ``training`` do not change.

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
            self._calls.meet("predict")
            return self._predict(batch, gather=gather)

    def _predict(self, batch: Batch, *, gather: bool) -> Any:
        """Return the prediction itself, inside the context of all ranks."""
        full, missing = self._outputs.filled(batch)
        if self._outputs.is_loss_alone:
            return self._loss.of(self._evaluation_forward(full, "predict")[0])
        with self._outputs.taking():
            loss, partial = self._evaluation_forward(full, "predict")
            total = self._loss.of(loss)
            given = None if missing else total
            return self._outputs.made(batch, partial, loss=given, missing=missing, gather=gather)

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
            return self._call(batch)

    def _call(self, batch: Batch) -> Any:
        """Return the output of the model in training, inside the context of all ranks."""
        if self._outputs.is_loss_alone or not self._outputs.has_loss:
            return self._called_loss(batch)[0]
        with self._outputs.taking():
            loss, partial = self._called_loss(batch)
            return self._outputs.made(batch, partial, loss=loss, gather=False, communicates=False)

    def _called_loss(self, batch: Batch) -> tuple[Tensor, PartialBatch | None]:
        """Return the loss of the global batch, whose backward the user calls; if gradients are on, a step begins here and ends with it."""
        if self._accumulation is None:
            raise UsageError(
                f"A model of {len(self._program.stages)} pipeline stages cannot be called in training: forward and backward run together",
                fix="Replace `loss = par(**batch); loss.backward()` by `loss = par.train_step(batch)`, or the call by "
                "autopar.integrations.loss.step_loss(par, batch). par.predict(batch) has the outputs",
            )
        check_modes(self.plan, self._world.device, learns=False)
        if torch.is_grad_enabled():
            self._scaler.check()
            partial = self._begin_step(batch, "call")
        else:
            partial = self._batches.partial(batch, "call")
        local = self._batches.local(batch, partial)
        count = self._batches.count(partial)
        self._begin_forward(local, partial)
        parts = micro_batches(local, self._program.graph.inputs, count)
        losses = [self._accumulation.forward(part, number) for number, part in enumerate(parts)]
        loss = losses[0] if count == 1 else torch.stack(losses).sum()
        self._commit()
        if loss.requires_grad:
            self.step_count += 1
        return self._loss.called(loss, self._begin_backward, self._finish_backward, self.parameters()), partial

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

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their 2-norm over the complete model is at most ``max_norm``; return the norm.

        Torch's function of this name computes the norm of one rank's parameters: with pipeline stages, or experts split over data ranks,
        ranks would scale by different norms.

        Raises:
            UsageError: gradients are still those of a scaled loss, or the norm is no number from 0.
        """
        check_max_norm(max_norm)
        norm = self._norm_of("clip_grad_norm_")
        clip(self._assembly.held, norm, max_norm)
        return norm

    def grad_norm(self) -> Tensor:
        """Return the 2-norm of all gradients of the model, a scalar, the same on every rank; all ranks call it.

        Raises:
            UsageError: gradients are still those of a scaled loss.
        """
        return self._norm_of("grad_norm")

    def scale_gradients_(self, norm: Tensor, max_norm: float) -> None:
        """Do the scaling of :meth:`clip_grad_norm_`, given the norm."""
        clip(self._assembly.held, norm, max_norm)

    def _norm_of(self, call: str) -> Tensor:
        """Return the norm of all gradients, for a call of this name."""
        self._scaler.check_unscaled()
        with self._calls.at_once(call, meets=False):  # the norm's sum synchronises the ranks
            return self._norm()

    def non_finite_gradients(self) -> list[str]:
        """Name of parameters with infinite or NaN gradients, up to three from each rank; the same on every rank, all of which call it."""
        own = [h.key for h in self._assembly.held if h.gradient is not None and not bool(h.gradient.isfinite().all())]
        with self._calls.at_once("non_finite_gradients"):
            found = self._checkpointed.meeting.all_gather(own[:3])
        return sorted({name for names in found for name in names})

    def largest(self, *values: float) -> list[float]:
        """For each number the largest of all ranks; the same on every rank, all of which call it."""
        with self._calls.at_once("largest", meets=False):
            return [max(found) for found in zip(*self._checkpointed.meeting.all_gather(values), strict=True)]

    def memory_error(self, error: BaseException) -> AutoparError:
        """Return the error to raise in place of torch's out-of-memory error; it compares what was predicted with what is used."""
        return self._memory_report.error()

    def dataloader(self, dataset: Dataset[Any], **options: Any) -> PlannedLoader:
        """Return a ``torchdata.stateful_dataloader.StatefulDataLoader`` that gives each rank its part of global batches.

        Ranks that share samples load the same ones. Every rank loads all of a batch smaller than the plan's (the last of an epoch), as
        steps require. All ranks give the same options.

        Args:
            dataset: a data set with a length and indices, or a stream, which iterates over samples in the same order on each rank.
            options: ``batch_size`` (of the global batch; the plan's, or smaller), ``shuffle`` (True), ``seed`` (0; not for a stream, as
                shuffle), ``drop_last`` (False), and those of torch's ``DataLoader``, such as ``collate_fn`` and ``num_workers``.

        Raises:
            UsageError: torchdata is missing, or the batches cannot be computed (in training, or in evaluation after ``par.eval()``).
        """
        from autopar.runtime.data import planned_loader

        check = functools.partial(partial_of, self._program, data_rank=self.data_rank, trains=self.training)
        return planned_loader(self.plan, self.data_rank, dataset, check_smaller=check, **options)

    # --- checkpoints

    def save(
        self,
        path: str | Path,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Any = None,
        dataloader: Any = None,
        extra: Any = None,
    ) -> None:
        """Write a checkpoint, from which any plan can continue; it replaces an existing one completely or not at all. All ranks call it.

        It has the complete model, the optimizer, the scaler, seed and step, the plan, the random states of Python, numpy, torch and CUDA on
        each rank, and the other arguments. Every rank writes its share; no file is a pickle.

        Args:
            scheduler, dataloader: an object, or a list of objects, with ``state_dict`` and ``load_state_dict``, whose states have numbers,
                texts, tensors and containers of them.
            extra: such a value, from rank 0; :meth:`load` returns it.

        Raises:
            UsageError: the folder cannot be written, or a state cannot be saved; raised on all ranks. An existing checkpoint is unchanged.
        """
        with self._calls.at_once("save"):
            given = {SCHEDULER: scheduler, LOADER: dataloader, EXTRA: extra}
            save = self._begin_save(path, optimizer, given)
            save.write(self._checkpointed.meeting)

    def _begin_save(self, path: str | Path, optimizer: Optimizer | None, given: CallerStates) -> Save:
        """Collect what a checkpoint is to have; nothing is written yet."""
        check_places(path=path)
        self._parameter_checks.check_memory()
        self._replicas.check_now()
        progress = {"seed": self.seed, "step": self.step_count, "scaler": self._scaler.numbers}
        return self._checkpointed.save(path, progress, optimizer, given)

    def save_pretrained(self, path: str | Path, *, max_shard_size: str | int = "5GB") -> None:
        """Write the weights as transformers does, in the model's dtypes: ``from_pretrained`` and ``weights=DIR`` read them.

        It writes safetensors under the model's names (tied weights once), in files of at most ``max_shard_size`` with an index, and the
        configuration, if the model has one of transformers. All ranks call it; none of them holds the complete model.

        Raises:
            UsageError: the folder cannot be written; raised on all ranks.
        """
        check_places(path=path)
        with self._calls.at_once("save_pretrained"):
            self._parameter_checks.check_memory()
            export = Export(
                graph=self._program.graph,
                held=self._assembly.held,
                buffers=self._changing_buffers.named(self._changing_buffers.own),
                untrained=self._untrained,
                facts=self._facts,
                meeting=self._checkpointed.meeting,
            )
            export.save(path, max_shard_size)

    def load(
        self,
        path: str | Path,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Any = None,
        dataloader: Any = None,
        allow_pickle: bool = False,
    ) -> Any:
        """Read what :meth:`save` wrote under any plan; return its ``extra``. All ranks call it.

        Each rank reads and verifies what it needs before anything is changed. Random states are restored if the job has as many ranks as
        the one that saved.

        Args:
            allow_pickle: also read checkpoints of older versions, before they had an index in JSON. Their index is a pickle, by which
                whoever can write the file may run code in this job, and damage in them is not detected. Use it for files that you trust.

        Raises:
            CheckpointError: the folder has no checkpoint, or a damaged one; names the file and the tensor; raised on all ranks.
            PlanError: the checkpoint is of another model, optimizer or number of data ranks; raised on all ranks.
        """
        check_places(path=path)
        with self._calls.at_once("load"):
            self._parameter_checks.check_memory()
            given = {SCHEDULER: scheduler, LOADER: dataloader}
            progress, extra = self._checkpointed.load(path, optimizer, given, allow_pickle=allow_pickle)
        self.seed, self.step_count = progress["seed"], progress["step"]
        if self._scaler.is_wanted and progress.get("scaler") is not None:
            self._scaler.numbers = progress["scaler"]
        return extra

    # --- state_dict and load_state_dict of a module, which torch.distributed.checkpoint calls

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Add this rank's parameters, the buffers that it changes, and the state that steps continue from.

        All ranks call it if the plan has lengthened a vocabulary, which is saved at the model's length.
        """
        with self._calls.at_once("state_dict", meets=self._module_state.is_lengthened):
            self._parameter_checks.check_memory()
            super()._save_to_state_dict(destination, prefix, keep_vars)
            self._module_state.complete(destination, prefix, self._parameters.keys())

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load in place. The state may also have the model's own names, with complete parameters (:meth:`full_state_dict`)."""
        if local_metadata.get("assign_to_params_buffers"):
            error_msgs.append("load_state_dict(assign=True) would replace the memory that steps read: leave assign out")
            return
        self._parameter_checks.check_memory()
        missing, problems = self._module_state.put(state_dict, prefix, self._changing_buffers.named())
        missing_keys += missing
        error_msgs += problems
        self._untrained.take(state_dict, prefix)
        if strict:
            unexpected_keys += self._module_state.unexpected(state_dict, prefix)
        if prefix + EXTRA_STATE in state_dict:
            self.set_extra_state(state_dict[prefix + EXTRA_STATE])

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return the seed, the number of steps, and the scaler's state (zeros if there is none), as tensors, which need no pickle."""
        numbers = self._scaler.numbers or {}
        scaler = torch.tensor([numbers.get(name, 0.0) for name in SCALER_NUMBERS], dtype=torch.float64)
        return {"scaler": scaler, "seed": torch.tensor(self.seed), "step": torch.tensor(self.step_count)}

    def set_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the result of :meth:`get_extra_state`."""
        self.seed, self.step_count = int(state["seed"]), int(state["step"])
        if self._scaler.is_wanted and state["scaler"].any():
            self._scaler.numbers = dict(zip(SCALER_NUMBERS, state["scaler"].tolist(), strict=True))

    # --- inside a step

    def _commit(self) -> None:
        """Give the buffers that a step changes their new values, after its last micro-batch."""
        self._changing_buffers.commit()
        self._show_buffers(self._changing_buffers.named())

    def _begin_forward(self, local: Batch, partial: PartialBatch | None) -> None:
        """Check parameters, compute totals of the global batch and set the random streams, before the first micro-batch."""
        self._parameter_checks.check()
        self._original.check(self.step_count)
        self._alarm.runs()
        self._replicas.check(self.step_count)
        totals = self._batches.totals(local, partial, self._changing_buffers.values)
        first_seed = (self.seed * 1_000_003 + self.step_count) * (self.plan.num_micro_batches + 1)
        for stage in self._assembly.stages:
            forget_gathered(stage)
            stage.totals, stage.seed = totals, first_seed  # each micro-batch adds its number to the seed
            stage.share = 1.0 if partial is None else partial.share
            stage.weights = None if partial is None else partial.weights

    def _begin_backward(self) -> None:
        """Begin a backward that the user called on a loss of :meth:`forward`."""
        self._scaler.check_called()
        if not self._gradients.is_open:
            self._alarm.begin("backward")
        self._gradients.begin(1)

    def _finish_backward(self) -> None:
        """End a backward that the user called, and with it the step."""
        self._gradients.finish()
        self._scaler.done()
        self._alarm.end()
        self.monitor.end_step()

    def _begin_step(self, batch: Batch, purpose: str) -> PartialBatch | None:
        """Begin a step with gradients; return how a batch smaller than the plan's is computed, None for one of the plan's size.

        Only steps of the plan's size are timed, as the prediction is of these.
        """
        partial = self._batches.partial(batch, purpose)
        self.monitor.begin_step(is_timed=partial is None)
        return partial
