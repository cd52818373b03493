import json
import math
from pathlib import Path

import pytest

from autopar.verification.rank_pool import WorkerPool
from tests.support.scripts import run_script

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_training_script_on_one_rank_and_on_two(pair: WorkerPool, tmp_path: Path) -> None:
    losses = []
    for ranks in (1, 2):
        record = tmp_path / f"{ranks}.json"
        options = [f"--cluster=cpu:1x{ranks}", "--steps=3", f"--record={record}"]
        pair.run(run_script, str(EXAMPLES / "train_gpt2.py"), options, {}, size=ranks)
        losses.append(json.loads(record.read_text())["losses"])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_training_script_is_short() -> None:
    assert len((EXAMPLES / "train_gpt2.py").read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    ("script", "pins"), [("train_hf", "tp=2"), ("train_lightning", "pp=2"), ("train_accelerate", "dp=2 zero=3")]
)
def test_loops_of_other_libraries_on_two_ranks(pair: WorkerPool, tmp_path: Path, script: str, pins: str) -> None:
    record = tmp_path / "record.json"
    options = ["--cluster=cpu:1x2", "--steps=3", f"--folder={tmp_path / 'run'}", f"--record={record}"]
    options += [f"--pin={pin}" for pin in pins.split()]
    pair.run(run_script, str(EXAMPLES / f"{script}.py"), options, {}, timeout_s=300.0)
    losses = json.loads(record.read_text())["losses"]
    assert len(losses) >= 3
    assert all(map(math.isfinite, losses))
