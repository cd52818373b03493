"""``autopar profile`` in the shell; links between processes: tests/distributed/test_profile_links.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autopar.measure import operators as ops
from tests.support.cli_runner import Run

MODEL = ("gpt:layers=1,hidden=16,heads=2,vocab=32", "--seq", "8")


@pytest.mark.slow
def test_operators_are_timed_once_and_plans_use_them(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "REPEATS", 3)
    monkeypatch.setattr(ops, "MIN_BATCH_S", 1e-4)
    given = ("profile", "ops", *MODEL, "--cluster", "cpu:1x1", "--space", "quick", "--pin", "micro_batch=1")
    first = json.loads(run(*given, "-o", "mine.toml", "--json").out)
    assert first["operators"] == first["timed_now"] > 10
    assert first["operators_failed"] == 0
    again = json.loads(run(*given, "-o", "mine.toml", "--json").out)
    assert (again["operators"], again["timed_now"]) == (first["operators"], 0)
    plan = ("estimate", *MODEL, "--cluster", "mine.toml:1x1", "--global-batch", "4", "--pin", "micro_batch=1")
    shown = run(*plan).out
    assert "operators at their measured time" in shown
    assert "by roofline" not in shown


def test_what_cannot_be_profiled_is_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("profile", "ops", *MODEL, "--cluster", "cpu:1x1", "-o", "mine.json")
    assert done.code == 2
    assert "does not end in .toml" in done.error
    (tmp_path / "file").write_text("")
    for command in (("ops", *MODEL, "--cluster", "cpu:1x1"), ("links",), ("all", *MODEL)):
        done = run("profile", *command, "-o", "file/mine.toml")
        assert done.code == 2
        assert "Cannot write file/mine.toml" in done.error
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run("profile", "ops", *MODEL, "--cluster", "h100-sxm5-80gb:1x8", "-o", "mine.toml")
    assert done.code == 2
    assert "no CUDA device" in done.error
