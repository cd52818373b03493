"""The reasons for a plan: the alternatives with the time that each would cost, and the notes for the plan's reader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import ne

import torch

from autopar.cost.operators.operator_times import Measured, Source, measurement_note, op_time
from autopar.cost.operators.work import operand_specs
from autopar.graph.graph import Graph, Op
from autopar.hardware.cluster import Cluster
from autopar.plan.prediction import Prediction
from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.branch_and_bound.process_group import ProcessGroup
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.layout import layout_key_of
from autopar.planner.search import Evaluation, Outcome, Task
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.variants import origins
from autopar.util.formatting import num_bytes, percent, seconds

MAX_ALTERNATIVES = 10
"""The number of alternatives with which a plan is compared at most."""

CLEAR = 1.05
"""The goal of an alternative's tighter bounds, as a ratio to the plan's time: beyond it no comparison needs a tighter one."""

_CHOICES: tuple[tuple[str, Callable[[Candidate], object]], ...] = (
    ("tp", lambda c: c.mesh.tp),
    ("cp", lambda c: c.mesh.cp),
    ("pp", lambda c: c.mesh.pp),
    ("virtual_stages", lambda c: c.virtual_stages),
    ("ep_data", lambda c: c.mesh.ep_data),
    ("zero", lambda c: c.zero_stage),
    ("dp_shard", lambda c: c.mesh.dp_shard),
    ("micro_batch", lambda c: c.micro_batch_size),
    ("vocab_multiple", lambda c: c.vocab_multiple),
    ("data_shares", lambda c: "unequal" if c.shares else "equal"),
    ("order of node groups", lambda c: "-".join(map(str, c.order)) or "as given"),
    ("offload", lambda c: ", ".join(c.on_host) or "none"),
    ("schedule", lambda c: c.schedule),
)
"""The choices that alternatives change, each with its value for a candidate."""

_PARTS = (
    ("compute", "compute_s"),
    ("recompute", "recompute_s"),
    ("tensor-parallel communication", "tensor_parallel_s"),
    ("context-parallel communication", "context_parallel_s"),
    ("data-parallel communication", "data_parallel_s"),
    ("pipeline sends", "pipeline_s"),
    ("pipeline bubble", "bubble_s"),
    ("optimizer", "optimizer_s"),
    ("copies to and from the host", "offload_s"),
)
"""The parts of a step in words, each with its field of the breakdown."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alternative:
    """A candidate with another value of one choice and as few other changes as possible.

    Attributes:
        choice: the choice with its other value, such as ``tp=4``.
        comparison: the comparison with the plan, in words.
        evaluation: the candidate's best plan; None if bounds were enough or it has none.
    """

    choice: str
    comparison: str
    evaluation: Evaluation | None

    def __str__(self) -> str:
        return f"{self.choice}: {self.comparison}"


def compare(
    evaluator: Evaluator, pool: Sequence[Candidate], best: Evaluation, group: ProcessGroup | None = None
) -> list[Alternative]:
    """Return the alternatives to a plan, compared with it.

    Args:
        group: the processes of the search; each compares the candidates whose layouts it owns.
    """
    group = ProcessGroup() if group is None else group
    named = _alternatives(pool, best.candidate)
    distinct = list(dict.fromkeys(other for _, other in named))  # a candidate may be an alternative in several choices
    first_s = evaluator.bounds_s(0, distinct)
    compared: dict[Candidate, tuple[str, Evaluation | None]] = {}
    for other, bound_s in zip(distinct, first_s, strict=True):
        if group.owner(layout_key_of(other)) == group.rank:
            compared[other] = _compare(evaluator, best, other, bound_s)
    for part in group.allgather(compared):
        compared |= part
    return [
        Alternative(choice=choice, comparison=compared[other][0], evaluation=compared[other][1])
        for choice, other in named
    ]


