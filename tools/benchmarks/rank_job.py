"""Runs a job of ``autopar.benchmark`` under torchrun: ``torchrun ... tools/benchmarks/rank_job.py JOB RESULT``.

JOB is a pickled job, and RESULT will be a JSON list with what it returned on each rank.
"""

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.benchmark.rank_runs import Job, LinkTask, run
from autopar.runtime.job import start, stop
from autopar.util.files import write_text


def main(job_file: Path, result_file: Path) -> None:
    """Run one rank; rank 0 writes the results of all."""
    torch.set_num_threads(1)
    job: Job | LinkTask = pickle.loads(job_file.read_bytes())
    limits = job.limits if isinstance(job, LinkTask) else job
    start("cpu", collective_timeout_s=limits.collective_timeout_s)
    result = run(job)
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, result)
    if dist.get_rank() == 0:
        write_text(result_file, json.dumps(results))
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
