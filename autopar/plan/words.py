"""Numbers as people read them, and the parts of a plan that every picture names alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.plan.plan import Plan
    from autopar.plan.prediction import Breakdown, Memory
from autopar.util.units import num_bytes

TIME_PARTS = (
    ("compute", "compute_s"),
    ("recompute", "recompute_s"),
    ("tensor parallel", "tensor_parallel_s"),
    ("context parallel", "context_parallel_s"),
    ("data parallel, exposed", "data_parallel_s"),
    ("pipeline sends, exposed", "pipeline_s"),
    ("pipeline bubble", "bubble_s"),
    ("optimizer", "optimizer_s"),
    ("copies to and from the host", "offload_s"),
)
"""Name and field of each part of a step."""

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "transient", "reserved")
"""Fields of :class:`autopar.plan.prediction.Memory` that add up to its total."""


def time_parts(breakdown: Breakdown) -> list[tuple[str, float]]:
    """Name and seconds of each part of a step."""
    return [(name, getattr(breakdown, field)) for name, field in TIME_PARTS]


def memory_parts(memory: Memory) -> list[tuple[str, int]]:
    """Name and bytes of each part of a rank's peak."""
    return [(name, getattr(memory, name)) for name in MEMORY_PARTS]


def zero_text(plan: Plan) -> str:
    """What ZeRO splits, in words."""
    split = {
        0: "nothing split",
        1: "optimizer states split",
        2: "optimizer states and gradients split",
        3: "optimizer states, gradients and parameters split",
    }[plan.zero_stage]
    over = f" over dp_shard={plan.mesh.dp_shard}" if plan.zero_stage else ""
    return f"stage {plan.zero_stage}: {split}{over}"


def batch_text(plan: Plan) -> str:
    """How the global batch is cut."""
    count = f"{plan.num_micro_batches} micro-batch{'es' if plan.num_micro_batches > 1 else ''}"
    if plan.data_shares:
        groups = zip(plan.groups, plan.data_shares, strict=True)
        shares = " + ".join(f"{group.num_ranks} x {share} on {group.device}" for group, share in groups)
        return f"{plan.global_batch_size} = {count} x ({shares}) samples"
    parts = [
        count,
        f"{plan.micro_batch_size} sample{'s' if plan.micro_batch_size > 1 else ''}",
        f"{plan.mesh.data} data rank{'s' if plan.mesh.data > 1 else ''}",
    ]
    return f"{plan.global_batch_size} = {' x '.join(parts)}"


def micro_batch_text(plan: Plan) -> str:
    """Samples of a micro-batch; of each node group where they differ (``3-1``)."""
    return "-".join(map(str, plan.data_shares)) or str(plan.micro_batch_size)


def schedule_text(plan: Plan) -> str:
    """Schedule and stages."""
    if plan.schedule == "none":
        return "none (one stage, micro-batches one after the other)"
    virtual = f" ({plan.virtual_stages} on each pipeline rank)" if plan.virtual_stages > 1 else ""
    return f"{plan.schedule}, {len(plan.stages)} stages{virtual}"


def groups_text(plan: Plan) -> str:
    """Which ranks stand on which devices, where nodes differ."""
    groups = (f"ranks {g.start}-{g.stop - 1} on {g.device}" for g in plan.groups)
    return f"{', '.join(groups)}: number the nodes in this order"


def devices_text(plan: Plan, pp_rank: int) -> str:
    """The devices that a pipeline rank lies on, where nodes differ."""
    return " + ".join(plan.devices_of(pp_rank))


def fits(plan: Plan) -> bool:
    """Whether the upper end of every rank's memory stays under its limit."""
    return plan.predicted.fits


def memory_text(plan: Plan) -> str:
    """Peak memory with its interval, and the limit."""
    predicted = plan.predicted
    of = f"of {num_bytes(predicted.memory_limit_bytes)}"
    if not predicted.peak_memory_interval_bytes:
        return f"{num_bytes(predicted.peak_memory_bytes)} {of}"
    low, high = map(num_bytes, predicted.peak_memory_interval_bytes)
    return f"{num_bytes(predicted.peak_memory_bytes)} (between {low} and {high}) {of}"