def _alternatives(pool: Sequence[Candidate], best: Candidate) -> list[tuple[str, Candidate]]:
    """Return for each choice the nearest candidates with another value of it."""
    alternatives: list[tuple[str, Candidate]] = []
    of_best = [value(best) for _, value in _CHOICES]
    columns = [[value(c) for c in pool] for _, value in _CHOICES]
    rows = zip(zip(*columns, strict=True), pool, strict=True)
    distances = [sum(map(ne, values, of_best)) + _spread(candidate, best) for values, candidate in rows]
    for (name, value), best_value, values in zip(_CHOICES, of_best, columns, strict=True):
        near = _neighbours(pool, distances, values, best_value)[: MAX_ALTERNATIVES - len(alternatives)]
        alternatives += [(f"{name}={value(other)}", other) for other in near]
    return alternatives


def _neighbours(
    pool: Sequence[Candidate], distances: Sequence[float], values: Sequence[object], best_value: object
) -> list[Candidate]:
    """Return the nearest candidate for the next value below and above ``best_value``, or for two other values that are no numbers.

    Args:
        distances: the distance of each candidate of the pool from the plan's.
        values: the value of the choice for each candidate.
        best_value: its value for the plan.
    """
    nearest: dict[object, tuple[float, Candidate]] = {}
    for candidate, distance, key in zip(pool, distances, values, strict=True):
        if key != best_value and (key not in nearest or distance < nearest[key][0]):
            nearest[key] = (distance, candidate)
    if isinstance(best_value, int):
        numbers = sorted(k for k in nearest if isinstance(k, int))
        adjacent = [k for k in numbers if k < best_value][-1:] + [k for k in numbers if k > best_value][:1]
        return [nearest[k][1] for k in adjacent]
    return [nearest[k][1] for k in sorted(nearest, key=str)][:2]


def _spread(candidate: Candidate, best: Candidate) -> float:
    """Return the distance of a candidate's degrees from the best one's, scaled to be less than a difference in any choice."""
    pairs = zip(
        (*candidate.mesh.degrees, candidate.micro_batch_size), (*best.mesh.degrees, best.micro_batch_size), strict=True
    )
    return sum(max(x / y, y / x) for x, y in pairs) / 1e6


def _compare(evaluator: Evaluator, best: Evaluation, other: Candidate, bound_s: float) -> tuple[str, Evaluation | None]:
    """Return the comparison of a candidate with the plan, and its own plan if it was evaluated.

    Args:
        bound_s: the first bound of the candidate in seconds.
    """
    best_s = best.prediction.step_time_s
    for level in range(1, LEVELS):
        if bound_s < best_s:  # up to its goal a bound is a function of the candidate alone
            bound_s = max(bound_s, min(evaluator.bounds_s(level, [other], CLEAR * best_s)[0], CLEAR * best_s))
    if bound_s < best_s:
        bound_s = max(bound_s, evaluator.chained_s(other, CLEAR * best_s))
    if best_s <= bound_s < float("inf"):
        more_s = bound_s - best_s
        return f"at least {seconds(more_s)} ({percent(more_s / best_s)}) slower ({other}), by its lower bound", None
    evaluated = evaluator.evaluate(other)
    if not isinstance(evaluated, Evaluation):
        return f"no plan ({other}); {evaluated.reason}", None
    evaluated = evaluator.improved(evaluated)  # as was the plan with which it is compared
    more_s = evaluated.prediction.step_time_s - best_s
    relation = "slower" if more_s >= 0 else "faster"
    share = percent(abs(more_s) / best_s)
    return (
        f"{seconds(abs(more_s))} ({share}) {relation} ({other}); {_difference(best.prediction, evaluated.prediction)}",
        evaluated,
    )


def _difference(plan: Prediction, alternative: Prediction) -> str:
    """Return the two parts of the step that differ most, in words."""
    changes = [(getattr(alternative.breakdown, key) - getattr(plan.breakdown, key), name) for name, key in _PARTS]
    largest = sorted(changes, key=lambda change: -abs(change[0]))[:2]
    return ", ".join(f"{name} {'-' if change < 0 else '+'}{seconds(abs(change))}" for change, name in largest if change)


