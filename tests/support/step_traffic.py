"""The collectives of one step on one rank, listed from what the cost model prices, to be compared with those that the runtime runs.

| of                | collective                                                       | how often             |
|-------------------|------------------------------------------------------------------|-----------------------|
| blocks            | their changes of type, forward and backward                      | a micro-batch         |
| recompute         | the forward ones again, up to the last operator that keeps values | a micro-batch         |
| stages            | values to the next one, gradients to the one before              | a micro-batch         |
| FSDP units        | all-gather of parameters, padded to equal shards                 | by ZeRO stage         |
|                   | reduce-scatter of gradients, with HSDP an all-reduce of shards   | by ZeRO stage, a step |
| other gradients   | all-reduce in buckets; of pending axes; of tied parameters       | a step                |
| the loss          | all-reduce of its totals over data ranks, and of itself          | a step                |
| the gradient norm | all-reduce of a scalar over all ranks                            | when it is asked for  |
| a scaled loss     | all-reduce of a scalar over all ranks: is any gradient infinite  | a step                |

A unit is a block with the parameters that it alone reads on its stage; those that several of its blocks read are one
unit more. Experts that travel and keys that go round a ring are listed as the block's messages have them: routing as
if it were even, a ring as the collective of its volume.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.cost.blocks.block_cost import BlockCost, ParameterCost
from autopar.cost.model import CostModel
from autopar.cost.step import gradient_buckets
from autopar.cost.step.data_parallel import DataParallel, itemsize
from autopar.cost.step.step import StageCost, Step
from autopar.graph.graph import Graph
from autopar.lower.program import lower
from autopar.plan.mesh import MESH_AXES
from autopar.plan.plan import Plan
from tests.support.example_plans import schedule_actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """Bytes are of the whole tensor, of one rank's part for ``all_to_all`` and ``send``; ``pp_ranks``: who, if not the whole axis."""

    kind: str
    axes: tuple[str, ...]
    num_bytes: int
    pp_ranks: tuple[int, ...] = ()


Traffic = Counter[Collective]
"""How often each runs in a step."""


def traffic(model: CostModel, stages: Sequence[StageCost], step: Step, *, clips: bool = False) -> tuple[Traffic, ...]:
    """For each pipeline rank; ``clips``: with the norm of all gradients, which training takes by a call after the step."""
    data = model.of(step).data
    norm = Collective(
        kind="all_reduce", axes=MESH_AXES, num_bytes=gradient_buckets.SCALAR_BYTES * clips * (step.mesh.world_size > 1)
    )
    ranks = (_rank_traffic(stages, data, step, pp_rank=rank) for rank in range(step.mesh.pp))
    return tuple(found + Counter({norm: bool(norm.num_bytes)}) for found in ranks)


def _rank_traffic(stages: Sequence[StageCost], data: DataParallel, step: Step, *, pp_rank: int) -> Traffic:
    """What a rank of one pipeline rank sends in a step; ``stages``: of the whole model, in order."""
    turns = range(pp_rank, len(stages), data.mesh.pp)
    found: Traffic = Counter()
    for s in turns:
        found += _of_blocks(stages[s], step.num_micro_batches)
        found += _sends(stages, s, step.num_micro_batches)
    if data.uses_fsdp:
        found += _of_fsdp(stages, data, step.schedule, step.num_micro_batches, pp_rank)
    found += _of_gradients([stages[s].blocks for s in turns], data, step.bucket_bytes)
    found += _ties(stages, data, pp_rank)
    for axes, num_bytes in gradient_buckets.scalars(data, step.totals):
        found[Collective(kind="all_reduce", axes=axes, num_bytes=num_bytes)] += 1
    return Counter({c: n for c, n in found.items() if c.num_bytes and data.mesh.size(c.axes) > 1})


def _of_blocks(stage: StageCost, num_micro_batches: int) -> Traffic:
    found: Traffic = Counter()
    for block, mode in zip(stage.blocks, stage.recompute, strict=True):
        for m in block.messages:
            times = 2 if mode == "full" and m.repeated and not m.backward else 1
            found[Collective(kind=m.kind, axes=(m.axis,), num_bytes=m.num_bytes)] += times * num_micro_batches
    return found


def _sends(stages: Sequence[StageCost], s: int, num_micro_batches: int) -> Traffic:
    found: Traffic = Counter()
    sizes: list[int] = []
    if s < len(stages) - 1 and stages[s].blocks:
        sizes += stages[s].blocks[-1].sends
    if s and stages[s - 1].blocks:
        sizes += stages[s - 1].blocks[-1].send_gradients
    for size in sizes:
        found[Collective(kind="send", axes=("pp",), num_bytes=size)] += num_micro_batches
    return found


