"""The examples as a user starts them, a few steps each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(record: Path, *command: str) -> list[float]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)}
    subprocess.run(
        [sys.executable, *command, "--steps=3", f"--record={record}"],
        check=True,
        timeout=120,
        env=environment,
        capture_output=True,
    )
    losses: list[float] = json.loads(record.read_text())["losses"]
    return losses


def test_training_script_on_one_rank_and_on_two(tmp_path: Path) -> None:
    script = str(EXAMPLES / "train_gpt2.py")
    alone = run(tmp_path / "one.json", script, "--cluster=cpu:1x1")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    together = run(tmp_path / "two.json", *launcher, script, "--cluster=cpu:1x2")
    assert len(alone) == 3
    assert together == pytest.approx(alone, rel=1e-5)


def test_training_script_is_short() -> None:
    assert len((EXAMPLES / "train_gpt2.py").read_text().splitlines()) <= 60
