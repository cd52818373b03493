"""The plan as one flat JSON object for scripts: the contract of ``--json``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopar.plan.text import fits

if TYPE_CHECKING:
    from autopar.plan.plan import Plan


def plan_summary(plan: Plan) -> dict[str, Any]:
    """What ``search --json``, ``estimate --json`` and ``show --json`` print; seconds and bytes."""
    predicted, search = plan.predicted, plan.search
    return {
        "model": asdict(plan.model),
        "cluster": plan.cluster,
        "mesh": {axis: getattr(plan.mesh, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")},
        "groups": [asdict(group) for group in plan.groups],
        "global_batch_size": plan.global_batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "num_micro_batches": plan.num_micro_batches,
        "data_shares": list(plan.data_shares),
        "schedule": plan.schedule,
        "virtual_stages": plan.virtual_stages,
        "zero_stage": plan.zero_stage,
        "recompute": plan.recompute,
        "precision": plan.precision.name,
        "optimizer": plan.optimizer,
        "stages": [
            {
                "index": stage.index,
                "pp_rank": stage.pp_rank,
                "devices": list(plan.devices_of(stage.pp_rank)),
                "start": stage.start,
                "stop": stage.stop,
                "blocks": [block.label for block in plan.blocks[stage.start : stage.stop]],
            }
            for stage in plan.stages
        ],
        "predicted": {
            "step_time_s": predicted.step_time_s,
            "step_time_interval_s": list(predicted.step_time_interval_s),
            "peak_memory_bytes": predicted.peak_memory_bytes,
            "peak_memory_interval_bytes": list(predicted.peak_memory_interval_bytes),
            "memory_limit_bytes": predicted.memory_limit_bytes,
            "memory_limits_bytes": list(predicted.memory_limits_bytes),
            "fits": fits(plan),
            "mfu": predicted.mfu,
            "tokens_per_s": predicted.tokens_per_s,
            "breakdown": asdict(predicted.breakdown),
            "memory": [asdict(memory) for memory in predicted.memory],
        },
        "search": {
            "wall_time_s": search.wall_time_s,
            "candidates": search.candidates,
            "evaluated": search.evaluated,
            "lower_bound_s": search.lower_bound_s,
            "gap": search.gap,
            "reasons": list(search.reasons),
        },
        "pins": list(plan.pins),
        "notes": list(plan.notes),
    }
