"""Builds this rank's stages: modules, parameters on the mesh, FSDP2 (ZeRO 1 to 3, HSDP), and the groups of gradient sums.

Losses are sums over a global count, so gradients are summed over data ranks, not averaged.

| ZeRO | parameters between forward and backward | gradients are reduced |
|------|-----------------------------------------|-----------------------|
| 1    | stay gathered until the step's last backward | on the last micro-batch |
| 2    | stay gathered until the step's last backward | on every micro-batch  |
| 3    | freed after each block's forward and backward | on every micro-batch; with a pipeline on the last |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from autopar.errors import UsageError
from autopar.graph.graph import Buffer, Parameter
from autopar.lower.program import PreludeProgram, Program, StageProgram
from autopar.ops.opaque import Holder
from autopar.plan.mesh import EXPERT_MESH_AXES, MESH_AXES
from autopar.plan.plan import Plan, Precision
from autopar.rules.local_calls import SPREAD
from autopar.runtime.joined_values import placement_of
from autopar.runtime.step.gradients import RankParameter, lengthened
from autopar.runtime.step.stage import BlockModule, StageModule
from autopar.runtime.weights import ModelWeights, local_index
from autopar.runtime.world import World


def uses_fsdp(plan: Plan) -> bool:
    """Return whether the plan uses FSDP, which does the sharding of ZeRO and the casts of mixed precision."""
    return plan.mesh.dp_shard > 1 or is_mixed(plan.precision)


def is_mixed(precision: Precision) -> bool:
    """Return whether parameters are stored, computed with or reduced in different dtypes."""
    return len({precision.compute, precision.storage, precision.reduce}) > 1


def fsdp_mesh(plan: Plan, device_mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for FSDP: one dim if parameters are only sharded, two (replicated, sharded) for HSDP."""
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
    """Make ``module`` one FSDP unit, whose parameters are gathered and whose gradients are reduced together.

    Args:
        keep_gathered: keeps parameters gathered between forward and backward, whatever the plan says (for what backward needs first).
        ignored: parameters that FSDP leaves alone.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, plan.precision.compute) if is_mixed(plan.precision) else None,
        reduce_dtype=getattr(torch, plan.precision.reduce) if is_mixed(plan.precision) else None,
        cast_forward_inputs=False,
    )
    size, frees = plan.mesh.dp_shard, plan.zero_stage == 3 and not keep_gathered
    if isinstance(module, BlockModule):
        module.frees_parameters = frees
    fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=frees,
        shard_placement_fn=lambda parameter: _shard_dim(parameter, size),
        mp_policy=policy,
        ignored_params=ignored,
    )


def _shard_dim(parameter: nn.Parameter, size: int) -> Shard | None:
    """Return the dim that FSDP shards if it is not the first: that of a tensor-parallel shard whose first dim ``size`` does not divide."""
    if not isinstance(parameter, DTensor) or parameter.to_local().shape[0] % size == 0:
        return None
    if not any(placement.is_shard(0) for placement in parameter.placements):
        return None
    local = parameter.to_local()
    return next((Shard(dim) for dim in range(1, local.ndim) if local.shape[dim] % size == 0), None)


def sum_gradients(stage: StageModule) -> None:
    """Make FSDP sum gradients, without a division before or after."""
    for module in fsdp_modules(stage):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def fsdp_modules(stage: nn.Module) -> Iterator[FSDPModule]:
    """Return the FSDP units in a stage; the stage itself may be one."""
    return (module for module in stage.modules() if isinstance(module, FSDPModule))


def forget_gathered(stage: StageModule) -> None:
    """Free gathered parameters, so that a forward pass gathers them again.

    Backward frees them. A forward pass without backward leaves them, and the step of an optimizer or a checkpoint that is loaded later
    would not reach them.
    """
    for module in fsdp_modules(stage):
        module.reshard()


def before_backward(stage: StageModule, plan: Plan, *, is_last: bool) -> None:
    """Set what FSDP does in the backward of one micro-batch; ``is_last`` says whether it is the step's last."""
    if not isinstance(stage, FSDPModule):
        return
    always_reduces = plan.zero_stage >= 2
    stage.set_is_last_backward(is_last)
    stage.set_requires_gradient_sync(is_last or always_reduces)
    stage.set_reshard_after_backward(is_last or plan.zero_stage == 3)
    if plan.mesh.dp_replicate > 1:
        stage.set_requires_all_reduce(is_last)


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """The stages and parameters of one rank.

    Attributes:
        stages: its (virtual) pipeline stages, in order of the model.
        held: its parameters, in order; a parameter that two of its stages hold appears twice.
    """

    stages: tuple[StageModule, ...]
    held: tuple[RankParameter, ...]

    @property
    def tied(self) -> list[list[RankParameter]]:
        """The copies on this rank of each parameter that another stage also holds: on another rank (they have a ``tie_group``) or on this one."""
        by_name: defaultdict[str, list[RankParameter]] = defaultdict(list)
        for held in self.held:
            by_name[held.name].append(held)
        return [copies for copies in by_name.values() if len(copies) > 1 or copies[0].tie_group is not None]


