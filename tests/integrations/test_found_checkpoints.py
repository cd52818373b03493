"""Checkpoints that a library's loop is pointed to: copies under other names, and those of another loop."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autopar.errors import UsageError
from autopar.integrations import hf
from autopar.integrations.accelerate import Accelerator


def test_resuming_takes_the_last_numbered_checkpoint_that_is_complete(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").touch()
    (tmp_path / "checkpoint-11").mkdir()
    assert hf._last_complete(tmp_path) == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (None, "was not written by accelerator.save_state"),
        ({"epoch": 1}, "was not written by accelerator.save_state"),
        ({"step": 3, "custom": [{}, {}]}, "number of objects registered for checkpointing"),
    ],
)
def test_a_checkpoint_of_another_loop_is_refused_by_name(extra: Any, problem: str) -> None:
    model = SimpleNamespace(load=lambda *_, **__: extra)
    loop = SimpleNamespace(parallel_model=model, _optimizer=lambda: None, _beside=dict, _custom_objects=[], step=0)
    with pytest.raises(UsageError, match=problem):
        Accelerator.load_state(cast("Accelerator", loop), "folder")
    assert loop.step == 0
