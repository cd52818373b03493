"""Peak memory of each pipeline rank, as the runtime keeps tensors; what optimizers keep and move in torch's implementations.

| what        | ZeRO 0, one dtype | ZeRO 0 mixed, 1, 2                 | ZeRO 3                |
|-------------|-------------------|------------------------------------|-----------------------|
| parameters  | full              | shard + full in the compute dtype  | shard + two gathered blocks; in a pipeline + all gathered |
| gradients   | full              | full while they accumulate, then shard; else shard + one full block | likewise |
| optimizer   | full              | shard                              | shard                 |

Full gradients accumulate in the dtype of reductions: with a pipeline at every ZeRO stage, without one below stage 2 if there are several
micro-batches. Activations are what autograd keeps of each block, times the micro-batches that the schedule keeps alive. A block under full
recompute keeps its inputs, one under selective recompute what it does not recompute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from autopar.cost.step.data_parallel import DataParallel, Unit, itemsize
from autopar.cost.step.step import StageCost, Step
from autopar.errors import UsageError
from autopar.hardware.device import Device, HostLink
from autopar.plan.prediction import Memory
from autopar.plan.schedule import peak_table


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """An optimizer of ``torch.optim`` that steps all parameters, operator by operator (not fused).

    Attributes:
        states: the tensors of a parameter's shape that it keeps, in the dtype of the parameter.
        is_factored: whether it keeps one row and one column instead for parameters with two dims or more (Adafactor).
        element_bytes: the declared bytes of all states of one element, whatever the dtype; None: as ``states`` says.
        passes: how often a step reads or writes an element of a parameter, its gradient or a state.
        kernels: the operators for one parameter (for all of them on a GPU, where torch groups them).
        temporaries: the temporary tensors of a parameter's shape.
    """

    states: int
    passes: int
    kernels: int
    temporaries: int
    is_factored: bool = False
    element_bytes: float | None = None

    def state_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Return the bytes of states of a parameter, or of a shard of one."""
        numel = prod(shape)
        if self.element_bytes is not None:
            return math.ceil(numel * self.element_bytes)
        if self.is_factored and len(shape) > 1:
            return numel // max(shape[-1], 1) * itemsize + numel // max(shape[-2], 1) * itemsize
        return self.states * numel * itemsize

    def bytes_per_element(self, itemsize: int) -> float:
        """Return the bytes of states for each element of a large parameter."""
        if self.element_bytes is not None:
            return self.element_bytes
        return 0.0 if self.is_factored else float(self.states * itemsize)


_ADAM = OptimizerCost(states=2, passes=19, kernels=8, temporaries=1)
"""Its passes are lerp (3), mul (2), addcmul (3), sqrt (2), div (2), add (2), addcdiv (4) and the step count (1)."""

OPTIMIZERS = {
    "adamw": OptimizerCost(states=2, passes=21, kernels=9, temporaries=1),
    "adam": _ADAM,
    "momentum": OptimizerCost(states=1, passes=8, kernels=3, temporaries=0),
    "sgd": OptimizerCost(states=0, passes=3, kernels=1, temporaries=0),
    "adafactor": OptimizerCost(states=1, passes=17, kernels=14, temporaries=1, is_factored=True),
}
"""The costs of optimizers by name, with their passes by operator.

adamw is adam and the decay of weights (2); momentum is mul (2), add (3), add (3); sgd is add (3). adafactor is two norms (2), product of
row and column (1), div (2), clamp (2), rsqrt (2), mul (3), norm of the update (1) and of the parameter (1), add (3), and has one state for
a parameter of fewer than two dims.
"""

_DECLARED = ":bytes="


