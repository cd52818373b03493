"""What is known of one step while plans for it are priced one after the other: they have most stages in common."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.cost.step.data_parallel import DataParallel, Unit
from autopar.cost.step.memory import Known, StageCost
from autopar.cost.step.stage_time import StageKey, StageSums
from autopar.cost.step.step import Step


@dataclass(slots=True, kw_only=True, eq=False)
class OfStep:
    """Of one step, by what it depends on; models and blocks are known by their ids.

    Attributes:
        step: that all of it is of.
        data: its data axes.
        units: of a stage, by model and blocks.
        sums: of a stage, by model, blocks, recompute, share of gathers and seconds of the prelude.
        gradients_s: sums of gradients of a pipeline rank, by model and stages.
        memory: by model.
        once_s: the scalars that a step sums.
        stages: that have the blocks whose ids are known, so that the ids stay their own.
    """

    step: Step
    data: DataParallel
    units: dict[tuple[int, ...], list[Unit]] = field(default_factory=dict)
    sums: dict[tuple[int, StageKey, float, float], StageSums] = field(default_factory=dict)
    gradients_s: dict[tuple[int, tuple[StageKey, ...]], dict[str, float]] = field(default_factory=dict)
    memory: dict[int, Known] = field(default_factory=dict)
    once_s: float | None = None
    stages: list[StageCost] = field(default_factory=list)
