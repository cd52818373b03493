import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed import jobs
from tests.support.said import refuses

pytestmark = pytest.mark.distributed


def test_workers_live_from_job_to_job() -> None:
    with WorkerPool(2) as pool:
        first, again = pool.run(os.getpid, timeout_s=300.0), pool.run(os.getpid, timeout_s=300.0)
        assert first == again
        assert len({*first, os.getpid()}) == 3
        assert pool.run(os.getpid, size=1, timeout_s=300.0) == first[:1]


def test_a_worker_that_dies_fails_or_is_late_is_told_and_replaced() -> None:
    with WorkerPool(2) as pool:
        for timeout_s, said, *job in (
            (30.0, "the process died", os._exit, 3),
            (0.5, r"no answer within 0\.5 s", time.sleep, 60.0),
            (30.0, r"(?s)rank 0: .*this rank has had enough", jobs.fail_on_first_rank),
        ):
            refuses(AutoparError, said, pool.run, *job, timeout_s=timeout_s)
            assert pool.run(dist.get_rank, timeout_s=300.0) == (0, 1)


def test_a_job_that_crashes_once_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "crashes"
    path.write_text("")
    with WorkerPool(2) as pool:
        assert pool.run(jobs.crash, path, 1, timeout_s=300.0)[0] == 2
        refuses(AutoparError, "rank 0: the process died of signal 6", pool.run, jobs.crash, path, 9, timeout_s=300.0)
    assert len(path.read_text()) == 4


def test_a_script_that_starts_processes_at_its_top_level_is_told_where_to(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from autopar.verification.rank_pool import WorkerPool\nWorkerPool(1).run(print)\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert 'make this call under `if __name__ == "__main__":`' in done.stderr
