"""What blocks add to a step once beside their optimizer step and FSDP's reductions, at the least: terms of the lower bounds.

- Gradients that FSDP does not sum are summed by all-reduces (:mod:`autopar.cost.step.gradient_buckets`). How a rank's gradients fall into
  them depends on its blocks. A collective of more bytes takes no less, and less for each byte (the least of straight lines
  that begin above zero): no byte of a rank takes less than one of all blocks' bytes together.
- All-reduces that leave during the last backward run beside it, which they slow by the device's interference. What the
  backwards of a rank are too short to hide stands after them: seconds of all-reduces less those of backwards, over its
  stages at least their difference.
- Where the first and the last block of a pipeline read the same parameter, two ranks have it whole, and sum its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.cost.blocks.block_cost import BlockCost, ParameterCost
from autopar.cost.model import CostModel, Step
from autopar.cost.step.data_parallel import DataParallel, itemsize
from autopar.cost.step.gradient_buckets import is_fsdps, sum_axes
from autopar.cost.step.pipeline_step import ties_s

Sums = dict[tuple[str, ...], int]
"""Bytes of gradients by the axes over which they are summed."""


def least_sums_s(
    model: CostModel, costs: Sequence[BlockCost], counts: Sequence[int], step: Step, *, others: bool
) -> list[float]:
    """For each block the least that the sums of its gradients add to a step of a rank with consecutive blocks, once.

    Those of a rank's blocks may be added up; single ones can be negative, where a block's backward hides what others leave.

    Args:
        costs: of the blocks of the compact graph, parameters that earlier ones have left out.
        counts: blocks that each of them stands for.
        others: some blocks may be on a rank without being counted.
    """
    if model.collectives.is_measured:  # a table of times need not be of straight lines
        return [0.0] * len(costs)
    data = model.of(step).data
    known: dict[tuple[ParameterCost, ...], tuple[Sums, Sums]] = {}
    for cost in costs:
        if cost.parameters not in known:
            known[cost.parameters] = _bytes(cost.parameters, data, itemsize(model.precision.storage))
    beside, late = ([known[cost.parameters][part] for cost in costs] for part in (0, 1))
    beside_s, late_s = (_seconds(model, sums, counts, step) for sums in (beside, late))
    if not any(beside_s):
        return late_s
    interference = model.device.interference
    hiding = [cost.backward_s + cost.communication_backward_s + cost.recompute_s("full") for cost in costs]
    left_s = [(1 - interference) * (sent - back) for sent, back in zip(beside_s, hiding, strict=True)]
    if others or sum(n * s for n, s in zip(counts, left_s, strict=True)) <= 0:
        left_s = [0.0] * len(costs)
    return [after + interference * sent + left for after, sent, left in zip(late_s, beside_s, left_s, strict=True)]


def _bytes(parameters: Sequence[ParameterCost], data: DataParallel, size: int) -> tuple[Sums, Sums]:
    """Of the all-reduces beside the last backward, and of those after it."""
    beside: Sums = {}
    late: Sums = {}
    known: dict[tuple[object, ...], tuple[str, ...]] = {}
    for p in parameters:
        if not p.trained:
            continue
        is_late = is_fsdps(p, data.uses_fsdp)
        key = (p.spread, is_late, p.gradient_sum_axes)  # what the axes depend on
        axes = known.get(key)
        if axes is None:
            axes = known[key] = sum_axes(p, data.mesh, data.uses_fsdp)
        if not axes:
            continue
        found = late if is_late else beside
        numel = p.shard_numel(data.mesh.dp_shard) if is_late else p.numel
        found[axes] = found.get(axes, 0) + numel * size
    return beside, late


def _seconds(model: CostModel, sums: Sequence[Sums], counts: Sequence[int], step: Step) -> list[float]:
    """Of each block's bytes, each as one of those of all blocks together."""
    total: Sums = {}
    for own, n in zip(sums, counts, strict=True):
        for axes, size in own.items():
            total[axes] = total.get(axes, 0) + n * size
    rate = {axes: model.of(step).sum_s(axes, size, copied_bytes=0) / size for axes, size in total.items() if size}
    return [sum(size * rate[axes] for axes, size in own.items() if size) for own in sums]


def at_both_ends(costs: Sequence[BlockCost]) -> tuple[ParameterCost, ...]:
    """Parameters that the first and the last block read, whether others do or not: in a pipeline two ranks have them at least."""
    names = [{p.name for p in cost.parameters if p.shared} for cost in (costs[0], costs[-1])]
    return tuple(p for p in costs[-1].parameters if p.name in names[0] & names[1])


def are_inside(costs: Sequence[BlockCost], shared: Sequence[ParameterCost]) -> bool:
    """Whether blocks between the first and the last one read some of these too: then any ranks may have them beside the two."""
    names = {p.name for p in shared}
    return any(p.name in names for cost in costs[1:-1] for p in cost.parameters if p.shared)


def tie_s(model: CostModel, shared: Sequence[ParameterCost], step: Step, *, inside: bool) -> float:
    """Summing the gradients of :func:`at_both_ends`, on either of the two ranks, at the least.

    Two ranks sum them, or all do, or some do as two would: of each way a sum of all bytes takes no longer than several of its parts.
    """
    data, size, pp = model.of(step).data, itemsize(model.precision.storage), step.mesh.pp
    shards = [step.mesh.dp_shard if is_fsdps(p, data.uses_fsdp) else 1 for p in shared]
    num_bytes = sum(p.shard_numel(n) * size for p, n in zip(shared, shards, strict=True) if p.trained)
    ways = [(0, pp - 1), tuple(range(pp))][: 1 + inside]
    return min(ties_s(model.collectives, {ranks: num_bytes}, step, 0) for ranks in ways) if num_bytes else 0.0
