"""``accelerate`` with a parallel model, all of whose ranks are one device for it.

Every rank gets the same global batches. Nothing is therefore gathered, and data loaders are not divided among processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import UsageError
from autopar.integrations.loss import check_precision, only_model, scaler_of, step_loss
from autopar.runtime.data import PlannedLoader
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.world import Peers

try:
    import accelerate
    from accelerate.data_loader import DataLoaderStateMixin, prepare_data_loader
    from accelerate.state import GradientState
    from accelerate.utils import DistributedType, parse_choice_from_env, recursively_apply
    from accelerate.utils import reduce as reduce_over_processes
except ImportError as missing:
    raise UsageError.missing("package accelerate", fix='Run: pip install "autopar[hf]"') from missing

__all__ = ["Accelerator", "step_loss"]

_OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """``accelerate.Accelerator`` for one parallel model, which ``autopar.parallelize`` returned on every rank.

    ``prepare``, ``backward``, ``accumulate``, ``clip_grad_norm_``, ``gather_for_metrics``, ``save_state`` and ``load_state`` are used as in
    accelerate. The batch size of a prepared loader is that of all ranks together, as in the plan.

    Raises:
        UsageError: DeepSpeed, FSDP or Megatron is configured, or another precision than the plan's.
    """

    flag_tensor: Any
    scaler: Any
    scaler_handler: Any
    split_batches = True
    """Makes accelerate step schedulers once for each step of their optimizer, not once for each process."""

    num_evaluated: int | None = None
    """Samples of the batch that is evaluated, if the loop sets it."""

    def __init__(self, *args: Any, mixed_precision: str | None = None, **options: Any) -> None:
        # `accelerate launch --mixed_precision` sets an environment variable that accelerate reads
        self._asked_precision = str(mixed_precision or parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no"))
        super().__init__(*args, mixed_precision="no", **options)  # the parallel model casts and scales
        if self.distributed_type in _OTHERS:
            raise UsageError(
                f"Accelerate was started with {self.distributed_type.value}, but the plan has distributed the model",
                fix="Leave its plug-in and `accelerate config` out, and start the script with torchrun",
            )

    @property
    def parallel_model(self) -> ParallelModel:
        """The prepared parallel model.

        Raises:
            UsageError: none or several were prepared.
        """
        models = [model for model in self._models if isinstance(model, ParallelModel)]
        fix = "Call accelerator.prepare(par, optimizer, ...) with the one that autopar.parallelize returned"
        return only_model(models, "This Accelerator", fix)

    # --- preparation

    def prepare(self, *args: Any, **options: Any) -> Any:
        """Prepare as accelerate does, the parallel model first, since optimizers step by its gradient scaler."""
        for model in args:
            if isinstance(model, ParallelModel):
                self.prepare_model(model)
        return super().prepare(*args, **options)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return the parallel model unchanged.

        Raises:
            UsageError: it is another model, whose gradients would not be summed over ranks; or another precision than the plan's is
                configured.
        """
        if not isinstance(model, ParallelModel):
            raise UsageError(
                f"The Accelerator of autopar was given a {type(model).__name__}, not a parallel model",
                fix="Prepare what autopar.parallelize returned, and use accelerate.Accelerator for other models",
            )
        if model not in self._models:
            check_precision(model, self._asked_precision)
            self.scaler = scaler_of(model, **({} if self.scaler_handler is None else self.scaler_handler.to_kwargs()))
            self._models.append(model)
        return model

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Return a loader that gives every rank the same batches in the same order; loaders of ``par.dataloader`` keep their batches."""
        if data_loader in self._dataloaders:
            return data_loader
        seed = self.dataloader_config.data_seed
        if isinstance(data_loader, PlannedLoader):
            prepared: Any = _Watched(data_loader)
        else:
            prepared = prepare_data_loader(
                data_loader,
                self.device,
                num_processes=1,
                process_index=0,
                put_on_device=self.device_placement if device_placement is None else device_placement,
                rng_types=self.rng_types.copy(),
                dispatch_batches=False,
                use_seedable_sampler=True,
                data_seed=_same_everywhere(seed),
                non_blocking=self.non_blocking,
                use_stateful_dataloader=self.use_stateful_dataloader,
            )
        self._dataloaders.append(prepared)
        return prepared

    # --- gradients

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of a plan in fp16."""
        optimizers = self._optimizers if optimizer is None else optimizer
        if self.scaler is not None:
            for item in optimizers if isinstance(optimizers, list | tuple) else [optimizers]:
                self.scaler.unscale_(getattr(item, "optimizer", item))

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip by the norm of all gradients of the model, by ``par.clip_grad_norm_``.

        Raises:
            UsageError: another norm than the 2-norm is wanted, or that of other parameters than all of the model's.
        """
        par = self.parallel_model
        all_of_model, wanted = {id(p) for p in par.parameters()}, {id(p) for p in parameters}
        if norm_type != 2 or wanted != all_of_model:
            raise UsageError.unsupported(
                "Clipping by another norm than the 2-norm of all parameters of the parallel model",
                instead="Call accelerator.clip_grad_norm_(model.parameters(), max_norm)",
            )
        self.unscale_gradients()
        return par.clip_grad_norm_(max_norm)

    # --- between processes

    def gather(self, tensor: Any) -> Any:
        """Return the tensor unchanged: it is complete on every rank."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the data without the samples that pad the last batch of the data set."""
        state = self.gradient_state
        count = state.remainder if state.end_of_dataloader else 0
        if self.num_evaluated is not None:
            count = self.num_evaluated
        return input_data if use_gather_object or count <= 0 else recursively_apply(lambda x: x[:count], input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the tensor times ``scale``: it is a result of all ranks already."""
        return recursively_apply(lambda value: value * scale, tensor)

    def check_trigger(self) -> bool:
        """Return whether :meth:`set_trigger` was called on any rank; all ranks must call this."""
        flag = self.flag_tensor
        if flag is None:
            flag = torch.tensor(0, device=self.device)
        is_set = bool(reduce_over_processes(flag).item() >= 1)
        self.flag_tensor = None if is_set else self.flag_tensor
        return is_set

    # --- checkpoints

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> str:
        """Save a checkpoint by ``par.save``: model, optimizer, schedulers, loaders of ``par.dataloader``, and registered objects.

        Raises:
            UsageError: no folder is named.
        """
        if output_dir is None or self.project_configuration.automatic_checkpoint_naming:
            raise UsageError.unsupported(
                "Naming of checkpoints by accelerate",
                instead="Name the folder: accelerator.save_state(DIR). autopar.Checkpoints(root, keep=3) keeps the latest ones",
            )
        custom = [item.state_dict() for item in self._custom_objects]
        self.parallel_model.save(
            output_dir, self._optimizer(), **self._other_states(), extra={"step": self.step, "custom": custom}
        )
        return output_dir

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """Load a checkpoint of :meth:`save_state`, under any plan.

        Raises:
            UsageError: no folder is named, :meth:`save_state` did not write it, or the number of registered objects is another one.
            CheckpointError: there is no checkpoint, or it is damaged.
        """
        if input_dir is None:
            raise UsageError.missing("folder of a checkpoint", fix="Name it: accelerator.load_state(DIR)")
        extra = self.parallel_model.load(input_dir, self._optimizer(), **self._other_states())
        if not isinstance(extra, dict) or not extra.keys() >= {"step", "custom"}:
            raise UsageError(
                f"The checkpoint {input_dir} was not written by accelerator.save_state",
                fix="Call par.load(DIR, optimizer) for a checkpoint of par.save; the model and the optimizer are loaded",
            )
        if len(extra["custom"]) != len(self._custom_objects):
            raise UsageError.mismatch(
                "The number of objects registered for checkpointing",
                where=input_dir,
                expected=len(extra["custom"]),
                got=len(self._custom_objects),
                fix="Call accelerator.register_for_checkpointing(...) as before the save; the model and the optimizer are loaded",
            )
        self.step = extra["step"]
        for item, state in zip(self._custom_objects, extra["custom"], strict=True):
            item.load_state_dict(state)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return all complete parameters and buffers on every rank; all ranks must call this."""
        return self.parallel_model.full_state_dict()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: str | int = "5GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write safetensors files with the model's names, by ``par.save_pretrained``; all ranks must call this."""
        self.parallel_model.save_pretrained(save_directory, max_shard_size=max_shard_size)

    def _optimizer(self) -> Any:
        """Return the optimizer, without accelerate's wrapper."""
        if len(self._optimizers) > 1:
            raise UsageError.unsupported(
                "A checkpoint with several optimizers", instead="Make one optimizer with several groups of parameters"
            )
        return self._optimizers[0].optimizer if self._optimizers else None

    def _other_states(self) -> dict[str, Any]:
        """Return the schedulers and loaders whose states are saved with the model and the optimizer."""
        return {
            "scheduler": [item.scheduler for item in self._schedulers],
            "dataloader": [item for item in self._dataloaders if isinstance(item, _Watched)],
        }


class _Watched(DataLoaderStateMixin):  # type: ignore[misc]
    """A loader of ``par.dataloader`` that tells accelerate when it gives the last batch, which ends an accumulation of gradients."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.gradient_state = loader, GradientState()
        self.dataset = loader.dataset
        self.total_batch_size, self._drop_last = loader.global_batch_size, loader.drops_last
        self._state: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches one behind the loader, so that the last one is known; the state is that of the batches yielded."""
        self.begin()
        try:
            batches = iter(self.loader)
            batch = next(batches, None)
            while batch is not None:
                self._state = self.loader.state_dict()
                following = next(batches, None)
                self.end_of_dataloader = following is None
                yield batch
                batch = following
            self._state = None
        finally:
            self.end()

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        return self.loader.state_dict() if self._state is None else self._state

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.loader.load_state_dict(state_dict)
        self._state = None


def _same_everywhere(seed: int | None) -> int:
    """Return rank 0's seed for the order of samples; without one, that of its random numbers."""
    job = Peers(dist.group.WORLD if dist.is_initialized() else None)
    return job.from_first_rank(lambda: torch.initial_seed() if seed is None else seed)