def optimizer_cost(name: str) -> OptimizerCost:
    """Return the costs of an optimizer.

    Args:
        name: one of :data:`OPTIMIZERS`, or ``NAME:bytes=N`` with N declared bytes of states for each element, as 8-bit optimizers have: 2
            bytes of two moments, and 4 for each block of 256 of each (``adamw:bytes=2.03125``).

    Raises:
        UsageError: the name is unknown, or the bytes are not a number of at least 0.
    """
    base, declared, text = name.lower().partition(_DECLARED)
    cost = OPTIMIZERS.get(base)
    if cost is None:
        raise UsageError.unknown(
            "optimizer", name, OPTIMIZERS, fix=f"or NAME{_DECLARED}N with N bytes of states for each element"
        )
    if not declared:
        return cost
    try:
        size = float(text)
    except ValueError:
        size = -1.0
    if not 0 <= size < math.inf:
        raise UsageError(
            f"'{text}' of the optimizer '{name}' is no number of bytes of states for each element",
            fix="Give one from 0 on, for example adamw:bytes=2",
        )
    return replace(cost, element_bytes=size)


def launched_s(optimizer: OptimizerCost, units: Sequence[Unit], device: Device, host: HostLink | None) -> float:
    """Return the seconds to launch the optimizer's operators; on a GPU torch groups those of all parameters.

    Args:
        optimizer: the optimizer.
        units: the units that it steps.
        device: the device.
        host: the host link if the optimizer steps on the host, else None.
    """
    parameters = sum(unit.num_trained for unit in units)
    if host is not None:
        return optimizer.kernels * parameters * host.launch_s
    launch_s = device.overheads.sharded_launch_s or device.launch_s
    return optimizer.kernels * (1 if device.kind == "cuda" else parameters) * launch_s


def stepped_s(
    optimizer: OptimizerCost, units: Sequence[Unit], itemsize: int, device: Device, host: HostLink | None
) -> tuple[float, float]:
    """Return the seconds of the optimizer's reads and writes and, if it steps on the host, those of copies.

    Gradients are copied to the host and parameters back, and nothing overlaps: a step begins when gradients are summed and clipped, and
    forward waits for it. Checksums read the parameters on the device before and after (``autopar.runtime.local_optimizer``); parameters are
    copied to the host only where other code has written them.

    Args:
        optimizer: the optimizer.
        units: the units that it steps.
        itemsize: the bytes of an element of a stored parameter.
        device: the device.
        host: the host link if the optimizer steps on the host, else None.
    """
    size = sum(unit.trained_shard_numel for unit in units) * itemsize
    moved = optimizer.passes * size
    if host is None:
        return moved / device.memory_bandwidth_bytes_per_s, 0.0
    copies = 2 * sum(unit.num_trained for unit in units)
    copied_s = size / host.to_host_bytes_per_s + size / host.to_device_bytes_per_s + copies * host.latency_s
    copied_s += 2 * size / device.memory_bandwidth_bytes_per_s
    return moved / host.memory_bandwidth_bytes_per_s, copied_s


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The bytes of a rank that persist between steps or between micro-batches."""

    parameters: int
    gradients: int
    optimizer: int
    host: int = 0
    """The bytes in host memory."""

    @property
    def total(self) -> int:
        """The bytes on the device."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    unit: Unit, data: DataParallel, optimizer: OptimizerCost, num_micro_batches: int, *, on_host: bool = False
) -> State:
    """Return the state of one FSDP unit.

    With ``on_host`` its optimizer states are on the host, besides a copy of what is trained and its gradients.
    """
    storage = itemsize(data.precision.storage)
    parameters = unit.shard_numel * storage
    if data.uses_fsdp and data.zero_stage < 3:
        parameters += unit.numel * itemsize(data.precision.compute)
    if not data.uses_fsdp:
        gradients = unit.trained_numel * storage
    elif data.accumulates(num_micro_batches):
        gradients = unit.trained_numel * itemsize(data.precision.reduce)
    else:
        gradients = (unit.trained_shard_numel - unit.spread_numel) * storage
    gradients += unit.spread_numel * storage
    kept = sum([optimizer.state_bytes(shape, storage) for shape in unit.trained_shard_shapes])
    if on_host:
        copies = 2 * unit.trained_shard_numel * storage
        return State(parameters=parameters, gradients=gradients, optimizer=0, host=kept + copies)
    return State(parameters=parameters, gradients=gradients, optimizer=kept)


def gathered_bytes(unit: Unit, data: DataParallel) -> int:
    """Return the bytes of a unit that stay gathered under ZeRO 3 in a pipeline, from a backward to the next forward."""
    stays = data.gathers_always and data.is_pipelined
    return unit.numel * itemsize(data.precision.compute) if stays else 0