BOUND_ROUNDING = 1e-6
"""The part of a plan's time by which its bound may exceed it by rounding alone."""

NOTED = 0.01
"""The part of the computation from which on a loss is worth a note."""

_WIDE = frozenset(
    (
        *("pow", "exp", "expm1", "log", "log2", "log10", "log1p", "reciprocal", "rsqrt", "cosh", "sinh", "tan"),
        *("sum", "prod", "cumsum", "cumprod", "norm", "linalg_vector_norm", "dist", "cdist", "softplus", "erfinv"),
    )
)
"""The operators that may leave the range of float16, among those that torch's autocast computes in float32 (ATen, autocast_mode.h)."""


def interrupted_note(outcome: Outcome) -> tuple[str, ...]:
    """Return a note if the search was interrupted: its plan need not be the best."""
    if not outcome.interrupted:
        return ()
    return (f"the search was interrupted after {outcome.evaluated} of {outcome.candidates} candidates: best so far",)


def certificate_note(best: Evaluation, outcome: Outcome) -> tuple[str, ...]:
    """Return a note if the plan is faster than the lower bound of all candidates: the bound is wrong then."""
    time_s, bound_s = best.prediction.step_time_s, outcome.lower_bound_s
    if bound_s <= time_s * (1 + BOUND_ROUNDING):
        return ()
    held = f"the search held that no plan takes less than {bound_s:.4g} s, and this one does"
    return (f"{held}: its certificate is worth nothing; please report this",)


def host_note(best: Evaluation) -> tuple[str, ...]:
    """Return a note on the host memory that the plan needs, if the profile does not say how much there is."""
    most = max(memory.host for memory in best.prediction.memory)
    if not most or best.prediction.host_memory_limit_bytes:
        return ()
    return (f"{num_bytes(most)} of host memory for each device: the profile does not know how much there is",)


def mixing_note(mixing: Sequence[Op]) -> tuple[str, ...]:
    """Return a note on operators that mix samples: they are why a data rank takes its samples in one micro-batch."""
    if not mixing:
        return ()
    return (f"statistics over the global batch ({_named(mixing)}): exact, with one micro-batch a data rank",)


def precision_note(task: Task) -> tuple[str, ...]:
    """Return a note if a GPU computes in single precision, which is exact but much slower than the precisions that training usually has."""
    devices = task.cluster.devices
    if task.precision.compute != "float32" or all(device.kind != "cuda" for device in devices):
        return ()
    everywhere = [{rate.dtype for rate in device.matmul} for device in devices]
    name = "bf16" if all("bfloat16" in known for known in everywhere) else "fp16"
    return (f"computed in float32: precision {name} (parameters at rest in float32) is several times faster here",)


def range_note(task: Task) -> tuple[str, ...]:
    """Return a note on operators that may leave the range of float16 and that torch's autocast would run in float32.

    Operators run in the dtype that the model gives them. With bf16 that needs no note: its range is that of float32.
    """
    if task.precision.compute != "float16":
        return ()
    graph = task.graph
    risky = [op for op in graph.ops if _name(op) in _WIDE and any(spec.dtype == torch.float16 for spec in op.outputs)]
    if not risky:
        return ()
    where = f"computed in float16, where autocast would in float32: {_named(risky)}"
    return (f"{where}; what may grow beyond 65504 there, or shrink to nothing, is cast by the model (x.float())",)


def _named(ops: Sequence[Op]) -> str:
    """Return the first operator with its place in the model, and the number of others."""
    first, more = ops[0], f" and {len(ops) - 1} more" if len(ops) > 1 else ""
    where = ", ".join(text for text in (first.module, first.source) if text) or first.name
    return f"{first.target} of {where}{more}"


