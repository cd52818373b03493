"""The pool without a world of several: results in rank order, one process each."""

from __future__ import annotations

import os

import pytest

from autopar.errors import AutoparError
from autopar.runtime.workers import WorkerPool

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]


def test_workers_live_from_job_to_job() -> None:
    with WorkerPool(2) as pool:
        first, again = pool.run(os.getpid, timeout_s=30.0), pool.run(os.getpid, timeout_s=30.0)
        assert first == again
        assert len({*first, os.getpid()}) == 3
        assert pool.run(os.getpid, size=1, timeout_s=30.0) == first[:1]


def test_a_dead_worker_is_told_and_replaced() -> None:
    with WorkerPool(2) as pool:
        with pytest.raises(AutoparError, match="the process died"):
            pool.run(os._exit, 3, timeout_s=30.0)
        assert len(pool.run(os.getpid, timeout_s=30.0)) == 2
