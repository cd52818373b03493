"""Jobs under torchrun whose ranks die or are told to end go on from their last checkpoint, with the losses of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.distributed import fit_script

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.usefixtures("known_machine"),  # fewer ranks plan for the machine that is there
]

ROOT = Path(__file__).parents[2]
STEPS = 12


def run(
    folder: Path, *pins: str, faults: str = "", ranks: int = 2, restarts: int = 0
) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
        *(f"--max-restarts={restarts}", fit_script.__file__, str(folder), *pins),
    ]
    told = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FIT_FAULTS": faults, "FIT_DROPOUT": "0"}
    found = subprocess.run(command, env=os.environ | told, capture_output=True, text=True, check=False, timeout=240.0)
    assert found.returncode == 0, found.stderr[-3000:]
    return found


def log(folder: Path, rank: int = 0) -> dict[str, str]:
    """What was written last of each step."""
    lines = (folder / f"log.{rank}").read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines)


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


def test_a_job_goes_on_after_a_rank_was_killed_and_with_fewer_ranks_after_it_was_told_to_end(tmp_path: Path) -> None:
    """Ranks ask each other after their first step, the fifth of the second start, whether one was told to end."""
    first = run(tmp_path, "dp_shard=2", "zero=3", faults="SIGKILL,5,1 SIGTERM,5,1", restarts=1)
    assert {path.name for path in tmp_path.glob("faulted.*")} == {"faulted.SIGKILL", "faulted.SIGTERM"}
    lines = (tmp_path / "log.1").read_text().splitlines()
    assert [line.split()[0] for line in lines].count("5") == 2, "the step after the checkpoint was made twice"
    assert "SIGTERM: training ends after step" in first.stderr
    done = log(tmp_path)
    assert "end" not in done
    assert done.pop("told") == log(tmp_path, 1)["told"]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000004", f"step-{len(done):08d}"]
    again = run(tmp_path, ranks=1)
    assert "the cluster cpu:1x2 has 2 devices, and this job 1 rank" in again.stderr
    found = log(tmp_path)
    del found["told"]
    assert list(found) == [*map(str, range(1, STEPS + 1)), "end"]
    losses = [float(value) for key, value in found.items() if key != "end"]
    assert losses == pytest.approx(losses_of_one_device(), rel=1e-5)
