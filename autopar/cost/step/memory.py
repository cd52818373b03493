"""Peak memory of each pipeline rank, as the runtime keeps tensors.

| what        | ZeRO 0, one dtype | ZeRO 0 mixed, 1, 2                 | ZeRO 3                |
|-------------|-------------------|------------------------------------|-----------------------|
| parameters  | whole             | shard + whole in the compute dtype | shard; two blocks in passing, in a pipeline all |
| gradients   | whole             | whole while they accumulate, then shard; else shard + one block in passing | likewise |
| optimizer   | whole             | shard                              | shard                 |

Whole gradients accumulate in the dtype of reductions: with a pipeline at every ZeRO stage, without one below stage 2
when there are several micro-batches. Activations are what autograd keeps of each block, times the micro-batches that
the schedule keeps alive; a block that is recomputed keeps its inputs, one that is so in part what cannot be made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.cost.blocks.block_cost import BlockCost
from autopar.cost.step.data_parallel import DataParallel, Unit, itemsize
from autopar.cost.step.gradient_buckets import Summed, buckets
from autopar.cost.step.optimizer import OptimizerCost
from autopar.cost.step.step import Step
from autopar.device import Device
from autopar.frozen import quickly
from autopar.plan import Memory, Recompute
from autopar.schedule import peak_table


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Blocks that run as one stage, in order, and what of each is recomputed in backward."""

    blocks: tuple[BlockCost, ...]
    recompute: tuple[Recompute, ...]


@quickly
@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Bytes of a rank that live from step to step or from micro-batch to micro-batch."""

    parameters: int
    gradients: int
    optimizer: int
    host: int = 0
    """Of the host's memory."""

    @property
    def total(self) -> int:
        """All of the device's."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    unit: Unit, data: DataParallel, optimizer: OptimizerCost, num_micro_batches: int, *, on_host: bool = False
) -> State:
    """State of one FSDP unit; ``on_host``: its optimizer's live there, beside a copy of what is trained and its gradients."""
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
    """Parameters of a unit that stay gathered: ZeRO 3 in a pipeline, from a backward on to the next forward."""
    stays = data.gathers_always and data.is_pipelined
    return unit.numel * itemsize(data.precision.compute) if stays else 0


def least_state_bytes(data: DataParallel, optimizer_bytes: float, num_micro_batches: int) -> float:
    """Bytes for an element of a large trained parameter, whose shards are all equal: state, and what stays gathered."""
    storage, share = itemsize(data.precision.storage), 1 / data.mesh.dp_shard
    total = (storage + optimizer_bytes) * share
    if data.uses_fsdp and (data.zero_stage < 3 or data.is_pipelined):  # and what stays gathered
        total += itemsize(data.precision.compute)
    if not data.uses_fsdp:
        return total + storage
    return total + (itemsize(data.precision.reduce) if data.accumulates(num_micro_batches) else storage * share)


@dataclass(frozen=True, slots=True)
class Known:
    """What ranks of one plan have in common: bytes of equal stages, states of units, for as long as these are there."""

    sizes: dict[object, int]
    states: dict[int, State]


def rank_memory(
    stages: Sequence[StageCost],
    units: Sequence[Sequence[Unit]],
    data: DataParallel,
    *,
    optimizer: OptimizerCost,
    device: Device,
    step: Step,
    pp_rank: int,
    known: Known | None = None,
) -> Memory:
    """Memory of one pipeline rank.

    Args:
        stages: of this rank, in order of the model.
        units: for each stage the FSDP units of its blocks.
        data: the data axes.
        optimizer: what it keeps.
        device: whose profile says what is reserved.
        step: how they are run.
        pp_rank: this one.
        known: of other ranks of the same plan.
    """
    known = Known({}, {}) if known is None else known
    pp, num_micro_batches = step.mesh.pp, step.num_micro_batches
    for unit in {id(unit): unit for stage in units for unit in stage}.values():
        if id(unit) not in known.states:
            known.states[id(unit)] = state_bytes(
                unit, data, optimizer, num_micro_batches, on_host=step.offloads_optimizer
            )
    state = [known.states[id(unit)] for stage in units for unit in stage]
    parameters = sum(s.parameters for s in state)
    gradients = sum(s.gradients for s in state)
    keys = [(tuple(map(id, stage.blocks)), stage.recompute) for stage in stages]
    kept = _kept_on(stages, keys, pp, pp_rank, known.sizes)
    table = peak_table(step.schedule, pp, len(stages), num_micro_batches, pp_rank)
    activations = int((table @ np.array(kept, dtype=np.int64)).max())
    moved = [sum(b.moved_bytes(r) for b, r in zip(s.blocks, s.recompute, strict=True)) for s in stages]
    for stage, own, key in zip(stages, units, keys, strict=True):
        if key not in known.sizes:
            known.sizes[key] = passing_bytes(stage, own, data, num_micro_batches)
    transient = max(known.sizes[key] for key in keys)
    transient += sum(gathered_bytes(unit, data) for stage in units for unit in stage)
    # activations are gone when gradients are summed and parameters stepped
    if tuple(keys) not in known.sizes:
        known.sizes[tuple(keys)] = _copied_bytes(stages, data, step.bucket_bytes)
    temporaries = 0 if step.offloads_optimizer else optimizer.temporaries
    copied = _summed_bytes(units, data, known.sizes[tuple(keys)])
    stepping = _stepping_bytes(units, data, temporaries, device) - _freed_bytes(units, data, num_micro_batches)
    after = max(copied, stepping)
    transient = max(transient, after - activations)
    optimizer_bytes = sum(s.optimizer for s in state)
    tensors = parameters + gradients + optimizer_bytes + activations + transient
    return Memory(
        pp_rank=pp_rank,
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer_bytes,
        activations=activations,
        transient=transient,
        reserved=device.reserved_bytes + round(device.fragmentation * tensors),
        host=sum(s.host for s in state) + (int((table @ np.array(moved, dtype=np.int64)).max()) if any(moved) else 0),
    )


