import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.benchmarks.launches import PAGE, listed
from tools.fakes.build import build, compiler
from tools.fakes.cases import IN_THE_SUITE, LISTED, PLANS, runs, wrong
from tools.fakes.driver import PROBE

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler (c++, g++ or clang++), and there is none"),
    pytest.mark.skipif(
        torch.version.cuda is not None or torch.version.hip is not None,
        reason="needs a torch that is built for the CPU alone: the fake device takes the place of CUDA's",
    ),
    pytest.mark.timeout(1500),
    pytest.mark.slow,
]
LIMIT_S = 1400.0
"""Of all plans, which take two minutes of one core: for one that hangs, not for one on a busy machine."""

CASES = [(group, name) for group, name, *_ in runs(IN_THE_SUITE)]

Seen = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("guard")
    guard = build(folder, Path(torch.__file__).parent)

    output = folder / "seen.json"
    command = [sys.executable, "-m", "tools.fakes.driver", str(guard), str(output), PROBE, *sorted(IN_THE_SUITE)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, ["", *sys.path]))}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert not done.returncode, f"the driver ended with {done.returncode}: {done.stderr[-3000:]}"
    found = json.loads(output.read_text())
    return lambda group: {name: found[name] for own, name in CASES if own == group} or found[group]


@pytest.mark.parametrize(("group", "name"), CASES, ids=[name for _, name in CASES])
def test_a_program_runs_on_a_device_alone(seen: Seen, group: str, name: str) -> None:
    assert not wrong(seen(group)[name])


def test_what_is_listed_is_still_there(seen: Seen) -> None:
    there = {tuple(row[1:4]) for group in PLANS for case in seen(group).values() for row in case["seen"]}
    assert set(LISTED) <= there, "take it off the list"


def test_copies_are_compared_once_a_step_whatever_is_evaluated_at_it(seen: Seen) -> None:
    for name, case in seen("dense").items():
        looks = [
            count
            for phase, *_, place, count in case["seen"]
            if phase == "loaded" and "same_values.py:check_now" in place
        ]
        assert sum(looks) <= 2, name  # the axes along which ranks have copies
    assert any(row[3].endswith("same_values.py:check_now") for row in seen("dense")["tp rank 0"]["seen"])


def test_the_page_names_the_plans_and_the_waits() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    names = [f"| {name} | {rank} | " for cases in PLANS.values() for name, case in cases.items() for rank in case.run]
    assert [row[: len(name)] for row, name in zip(rows, names, strict=True)] == names
    assert text.endswith(listed()), "python -m tools.benchmarks.launches writes it"


def test_dense_models_wait_for_nothing_in_a_step(seen: Seen) -> None:
    for group in ("dense", "pipelines"):
        for name, case in seen(group).items():
            phases = {row[0] for row in case["seen"] if row[1] == "host waits"}
            assert not phases & {"step", "clip", "optimizer"}, name


def test_first_steps_are_compared_without_the_device(seen: Seen) -> None:
    """But for the events that they were measured by."""
    for name, case in seen("dense").items():
        there = {row[3] for row in case["seen"] if row[0] == "measured"}
        assert there <= {"autopar/runtime/monitor.py:_between"}, name
        assert "measured" not in case["launches"], name
    assert any(row[0] == "measured" for row in seen("dense")["tp rank 0"]["seen"])


def test_batches_on_the_device_are_compared_by_checksums(seen: Seen) -> None:
    """Nothing else of them is read, and nothing of batches on the host."""
    for group in PLANS:
        for name, case in seen(group).items():
            reads = [
                count
                for phase, *_, place, count in case["seen"]
                if phase == "batch on the device" and "local_batch.py" in place
            ]
            assert len(reads) <= 1, name
    looked = [row for row in seen("dense")["tp rank 0"]["seen"] if "local_batch.py" in row[3]]
    assert [row[:2] for row in looked] == [["batch on the device", "copy that blocks"]]


def test_faults_are_seen(seen: Seen) -> None:
    found: dict[str, set[str]] = {}
    for phase, kind, *_ in seen(PROBE)["seen"]:
        found.setdefault(phase, set()).add(kind)
    waits, blocks = "host waits", "copy that blocks"
    assert "devices mixed" in found["two devices"]
    assert all(blocks in found[name] for name in ("up", "down", "into", "numbers"))
    assert all(waits in found[name] for name in ("item", "int", "if", "list", "where", "mask", "repeats", "event"))
    assert "state of generators kept" in found["fork"]
    assert "all right" not in found


def test_kernels_are_counted_and_nothing_else(seen: Seen) -> None:
    launches = seen(PROBE)["launches"]
    assert launches["all right"] == 7
    assert "questions" not in launches
