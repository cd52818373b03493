from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autopar.profile import gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the command would run everything")
def test_without_a_gpu_the_command_says_what_it_would_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autopar.profile.gpu", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    for title in gpu.STEPS:
        assert title in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.gpu
def test_collectives_over_nccl_with_one_rank_are_right(tmp_path: Path) -> None:
    assert gpu.run_nccl(tmp_path)
    assert json.loads((tmp_path / "nccl.json").read_text(encoding="utf-8"))["wrong"] == []