def assemble(program: Program, world: World, weights: ModelWeights) -> Assembly:
    """Make the stages that ``program`` puts on this rank, with the values of their parameters. All ranks call this.

    The program's modules become part of the result. Blocks are filled in sequence, so that under FSDP at most one is complete at a time.
    """
    build = _Assembler(program, world, weights)
    stages = tuple(build.stage(s) for s in program.stages if s.pp_rank == world.coordinate["pp"])
    for sums in program.sums:
        build.fill_buffers(sums)
    held = tuple(h for stage in stages for h in build.held(stage))
    return Assembly(stages=stages, held=held)


class _Assembler:
    """The state of one :func:`assemble`.

    Attributes:
        visible: parameters that users see where emitted code reads another tensor on their memory, by stage and name.
        groups: process groups of gradient sums, by axes.
        tied, tie_groups: the stages that hold each tied parameter, and the process groups of their pipeline ranks.
    """

    def __init__(self, program: Program, world: World, weights: ModelWeights) -> None:
        self.program, self.world, self.weights = program, world, weights
        self.plan = program.plan
        self.mesh = fsdp_mesh(self.plan, world.device_mesh) if uses_fsdp(self.plan) else None
        self.storage: torch.dtype = getattr(torch, self.plan.precision.storage)
        self.degrees: Mapping[str, int] = {axis: getattr(self.plan.mesh, axis) for axis in (*MESH_AXES, "ep_data")}
        self.dense_mesh = world.device_mesh["tp" if self.plan.mesh.tp > 1 else "dp_replicate"]
        self.parameters = {p.name: p for p in program.graph.parameters}
        self.buffers: dict[str, Buffer] = {b.name: b for b in program.graph.buffers}
        self.visible: dict[tuple[int, str], nn.Parameter] = {}
        sum_axes = sorted({self._sum_axes(p) for p in program.graph.parameters})  # in one order on all ranks
        self.groups = {axes: world.axis_group(axes) for axes in sum_axes}
        self.tied = dict(program.tied)
        stage_rank = {stage.index: stage.pp_rank for stage in program.stages}
        self.tie_groups = {
            name: world.stage_group(tuple(stage_rank[stage] for stage in self.tied[name])) for name in sorted(self.tied)
        }

    def _sum_axes(self, parameter: Parameter) -> tuple[str, ...]:
        pending = tuple(axis for axis in parameter.gradient_sum_axes if axis in MESH_AXES)
        if _is_spread(parameter):  # the ranks of ep_data hold other experts
            return tuple(axis for axis in EXPERT_MESH_AXES if axis in ("ep_outer", *pending))
        data = () if self._is_sharded_by_fsdp(parameter) else ("dp_replicate", "dp_shard")
        return tuple(axis for axis in MESH_AXES if axis in (*data, *pending))

    # --- modules

    def stage(self, program: StageProgram) -> StageModule:
        module = StageModule(program, self.program, self.world.meshes)
        for region in module.modules():
            if isinstance(region, Holder):
                region.bind(self.weights.model, self.world.device)
        for block, block_program in zip(module.blocks, program.blocks, strict=True):
            for name in block_program.parameters:
                self._place(program.index, name, block.body)
            if self.mesh is not None and block_program.parameters:
                shard_block(block, self.plan, self.mesh, ignored=self._ignored(block))
        for name in program.shared_parameters:
            self._place(program.index, name, module)
        if program.prelude is not None:
            self.fill_buffers(program.prelude)
        if self.mesh is not None:
            shard_block(module, self.plan, self.mesh, keep_gathered=True, ignored=self._ignored(module))
            sum_gradients(module)
        return module

    def _place(self, stage: int, name: str, holder: nn.Module) -> None:
        """Give one parameter its values and registers it where emitted code reads it."""
        ir = self.parameters[name]
        local = self._value(ir)
        if self._is_sharded_by_fsdp(ir) and self.plan.mesh.tp == 1:
            holder.register_parameter(name, nn.Parameter(local, ir.spec.requires_grad))
            return
        mesh, placements = self.dense_mesh, [placement_of(dict(ir.layout).get("tp"))]
        if _is_spread(ir):  # sharded already: FSDP ignores them, and buckets sum their gradients
            assert self.world.expert_mesh is not None
            mesh = self.world.expert_mesh[("ep_data", "tp") if self.plan.mesh.tp > 1 else ("ep_data",)]
            placements = [Shard(0), *placements][: mesh.ndim]
        on_mesh = DTensor.from_local(local, mesh, placements, run_check=False)
        parameter = nn.Parameter(on_mesh, ir.spec.requires_grad)
        if self._is_sharded_by_fsdp(ir):
            holder.register_parameter(name, parameter)
            return
        # emitted code reads a plain tensor on the memory of the parameter that users see
        self.visible[stage, name] = parameter
        holder.register_parameter(name, nn.Parameter(on_mesh._local_tensor.detach(), parameter.requires_grad))

    def _ignored(self, module: nn.Module) -> set[nn.Parameter]:
        """Parameters that FSDP must not touch."""
        ignored = {name for name, ir in self.parameters.items() if not self._is_sharded_by_fsdp(ir)}
        named = ((path.rpartition(".")[2], parameter) for path, parameter in module.named_parameters())
        return {parameter for name, parameter in named if name in ignored}

    def _value(self, ir: Parameter) -> Tensor:
        here = {**self.world.coordinate, "ep_data": self.world.data_index % self.plan.mesh.ep_data}
        index = local_index(ir, self.weights.model.get_parameter(ir.fqn).shape, self.degrees, here)
        value = self.weights.parameter(ir, index)
        if ir.padding is not None:
            value = lengthened(value, ir.padding.dim, ir.spec.shape[ir.padding.dim])
        dtype = self.storage if value.is_floating_point() else value.dtype  # indices and masks keep their dtype
        return value.to(device=self.world.device, dtype=dtype, copy=True).contiguous()

    def fill_buffers(self, program: PreludeProgram) -> None:
        """Load buffers of the model, and move them and constants of the graph to the device.

        Raises:
            UsageError: a constant has no value.
        """
        for name in program.buffers:
            buffer = self.buffers[name]
            value = self.weights.buffer(buffer.fqn, buffer.value) if buffer.fqn else buffer.value
            if value is None:
                raise UsageError(
                    "A tensor that forward reads was made on meta and has no value",
                    where=name,
                    fix="Make it a buffer (register_buffer) with an initialiser, or build the model on a real device",
                )
            here = value.to(self.world.device, buffer.spec.dtype, copy=True)  # a checkpoint is loaded into it
            program.module.register_buffer(name, here, persistent=False)

    # --- parameters

    def held(self, stage: StageModule) -> list[RankParameter]:
        """Return the parameters of the stage, after FSDP has replaced them by its own."""
        parameters = []
        for name, holder in stage.holders().items():
            ir = self.parameters[name]
            registered, replicated = holder._parameters[name], self._replicated(ir)
            copies, copy = self._copies(replicated, self.tied.get(name, (stage.index,)), stage.index)
            assert registered is not None
            parameters.append(
                RankParameter(
                    name=name,
                    key=ir.key,
                    parameter=self.visible.get((stage.index, name), registered),
                    leaf=registered if (stage.index, name) in self.visible else None,
                    group=self.groups[self._sum_axes(ir)],
                    tie_group=self.tie_groups.get(name),
                    copies=copies,
                    copy=copy,
                    replicated=replicated,
                    padding=ir.padding,
                )
            )
        return parameters

    def _copies(self, axes: tuple[str, ...], stages: Sequence[int], stage: int) -> tuple[int, int]:
        """Return how many copies ranks along ``axes`` and ``stages`` hold, and the number of this rank's copy in ``stage``."""
        outer, _ = divmod(self.world.data_index, self.plan.mesh.ep_data)
        here, count, number = {**self.world.coordinate, "ep_outer": outer}, len(stages), stages.index(stage)
        for axis in axes:
            degree = getattr(self.plan.mesh, axis)
            count, number = count * degree, number * degree + here[axis]
        return count, number

    def _is_sharded_by_fsdp(self, ir: Parameter) -> bool:
        """Return whether FSDP shards the parameter: not experts over data ranks, nor scalars and empty parameters, which it does not support."""
        takes = torch.__version__ >= "2.13" or ir.spec.dtype.is_floating_point  # before, FSDP gave integers a gradient
        return self.mesh is not None and not _is_spread(ir) and bool(ir.spec.shape) and ir.spec.numel > 0 and takes

    def _replicated(self, ir: Parameter) -> tuple[str, ...]:
        """Axes along which ranks hold the same elements."""
        kinds = dict(ir.layout)
        data = ("dp_replicate",) if self._is_sharded_by_fsdp(ir) else ("dp_replicate", "dp_shard")
        axes = ("ep_outer",) if _is_spread(ir) else data
        unsplit = tuple(axis for axis in ("cp", "tp") if axis not in kinds or not kinds[axis].is_split)
        return tuple(axis for axis in (*axes, *unsplit) if getattr(self.plan.mesh, axis) > 1)


def _is_spread(parameter: Parameter) -> bool:
    """Return whether the parameter is of experts that are split over data ranks."""
    return any(axis == SPREAD and kind.is_split for axis, kind in parameter.layout)
