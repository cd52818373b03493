"""Why this plan: its neighbours among the candidates, what each would cost and why; and what it says beside its numbers."""

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
from autopar.planner.search import Evaluation, Outcome, Task, readable
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.variants import origins

MAX_ALTERNATIVES = 10
"""Neighbours that a plan is compared with."""

CLEAR = 1.05
"""Times the plan that neighbours are known to take at the least where no more is said of them."""

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Alternative:
    """A candidate with another value of one choice and as little else changed as can be.

    Attributes:
        choice: with the other value, as ``tp=4``.
        comparison: with the plan, in words.
        evaluation: its best plan, where bounds did not say enough and it has one.
    """

    choice: str
    comparison: str
    evaluation: Evaluation | None

    def __str__(self) -> str:
        return f"{self.choice}: {self.comparison}"


def compare(
    evaluator: Evaluator, pool: Sequence[Candidate], best: Evaluation, group: ProcessGroup | None = None
) -> list[Alternative]:
    """The alternatives to a plan, compared with it.

    Args:
        group: the processes of the search, of which each compares the candidates whose layouts it has worked out.
    """
    group = ProcessGroup() if group is None else group
    named = _alternatives(pool, best.candidate)
    distinct = list(dict.fromkeys(other for _, other in named))  # one may be an alternative by several choices
    first_s = evaluator.bounds_s(0, distinct)
    compared: dict[Candidate, tuple[str, Evaluation | None]] = {}
    for other, bound_s in zip(distinct, first_s, strict=True):
        if group.owner(layout_key_of(other)) == group.rank:
            compared[other] = _compare(evaluator, best, other, bound_s)
    for some in group.allgather(compared):
        compared |= some
    return [
        Alternative(choice=choice, comparison=compared[other][0], evaluation=compared[other][1])
        for choice, other in named
    ]


def _alternatives(pool: Sequence[Candidate], best: Candidate) -> list[tuple[str, Candidate]]:
    """For each choice the nearest candidates with another value of it."""
    found: list[tuple[str, Candidate]] = []
    mine = [value(best) for _, value in _CHOICES]
    columns = [[value(c) for c in pool] for _, value in _CHOICES]
    rows = zip(zip(*columns, strict=True), pool, strict=True)
    distances = [sum(map(ne, values, mine)) + _spread(candidate, best) for values, candidate in rows]
    for (name, value), own, values in zip(_CHOICES, mine, columns, strict=True):
        near = _neighbours(pool, distances, values, own)[: MAX_ALTERNATIVES - len(found)]
        found += [(f"{name}={value(other)}", other) for other in near]
    return found


def _neighbours(
    pool: Sequence[Candidate], distances: Sequence[float], values: Sequence[object], mine: object
) -> list[Candidate]:
    """For the values below and above (or beside) ``mine`` the candidate that differs least.

    Args:
        distances: how much each of the pool differs.
        values: what each has of the choice.
    """
    nearest: dict[object, tuple[float, Candidate]] = {}
    for candidate, distance, key in zip(pool, distances, values, strict=True):
        if key != mine and (key not in nearest or distance < nearest[key][0]):
            nearest[key] = (distance, candidate)
    if isinstance(mine, int):
        numbers = sorted(k for k in nearest if isinstance(k, int))
        beside = [k for k in numbers if k < mine][-1:] + [k for k in numbers if k > mine][:1]
        return [nearest[k][1] for k in beside]
    return [nearest[k][1] for k in sorted(nearest, key=str)][:2]


def _spread(candidate: Candidate, best: Candidate) -> float:
    """How far its degrees are from those of the best, less than any other choice counts."""
    pairs = zip(
        (*candidate.mesh.degrees, candidate.micro_batch_size), (*best.mesh.degrees, best.micro_batch_size), strict=True
    )
    return sum(max(x / y, y / x) for x, y in pairs) / 1e6


def _compare(evaluator: Evaluator, best: Evaluation, other: Candidate, bound_s: float) -> tuple[str, Evaluation | None]:
    """In words, with the other one's plan where it was made; ``bound_s``: a first bound of the other one."""
    best_s = best.prediction.step_time_s
    for level in range(1, LEVELS):
        if bound_s < best_s:  # up to there a bound is a function of the candidate alone
            bound_s = max(bound_s, min(evaluator.bounds_s(level, [other], CLEAR * best_s)[0], CLEAR * best_s))
    if bound_s < best_s:
        bound_s = max(bound_s, evaluator.chained_s(other, CLEAR * best_s))
    if best_s <= bound_s < float("inf"):
        more_s = bound_s - best_s
        return f"at least {more_s:.3g} s ({100 * more_s / best_s:.1f}%) slower ({other}), by its lower bound", None
    found = (evaluator.hopeless(other) if bound_s == float("inf") else None) or evaluator.evaluate(other)
    if not isinstance(found, Evaluation):
        return f"no plan ({other}); {found.reason}", None
    found = evaluator.improved(found)  # as the plan is that it is compared with
    more_s = found.prediction.step_time_s - best_s
    word = "slower" if more_s >= 0 else "faster"
    share = 100 * abs(more_s) / best_s
    return (
        f"{abs(more_s):.3g} s ({share:.1f}%) {word} ({other}); {_difference(best.prediction, found.prediction)}",
        found,
    )


def _difference(mine: Prediction, theirs: Prediction) -> str:
    """The two parts of the step that differ most."""
    changes = [(getattr(theirs.breakdown, key) - getattr(mine.breakdown, key), name) for name, key in _PARTS]
    largest = sorted(changes, key=lambda change: -abs(change[0]))[:2]
    return ", ".join(f"{name} {change:+.3g} s" for change, name in largest if change)


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
    return (f"statistics over the global batch ({_named(mixing)}): exact, with one micro-batch a data rank",)


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
    said = f"computed in float16, where autocast would in float32: {_named(found)}"
    return (f"{said}; what may grow beyond 65504 there, or shrink to nothing, is cast by the model (x.float())",)


def _named(ops: Sequence[Op]) -> str:
    """The first of some operators with its place in the model, and how many more there are."""
    first, more = ops[0], f" and {len(ops) - 1} more" if len(ops) > 1 else ""
    where = ", ".join(text for text in (first.module, first.source) if text) or first.name
    return f"{first.target} of {where}{more}"


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
