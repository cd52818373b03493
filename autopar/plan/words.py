"""Numbers as people read them, and the parts of a plan that every picture names alike."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from autopar.plan.plan import Breakdown, Memory, Plan

_NUMBERED = re.compile(r"^(.*?)(\d+)((?:\D.*)?)$")

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
"""Fields of :class:`autopar.plan.plan.Memory` that add up to its total."""


def seconds(value_s: float) -> str:
    """Three significant digits in a fitting unit.

    >>> seconds(0.45), seconds(12.3), seconds(0.00021), seconds(0)
    ('450 ms', '12.3 s', '210 us', '0 s')
    """
    if value_s == 0:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value_s) >= scale:
            return f"{_digits(value_s / scale)} {unit}"
    return f"{_digits(value_s / 1e-9)} ns"


def num_bytes(value: float) -> str:
    """Binary units.

    >>> num_bytes(31 * 2**30), num_bytes(1536), num_bytes(12)
    ('31 GiB', '1.5 KiB', '12 B')
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(value) >= 2**power:
            return f"{_digits(value / 2**power)} {unit}"
    return f"{value:.0f} B"


def count(value: float) -> str:
    """Decimal units.

    >>> count(2_200_000_000), count(5.4e13), count(124)
    ('2.2 B', '54 T', '124')
    """
    for scale, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{_digits(value / scale)} {unit}"
    return f"{value:.0f}"


def flops(value: float) -> str:
    """Floating point operations.

    >>> flops(329e9), flops(0)
    ('329 GFLOP', '0 FLOP')
    """
    text = count(value).replace("B", "G")
    return f"{text}FLOP" if " " in text else f"{text} FLOP"


def share(part: float, whole: float) -> str:
    """A part in percent; ``-`` where there is no whole."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def ranges(labels: Iterable[str]) -> str:
    """Labels with runs of numbers joined.

    >>> ranges(["wte", "h.0", "h.1", "h.2", "h.5", "ln_f"])
    'wte, h.0-2, h.5, ln_f'
    """
    found: list[tuple[str, str, int, int]] = []
    for label in map(printable, labels):
        match = _NUMBERED.match(label)
        if match is None:
            found.append((label, "", -1, -1))
            continue
        before, number, after = match[1], int(match[2]), match[3]
        if found and found[-1][:2] == (before, after) and found[-1][3] == number - 1:
            found[-1] = (before, after, found[-1][2], number)
        else:
            found.append((before, after, number, number))
    texts = [
        before if first < 0 else f"{before}{first}{after}" if first == last else f"{before}{first}-{last}{after}"
        for before, after, first, last in found
    ]
    return ", ".join(text for text, _ in groupby(texts))


def printable(text: str) -> str:
    """The text with control characters shown as ``?``: names come from files that anyone may have written."""
    return "".join(char if char.isprintable() else "?" for char in text)


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


def _digits(value: float) -> str:
    text = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return text if "e" not in text else f"{value:.0f}"
