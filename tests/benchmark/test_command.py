import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from autopar.benchmark.batches import Outcome, Row, score
from autopar.benchmark.local import MAX_AGE_S, BenchmarkRequest, run_local, whether_again
from autopar.benchmark.rank_runs import QUIET_PROFILER
from tests.support.cli_runner import Run


def test_an_old_speed_of_the_machine_is_measured_again_but_never_a_shipped_profile(tmp_path: Path) -> None:
    kept = tmp_path / "ranks.json"
    again, line = whether_again(kept, fresh=False)
    assert again and line.endswith("measured now, for the first time")
    kept.write_text("{}", encoding="utf-8")
    said = "speed of this machine: measured 0 minutes ago (--fresh measures it again)"
    assert whether_again(kept, fresh=False) == (False, said)
    again, line = whether_again(kept, fresh=True)
    assert again and line.endswith("the one before was 0 minutes old")
    before = time.time() - MAX_AGE_S - 1800
    os.utime(kept, (before, before))
    again, line = whether_again(kept, fresh=False)
    assert again and line.endswith("the one before was 6.5 hours old")
    again, line = whether_again(None, fresh=True)
    assert not again and "shipped profile" in line


@pytest.mark.slow
def test_counting_memory_says_nothing_beside_the_table() -> None:
    code = (
        "import torch; from autopar.benchmark.rank_runs import cpu_peak_bytes as c; print(c(lambda: torch.ones(1024)))"
    )
    environment = {**os.environ, **QUIET_PROFILER}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert (done.stdout.strip(), done.stderr) == ("4096", "")


@pytest.mark.parametrize(
    ("failures", "code"), [(("ValueError: boom", "ValueError: boom"), 1), (("", "ValueError: boom"), 0)]
)
def test_a_benchmark_all_of_whose_plans_fail_has_failed(run: Run, failures: tuple[str, ...], code: int) -> None:
    rows = tuple(
        Row(
            key=str(number), name=f"plan {number}", predicted_s=1.0, interval_s=(0.5, 2.0), predicted_bytes=100,
            predicted_parts={}, measured_s=None if failure else 1.0, failure=failure,
        )
        for number, failure in enumerate(failures)
    )  # fmt: skip
    outcome = Outcome(title="t", rows=rows, score=score(rows, "0"), num_candidates=2, misfits=())
    with mock.patch("autopar.benchmark.local.run_local", return_value=outcome):
        done = run("benchmark", "local", "own:model")
    assert done.code == code and "failed: plan 1: ValueError: boom" in done.out
    assert ("own:model: All 2 plans failed" in done.err) == (code == 1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--ranks", "5000"), "--ranks: One machine does not run 5,000 ranks. Give at most 1024"),
        (("--space", "quik"), "Unknown space 'quik'. Did you mean 'quick'?"),
        (("--as-rank", "4"), "--as-rank: The plans have no rank 4"),
        (("--optimizer", "adamw:bytes=2"), "--optimizer: Unknown optimizer of a benchmark 'adamw:bytes=2'"),
    ],
)
def test_options_are_refused_before_the_machine_is_measured(run: Run, options: tuple[str, ...], says: str) -> None:
    with mock.patch("autopar.benchmark.local.machine_profile", side_effect=NotImplementedError("it is measured")):
        done = run("benchmark", "local", "gpt:layers=1,hidden=32,heads=4,vocab=64,seq=16", *options)
    assert says in done.mistake


def test_a_model_that_cannot_make_a_step_is_refused_before_the_machine_is_measured(run: Run, tmp_path: Path) -> None:
    lines = ("import torch", "class Net(torch.nn.Embedding):", "    def forward(self, x):")
    lines += ("        return super().forward(x + 4).sum()", "def make():")
    lines += ("    return Net(4, 8), {'x': torch.zeros(4, 3, dtype=torch.int64)}",)
    (tmp_path / "beyond.py").write_text("\n".join(lines), encoding="utf-8")
    measured = mock.patch("autopar.benchmark.local.machine_profile", side_effect=NotImplementedError("it is measured"))
    with measured, mock.patch("torch.cuda.is_available", return_value=False):
        done = run("benchmark", "local", "beyond:make", "--ranks", "2")
        with pytest.raises(NotImplementedError, match="it is measured"):  # as the model may be too large for one device
            run_local(BenchmarkRequest(model="beyond:make", num_ranks=2, as_rank=0))
    assert done.code == 1 and "beyond.py:4: One device alone cannot train the model" in done.error
    assert "IndexError: index out of range" in done.error