def freed_bytes(unit: Unit, data: DataParallel, num_micro_batches: int) -> int:
    """Return by how many bytes the gradients of a unit shrink when they are summed; see :func:`rank_memory`."""
    if not data.uses_fsdp or not data.accumulates(num_micro_batches):
        return 0
    summed = (unit.trained_shard_numel - unit.spread_numel) * itemsize(data.precision.storage)
    return unit.trained_numel * itemsize(data.precision.reduce) - summed


def stepping_bytes(optimizer: OptimizerCost, data: DataParallel, step: Step) -> int:
    """Return the temporary bytes of an optimizer step on the device for each element that it steps."""
    return 0 if step.offloads_optimizer else optimizer.temporaries * itemsize(data.precision.storage)


def steps_at_once(device: Device) -> bool:
    """Return whether all parameters of a rank are stepped together, as torch does on a GPU."""
    return device.kind == "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The bytes of one stage, from which those of its rank are computed.

    Attributes:
        parameters, gradients, optimizer, host: its state.
        gathered: parameters that stay gathered.
        kept: what one micro-batch keeps from forward to backward.
        received, sent: what it also keeps of its inputs and outputs, where there is a stage before and after it.
        moved: what one micro-batch keeps on the host.
        passing: the peak beyond what micro-batches keep.
        reduced: the largest unit's gradients while they are summed; 0 without FSDP.
        stepped, largest_stepped: the rank's trained elements, of all units and of the largest one.
        freed: by how many bytes gradients shrink when they are summed; see :func:`rank_memory`.
    """

    parameters: int
    gradients: int
    optimizer: int
    host: int
    gathered: int
    kept: int
    received: int
    sent: int
    moved: int
    passing: int
    reduced: int
    stepped: int
    largest_stepped: int
    freed: int


def stage_memory(
    stage: StageCost, units: Sequence[Unit], states: Sequence[State], data: DataParallel, num_micro_batches: int
) -> StageMemory:
    """Return the bytes of one stage.

    Args:
        stage: the stage.
        units, states: the FSDP unit and the state of each block.
        data: how the data axes run.
        num_micro_batches: the micro-batches of a step.
    """
    pairs = list(zip(stage.blocks, stage.recompute, strict=True))
    kept = kept_bytes(stage, receives=False, sends=False)
    reduced = itemsize(data.precision.reduce)
    return StageMemory(
        parameters=sum(s.parameters for s in states),
        gradients=sum(s.gradients for s in states),
        optimizer=sum(s.optimizer for s in states),
        host=sum(s.host for s in states),
        gathered=sum(gathered_bytes(unit, data) for unit in units),
        kept=kept,
        received=kept_bytes(stage, receives=True, sends=False) - kept,
        sent=kept_bytes(stage, receives=False, sends=True) - kept,
        moved=sum(block.moved_bytes(mode) for block, mode in pairs),
        passing=passing_bytes(stage, units, data, num_micro_batches),
        reduced=max((unit.trained_numel for unit in units), default=0) * reduced if data.uses_fsdp else 0,
        stepped=sum(unit.trained_shard_numel for unit in units),
        largest_stepped=max((unit.trained_shard_numel for unit in units), default=0),
        freed=sum(freed_bytes(unit, data, num_micro_batches) for unit in units),
    )


def rank_memory(
    stages: Sequence[StageMemory],
    data: DataParallel,
    *,
    copied_bytes: int,
    optimizer: OptimizerCost,
    device: Device,
    step: Step,
    pp_rank: int,
) -> Memory:
    """Return the memory of one pipeline rank.

    There are no activations when gradients are summed and parameters stepped. FSDP then has shards of gradients in place of the full ones
    that accumulated. Shards in a longer dtype may be larger than the full ones of one or two ranks; this is left out.

    Args:
        stages: the stages of this rank, in the order of the model.
        data: how the data axes run.
        copied_bytes: the bytes of gradients copied into buckets, all of which exist while the last sums run.
        optimizer: the optimizer.
        device: the device, whose profile gives reserved bytes and fragmentation.
        step: how the step is run.
        pp_rank: the pipeline rank.
    """
    pp, last = step.mesh.pp, len(stages) - 1
    kept = [
        s.kept + (s.received if index > 0 or pp_rank > 0 else 0) + (s.sent if index < last or pp_rank < pp - 1 else 0)
        for index, s in enumerate(stages)
    ]
    table = peak_table(step.schedule, pp, len(stages), step.num_micro_batches, pp_rank)
    activations = int((table @ np.array(kept, dtype=np.int64)).max())
    moved = [s.moved for s in stages]
    transient = max(s.passing for s in stages) + sum(s.gathered for s in stages)
    numel = sum(s.stepped for s in stages) if steps_at_once(device) else max(s.largest_stepped for s in stages)
    stepping = numel * stepping_bytes(optimizer, data, step) - max(sum(s.freed for s in stages), 0)
    summed = copied_bytes + max(s.reduced for s in stages)
    transient = max(transient, max(summed, stepping) - activations)
    parameters, gradients = sum(s.parameters for s in stages), sum(s.gradients for s in stages)
    kept_states = sum(s.optimizer for s in stages)
    tensors = parameters + gradients + kept_states + activations + transient
    return Memory(
        pp_rank=pp_rank,
        parameters=parameters,
        gradients=gradients,
        optimizer=kept_states,
        activations=activations,
        transient=transient,
        reserved=device.reserved_bytes + round(device.fragmentation * tensors),
        host=sum(s.host for s in stages) + (int((table @ np.array(moved, dtype=np.int64)).max()) if any(moved) else 0),
    )


def kept_bytes(stage: StageCost, *, receives: bool, sends: bool) -> int:
    """Return the bytes that one micro-batch keeps on a stage from forward to backward; the pipeline keeps inputs and outputs."""
    if not stage.blocks:
        return 0
    prelude = {name: size for block in stage.blocks for name, size in block.prelude}
    total = sum(prelude.values())
    for block, recompute in zip(stage.blocks, stage.recompute, strict=True):
        total += block.kept_bytes(recompute)
    first = stage.blocks[0]
    if receives:
        total += first.input_bytes - (0 if first.offloads else first.kept_input_bytes(stage.recompute[0]))
    return total + (stage.blocks[-1].send_bytes if sends else 0)


def passing_bytes(stage: StageCost, units: Sequence[Unit], data: DataParallel, num_micro_batches: int) -> int:
    """Return the peak of a stage beyond what its micro-batches keep when all of it exists."""
    peak = later = 0
    rows = list(zip(stage.blocks, stage.recompute, units, strict=True))
    for i in reversed(range(len(rows))):
        block, recompute, unit = rows[i]
        here = block.passing_bytes(recompute) - later
        if i:  # activations of the block before are copied back, or to the host, during this block
            here += rows[i - 1][0].moved_bytes(rows[i - 1][1])
        neighbours = (rows[i - 1][2] if i else None), (rows[i + 1][2] if i + 1 < len(rows) else None)
        here += unit_passing_bytes(unit, *neighbours, data, num_micro_batches)
        peak = max(peak, here)
        later += block.kept_bytes(recompute)
    return peak


def unit_passing_bytes(
    unit: Unit, before: Unit | None, after: Unit | None, data: DataParallel, num_micro_batches: int
) -> int:
    """Return what FSDP holds temporarily during a block's backward: parameters of two blocks, gradients of two.

    Args:
        unit: the unit of the block.
        before, after: the units of the neighbouring blocks on the stage; None: there is none.
        data: how the data axes run.
        num_micro_batches: the micro-batches of a step.
    """
    compute, reduced = itemsize(data.precision.compute), itemsize(data.precision.reduce)
    num_bytes = 0
    if data.gathers_always and not data.is_pipelined:
        num_bytes += (unit.numel + (before.numel if before else 0)) * compute
    if data.uses_fsdp and not data.accumulates(num_micro_batches):
        # gradients of this block, while those of the block after are reduced
        num_bytes += unit.trained_numel * compute
        num_bytes += max(unit.trained_numel, after.trained_numel if after else 0) * reduced
    return num_bytes