def _kept_on(
    stages: Sequence[StageCost], keys: Sequence[object], pp: int, pp_rank: int, sizes: dict[object, int]
) -> list[int]:
    """:func:`kept_bytes` of each stage of a rank; ``sizes``: of stages with these ``keys``, those of other ranks among them."""
    found, last = [], len(stages) - 1
    for turn, (stage, key) in enumerate(zip(stages, keys, strict=True)):
        ends = (turn > 0 or pp_rank > 0, turn < last or pp_rank < pp - 1)
        if (key, ends) not in sizes:
            sizes[key, ends] = kept_bytes(stage, receives=ends[0], sends=ends[1])
        found.append(sizes[key, ends])
    return found


def kept_bytes(stage: StageCost, *, receives: bool, sends: bool) -> int:
    """Bytes that one micro-batch keeps on a stage from forward to backward; the pipeline keeps inputs and outputs."""
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
    """The most that is alive in passing on a stage, over what its micro-batches keep when all of it is there."""
    peak = later = 0
    rows = list(zip(stage.blocks, stage.recompute, units, strict=True))
    for i in reversed(range(len(rows))):
        block, recompute, unit = rows[i]
        here = block.passing_bytes(recompute) - later
        if i:  # comes up, or goes down, beside this block
            here += rows[i - 1][0].moved_bytes(rows[i - 1][1])
        units_beside = (rows[i - 1][2] if i else None), (rows[i + 1][2] if i + 1 < len(rows) else None)
        here += unit_passing_bytes(unit, *units_beside, data, num_micro_batches)
        peak = max(peak, here)
        later += block.kept_bytes(recompute)
    return peak


def unit_passing_bytes(
    unit: Unit, before: Unit | None, after: Unit | None, data: DataParallel, num_micro_batches: int
) -> int:
    """What FSDP holds for a while beside a block's backward: parameters of two blocks, gradients of two.

    Args:
        before, after: the units beside it on the stage; None: there is none.
    """
    compute, reduced = itemsize(data.precision.compute), itemsize(data.precision.reduce)
    found = 0
    if data.gathers_always and not data.is_pipelined:
        found += (unit.numel + (before.numel if before else 0)) * compute
    if data.uses_fsdp and not data.accumulates(num_micro_batches):
        # its gradients, those of the block after on their way
        found += unit.trained_numel * compute
        found += max(unit.trained_numel, after.trained_numel if after else 0) * reduced
    return found


def _copied_bytes(stages: Sequence[StageCost], data: DataParallel, bucket_bytes: int) -> int:
    """Gradients that lie in buckets beside themselves, all of them when the last ones are on their way."""
    if data.uses_fsdp and data.mesh.ep_outer == 1:  # but for scalars FSDP holds all parameters
        return 0
    size = itemsize(data.precision.storage)
    found = buckets([stage.blocks for stage in stages], Summed(data.mesh, data.uses_fsdp), size, bucket_bytes)
    return sum(bucket.copied_bytes for bucket in found)


def _summed_bytes(units: Sequence[Sequence[Unit]], data: DataParallel, copied_bytes: int) -> int:
    """Copies of gradients while they are summed: those in buckets, and those of FSDP's largest unit."""
    if not data.uses_fsdp:
        return copied_bytes
    largest = max((unit.trained_numel for stage in units for unit in stage), default=0)
    return copied_bytes + largest * itemsize(data.precision.reduce)


def _stepping_bytes(units: Sequence[Sequence[Unit]], data: DataParallel, temporaries: int, device: Device) -> int:
    """The optimizer's temporaries: of all parameters at once on a GPU alone."""
    storage = itemsize(data.precision.storage)
    sizes = [unit.trained_shard_numel * storage * temporaries for stage in units for unit in stage]
    return sum(sizes) if device.kind == "cuda" else max(sizes, default=0)


def _freed_bytes(units: Sequence[Sequence[Unit]], data: DataParallel, num_micro_batches: int) -> int:
    """What gradients are smaller by while parameters are stepped: FSDP has shards in place of the whole ones that accumulated.

    Shards in a longer dtype may be larger than the whole ones of one or two ranks; that is left out.
    """
    if not (data.uses_fsdp and data.accumulates(num_micro_batches)):
        return 0
    reduced, storage = itemsize(data.precision.reduce), itemsize(data.precision.storage)
    flat = [unit for stage in units for unit in stage]
    return max(sum(u.trained_numel * reduced - (u.trained_shard_numel - u.spread_numel) * storage for u in flat), 0)
