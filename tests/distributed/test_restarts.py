"""Jobs under torchrun whose ranks die or are told to end go on from their last checkpoint, with the losses of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.support.distributed import fit_script

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(280)]

ROOT = Path(__file__).parents[2]
STEPS = 12


def run(
    folder: Path, *pins: str, fault: str = "", ranks: int = 2, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
        *(f"--max-restarts={restarts}", fit_script.__file__, str(folder), *pins),
    ]
    told = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FIT_FAULT": fault, "FIT_DROPOUT": "0"}
    found = subprocess.run(command, env=os.environ | told, capture_output=True, text=True, check=False, timeout=240.0)
    assert found.returncode == 0, found.stderr[-3000:]
    return found


def log(folder: Path, rank: int = 0) -> dict[str, str]:
    """What was written last of each step."""
    lines = (folder / f"log.{rank}").read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines)


@cache
def losses_of_one_device() -> list[float]:
    torch.manual_seed(0)
    model, found = fit_script.Net(0.0), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
    for step in range(STEPS):
        batch = fit_script.batches()[step % 5]
        loss = model(**batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        found.append(loss.item())
    return found


def assert_as_one_device(folder: Path) -> None:
    found = log(folder)
    assert list(found) == [*map(str, range(1, STEPS + 1)), "end"]
    losses = [float(value) for key, value in found.items() if key != "end"]
    assert losses == pytest.approx(losses_of_one_device(), rel=1e-5)


def test_a_job_whose_rank_is_killed_goes_on(tmp_path: Path) -> None:
    run(tmp_path, "dp_shard=2", "zero=3", fault="SIGKILL,6,1", restarts=1)
    assert (tmp_path / "faulted").exists()
    lines = (tmp_path / "log.0").read_text().splitlines()
    assert [line.split()[0] for line in lines].count("5") == 2, "the step after the checkpoint was made twice"
    assert_as_one_device(tmp_path)
    assert log(tmp_path)["end"] == log(tmp_path, 1)["end"]


def test_a_job_that_is_told_to_end_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    first = run(tmp_path, fault="SIGTERM,1,1")
    assert "SIGTERM: training ends after step" in first.stderr
    assert "end" not in log(tmp_path)
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert saved.name == f"step-{len(log(tmp_path)):08d}"
    again = run(tmp_path, ranks=1)
    assert "the cluster cpu:1x2 has 2 devices, and this job 1 rank" in again.stderr
    assert_as_one_device(tmp_path)
