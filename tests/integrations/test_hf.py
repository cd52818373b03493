"""Hugging Face's Trainer with a parallel model does what it does with the model itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autopar.graph.graph import Graph
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.integrations import hf
from tests.support.integrations.ranks import PLANS, plan_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]


@cache
def wanted(accumulated: int) -> dict[str, Any]:
    return hf.alone("unused", {"gradient_accumulation_steps": accumulated}, metrics=False)


def assert_logs_close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [sorted(log) for log in found] == [sorted(log) for log in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5), theirs["step"]


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_what_is_logged_equals_one_process(
    pair: WorkerPool, graph: Graph, tmp_path: Path, name: str, accumulated: int
) -> None:
    changes = {"gradient_accumulation_steps": accumulated}
    ranks = pair.run(
        hf.parallel, plan_of(name, graph), graph, str(tmp_path), changes, {"metrics": False}, timeout_s=200.0
    )
    expected = wanted(accumulated)
    assert len(expected["logs"]) == (8 if accumulated == 1 else 4) + 2 + 1
    for found in ranks:
        assert_logs_close(found["logs"], expected["logs"])
        assert found["called"] == expected["called"]
        assert_close(found["train_loss"], expected["train_loss"], 1e-5)
