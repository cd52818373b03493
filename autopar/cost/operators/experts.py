"""How a mixture of experts runs on a GPU (``autopar.expert_ops``): in grouped products or a loop, and how often it waits."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from autopar.cost.operators.work_record import Work
from autopar.device import Device
from autopar.graph.ir import Op

ONE_RANK = "autopar.experts"
TARGETS = frozenset((ONE_RANK, *(f"{ONE_RANK}_{name}" for name in ("split", "dispatch", "dispatch_split"))))

_GROUPED = re.compile(r"(?<![a-z0-9])(g?h(20|100|200|800)|g?b(100|200|300))(?![a-z0-9])")
"""Names of GPUs of compute capability 9 and 10; any other one is priced as reading and looping, which all can do."""

_ALIGNMENT = 8  # elements of bfloat16 in 16 bytes


def as_run(done: Work, op: Op, device: Device) -> Work:
    """The work with the launches of grouped products, where these are used: one for all experts instead of one each."""
    if not _is_grouped(op, device):
        return done
    held = 3 if op.args[3] is not None else 2
    spared = done.matmuls // held - 1
    return replace(
        done,
        launches=done.launches - (held + 2) * spared,
        backward_launches=max(done.backward_launches - (2 * held + 2) * spared, 0),
    )


def waiting_s(op: Op, device: Device) -> float:
    """Seconds of a forward, in backward too where that recomputes it, in which the host waits: ``reads * time_of_one``.

    ``reads`` is 1, or 0 on a CPU and for all experts of one rank in grouped products. A read drains the queue, so what
    is launched next is exposed; ``time_of_one`` is the profile's time of a launch that the host waits for
    (``blocking_launch_s``, with the provenance of its launches; where it has none, that of a launch).
    """
    if device.kind == "cpu" or (op.target == ONE_RANK and _is_grouped(op, device)):
        return 0.0
    return device.blocking_launch_s or device.launch_s


def _is_grouped(op: Op, device: Device) -> bool:
    is_fitting = op.spec.dtype == torch.bfloat16 and op.spec.shape[-1] % _ALIGNMENT == 0
    return device.kind == "cuda" and is_fitting and _GROUPED.search(device.name.lower()) is not None
