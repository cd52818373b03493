"""Lightning with a parallel model, all of whose ranks are one device for it: ``Trainer(strategy=AutoparStrategy())``.

The LightningModule makes the parallel model in ``configure_model``, and returns ``step_loss(self.model, batch)`` from ``training_step``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.errors import UsageError
from autopar.integrations.loss import check_precision, only_model, parts_are_explained, scaler_of, step_loss
from autopar.runtime.job import choose_device_type, local_device
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.step.gradients import local_part

try:
    from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
    from lightning.pytorch import callbacks
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
except ImportError as missing:
    raise UsageError.missing("package lightning", fix='Run: pip install "autopar[lightning]"') from missing

_AVERAGES = tuple(
    getattr(callbacks, name) for name in ("StochasticWeightAveraging", "WeightAveraging") if hasattr(callbacks, name)
)

__all__ = ["AutoparStrategy", "step_loss"]

_Value = TypeVar("_Value")

_MAKE = "Write in configure_model of the LightningModule: self.model = autopar.parallelize(self.model, ...)"


class AutoparStrategy(Strategy):  # type: ignore[misc]
    """The strategy of ``Trainer(strategy=AutoparStrategy(), devices=1)`` in a script that torchrun starts on every rank.

    Loaders give all ranks the same global batches, or are made by ``par.dataloader``. Checkpoints are folders of ``par.save``, with the
    states of loops, schedulers and callbacks. They can be loaded under any plan.
    """

    strategy_name = "autopar"
    world_size = 1
    """The number of ranks that Lightning sees: it divides nothing among devices and gathers nothing."""

    def __init__(self) -> None:
        super().__init__(precision_plugin=AutoparPrecision())

    # --- devices and ranks

    @property
    def global_rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))

    @property
    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    @property
    def root_device(self) -> torch.device:
        """The device of the parallel model, or the one that it will have."""
        models = None if self.lightning_module is None else _parallel_models(self.lightning_module)
        if models:
            return models[0].device
        return local_device("cpu" if type(self.accelerator).__name__ == "CPUAccelerator" else choose_device_type(""))

    def setup_environment(self) -> None:
        """Set up as Lightning does; only rank 0 prints and logs."""
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank
        super().setup_environment()

    def model_to_device(self) -> None:
        """Do nothing: the plan has placed the model."""

    @property
    def parallel_model(self) -> ParallelModel:
        """The parallel model of the LightningModule.

        Raises:
            UsageError: it has none, or several.
        """
        return only_model(_parallel_models(self.lightning_module), "The LightningModule", _MAKE)

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does.

        Raises:
            UsageError: parameters outside the parallel model would train, or there are several optimizers.
        """
        inside = {id(p) for p in self.parallel_model.parameters()}
        others = [n for n, p in self.lightning_module.named_parameters() if p.requires_grad and id(p) not in inside]
        if others:
            raise UsageError(
                f"The LightningModule has parameters outside of the parallel model ({', '.join(others[:3])}), which ranks would "
                "train each by itself",
                fix="Make them a part of the model before autopar.parallelize",
            )
        check_precision(self.parallel_model, _precision_of(trainer))
        averaging = [type(callback).__name__ for callback in trainer.callbacks if isinstance(callback, _AVERAGES)]
        if averaging:
            raise UsageError.unsupported(
                f"The callback {averaging[0]}, which copies the model,",
                instead="Leave it out, and keep means of weights as copies of model.parameters(), changed after each step",
            )
        super().setup(trainer)
        if len(self.optimizers) > 1:
            raise UsageError.unsupported(
                "A LightningModule with several optimizers",
                instead="Return one from configure_optimizers, with several groups of parameters",
            )

    def teardown(self) -> None:
        """Tear down without moving the model to the host, which Lightning would do."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run Lightning's step; an error explains how to give the plan a loss that is computed from outputs."""
        with parts_are_explained():
            return super().training_step(*args, **kwargs)

    # --- between ranks

    def reduce(self, tensor: _Value, group: Any = None, reduce_op: Any = "mean") -> _Value:
        """Return the tensor unchanged: it is a result of all ranks already."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensor unchanged: it is complete on every rank."""
        return tensor

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: _Value, src: int = 0) -> _Value:
        objects: list[Any] = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(objects, src=src, device=self.root_device)
        value: _Value = objects[0]
        return value

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Combine the decisions of all ranks, since a signal may reach only one of them."""
        if not dist.is_initialized():
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes.item())

    # --- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: model and optimizer are loaded together."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the buffers of the LightningModule outside the parallel model."""
        names = [name for name, module in self.lightning_module.named_modules() if isinstance(module, ParallelModel)]
        prefix = f"{names[0]}." if names else ""
        buffers = dict(self.lightning_module.named_buffers())
        return {name: value for name, value in buffers.items() if not name.startswith(prefix)}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return nothing: ``par.save`` writes each rank's part."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint folder; all ranks write."""
        optimizer = self.optimizers[0] if "optimizer_states" in checkpoint and self.optimizers else None
        self.parallel_model.save(filepath, optimizer, extra=checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load model and optimizer, and return all other states."""
        optimizer = self.optimizers[0] if self.optimizers else None
        states: dict[str, Any] = self.parallel_model.load(checkpoint_path, optimizer)
        return states

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the buffers of the LightningModule outside the parallel model."""
        buffers = dict(self.lightning_module.named_buffers())
        for name, value in checkpoint["state_dict"].items():
            buffers[name].copy_(value)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: the optimizer was loaded with the model."""


class AutoparPrecision(Precision):  # type: ignore[misc]
    """The plan's precision, which ``Trainer(precision=...)`` may repeat.

    It clips the gradients of the whole model, and steps without a closure.
    """

    _models: list[ParallelModel]
    _scaler: Any = None

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Keep the parallel model and its scaler."""
        self._models = _parallel_models(model)
        self._scaler = scaler_of(self._models[0]) if self._models else None
        return model, optimizers, lr_schedulers

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Return the loss, scaled if the plan is in fp16."""
        scaled: Tensor = tensor if self._scaler is None else self._scaler.scale(tensor)
        loss: Tensor = super().pre_backward(scaled, module)
        return loss

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **options: Any) -> Any:
        """Run backward, then the optimizer without a closure: an optimizer could call a closure more than once."""
        result = closure()
        steps = not model.automatic_optimization or result is not None
        if self._scaler is not None and steps:
            self._scaler.unscale_(optimizer)
        self._after_closure(model, optimizer)
        if self._scaler is not None and steps:
            self._scaler.step(optimizer, **options)
            self._scaler.update()
        elif steps:
            optimizer.step(**options)
        return result

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip by ``par.clip_grad_norm_``, as a rank has only a part of the gradients."""
        (par,) = self._models
        par.clip_grad_norm_(float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each element of the parts that this rank has."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    local_part(p.grad).clamp_(-clip_val, clip_val)


def _precision_of(trainer: Any) -> str:
    """Return the precision in ``Trainer(precision=...)``; ``no`` if none was given."""
    flag = str(trainer._accelerator_connector._precision_flag)
    return {"32-true": "no", "16-mixed": "fp16", "bf16-mixed": "bf16", "64-true": "fp64"}.get(flag, flag)


def _parallel_models(module: nn.Module) -> list[ParallelModel]:
    """Return the parallel models in a module."""
    return [submodule for submodule in module.modules() if isinstance(submodule, ParallelModel)]
