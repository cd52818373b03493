"""What ``make gpus`` runs, over gloo where there are no GPUs."""

import argparse
import json
import os
import subprocess
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.errors import AutoparError
from autopar.planner.space.pins import Pins
from autopar.verification.rank_pool import WorkerPool
from tools.gpu import __main__ as gpu
from tools.gpu.machine_facts import facts_text, machine_facts
from tools.gpus import __main__ as gpus
from tools.gpus import ranks
from tools.gpus.ranks import BATCH, cases_of


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there are GPUs: the command would run everything")
def test_without_gpus_a_line_says_what_would_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpus.main(["--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "trains plans of every axis over NCCL" in said and "'--device cpu' does so over gloo" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("num_ranks", gpus.SIZES)
def test_every_axis_has_a_plan_whose_degrees_are_the_ranks(num_ranks: int) -> None:
    axes = set()
    for case in cases_of(num_ranks):
        Pins.parse(case.pins)
        degrees = {name: int(value) for name, value in (pin.split("=") for pin in case.pins) if value.isdecimal()}
        mesh = {axis: degrees.get(axis, 1) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
        assert prod(mesh.values()) == num_ranks, case
        assert BATCH % (mesh["dp_replicate"] * mesh["dp_shard"]) == 0
        axes |= {axis for axis, degree in mesh.items() if degree > 1} | ({"ep"} if "ep" in degrees else set())
    assert axes == {"pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"}
    assert len({case.name for case in cases_of(num_ranks)}) == len(cases_of(num_ranks))


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2) as workers:
        yield workers


def ranks_that_write(arguments: list[str], log: str) -> None:
    """A rank, whose errors go to a file, as the alarm ends the process."""
    with Path(log).open("a") as file:
        os.dup2(file.fileno(), 2)
    ranks.main(arguments)


@pytest.mark.distributed
def test_a_failure_is_told(pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By ranks of worker processes; how torchrun would be started: ``test_ranks_on_cpus_see_no_gpu_of_the_machine``."""

    def job(_: argparse.Namespace, log: Path, arguments: list[str]) -> tuple[int, str]:
        assert arguments[:2] == ["-m", "tools.gpus.ranks"]
        with pytest.raises(AutoparError, match="rank 0: the process died"):
            pool.run(ranks_that_write, arguments[2:], str(log), timeout_s=60.0)
        return 1, log.read_text(encoding="utf-8")

    monkeypatch.setattr(gpus, "_torchrun", job)
    assert gpus.main(["--device", "cpu", "--ranks", "2", "--out", str(tmp_path), "--only", "failure"]) == 0
    found: dict[str, Any] = json.loads((tmp_path / "gpus.json").read_text(encoding="utf-8"))
    assert found["failure"]["is_told"]
    assert "RuntimeError: a failure made on purpose" in (tmp_path / "gpus.md").read_text(encoding="utf-8")


@pytest.mark.distributed
def test_a_plan_is_held_against_one_device(pool: WorkerPool, tmp_path: Path) -> None:
    chosen = {case.name: (number, case.precision) for number, case in enumerate(cases_of(2))}
    number, precision = chosen["tensor parallel, GPT-2"]
    result = tmp_path / f"{number}.json"
    pool.run(ranks.main, ["train", str(result), "cpu", str(number)], timeout_s=300.0)
    row = json.loads(result.read_text(encoding="utf-8"))
    assert gpus._is_right(row["loss_error"], row["parameter_error"], precision), row
    assert row["num_parameters"] > 10 and row["step_s"] > 0 and row["predicted_s"] > 0


def test_ranks_on_cpus_see_no_gpu_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        seen.append(options["env"])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(subprocess, "run", run)
    for device in ("cpu", "cuda"):
        gpus._torchrun(argparse.Namespace(device=device, ranks=2), tmp_path / "log", [])
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in seen] == ["", "0"]


def test_a_job_is_begun_on_the_device_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ranks, "start", begun.append)
    monkeypatch.setattr(ranks.dist, "get_world_size", lambda: 2)
    assert ranks.job_size("cpu") == 2
    assert begun == ["cpu"]


def test_a_page_says_what_failed_and_what_is_wrong() -> None:
    row = {
        "loss_error": 1e-7, "parameter_error": 0.5, "is_right": False, "step_s": 0.1, "predicted_s": 0.2, "syncs": [0, 3],
        "mesh": "tp=2",
    }  # fmt: skip
    found = {
        "machine": machine_facts(), "ranks": 2, "trainings": {"one": row, "other": {"failure": "Traceback\nNCCL error"}},
        "failure": {"said": "The others were not told."},
    }  # fmt: skip
    text = gpus.page(found)
    assert "| one | tp=2 | 1.0e-07 | 5.0e-01 | no | 100 ms | 200 ms | 3 |" in text
    assert "| other | | | | failed | | | |" in text and "NCCL error" in text
    assert facts_text(machine_facts()) in text
    assert not gpus._is_right(1e-7, 0.5, "fp32") and gpus._is_right(1e-3, 0.5, "bf16")


def test_a_step_that_fails_in_any_way_leaves_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(_: Path) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    assert not gpu.passed(gpu.Step(title="a step", run=fails, needs=()), tmp_path)
    assert "failed: RuntimeError: CUDA error: an illegal memory access" in capsys.readouterr().out
    log = (tmp_path / gpu.ERRORS).read_text(encoding="utf-8")
    assert "a step:" in log and "Traceback" in log and "more" in log
