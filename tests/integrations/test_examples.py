import json
import math
import re
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import autopar
from autopar.runtime.job import PLAN
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.distributed.plans import estimated
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


# --- the script of nanoGPT


SCRIPT = Path(__file__).parents[2] / "examples" / "train_nanogpt.py"
MARKED = re.compile(r"^(?P<indent> *)\S.*  # autopar(?:, was: (?P<was>.*))?$", re.MULTILINE)
SMALL = ("--layers=2", "--hidden=32", "--dropout=0", "--steps=6")


def without_autopar(text: str) -> str:
    return MARKED.sub(lambda found: found["indent"] + found["was"] if found["was"] else "", text)


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "record.json").read_text())


def parallel(pair: WorkerPool, folder: Path, plan: Path, *more: str) -> dict[str, Any]:
    pair.run(run_script, str(SCRIPT), [*more, *SMALL, f"--folder={folder}"], {PLAN: str(plan)}, timeout_s=300.0)
    return record(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    script = folder / "train.py"
    script.write_text(without_autopar(SCRIPT.read_text()))
    with mock.patch.object(sys, "argv", [str(script), *SMALL, f"--folder={folder}"]):
        runpy.run_path(str(script), run_name="__main__")
    return record(folder)


def test_few_lines_make_it_parallel() -> None:
    text = SCRIPT.read_text()
    assert 5 <= len(MARKED.findall(text)) <= 10
    rest = without_autopar(text)
    assert "autopar" not in rest.split('"""', 2)[2]
    compile(rest, "train.py", "exec")


def test_it_trains_as_alone(pair: WorkerPool, alone: Any, tmp_path: Path) -> None:
    """Losses and norms of gradients, with a checkpoint in the middle that another plan goes on from."""
    example = runpy.run_path(str(SCRIPT))
    model, batch = example["GPT"](2, 32, 4, 0.0), example["make_batch"](0)
    graph = autopar.trace(model, example_inputs=batch, loss_fn=lambda out, _: out[1])
    for name, pins in (("first", ["dp=2", "zero=3"]), ("second", ["pp=2"])):
        estimated(graph, cluster="cpu:1x2", global_batch_size=8, pins=pins).save(tmp_path / f"{name}.json")
    steps = parallel(pair, tmp_path, tmp_path / "first.json", "--stop=3")["steps"]
    found = parallel(pair, tmp_path, tmp_path / "second.json")
    assert len(steps) == 3
    assert_close([*steps, *found["steps"]], alone["steps"], 2e-5)
    assert_close(found["validation"], alone["validation"], 2e-5)
