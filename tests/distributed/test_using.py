"""What people try around a parallel model in their first hour, on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.verification.rank_pool import WorkerPool
from autopar.verification.reference import adamw, loss_of
from tests.support.distributed import using
from tests.support.distributed.layouts import batches, planned

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]


@pytest.mark.parametrize("layout", ["dp4 ZeRO 3", "tp2 x dp2 whole parameters", "pp2 x dp2"])
def test_nothing_that_is_kept_is_made_in_inference_mode(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    """FSDP gathered into memory that no later step could write to; parameters could not be detached."""
    subject, plan, graph = planned(layout, "gpt2")
    (batch,) = batches(subject, 1)
    model = subject.build()
    first = loss_of(model(**batch))
    first.backward()
    adamw(model.parameters()).step()
    wanted = [first.item()] * 2 + [loss_of(model(**batch)).item()] * 2
    found = pool.run(using.in_inference_mode, subject, plan, graph, batch, str(tmp_path), timeout_s=60.0)
    for losses, is_inference in found:
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert not is_inference


@pytest.mark.usefixtures("known_machine")
def test_ranks_on_two_hosts_are_planned_as_two_nodes(pool: WorkerPool) -> None:
    subject, _, _ = planned("dp4 ZeRO 3", "gpt2")
    (batch,) = batches(subject, 1)
    found = pool.run(using.without_a_cluster, subject, batch, timeout_s=80.0)
    assert {(cluster, mesh) for cluster, mesh, _ in found} == {("local (2x2)", found[0][1])}
    assert [nodes for _, _, nodes in found] == [[(2, 2)], [], [], []]  # rank 0 plans, and knows of all
