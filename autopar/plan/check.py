"""Checks of the invariants of every plan: its parts refer to each other, and its degrees fit together."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

from autopar.errors import PlanError
from autopar.plan.plan import MOST_SAMPLES, Plan, RankGroup, StagePlan

_FLOATS = ("float64", "float32", "bfloat16", "float16")
_GRID = re.compile(r":(\d+)x(\d+)(?:\?.*)?$")


def check_plan(plan: Plan, *, place: str = "plan") -> None:
    """Check that the parts of a plan fit together.

    Args:
        place: the name of the plan in errors (its file).

    Raises:
        PlanError: a part does not fit; the error names the first one by its path in the document.
    """
    for path, expected, got, fix in _faults(plan):
        raise PlanError(f"'{path}' does not fit the plan", where=place, expected=expected, got=got, fix=fix)


_Fault = tuple[str, str, object, str]
"""The path of a fault, what is expected there, what was found, and the remedy."""
_AGAIN = "Search again with these pins"
_REPORT = "Search again, and report it if autopar has written this plan"
_LARGEST = 1e30
"""Above all that a prediction may say: FLOPs of a sample of 10**12 tokens, times of the slowest clusters; sums of it are finite."""
_ROUNDING = -1e-6
"""Seconds and ratios are differences and sums of others, and may be below 0 by rounding."""
_BITS = 63
"""Of sizes and counts: torch and NumPy hold them as int64."""


def _faults(plan: Plan) -> Iterator[_Fault]:
    yield from _numbers(plan, "")
    yield from _dtypes(plan)
    yield from _degrees(plan)
    yield from _layouts(plan)
    yield from _stages(plan)


def _numbers(value: object, path: str) -> Iterator[_Fault]:
    if isinstance(value, float) and not abs(value) < _LARGEST:
        yield path, f"a finite number below {_LARGEST:g}", value, _REPORT
    elif isinstance(value, float) and value < _ROUNDING and path.startswith(("predicted.", "search.")):
        yield path, "a number from 0", value, _REPORT
    elif isinstance(value, int) and value.bit_length() > _BITS:
        yield path, f"a whole number of at most {_BITS} bits", f"one of {value.bit_length()}", _AGAIN
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _numbers(getattr(value, field.name), f"{path}.{field.name}" if path else field.name)


def _dtypes(plan: Plan) -> Iterator[_Fault]:
    for name in ("compute", "storage", "reduce"):
        if (found := getattr(plan.precision, name)) not in _FLOATS:
            yield f"precision.{name}", f"one of {', '.join(_FLOATS)}", repr(found), _AGAIN


def _degrees(plan: Plan) -> Iterator[_Fault]:
    mesh = plan.mesh
    if (grid := _GRID.search(plan.cluster)) and int(grid[1]) * int(grid[2]) != mesh.world_size:
        ranks = int(grid[1]) * int(grid[2])
        expected = f"degrees whose product is {ranks}, the number of devices of {plan.cluster}"
        yield "mesh", expected, f"{mesh} = {mesh.world_size}", _AGAIN
    if mesh.data % mesh.ep_data:
        yield "mesh.ep_data", f"a divisor of the {mesh.data} data ranks", mesh.ep_data, _AGAIN
    if mesh.ep not in (mesh.ep_data, mesh.ep_data * mesh.tp):
        expected = f"ep_data={mesh.ep_data}, or ep_data times tp={mesh.tp}"
        yield "mesh.ep", expected, mesh.ep, _AGAIN
    for name in ("global_batch_size", "micro_batch_size", "virtual_stages", "bucket_bytes", "vocab_multiple"):
        if getattr(plan, name) < 1:
            yield name, "at least 1", getattr(plan, name), _AGAIN
    if plan.global_batch_size > MOST_SAMPLES:
        yield "global_batch_size", f"at most {MOST_SAMPLES:,}", plan.global_batch_size, _AGAIN
    if not plan.data_shares and plan.global_batch_size % (plan.micro_batch_size * mesh.data):
        expected = "a multiple of micro_batch_size * dp_replicate * dp_shard"
        got = f"{plan.global_batch_size} with {plan.micro_batch_size} * {mesh.dp_replicate} * {mesh.dp_shard}"
        yield "global_batch_size", expected, got, _AGAIN
    if plan.zero_stage not in range(4):
        yield "zero_stage", "0, 1, 2 or 3", plan.zero_stage, _AGAIN
    if plan.zero_stage == 0 and mesh.dp_shard > 1:
        expected, got = "1, 2 or 3 where dp_shard is above 1", f"0 with dp_shard={mesh.dp_shard}"
        yield "zero_stage", expected, got, "Put the ranks on dp_replicate"
    if (plan.schedule == "none") != (mesh.pp == 1):
        expected = "'none' where pp is 1, and a pipeline schedule elsewhere"
        yield "schedule", expected, f"{plan.schedule!r} with pp={mesh.pp}", _AGAIN
    if plan.virtual_stages > 1 and plan.schedule != "Interleaved1F1B":
        expected = "1 (more only with the schedule Interleaved1F1B)"
        yield "virtual_stages", expected, f"{plan.virtual_stages} with {plan.schedule!r}", _AGAIN


def _layouts(plan: Plan) -> Iterator[_Fault]:
    for i, layout in enumerate(plan.layouts):
        for j, typing in enumerate(layout.typings):
            path = f"layouts[{i}].typings[{j}]"
            if typing.parameter_names and len(typing.parameter_names) != len(typing.parameters):
                got = f"{len(typing.parameter_names)} for {len(typing.parameters)}"
                yield f"{path}.parameter_names", "one name for each parameter or none", got, _AGAIN
            for k, kind in enumerate(typing.parameters):
                if kind.kind not in ("I", "S"):
                    yield f"{path}.parameters[{k}]", "I or S(d)", kind, _AGAIN
    for i, block in enumerate(plan.blocks):
        if block.index != i:
            yield f"blocks[{i}].index", str(i), block.index, _AGAIN
        if block.layout >= len(plan.layouts):
            expected = f"the number of one of the {len(plan.layouts)} layouts"
            yield f"blocks[{i}].layout", expected, block.layout, _AGAIN
        if block.offload and block.recompute == "selective":
            expected = "none or full where activations live on the host"
            fix = "Take one of them, or leave the block on the device"
            yield f"blocks[{i}].recompute", expected, block.recompute, fix


def _stages(plan: Plan) -> Iterator[_Fault]:
    count = plan.mesh.pp * plan.virtual_stages
    if len(plan.stages) != count:
        yield "stages", f"pp * virtual_stages = {count} stages", len(plan.stages), _AGAIN
    for i, stage in enumerate(plan.stages):
        if stage.index != i:
            yield f"stages[{i}].index", str(i), stage.index, _AGAIN
        if stage.pp_rank != i % plan.mesh.pp:
            yield f"stages[{i}].pp_rank", f"{i % plan.mesh.pp} (the stage modulo pp)", stage.pp_rank, _AGAIN
    yield from _spans(plan.stages, "stage", "block", len(plan.blocks))
    if plan.predicted.stage_times and len(plan.predicted.stage_times) != len(plan.stages):
        value = len(plan.predicted.stage_times)
        yield "predicted.stage_times", f"{len(plan.stages)} pairs of times, or none", value, _AGAIN
    yield from _groups(plan)
    if len(plan.predicted.peak_memory_interval_bytes) not in (0, 2):
        value = len(plan.predicted.peak_memory_interval_bytes)
        yield "predicted.peak_memory_interval_bytes", "2 items, or none", value, _AGAIN
    for i, memory in enumerate(plan.predicted.memory):
        if memory.pp_rank >= plan.mesh.pp:
            path = f"predicted.memory[{i}].pp_rank"
            yield path, f"a pipeline rank below pp={plan.mesh.pp}", memory.pp_rank, _AGAIN
        if memory.group and memory.group >= len(plan.data_shares):
            path, expected = f"predicted.memory[{i}].group", "a group that data_shares names"
            yield path, expected, memory.group, _AGAIN


def _spans(spans: Sequence[StagePlan | RankGroup], name: str, unit: str, count: int) -> Iterator[_Fault]:
    """Iterate over the faults of spans, which have to be consecutive and non-empty and to cover all ``count`` units."""
    start = 0
    for i, span in enumerate(spans):
        if span.start != start or span.stop <= span.start:
            expected = f"one {unit} or more, from {unit} {start} on, where the {name} before ends"
            yield f"{name}s[{i}]", expected, f"{span.start}:{span.stop}", _AGAIN
        start = span.stop
    if start != count:
        yield f"{name}s", f"{name}s of all {count} {unit}s", f"{name}s of {start}", _AGAIN


def _groups(plan: Plan) -> Iterator[_Fault]:
    if plan.groups:
        yield from _spans(plan.groups, "group", "rank", plan.mesh.world_size)
    if plan.data_shares:
        yield from _shares(plan)
    limits = len(plan.predicted.memory_limits_bytes)
    if limits and limits != (len(plan.data_shares) or plan.mesh.pp):
        whose = f"{len(plan.data_shares)} node groups" if plan.data_shares else f"{plan.mesh.pp} pipeline ranks"
        yield "predicted.memory_limits_bytes", f"one for each of {whose}, or none", limits, _AGAIN


def _shares(plan: Plan) -> Iterator[_Fault]:
    fault = shares_fault(plan.data_shares, [group.num_ranks for group in plan.groups], plan.global_batch_size)
    if fault is not None:
        yield "data_shares", *fault
    mesh = plan.mesh
    if (mesh.pp, mesh.cp, mesh.tp, mesh.ep_data) != (1, 1, 1, 1):
        yield "data_shares", SHARES_ALONE, mesh, "Drop data_shares, or search with pp=1, cp=1, tp=1 and ep_data=1"
    if plan.micro_batch_size != max(plan.data_shares):
        expected = f"{max(plan.data_shares)}, the largest of data_shares"
        yield "micro_batch_size", expected, plan.micro_batch_size, _AGAIN


SHARES_ALONE = "data parallelism alone (pp=1, cp=1, tp=1 and ep_data=1) beside unequal shares"
"""The expected mesh if data ranks take unequal numbers of samples, for errors."""


def shares_fault(shares: Sequence[int], ranks: Sequence[int], global_batch_size: int) -> tuple[str, object, str] | None:
    """Return the fault of data shares as what is expected, what was found, and the remedy; None if there is no fault.

    Args:
        shares: for each node group the samples that one of its ranks takes at once.
        ranks: the number of ranks of each node group; empty if all nodes are equal.
    """
    text, samples = "-".join(map(str, shares)), sum(s * n for s, n in zip(shares, ranks, strict=False))
    if len(shares) != len(ranks):
        if not ranks:
            return "node groups that differ", text, "Drop the shares: equal nodes take equal ones"
        return f"a share for each of {len(ranks)} node groups", text, "Give one for each group, or none"
    if min(shares) < 1:
        return "at least one sample for every data rank", text, "Leave the slow nodes out of the cluster instead"
    if len(set(shares)) == 1:
        return "shares that differ", text, f"Pin micro_batch={shares[0]}: then all ranks take as many"
    if global_batch_size % samples:
        expected = f"shares whose sum over ranks divides the global batch {global_batch_size}"
        products = " + ".join(f"{n} x {s}" for s, n in zip(shares, ranks, strict=True))
        return expected, f"{products} = {samples}", "Take other shares or another global batch"
    return None


def check_model(plan: Plan, name: str, fingerprint: str, *, place: str = "plan") -> None:
    """Check that a plan was made for the model of this name and fingerprint.

    Raises:
        PlanError: the fingerprints differ.
    """
    if plan.model.fingerprint != fingerprint:
        raise PlanError(
            f"This plan was made for model '{plan.model.name}', not for '{name}'"
            if plan.model.name != name
            else f"This plan was made for another '{name}': fingerprint {plan.model.fingerprint}, here {fingerprint}",
            where=place,
            fix="Search a plan for this model"
            if plan.model.name != name
            else "Search again with this model: its code, its sizes, autopar or a library differ",
        )
