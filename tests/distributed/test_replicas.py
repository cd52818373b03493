"""Copies of parameters on several ranks are compared, and brought together again with a warning that names them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed import jobs
from tests.support.distributed.layouts import on_batch, planned

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

LAYOUTS = ["dp4", "tp2 whole parameters", "tp2 x dp2 whole parameters", "HSDP 2x2", "tp2 x dp2 ZeRO 1", "pp2 x dp2"]


@pytest.mark.parametrize(("layout", "where"), [(name, ["step", "save"][n % 2]) for n, name in enumerate(LAYOUTS)])
def test_copies_that_drifted_have_the_first_ranks_values(
    pool: WorkerPool, tmp_path: Path, layout: str, where: str
) -> None:
    """A parameter of which ranks hold copies is changed on the last rank by one rounding."""
    found = on_batch(pool, jobs.drifting, *planned(layout, "llama"), where, str(tmp_path))
    name = found[-1]["changed"]
    assert name
    assert found[-1]["was_other"]
    said = " ".join(text for rank in found for text in rank["said"])
    assert f"copies of {name} differed" in said, said
    assert "torch.use_deterministic_algorithms(True)" in said
    assert sum(len(rank["said"]) for rank in found) <= len(found)  # once each, though it drifts twice
    for rank in found:
        for key, value in rank["copies"].items():
            others = [other["copies"][key] for other in found if key in other["copies"]]
            assert len(others) > 1, key
            assert all(torch.equal(value, other) for other in others), key


def test_equal_copies_are_left_alone(pool: WorkerPool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autopar"):
        for rank in on_batch(pool, jobs.drifting, *planned("tp2 x dp2 whole parameters", "llama"), "never", ""):
            assert rank["said"] == []
