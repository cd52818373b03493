"""Data ranks that take different numbers of samples (``Plan.data_shares``): each node group priced alone, and put together.

All ranks run as many micro-batches and meet in the same collectives. What a group does between them are its own devices'
times for its own micro-batch; gathers, sums of gradients and scalars are those of all ranks. A step ends with the group
that takes longest: others wait for it, which the parts of its time do not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost.model import CostModel, Step
from autopar.cost.step.step import StageCost
from autopar.plan import Memory, Prediction


def shared_step_s(models: Sequence[CostModel], stages: Sequence[StageCost], steps: Sequence[Step]) -> float:
    """Seconds of the step; arguments as in :func:`predict_shares`."""
    groups = zip(models, stages, steps, strict=True)
    return max(model.breakdown([stage], step).total_s for model, stage, step in groups)


def shared_memory(models: Sequence[CostModel], stages: Sequence[StageCost], steps: Sequence[Step]) -> list[Memory]:
    """Peak memory of a rank of each node group; arguments as in :func:`predict_shares`."""
    groups = zip(models, stages, steps, strict=True)
    return [model.memory([stage], step)[0] for model, stage, step in groups]


def predict_shares(models: Sequence[CostModel], stages: Sequence[StageCost], steps: Sequence[Step]) -> Prediction:
    """Step time and memory of a plan without a pipeline whose node groups take different numbers of samples.

    Args:
        models: of each node group alone (:meth:`CostModel.alone`).
        stages: for each group all blocks at its own micro-batch, as its devices run them.
        steps: how they are run; they differ in the prelude alone.

    Returns:
        The time of the slowest group with its parts; the memory of each group, and the largest peak with the limit there.
    """
    found = [model.predict([stage], step) for model, stage, step in zip(models, stages, steps, strict=True)]
    slowest = max(found, key=lambda p: p.step_time_s)
    fullest = max(found, key=lambda p: p.peak_memory_bytes)
    time_s, peak = slowest.step_time_s, fullest.peak_memory_bytes
    width = max(p.step_time_interval_s[1] / p.step_time_s for p in found)
    spread = max(model.memory_spread for model in models)
    return replace(
        slowest,
        step_time_interval_s=(time_s / width, time_s * width),
        peak_memory_bytes=peak,
        peak_memory_interval_bytes=(round(peak / spread), round(peak * spread)),
        memory_limit_bytes=fullest.memory_limit_bytes,
        memory=tuple(replace(p.memory[0], group=i) for i, p in enumerate(found)),
        memory_limits_bytes=tuple(p.memory_limit_bytes for p in found),
        host_memory_limit_bytes=max(p.host_memory_limit_bytes for p in found),
    )
