"""Lightning with a parallel model: ``Trainer(strategy=AutoparStrategy())``. To it, all ranks of the model are one device.

The LightningModule makes the parallel model in ``configure_model`` and returns ``step_loss(self.model, batch)`` from ``training_step``.
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
    """For ``Trainer(strategy=AutoparStrategy(), devices=1)`` in a script that torchrun starts on every rank.

    Loaders give all ranks the same global batches, or are made by ``par.dataloader``. Checkpoints are folders of ``par.save`` with
    the states of loops, schedulers and callbacks, and are read under any plan.
    """

    strategy_name = "autopar"
    world_size = 1
    """To Lightning: nothing is divided among devices, or gathered from them."""

    def __init__(self) -> None:
        super().__init__(precision_plugin=AutoparPrecision())

    # --- where it runs

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
        """The parallel model's, or the one that it will have."""
        found = None if self.lightning_module is None else _found(self.lightning_module)
        if found:
            return found[0].device
        return local_device("cpu" if type(self.accelerator).__name__ == "CPUAccelerator" else choose_device_type(""))

    def setup_environment(self) -> None:
        """Only rank 0 prints and logs."""
        rank_zero_only.rank = fabric_rank_zero_only.rank = self.global_rank
        super().setup_environment()

    def model_to_device(self) -> None:
        """Nothing: the plan has placed it."""

    @property
    def parallel_model(self) -> ParallelModel:
        """The one of the LightningModule.

        Raises:
            UsageError: it has none, or several.
        """
        return only_model(_found(self.lightning_module), "The LightningModule", _MAKE)

    def setup(self, trainer: Any) -> None:
        """As Lightning's.

        Raises:
            UsageError: parameters besides those of the parallel model would train, or there are several optimizers.
        """
        own = {id(p) for p in self.parallel_model.parameters()}
        others = [n for n, p in self.lightning_module.named_parameters() if p.requires_grad and id(p) not in own]
        if others:
            raise UsageError(
                f"The LightningModule has parameters outside of the parallel model ({', '.join(others[:3])}), which ranks would "
                "train each by itself",
                fix="Make them a part of the model before autopar.parallelize",
            )
        check_precision(self.parallel_model, _precision_of(trainer))
        averages = [type(one).__name__ for one in trainer.callbacks if isinstance(one, _AVERAGES)]
        if averages:
            raise UsageError.unsupported(
                f"The callback {averages[0]}, which copies the model,",
                instead="Leave it out, and keep means of weights as copies of model.parameters(), changed after each step",
            )
        super().setup(trainer)
        if len(self.optimizers) > 1:
            raise UsageError.unsupported(
                "A LightningModule with several optimizers",
                instead="Return one from configure_optimizers, with several groups of parameters",
            )

    def teardown(self) -> None:
        """Without moving the model to the host, as Lightning does."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's; says what a loss of one's own made of outputs needs."""
        with parts_are_explained():
            return super().training_step(*args, **kwargs)

    # --- between ranks

    def reduce(self, tensor: _Value, group: Any = None, reduce_op: Any = "mean") -> _Value:
        """What was given: it is of all ranks together already."""
        return tensor

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """What was given: every rank has it complete."""
        return tensor

    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized():
            dist.barrier()

    def broadcast(self, obj: _Value, src: int = 0) -> _Value:
        held: list[Any] = [obj]
        if dist.is_initialized():
            dist.broadcast_object_list(held, src=src, device=self.root_device)
        value: _Value = held[0]
        return value

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Of all ranks, one of which may have had a signal."""
        if not dist.is_initialized():
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(votes.item())

    # --- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Model and optimizer are loaded together."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """What the LightningModule has besides the parallel model."""
        names = [name for name, one in self.lightning_module.named_modules() if isinstance(one, ParallelModel)]
        prefix = f"{names[0]}." if names else ""
        others = dict(self.lightning_module.named_buffers())
        return {name: value for name, value in others.items() if not name.startswith(prefix)}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Tensor]:
        """Nothing: ``par.save`` writes it, each rank its part."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """A folder; all ranks write."""
        optimizer = self.optimizers[0] if "optimizer_states" in checkpoint and self.optimizers else None
        self.parallel_model.save(filepath, optimizer, extra=checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Model and optimizer as they were; gives the states of all else."""
        optimizer = self.optimizers[0] if self.optimizers else None
        found: dict[str, Any] = self.parallel_model.load(checkpoint_path, optimizer)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """What the LightningModule has besides the parallel model."""
        buffers = dict(self.lightning_module.named_buffers())
        for name, value in checkpoint["state_dict"].items():
            buffers[name].copy_(value)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: it was loaded with the model."""


class AutoparPrecision(Precision):  # type: ignore[misc]
    """The plan has the precision, of which ``Trainer(precision=...)`` may be a copy; clips the whole model's gradients, and steps without a closure."""

    _models: list[ParallelModel]
    _scaler: Any = None

    def connect(self, model: Any, optimizers: list[Any], lr_schedulers: list[Any]) -> tuple[Any, list[Any], list[Any]]:
        """Takes note of the parallel model."""
        self._models = _found(model)
        self._scaler = scaler_of(self._models[0]) if self._models else None
        return model, optimizers, lr_schedulers

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """The loss, scaled where the plan is in fp16."""
        scaled: Tensor = tensor if self._scaler is None else self._scaler.scale(tensor)
        found: Tensor = super().pre_backward(scaled, module)
        return found

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **options: Any) -> Any:
        """Backward first: a step that is given a closure may call it more than once, so that parameters could not stay apart."""
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
        """By ``par.clip_grad_norm_``: a rank has only a part of the gradients."""
        (par,) = self._models
        par.clip_grad_norm_(float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Element by element, on the parts that this rank has."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    local_part(p.grad).clamp_(-clip_val, clip_val)


def _precision_of(trainer: Any) -> str:
    """What ``Trainer(precision=...)`` asks for: ``no`` where it was left out."""
    asked = str(trainer._accelerator_connector._precision_flag)
    return {"32-true": "no", "16-mixed": "fp16", "bf16-mixed": "bf16", "64-true": "fp64"}.get(asked, asked)


def _found(module: nn.Module) -> list[ParallelModel]:
    return [one for one in module.modules() if isinstance(one, ParallelModel)]
