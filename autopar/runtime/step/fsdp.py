"""FSDP2 on the stages of one rank: ZeRO 1 to 3, HSDP, mixed precision.

Losses are sums over a global count, so gradients are summed over data ranks, not averaged.

| ZeRO | parameters between forward and backward | gradients are reduced |
|------|-----------------------------------------|-----------------------|
| 1    | stay gathered until the step's last backward | on the last micro-batch |
| 2    | likewise                                | on every micro-batch  |
| 3    | freed after each block's forward and backward | on every micro-batch; with a pipeline on the last |
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from autopar.plan.plan import Plan, Precision
from autopar.runtime.step.stage import StageModule


def uses_fsdp(plan: Plan) -> bool:
    """FSDP does the sharding of ZeRO, and the casts of mixed precision."""
    return plan.mesh.dp_shard > 1 or is_mixed(plan.precision)


def is_mixed(precision: Precision) -> bool:
    """Whether parameters change their dtype between rest and use."""
    return len({precision.compute, precision.storage, precision.reduce}) > 1


def fsdp_mesh(plan: Plan, device_mesh: DeviceMesh) -> DeviceMesh:
    """One dim where parameters are only sharded, two (replicated, sharded) for HSDP."""
    if plan.mesh.dp_replicate > 1:
        return device_mesh["dp_replicate", "dp_shard"]
    return device_mesh["dp_shard"]


def shard_block(
    module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    *,
    keep_gathered: bool = False,
    ignored: set[nn.Parameter] | None = None,
) -> None:
    """Makes ``module`` one FSDP unit: its parameters are gathered and its gradients reduced together.

    Args:
        keep_gathered: not freed between forward and backward, whatever the plan says (what backward
            needs at once).
        ignored: parameters that stay as they are.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, plan.precision.compute) if is_mixed(plan.precision) else None,
        reduce_dtype=getattr(torch, plan.precision.reduce) if is_mixed(plan.precision) else None,
        cast_forward_inputs=False,
    )
    size = plan.mesh.dp_shard
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=plan.zero_stage == 3 and not keep_gathered,
        shard_placement_fn=lambda parameter: _shard_dim(parameter, size),
        mp_policy=policy,
        ignored_params=ignored,
    )


def _shard_dim(parameter: nn.Parameter, size: int) -> Shard | None:
    """Another dim than the first where tensor parallelism has split that unevenly for ``size`` ranks."""
    if not isinstance(parameter, DTensor) or parameter.to_local().shape[0] % size == 0:
        return None
    if not any(placement.is_shard(0) for placement in parameter.placements):
        return None
    local = parameter.to_local()
    return next((Shard(dim) for dim in range(1, local.ndim) if local.shape[dim] % size == 0), None)


def sum_gradients(stage: StageModule) -> None:
    """Tells FSDP to sum gradients, without a division before or after."""
    for module in fsdp_modules(stage):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def fsdp_modules(stage: nn.Module) -> Iterator[FSDPModule]:
    """The FSDP units in a stage, the stage itself among them."""
    return (module for module in stage.modules() if isinstance(module, FSDPModule))


def forget_gathered(stage: StageModule) -> None:
    """Frees gathered parameters, so that a forward pass gathers them anew.

    Backward frees them. A forward pass without one leaves them there, where an optimizer's step or a checkpoint that is
    loaded later would not reach them.
    """
    for module in fsdp_modules(stage):
        module.reshard()


def before_backward(stage: StageModule, plan: Plan, *, is_last: bool) -> None:
    """Sets what FSDP does in the backward of one micro-batch; ``is_last`` of the step."""
    if not isinstance(stage, FSDPModule):
        return
    every = plan.zero_stage >= 2
    stage.set_is_last_backward(is_last)
    stage.set_requires_gradient_sync(is_last or every)
    stage.set_reshard_after_backward(is_last or plan.zero_stage == 3)
    if plan.mesh.dp_replicate > 1:
        stage.set_requires_all_reduce(is_last)