def _name(op: Op) -> str:
    return op.target.removeprefix("aten.").partition(".")[0]


def recompute_note(task: Task, best: Evaluation) -> tuple[str, ...]:
    """Return a note if blocks recompute fully for memory while the space has no selective recompute: a larger space may have a faster plan."""
    pinned = task.pins.recompute(task.graph)
    chosen = any(mode == "full" and index not in pinned for index, mode in enumerate(best.modes))
    if not chosen or "selective" in task.space.recompute:
        return ()
    lacks = f"blocks recompute fully, as the space {task.space.name} has no selective recompute"
    return (f"{lacks}: the space default has, and often a faster plan",)


def mixed_note(candidate: Candidate, cluster: Cluster) -> tuple[str, ...]:
    """Return a note on pipeline ranks with different devices, whose faster devices wait for the others."""
    if cluster.is_homogeneous or candidate.shares:
        return ()
    mixed = [str(rank) for rank, groups in enumerate(origins(candidate, cluster)) if len(groups) > 1]
    if not mixed:
        return ()
    ranks = (
        f"pipeline rank{'s' if len(mixed) > 1 else ''} {', '.join(mixed)} of {candidate.mesh.pp} on different devices"
    )
    return (f"{ranks}: data ranks take equal shares of the samples, so that the slowest device sets the pace",)


def calls(graph: Graph, layouts: Layouts) -> Iterator[tuple[Op, int]]:
    """Yield the operators of a compact graph's blocks, each with the number of the model's blocks that its block represents."""
    for block, members in zip(graph.blocks, layouts.compact.members, strict=True):
        for op in graph.block_ops(block):
            yield op, len(members)


def unaligned_note(evaluator: Evaluator, best: Evaluation) -> tuple[str, ...]:
    """Return a note on the time that rows of no multiple of 16 bytes cost, if it is a percent of the computation or more."""
    model, layouts, layout = evaluator.model, evaluator.layouts, best.layout
    graph = layouts.local_graph(layout)
    device, ideal = model.device, model.device.at_best()
    lost_s: dict[Op, float] = {}
    total_s = 0.0
    for op, count in calls(graph, layouts):
        operands = operand_specs(op, graph.spec)
        actual, least = (op_time(op, operands, d, quantized=model.quantized) for d in (device, ideal))
        actual_s = actual.forward_s + actual.backward_s
        total_s += count * actual_s
        lost_s[op] = count * (actual_s - least.forward_s - least.backward_s)
    if device is ideal or model.measured is not None or sum(lost_s.values()) < NOTED * total_s:
        return ()
    worst, rate = max(lost_s, key=lambda op: lost_s[op]), device.rate(model.precision.compute)
    fraction = rate.unaligned_fraction if rate.unaligned_fraction < 1 else rate.unaligned_batched_fraction
    source = "assumed" if "unaligned_fraction assumed" in rate.provenance else "whose source is in the profile"
    share = f"{sum(lost_s.values()) / total_s:.0%} of the computation, most in {worst.target} of {worst.module or worst.name}"
    return (
        f"rows that are no multiple of 16 bytes cost {share}: at {fraction:g} of the rate of aligned products, {source}",
    )


def measured_note(evaluator: Evaluator, best: Evaluation) -> tuple[str, ...]:
    """Return a note on how many operators of a plan have a measured time; none if the device has no measurements."""
    model, layouts, layout = evaluator.model, evaluator.layouts, best.layout
    measured = model.measured
    if not isinstance(measured, Measured):
        return ()
    graph = layouts.local_graph(layout)
    counts: Counter[Source] = Counter()
    for op, count in (*((op, 1) for op in graph.prelude), *calls(graph, layouts)):
        operands = operand_specs(op, graph.spec)
        roofline = op_time(op, operands, model.device, quantized=model.quantized)
        if roofline.forward_s + roofline.backward_s > 0:
            counts[measured.find(op, operands, roofline)[1]] += count
    return (measurement_note(counts),)
