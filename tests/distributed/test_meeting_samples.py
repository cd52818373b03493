"""Samples that meet inside of a step: smaller batches train, and batches of any size are evaluated, as on one device."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import nn

from autopar import api
from autopar.graph.graph import Graph
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.distributed import meeting
from tests.support.distributed.layouts import on_ranks
from tests.support.distributed.meeting import MeetingSubject, Residual, Routed

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

STEPS = (8, 6, 8, 5, 7, 1)
RESTS = (8, 3, 7)

LAYOUTS = {
    "dp4 ZeRO 3 recomputed": ["dp_shard=4", "zero=3", "recompute=full"],
    "pp2 x dp2": ["pp=2", "dp_replicate=2"],
    "tp2 x dp2": ["tp=2", "dp_replicate=2"],
    "tp2 x dp2 by channels": ["tp=2", "dp_replicate=2", "layers.*.conv.weight=tp:S(0)", "layers.*.norm.*=tp:S(0)"],
}


@cache
def traced(kind: type[nn.Module]) -> tuple[MeetingSubject, Graph]:
    subject = MeetingSubject(kind)
    return subject, api.trace(
        subject.build(), example_inputs=subject.make_batch(8, seed=1), precision="fp64", global_batch_size=8
    )


def compared(pool: WorkerPool, kind: type[nn.Module], layout: str, too_many: tuple[int, ...]) -> list[dict[str, Any]]:
    """What ranks found, the same as one device but for the steps of ``too_many`` samples."""
    subject, graph = traced(kind)
    plan = api.estimate(graph, cluster="cpu:1x4", global_batch_size=8, precision="fp64", pins=LAYOUTS[layout])
    steps = [subject.make_batch(size, seed=seed + 1) for seed, size in enumerate(STEPS)]
    rests = [subject.make_batch(size, seed=seed + 9) for seed, size in enumerate(RESTS)]
    wanted = meeting.on_one_device(subject, [s for s in steps if len(s["labels"]) not in too_many], rests)
    ranks = on_ranks(pool, meeting.on_ranks, subject, plan, graph, steps, rests, timeout_s=100.0)
    for found in ranks:
        done = [step for step, size in zip(found["steps"], STEPS, strict=True) if size not in too_many]
        refused = [step for step, size in zip(found["steps"], STEPS, strict=True) if size in too_many]
        assert all("drop_last=True" in error for error in refused), refused
        assert_close(done, wanted["steps"], 1e-9, place="steps")
        assert_close(found["state"], wanted["state"], 1e-9, place="state")
        for size, rest, one in zip(RESTS, found["rests"], wanted["rests"], strict=True):
            if isinstance(rest, str):
                assert size in too_many and kind is Routed, rest
            else:
                assert_close(rest, one, 1e-9, place=f"{size} samples")
    return ranks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_norms_of_smaller_batches_and_evaluations_equal_one_device(pool: WorkerPool, layout: str) -> None:
    compared(pool, Residual, layout, (1,) if "dp4" in layout else (1, 7))


@pytest.mark.parametrize("layout", ["dp4 ZeRO 3 recomputed", "tp2 x dp2"])
def test_losses_of_means_over_smaller_batches_equal_one_device(pool: WorkerPool, layout: str) -> None:
    compared(pool, Routed, layout, (1,) if "dp4" in layout else (1, 7))
