"""A model that trains in parallel, the class of the result of ``autopar.parallelize``: its parameters, batches, checkpoints and state."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from autopar.lower.program import Program
from autopar.runtime.checkpoint.contents import WholeTensors, model_parts, part_of
from autopar.runtime.checkpoint.export import Export, ModelFacts
from autopar.runtime.checkpoint.series import EXTRA, LOADER, SCHEDULER, CallerStates, Checkpointed
from autopar.runtime.checkpoint.write import Save
from autopar.runtime.data import PlannedLoader, planned_loader
from autopar.runtime.state_dict import EXTRA_STATE, ModuleState, Untrained
from autopar.runtime.step.global_loss import SCALER_NUMBERS
from autopar.runtime.step.other_runs import split_of
from autopar.runtime.trained_module import TrainedModule
from autopar.runtime.weights import ModelWeights
from autopar.runtime.world import World
from autopar.util.files import check_places


class ParallelModel(TrainedModule):
    """One rank's part of a model under a plan; every rank of the job makes one and calls the same methods.

    It is a ``torch.nn.Module``; :mod:`autopar.runtime.module` says how it differs from others. The methods of
    :class:`~autopar.runtime.trained_module.TrainedModule` compute, those here give and take state.

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
        super().__init__(program, world, weights, seed=seed, log_dir=log_dir)
        self.data_rank, self.data_size = world.data_index, self.plan.mesh.data
        self.samples = self.plan.samples_of(self.data_rank)
        held = self._assembly.held
        self._untrained = Untrained(program, world, weights)
        self._facts = ModelFacts.of(weights.model)
        self._checkpointed = Checkpointed(self.plan, world, held, self._changing_buffers, self._untrained)
        names = (*self._untrained.names, *(buffer.fqn for buffer in program.state))
        self._module_state = ModuleState(program.graph.parameters, names, held)

    @property
    def original_model(self) -> nn.Module | None:
        """The model that was given to ``autopar.parallelize``, while it exists; it has the config and the signature of forward."""
        return self._original.model()

    # --- parameters

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the complete state dict of the model, on every rank's CPU: ``model.load_state_dict(par.full_state_dict())``.

        All ranks call it. Parameters that the loss does not use and buffers that no step changes are as they were given.

        It is for models that fit one rank; others are saved by :meth:`save` and :meth:`save_pretrained`.
        """
        self._original.knows_weights()
        with self._calls.at_once("full_state_dict"):
            self._parameter_checks.check_memory()
            return self._untrained.named(self._whole_tensors())

    def full_gradients(self) -> dict[str, Tensor]:
        """Return all gradients, complete, on every rank's CPU; of a scaled loss until they are unscaled. All ranks call it."""
        with self._calls.at_once("full_gradients"):
            parts = model_parts(self._program.graph, self._assembly.held, gradients=True)
            return self._untrained.named(WholeTensors(parts, self._checkpointed.peers))

    def _whole_tensors(self) -> WholeTensors:
        """Return the tensors of the state dict by their first names; all ranks call it."""
        others = {**self._changing_buffers.sent(), **self._untrained.kept}
        parts = [*model_parts(self._program.graph, self._assembly.held), *starmap(part_of, others.items())]
        return WholeTensors(parts, self._checkpointed.peers)

    def dataloader(self, dataset: Dataset[Any], **options: Any) -> PlannedLoader:
        """Return a ``torch.utils.data.DataLoader`` that gives each rank its part of global batches, and has its position as a state.

        Ranks that share samples load the same ones. Every rank loads all of a batch smaller than the plan's (the last of an epoch), as
        steps require. All ranks give the same options.

        Args:
            dataset: a data set with a length and indices, or a stream, which iterates over samples in the same order on each rank.
            options: ``batch_size`` (of the global batch; the plan's, or smaller), ``shuffle`` (True), ``seed`` (0; not for a stream, as
                shuffle), ``drop_last`` (False), and those of torch's ``DataLoader``, such as ``collate_fn`` and ``num_workers``.

        Raises:
            UsageError: the batches cannot be computed (in training, or in evaluation after ``par.eval()``).
        """
        check = functools.partial(split_of, self._program, data_rank=self.data_rank, trains=self.training)
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
            save.write(self._checkpointed.peers)

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
            tensors, peers = self._whole_tensors(), self._checkpointed.peers
            export = Export(tensors=tensors, untrained=self._untrained, facts=self._facts, peers=peers)
            export.save(path, max_shard_size)

    def load(
        self,
        path: str | Path,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Any = None,
        dataloader: Any = None,
    ) -> Any:
        """Read what :meth:`save` wrote under any plan; return its ``extra``. All ranks call it.

        Each rank reads and verifies what it needs before anything is changed. Random states are restored if the job has as many ranks as
        the one that saved.

        Raises:
            CheckpointError: the folder has no checkpoint, or a damaged one; names the file and the tensor; raised on all ranks.
            PlanError: the checkpoint is of another model, optimizer or number of data ranks; raised on all ranks.
        """
        check_places(path=path)
        with self._calls.at_once("load"):
            self._parameter_checks.check_memory()
            given = {SCHEDULER: scheduler, LOADER: dataloader}
            progress, extra = self._checkpointed.load(path, optimizer, given)
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
        trained = self._module_state.put(state_dict, prefix, self._changing_buffers.named())
        for missing, problems in (trained, self._untrained.take(state_dict, prefix)):
            missing_keys += missing
            error_msgs += problems
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
