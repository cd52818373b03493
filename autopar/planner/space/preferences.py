"""What a choice that nobody made means in an estimate."""

from __future__ import annotations

from autopar.planner.space.candidates import Candidate
from autopar.schedule import SCHEDULES


def usual(candidate: Candidate) -> tuple[int, ...]:
    """Orders candidates by how usual they are; the first of these is what an unpinned choice means in an estimate."""
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
    )