def units(blocks: Sequence[BlockCost]) -> Iterator[tuple[tuple[ParameterCost, ...], bool]]:
    """Parameters of each FSDP unit of a stage, and whether it is the one of shared parameters."""
    own, shared = gradient_buckets.stage_parameters(blocks)
    yield from ((tuple(p for p in parameters if gradient_buckets.is_fsdps(p, True)), False) for parameters in own)
    yield tuple(p for p in shared if gradient_buckets.is_fsdps(p, True)), True


def _of_fsdp(
    stages: Sequence[StageCost], data: DataParallel, schedule: str, num_micro_batches: int, pp_rank: int
) -> Traffic:
    found: Traffic = Counter()
    shards, precision = data.mesh.dp_shard, data.precision
    for s in range(pp_rank, len(stages), data.mesh.pp):
        real = [(parameters, is_shared) for parameters, is_shared in units(stages[s].blocks) if parameters]
        actions = schedule_actions(schedule, data.mesh.pp, len(stages) // data.mesh.pp, num_micro_batches)[pp_rank]
        order = "".join(action.kind for action in actions if action.stage == s)
        counts = gathers(order, data, len(real), has_shared=bool(real) and real[-1][1])
        for (parameters, _), count in zip(real, counts, strict=True):
            whole = sum(p.shard_numel(shards) * shards for p in parameters) * itemsize(precision.compute)
            found[Collective(kind="all_gather", axes=("dp_shard",), num_bytes=whole)] += count
            trained = sum(p.shard_numel(shards) for p in parameters if p.trained) * itemsize(precision.reduce)
            scattered = Collective(kind="reduce_scatter", axes=("dp_shard",), num_bytes=trained * shards)
            found[scattered] += num_micro_batches if data.reduces_always else 1
            found[Collective(kind="all_reduce", axes=("dp_replicate",), num_bytes=trained)] += 1
    return found


def gathers(order: str, data: DataParallel, num_units: int, *, has_shared: bool) -> list[int]:
    """How often a step gathers each unit of one stage: what FSDP2 does (torch's ``_fsdp_param_group.py``).

    At ZeRO 3 a block's unit is freed after its forward, and after its backward unless a pipeline still has micro-batches
    to come (torch's stages keep everything from a backward on to their next forward). Every backward of a unit gathers
    the one that ran forward before it: for the first unit that is the last one of the micro-batch before, in vain.
    ``order``: ``F`` and ``B`` of the stage's actions; ``has_shared``: the last unit is that of shared parameters, which holds
    all others and stays gathered.
    """
    if not data.gathers_always:
        return [1] * num_units
    counts, is_there = [0] * num_units, [False] * num_units
    run: list[int] = []
    places: list[list[int]] = [[] for _ in range(num_units)]

    def need(unit: int) -> None:
        counts[unit] += not is_there[unit]
        is_there[unit] = True

    for kind in order:
        if kind == "F":
            if has_shared:
                need(num_units - 1)
            for unit in range(num_units):
                need(unit)
                is_there[unit] = has_shared and unit == num_units - 1
                places[unit].append(len(run))
                run.append(unit)
            continue
        for unit in reversed(range(num_units)):
            need(unit)
            place = places[unit].pop()
            if place > 0:
                need(run[place - 1])
            if not data.is_pipelined and not (has_shared and unit == num_units - 1):
                is_there[unit] = False
        if has_shared and not data.is_pipelined:
            is_there[num_units - 1] = False
    return counts


def _of_gradients(stages: Sequence[Sequence[BlockCost]], data: DataParallel, bucket_bytes: int) -> Traffic:
    found: Traffic = Counter()
    size, summed = itemsize(data.precision.storage), gradient_buckets.Summed(data.mesh, data.uses_fsdp)
    for bucket in gradient_buckets.buckets(stages, summed, size, bucket_bytes):
        found[Collective(kind="all_reduce", axes=bucket.axes, num_bytes=bucket.num_bytes)] += 1
    for axes, num_bytes in gradient_buckets.late_sums(stages, summed, size).items():
        found[Collective(kind="all_reduce", axes=axes, num_bytes=num_bytes)] += 1
    return found


def _ties(stages: Sequence[StageCost], data: DataParallel, pp_rank: int) -> Traffic:
    found: Traffic = Counter()
    for ranks, num_bytes in gradient_buckets.tied([stage.blocks for stage in stages], data).items():
        if pp_rank in ranks:
            some = () if len(ranks) == data.mesh.pp else ranks
            found[Collective(kind="all_reduce", axes=("pp",), num_bytes=num_bytes, pp_ranks=some)] += 1
    return found


def stages_of(model: CostModel, plan: Plan, graph: Graph) -> list[StageCost]:
    local = lower(plan, graph).graph
    costs = [model.price(model.block_work(local, block), plan.mesh) for block in local.blocks]
    costs = [replace(cost, offloads=block.offload) for cost, block in zip(costs, plan.blocks, strict=True)]
    again = [block.recompute for block in plan.blocks]
    return [
        StageCost(blocks=tuple(costs[s.start : s.stop]), recompute=tuple(again[s.start : s.stop])) for s in plan.stages
    ]
