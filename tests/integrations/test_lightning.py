"""A LightningModule trains a parallel model as it trains the model itself."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autopar.graph.graph import Graph
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.integrations import lit
from tests.support.integrations.ranks import PLANS, plan_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]


@cache
def wanted(accumulated: int) -> dict[str, Any]:
    return lit.alone(Path("unused"), {"accumulate_grad_batches": accumulated})


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_a_training_equals_one_process(
    pair: WorkerPool, graph: Graph, tmp_path: Path, name: str, accumulated: int
) -> None:
    options = {"accumulate_grad_batches": accumulated}
    ranks = pair.run(lit.parallel, plan_of(name, graph), graph, str(tmp_path), options, timeout_s=200.0)
    expected = wanted(accumulated)
    assert len(expected["seen"]) == 8
    for found in ranks:
        for part in ("seen", "validated", "logged"):
            assert_close(found[part], expected[part], 1e-5, place=part)
