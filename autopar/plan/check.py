"""What must hold in every plan, whoever made it: the parts refer to each other and the degrees fit together."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from autopar.errors import PlanError
from autopar.plan.plan import Plan

_FLOATS = ("float64", "float32", "bfloat16", "float16")
_GRID = re.compile(r":(\d+)x(\d+)(?:\?.*)?$")


def check_plan(plan: Plan, *, place: str = "plan") -> None:
    """Check the laws of a plan.

    Args:
        place: what an error calls the plan (its file).

    Raises:
        PlanError: the first law that does not hold, with the path in the document.
    """
    for path, law, value, remedy in _faults(plan):
        raise PlanError(law, value=value, place=f"{place}: {path}", remedy=remedy)


_Fault = tuple[str, str, object, str]
_AGAIN = "search again with these pins"


def _faults(plan: Plan) -> Iterator[_Fault]:
    yield from _numbers(plan, "")
    yield from _dtypes(plan)
    yield from _degrees(plan)
    yield from _layouts(plan)
    yield from _stages(plan)


def _numbers(value: object, path: str) -> Iterator[_Fault]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path, "every number of a plan is finite", value, "report it: autopar wrote a plan that it cannot read"
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _numbers(getattr(value, field.name), f"{path}.{field.name}" if path else field.name)


def _dtypes(plan: Plan) -> Iterator[_Fault]:
    for name in ("compute", "storage", "reduce"):
        if (found := getattr(plan.precision, name)) not in _FLOATS:
            yield f"precision.{name}", f"the dtype is one of {', '.join(_FLOATS)}", repr(found), _AGAIN


def _degrees(plan: Plan) -> Iterator[_Fault]:
    mesh = plan.mesh
    if (grid := _GRID.search(plan.cluster)) and int(grid[1]) * int(grid[2]) != mesh.world_size:
        ranks = int(grid[1]) * int(grid[2])
        law = f"the product of the mesh degrees is the number of ranks of cluster {plan.cluster}, {ranks}"
        yield "mesh", law, f"{mesh} = {mesh.world_size}", _AGAIN
    if mesh.data % mesh.ep_data:
        yield "mesh.ep_data", f"the data ranks that experts borrow divide all {mesh.data} of them", mesh.ep_data, _AGAIN
    if mesh.ep not in (mesh.ep_data, mesh.ep_data * mesh.tp):
        law = f"experts borrow ep_data={mesh.ep_data} data ranks and none or all of tp={mesh.tp}: ep is their product"
        yield "mesh.ep", law, mesh.ep, _AGAIN
    for name in ("global_batch_size", "micro_batch_size", "virtual_stages", "bucket_bytes", "vocab_multiple"):
        if getattr(plan, name) < 1:
            yield name, "the value is at least 1", getattr(plan, name), _AGAIN
    if not plan.data_shares and plan.global_batch_size % (plan.micro_batch_size * mesh.data):
        law = "micro_batch_size * dp_replicate * dp_shard divides global_batch_size"
        value = f"{plan.micro_batch_size} * {mesh.dp_replicate} * {mesh.dp_shard} and {plan.global_batch_size}"
        yield "global_batch_size", law, value, _AGAIN
    if plan.zero_stage not in range(4):
        yield "zero_stage", "the ZeRO stage is 0, 1, 2 or 3", plan.zero_stage, _AGAIN
    if plan.zero_stage == 0 and mesh.dp_shard > 1:
        yield "zero_stage", "without ZeRO dp_shard is 1", f"dp_shard={mesh.dp_shard}", "put the ranks on dp_replicate"
    if (plan.schedule == "none") != (mesh.pp == 1):
        law = "the schedule is 'none' exactly where pp is 1"
        yield "schedule", law, f"{plan.schedule!r} with pp={mesh.pp}", _AGAIN
    if plan.virtual_stages > 1 and plan.schedule != "Interleaved1F1B":
        law = "more than one virtual stage needs the schedule Interleaved1F1B"
        yield "virtual_stages", law, f"{plan.virtual_stages} with {plan.schedule!r}", _AGAIN


def _layouts(plan: Plan) -> Iterator[_Fault]:
    for i, layout in enumerate(plan.layouts):
        for j, typing in enumerate(layout.typings):
            path = f"layouts[{i}].typings[{j}]"
            if typing.parameter_names and len(typing.parameter_names) != len(typing.parameters):
                value = f"{len(typing.parameter_names)} for {len(typing.parameters)}"
                yield f"{path}.parameter_names", "there is one name for each parameter or none", value, _AGAIN
            for k, kind in enumerate(typing.parameters):
                if kind.kind not in ("I", "S"):
                    yield f"{path}.parameters[{k}]", "a parameter at rest is I or S(d)", kind, _AGAIN
    for i, block in enumerate(plan.blocks):
        if block.index != i:
            yield f"blocks[{i}].index", "blocks stand in order", block.index, f"expected {i}"
        if block.layout >= len(plan.layouts):
            law = f"a block's layout is one of the {len(plan.layouts)} layouts"
            yield f"blocks[{i}].layout", law, block.layout, _AGAIN
        if block.offload and block.recompute == "selective":
            law = (
                "a block whose activations live on the host recomputes nothing or all: what is made again is not moved"
            )
            yield f"blocks[{i}].recompute", law, block.recompute, "take none or full, or leave the block on the device"


def _stages(plan: Plan) -> Iterator[_Fault]:
    expected = plan.mesh.pp * plan.virtual_stages
    if len(plan.stages) != expected:
        yield "stages", f"there are pp * virtual_stages = {expected} stages", len(plan.stages), _AGAIN
    start = 0
    for i, stage in enumerate(plan.stages):
        if stage.index != i:
            yield f"stages[{i}].index", "stages stand in order", stage.index, f"expected {i}"
        if stage.start != start or stage.stop <= stage.start:
            law = f"the stage takes up the blocks where the one before ends, at {start}, and has at least one"
            yield f"stages[{i}]", law, f"{stage.start}:{stage.stop}", _AGAIN
        if stage.pp_rank != i % plan.mesh.pp:
            yield f"stages[{i}].pp_rank", f"stage {i} runs on pipeline rank {i % plan.mesh.pp}", stage.pp_rank, _AGAIN
        start = stage.stop
    if start != len(plan.blocks):
        yield "stages", f"the stages cover all {len(plan.blocks)} blocks", f"{start}", _AGAIN
    if plan.predicted.stage_times and len(plan.predicted.stage_times) != len(plan.stages):
        value = len(plan.predicted.stage_times)
        yield "predicted.stage_times", "there is one pair of times for each stage or none", value, _AGAIN
    yield from _groups(plan)
    for i, memory in enumerate(plan.predicted.memory):
        if memory.pp_rank >= plan.mesh.pp:
            path = f"predicted.memory[{i}].pp_rank"
            yield path, f"a pipeline rank lies below pp={plan.mesh.pp}", memory.pp_rank, _AGAIN
        if memory.group and memory.group >= len(plan.data_shares):
            path, law = f"predicted.memory[{i}].group", "a group is named where its ranks have a share of their own"
            yield path, law, memory.group, _AGAIN


def _groups(plan: Plan) -> Iterator[_Fault]:
    start = 0
    for i, group in enumerate(plan.groups):
        if group.start != start or group.stop <= group.start:
            law = f"the group takes up the ranks where the one before ends, at {start}, and has at least one"
            yield f"groups[{i}]", law, f"{group.start}:{group.stop}", _AGAIN
        start = group.stop
    if plan.groups and start != plan.mesh.world_size:
        yield "groups", f"the groups cover all {plan.mesh.world_size} ranks", start, _AGAIN
    if plan.data_shares:
        yield from _shares(plan)
    limits = len(plan.predicted.memory_limits_bytes)
    if limits and limits != (len(plan.data_shares) or plan.mesh.pp):
        whose = f"{len(plan.data_shares)} node groups" if plan.data_shares else f"{plan.mesh.pp} pipeline ranks"
        yield "predicted.memory_limits_bytes", f"there is one for each of {whose} or none", limits, _AGAIN


def _shares(plan: Plan) -> Iterator[_Fault]:
    fault = shares_fault(plan.data_shares, [group.num_ranks for group in plan.groups], plan.global_batch_size)
    if fault is not None:
        law, value, remedy = fault
        yield "data_shares", law, value, remedy
    mesh = plan.mesh
    if (mesh.pp, mesh.cp, mesh.tp, mesh.ep_data) != (1, 1, 1, 1):
        yield "data_shares", SHARES_ALONE, mesh, "drop data_shares, or search with pp=1, cp=1, tp=1 and ep_data=1"
    if plan.micro_batch_size != max(plan.data_shares):
        law = f"micro_batch_size is the largest of data_shares, {max(plan.data_shares)}"
        yield "micro_batch_size", law, plan.micro_batch_size, _AGAIN


SHARES_ALONE = (
    "data ranks take shares of their own where there is neither pipeline, context, tensor nor expert parallelism"
)


def shares_fault(shares: Sequence[int], ranks: Sequence[int], global_batch_size: int) -> tuple[str, object, str] | None:
    """What is wrong with shares of data ranks: a law, the value and the remedy; None where nothing is.

    Args:
        shares: for each node group the samples that one of its ranks takes at once.
        ranks: of each node group; empty where all nodes are equal.
    """
    text, one = "-".join(map(str, shares)), sum(s * n for s, n in zip(shares, ranks, strict=False))
    if len(shares) != len(ranks):
        law = f"there is a share for each of {len(ranks)} node groups" if ranks else "there are node groups that differ"
        return (
            law,
            text,
            "give one for each group, or none" if ranks else "drop the shares: equal nodes take equal ones",
        )
    if min(shares) < 1:
        return (
            "every data rank takes at least one sample at once",
            text,
            "leave the slow nodes out of the cluster instead",
        )
    if len(set(shares)) == 1:
        return "shares of node groups differ", text, f"say micro_batch={shares[0]}: then all ranks take as many"
    if global_batch_size % one:
        law = f"the global batch {global_batch_size} divides by the samples that all ranks take at once"
        products = " + ".join(f"{n} x {s}" for s, n in zip(shares, ranks, strict=True))
        return law, f"{products} = {one}", "take other shares or another global batch"
    return None


def check_model(plan: Plan, name: str, fingerprint: str, *, place: str = "plan") -> None:
    """Refuse a plan that was made for another model than the one of this name and fingerprint.

    Raises:
        PlanError: the fingerprints differ.
    """
    if plan.model.fingerprint != fingerprint:
        raise PlanError(
            f"the plan is for this model ({name}, fingerprint {fingerprint})",
            value=f"a plan for {plan.model.name}, fingerprint {plan.model.fingerprint}",
            place=place,
            remedy="search a plan for this model"
            if plan.model.name != name
            else "its code, autopar or a library has changed since: search again",
        )
