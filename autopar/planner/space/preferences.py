"""The candidates that experts would take: which one an incomplete choice means, which are leanest, and rules of thumb of the field.

The rules of thumb are written as pins: tensor parallelism inside a node and no more of it than a layer needs, then stages, then data
ranks (Narayanan et al. 2021, section 3.2); the defaults of Megatron-LM (no distributed optimizer, 1F1B), torchtitan (FSDP over all ranks)
and PyTorch's FSDP2 and HSDP. Every search by a sampler begins with their candidates, and benchmarks compare with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.plan.mesh import MESH_AXES
from autopar.plan.schedule import SCHEDULES
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.constraints import Table, pin_constraints
from autopar.planner.space.pins import Pins


def usual(candidate: Candidate) -> tuple[int, ...]:
    """Return a sort key of candidates, the most usual first; the first is what an estimate takes for choices that are not pinned."""
    mesh = candidate.mesh
    order = {"none": 0, "1F1B": 0, "Interleaved1F1B": 1, "GPipe": 2}
    zero = 0 if candidate.zero_stage == (1 if mesh.data > 1 else 0) else 1 + candidate.zero_stage
    return (
        len(candidate.on_host),
        mesh.cp * mesh.tp * mesh.pp,
        mesh.cp,
        mesh.pp,
        zero,
        min(mesh.dp_replicate, mesh.dp_shard),
        order[candidate.schedule],
        candidate.micro_batch_size,
        candidate.virtual_stages,
        mesh.dp_replicate,
        mesh.ep_data,
        SCHEDULES.index(candidate.schedule),
        candidate.vocab_multiple,
    )


def leanness(candidate: Candidate) -> tuple[int, ...]:
    """Return a sort key of candidates by the memory that they are likely to need, the leanest first."""
    mesh = candidate.mesh
    return (
        -len(candidate.on_host),
        -candidate.zero_stage,
        candidate.micro_batch_size,
        mesh.dp_replicate,
        -mesh.tp * mesh.cp,
        candidate.num_micro_batches if candidate.schedule == "GPipe" else 0,
        -mesh.pp,
        candidate.virtual_stages,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule of thumb.

    Attributes:
        name: its name, with where it comes from.
        tries: sets of pins, to be tried in this order until a candidate fits.
    """

    name: str
    tries: tuple[tuple[str, ...], ...]


def rules(devices_per_node: int) -> tuple[Rule, ...]:
    """Return the rules of thumb for nodes of ``devices_per_node`` devices."""
    node = devices_per_node
    degrees = [d for d in (1, 2, 4, 8) if d <= node]
    smallest = ("zero=1", "micro_batch=1")
    fsdp = ("tp=1", "pp=1", "cp=1", "zero=3")
    survey = (*((f"tp={d}", "cp=1", "pp=1", *smallest) for d in degrees), (f"tp={node}", "cp=1", *smallest))
    megatron = (f"tp={node}", "cp=1", "zero=0", "micro_batch=1", "schedule!=GPipe", "virtual_stages=1")
    titan = tuple((*fsdp, "dp_replicate=1", f"micro_batch={m}") for m in (8, 4, 2, 1))
    return (
        Rule(name="survey: least tp in a node, then pp, then data, ZeRO-1", tries=survey),
        Rule(name="Megatron: tp of a node, least pp, no ZeRO, 1F1B", tries=(megatron,)),
        Rule(name="torchtitan: FSDP over all, largest micro-batch to 8", tries=titan),
        Rule(name="FSDP2: ZeRO-3 over all, micro-batch 1", tries=((*fsdp, "dp_replicate=1", "micro_batch=1"),)),
        Rule(name="HSDP: ZeRO-3 inside a node, micro-batch 1", tries=((*fsdp, f"dp_shard={node}", "micro_batch=1"),)),
    )


def seeds(pool: Sequence[Candidate], devices_per_node: int, may_fit: Callable[[int], bool]) -> dict[int, str]:
    """Return the positions of the candidates that experts would try, each with the name of the first rule that gives it.

    A rule gives the most usual candidate that may fit, of the first of its tries that has one.

    Args:
        may_fit: returns whether the candidate at a position may fit in memory.
    """
    reasons: dict[int, str] = {}
    if not pool:
        return reasons
    table = _table(pool)
    for rule in rules(devices_per_node):
        tried = (i for texts in rule.tries for i in _usual_first(pool, table, texts))
        index = next(filter(may_fit, tried), None)
        if index is not None:
            reasons.setdefault(index, rule.name)
    return reasons


def _usual_first(pool: Sequence[Candidate], table: Table, texts: Sequence[str]) -> list[int]:
    """Return the positions of the candidates that satisfy some pins, the most usual first."""
    keep = np.ones(len(pool), dtype=bool)
    for constraint in pin_constraints(Pins.parse(texts), 0):
        keep &= constraint.holds(table)
    return sorted(np.flatnonzero(keep).tolist(), key=lambda i: usual(pool[i]))


def _table(pool: Sequence[Candidate]) -> Table:
    """Return the choices on which the rules have pins, one column for each."""
    columns = {key: [getattr(c.mesh, key) for c in pool] for key in MESH_AXES} | {
        "zero": [c.zero_stage for c in pool],
        "micro_batch": [c.micro_batch_size for c in pool],
        "schedule": [SCHEDULES.index(c.schedule) for c in pool],
        "virtual_stages": [c.virtual_stages for c in pool],
    }
    return {key: np.array(column, dtype=np.int64) for key, column in columns.items()}
