"""``accelerate`` with a parallel model: to it, all ranks of the model are one device.

Every rank is given the same global batches, so that nothing is gathered, and data loaders are not divided among processes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import UsageError
from autopar.integrations.loss import check_precision, only_model, scaler_of, step_loss
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.world import Meeting

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
    """``accelerate.Accelerator`` for one parallel model, made by ``autopar.parallelize`` on every rank.

    ``prepare``, ``backward``, ``accumulate``, ``clip_grad_norm_``, ``gather_for_metrics``, ``save_state`` and ``load_state`` are
    used as ever. The batch size of a prepared loader is that of all ranks together: the plan's.

    Raises:
        UsageError: DeepSpeed, FSDP or Megatron was asked for, or another precision than the plan has.
    """

    flag_tensor: Any
    scaler: Any
    scaler_handler: Any
    split_batches = True
    """By which accelerate steps schedulers once for each step of their optimizer; otherwise it would once for each process."""

    num_evaluated: int | None = None
    """Samples of the batch that is evaluated, where the loop says so."""

    def __init__(self, *args: Any, mixed_precision: str | None = None, **options: Any) -> None:
        # `accelerate launch --mixed_precision` says it in the environment, which accelerate reads
        self._asked_precision = str(mixed_precision or parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no"))
        super().__init__(*args, mixed_precision="no", **options)  # casts and scales are the plan's
        if self.distributed_type in _OTHERS:
            raise UsageError(
                f"Accelerate was started with {self.distributed_type.value}, but the plan has distributed the model",
                fix="Leave its plug-in and `accelerate config` out, and start the script with torchrun",
            )

    @property
    def parallel_model(self) -> ParallelModel:
        """The one that was prepared.

        Raises:
            UsageError: none was.
        """
        found = [model for model in self._models if isinstance(model, ParallelModel)]
        fix = "Call accelerator.prepare(par, optimizer, ...) with the one that autopar.parallelize returned"
        return only_model(found, "This Accelerator", fix)

    # --- what is prepared

    def prepare(self, *args: Any, **options: Any) -> Any:
        """As accelerate's, the parallel model first: optimizers step by its scaler."""
        for model in args:
            if isinstance(model, ParallelModel):
                self.prepare_model(model)
        return super().prepare(*args, **options)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """A parallel model as it is.

        Raises:
            UsageError: it is another model, whose gradients nobody would add up over ranks; or another precision was asked for.
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
        """The loader, which gives every rank the same batches in the same order, or those of ``par.dataloader`` as they are."""
        if data_loader in self._dataloaders:
            return data_loader
        seed = self.dataloader_config.data_seed
        if _is_planned(data_loader):
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
        """As accelerate's: of a plan in fp16."""
        given = self._optimizers if optimizer is None else optimizer
        if self.scaler is not None:
            for one in given if isinstance(given, list | tuple) else [given]:
                self.scaler.unscale_(getattr(one, "optimizer", one))

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """Of the whole model, by ``par.clip_grad_norm_``.

        Raises:
            UsageError: another norm than the 2-norm is asked for, or that of some of the model's parameters alone.
        """
        par = self.parallel_model
        own, given = {id(p) for p in par.parameters()}, {id(p) for p in parameters}
        if norm_type != 2 or given != own:
            raise UsageError.unsupported(
                "Clipping by another norm than the 2-norm of all parameters of the parallel model",
                instead="Call accelerator.clip_grad_norm_(model.parameters(), max_norm)",
            )
        self.unscale_gradients()
        return par.clip_grad_norm_(max_norm)

    # --- between processes

    def gather(self, tensor: Any) -> Any:
        """What was given: every rank has it complete."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """What was given, without what stands behind the last sample of the data set."""
        state = self.gradient_state
        count = state.remainder if state.end_of_dataloader else 0
        if self.num_evaluated is not None:
            count = self.num_evaluated
        return input_data if use_gather_object or count <= 0 else recursively_apply(lambda x: x[:count], input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """What was given, times ``scale``: it is of all ranks together already."""
        return recursively_apply(lambda value: value * scale, tensor)

    def check_trigger(self) -> bool:
        """As accelerate's: whether :meth:`set_trigger` was called on any rank; all ranks call it."""
        flag = self.flag_tensor
        if flag is None:
            flag = torch.tensor(0, device=self.device)
        is_set = bool(reduce_over_processes(flag).item() >= 1)
        self.flag_tensor = None if is_set else self.flag_tensor
        return is_set

    # --- checkpoints

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> str:
        """A checkpoint of ``par.save``: model, optimizer, schedulers, loaders of ``par.dataloader``, registered objects.

        Raises:
            UsageError: no folder is named.
        """
        if output_dir is None or self.project_configuration.automatic_checkpoint_naming:
            raise UsageError.unsupported(
                "Naming of checkpoints by accelerate",
                instead="Name the folder: accelerator.save_state(DIR). autopar.Checkpoints(root, keep=3) keeps the latest ones",
            )
        custom = [one.state_dict() for one in self._custom_objects]
        self.parallel_model.save(
            output_dir, self._optimizer(), **self._beside(), extra={"step": self.step, "custom": custom}
        )
        return output_dir

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **options: Any) -> None:
        """What :meth:`save_state` wrote, under any plan.

        Raises:
            UsageError: no folder is named, :meth:`save_state` did not write it, or other objects are registered than were then.
            CheckpointError: there is no checkpoint, or a damaged one.
        """
        if input_dir is None:
            raise UsageError.missing("folder of a checkpoint", fix="Name it: accelerator.load_state(DIR)")
        found = self.parallel_model.load(input_dir, self._optimizer(), **self._beside())
        if not isinstance(found, dict) or not found.keys() >= {"step", "custom"}:
            raise UsageError(
                f"The checkpoint {input_dir} was not written by accelerator.save_state",
                fix="Call par.load(DIR, optimizer) for a checkpoint of par.save; the model and the optimizer are loaded",
            )
        if len(found["custom"]) != len(self._custom_objects):
            raise UsageError.mismatch(
                "The number of objects registered for checkpointing",
                where=input_dir,
                expected=len(found["custom"]),
                got=len(self._custom_objects),
                fix="Call accelerator.register_for_checkpointing(...) as before the save; the model and the optimizer are loaded",
            )
        self.step = found["step"]
        for one, state in zip(self._custom_objects, found["custom"], strict=True):
            one.load_state_dict(state)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """All parameters and buffers whole, on every rank; all ranks call it."""
        return self.parallel_model.full_state_dict()

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: str | int = "5GB",
        safe_serialization: bool = True,
    ) -> None:
        """Safetensors files under the model's own names, by ``par.save_pretrained``; all ranks call it."""
        self.parallel_model.save_pretrained(save_directory, max_shard_size=max_shard_size)

    def _optimizer(self) -> Any:
        if len(self._optimizers) > 1:
            raise UsageError.unsupported(
                "A checkpoint with several optimizers", instead="Make one optimizer with several groups of parameters"
            )
        return self._optimizers[0].optimizer if self._optimizers else None

    def _beside(self) -> dict[str, Any]:
        """What has a state besides model and optimizer."""
        return {
            "scheduler": [one.scheduler for one in self._schedulers],
            "dataloader": [one for one in self._dataloaders if isinstance(one, _Watched)],
        }


class _Watched(DataLoaderStateMixin):  # type: ignore[misc]
    """A loader of ``par.dataloader`` of which accelerate knows when it comes to its end, which ends an accumulation."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.gradient_state = loader, GradientState()
        self.dataset = loader.dataset
        self.total_batch_size, self._drop_last = loader.global_batch_size, loader.drops_last
        self._state: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """One batch ahead, so that the last is known as such; the state is that of what has been given out."""
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


def _is_planned(loader: object) -> bool:
    """Whether ``par.dataloader`` made it, which takes a package that may not be there."""
    data = sys.modules.get("autopar.runtime.data")
    return data is not None and isinstance(loader, data.PlannedLoader)


def _same_everywhere(seed: int | None) -> int:
    """Rank 0's seed of the order of samples; without one, that of its random numbers."""
    job = Meeting(dist.group.WORLD if dist.is_initialized() else None)
    return job.first(lambda: torch.initial_seed() if seed is None else seed)
