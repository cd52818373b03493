"""Pipelines as the relaxations see them, in a line: what a test does not say takes no time and no memory."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autopar.planner.bounds.instance import BlockFloor, FloorTable, ModeFloor, PipelineInstance, runs_of


def block(*modes: tuple[float, float], forward_s: float = 1.0, **fields: float) -> BlockFloor:
    """A block by the seconds of the backward and the kept bytes of each of its modes."""
    own = tuple(ModeFloor(backward_s=time_s, kept_bytes=kept, passing_bytes=0.0) for time_s, kept in modes)
    return BlockFloor(forward_s=forward_s, modes=own, **fields)


def pipeline(
    schedule: str, pp: int, num_micro_batches: int, kinds: Sequence[int], blocks: Sequence[BlockFloor], **fields: Any
) -> PipelineInstance:
    """Blocks of these kinds on ranks with equal devices, which have room for all of them."""
    nothing = (0.0,) * pp if pp > 1 else ()
    instance = PipelineInstance(
        schedule=schedule, virtual_stages=1, num_micro_batches=num_micro_batches, runs=runs_of(kinds), groups=((1,),),
        floors=(FloorTable(blocks=tuple(blocks)),), device_of_rank=(0,) * pp, limit_bytes=(100.0,), forward_s=(0.0,),
        backward_s=(0.0,), sends_s=nothing, sends_back_s=nothing,
    )  # fmt: skip
    return replace(instance, **fields)
