"""What a plan says beside its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from autopar.cost.operators.operator_times import Measured, Source, measurement_note, op_time
from autopar.cost.operators.work import operand_specs
from autopar.graph.graph import Graph, Op
from autopar.hardware.cluster import Cluster
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.search import Evaluation, Outcome, Task, readable
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.variants import origins

BOUND_ROUNDING = 1e-6
"""Part of a plan's time by which a bound may be above it for rounding alone."""

NOTED = 0.01
"""Part of the computation from which on a loss is worth a note."""

_WIDE = frozenset(
    (
        *("pow", "exp", "expm1", "log", "log2", "log10", "log1p", "reciprocal", "rsqrt", "cosh", "sinh", "tan"),
        *("sum", "prod", "cumsum", "cumprod", "norm", "linalg_vector_norm", "dist", "cdist", "softplus", "erfinv"),
    )
)
"""Of what torch's autocast to float16 computes in float32 (ATen, autocast_mode.h), what leaves its range by itself."""


def interrupted_note(outcome: Outcome) -> tuple[str, ...]:
    """The plan of a search that did not end is not the best of its candidates for sure."""
    if not outcome.interrupted:
        return ()
    return (f"the search was interrupted after {outcome.evaluated} of {outcome.candidates} candidates: best so far",)


def certificate_note(best: Evaluation, outcome: Outcome) -> tuple[str, ...]:
    """A plan that is faster than the bound of all candidates: the bound was false."""
    time_s, bound_s = best.prediction.step_time_s, outcome.lower_bound_s
    if bound_s <= time_s * (1 + BOUND_ROUNDING):
        return ()
    held = f"the search held that no plan takes less than {bound_s:.4g} s, and this one does"
    return (f"{held}: its certificate is worth nothing; please report this",)


def host_note(best: Evaluation) -> tuple[str, ...]:
    """What the host has to have, where its profile does not know how much that is."""
    most = max(memory.host for memory in best.prediction.memory)
    if not most or best.prediction.host_memory_limit_bytes:
        return ()
    return (f"{readable(most)} of host memory for each device: the profile does not know how much there is",)


def mixing_note(mixing: Sequence[Op]) -> tuple[str, ...]:
    """Why a data rank takes its samples at once."""
    if not mixing:
        return ()
    first, more = mixing[0], f" and {len(mixing) - 1} more" if len(mixing) > 1 else ""
    where = ", ".join(text for text in (first.module, first.source) if text) or first.name
    return (
        f"statistics over the global batch ({first.target} of {where}{more}): exact, with one micro-batch a data rank",
    )


def precision_note(task: Task) -> tuple[str, ...]:
    """Single precision on a GPU is what one device would compute, and rarely what is wanted."""
    devices = task.cluster.devices
    if task.precision.compute != "float32" or all(device.kind != "cuda" for device in devices):
        return ()
    everywhere = [{rate.dtype for rate in device.matmul} for device in devices]
    name = "bf16" if all("bfloat16" in known for known in everywhere) else "fp16"
    return (f"computed in float32: precision {name} (parameters at rest in float32) is several times faster here",)


def range_note(task: Task) -> tuple[str, ...]:
    """What may leave the range of float16, and would not under torch's autocast to it.

    Operators are those of the model in that dtype, as for bf16, whose range is float32's.
    """
    if task.precision.compute != "float16":
        return ()
    graph = task.graph
    found = [op for op in graph.ops if _name(op) in _WIDE and any(spec.dtype == torch.float16 for spec in op.outputs)]
    if not found:
        return ()
    first, more = found[0], f" and {len(found) - 1} more" if len(found) > 1 else ""
    where = ", ".join(text for text in (first.module, first.source) if text) or first.name
    said = f"computed in float16, where autocast would in float32: {first.target} of {where}{more}"
    return (f"{said}; what may grow beyond 65504 there, or shrink to nothing, is cast by the model (x.float())",)


def _name(op: Op) -> str:
    return op.target.removeprefix("aten.").partition(".")[0]


def recompute_note(task: Task, best: Evaluation) -> tuple[str, ...]:
    """Where memory asks for recompute, what the space leaves out is worth a longer search."""
    pinned = task.pins.recompute(task.graph)
    chosen = any(mode == "full" and index not in pinned for index, mode in enumerate(best.modes))
    if not chosen or "selective" in task.space.recompute:
        return ()
    lacks = f"blocks recompute fully, as the space {task.space.name} has no selective recompute"
    return (f"{lacks}: the space default has, and often a faster plan",)


def mixed_note(candidate: Candidate, cluster: Cluster) -> tuple[str, ...]:
    """Stages that do not use their faster devices to the full."""
    if cluster.is_homogeneous or candidate.shares:
        return ()
    wide = [str(rank) for rank, own in enumerate(origins(candidate, cluster)) if len(own) > 1]
    if not wide:
        return ()
    who = f"pipeline rank{'s' if len(wide) > 1 else ''} {', '.join(wide)} of {candidate.mesh.pp} on different devices"
    return (f"{who}: data ranks take equal shares of the samples, so that the slowest device sets the pace",)


def calls(graph: Graph, layouts: Layouts) -> Iterator[tuple[Op, int]]:
    """The operators of the blocks of a compact graph, and how many blocks of the model each stands for."""
    for block, members in zip(graph.blocks, layouts.compact.members, strict=True):
        for op in graph.block_ops(block):
            yield op, len(members)


def unaligned_note(evaluator: Evaluator, best: Evaluation) -> tuple[str, ...]:
    """What rows that are no multiple of 16 bytes cost a plan, where that is a percent of its computation; see the profile."""
    model, layouts, option = evaluator.model, evaluator.layouts, best.option
    graph = layouts.local_graph(option)
    device, ideal = model.device, model.device.at_best()
    lost: dict[Op, float] = {}
    total_s = 0.0
    for op, count in calls(graph, layouts):
        operands = operand_specs(op, graph.spec)
        own, least = (op_time(op, operands, d, quantized=model.quantized) for d in (device, ideal))
        own_s = own.forward_s + own.backward_s
        total_s += count * own_s
        lost[op] = count * (own_s - least.forward_s - least.backward_s)
    if device is ideal or model.measured is not None or sum(lost.values()) < NOTED * total_s:
        return ()
    most, rate = max(lost, key=lambda op: lost[op]), device.rate(model.precision.compute)
    kept = rate.unaligned_fraction if rate.unaligned_fraction < 1 else rate.unaligned_batched_fraction
    source = "assumed" if "unaligned_fraction assumed" in rate.provenance else "whose source is in the profile"
    share = (
        f"{sum(lost.values()) / total_s:.0%} of the computation, most in {most.target} of {most.module or most.name}"
    )
    return (
        f"rows that are no multiple of 16 bytes cost {share}: at {kept:g} of the rate of aligned products, {source}",
    )


def measured_note(evaluator: Evaluator, best: Evaluation) -> tuple[str, ...]:
    """How many operators of a plan have a measured time; nothing where the device has none at all."""
    model, layouts, option = evaluator.model, evaluator.layouts, best.option
    measured = model.measured
    if not isinstance(measured, Measured):
        return ()
    graph = layouts.local_graph(option)
    counts: Counter[Source] = Counter()
    for op, count in (*((op, 1) for op in graph.prelude), *calls(graph, layouts)):
        operands = operand_specs(op, graph.spec)
        roofline = op_time(op, operands, model.device, quantized=model.quantized)
        if roofline.forward_s + roofline.backward_s > 0:
            counts[measured.find(op, operands, roofline)[1]] += count
    return (measurement_note(counts),)
