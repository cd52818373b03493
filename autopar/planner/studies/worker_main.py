"""The main program of a worker of a search: ``python -m autopar.planner.studies.worker_main JOB``.

:mod:`autopar.planner.studies.workers` starts it.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path
from types import FrameType

from autopar.planner.planner import Planner
from autopar.planner.studies.workers import Job
from autopar.rules.missing import adopt


def run(job: Job) -> None:
    """Work on the study until the search ends, or until the process that started the worker is gone."""
    adopt(job.rules)
    planner = Planner(job.task, explains=False)

    def stop_with_parent(what: str, done: int, total: int) -> None:
        if os.getppid() != job.parent:
            raise KeyboardInterrupt

    planner.branch_and_bound(job.limits, ledger=job.open_study(planner.pool), progress=stop_with_parent).work()


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> None:
    """Read and run the job. On SIGTERM, the trial that is being evaluated is ended as interrupted."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        run(pickle.loads(Path(sys.argv[1]).read_bytes()))
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
