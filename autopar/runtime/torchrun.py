"""A script started by torchrun on as many ranks as a plan has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from autopar.errors import UsageError
from autopar.plan.plan import Plan
from autopar.runtime.job import PLAN


def start(
    plan: Plan,
    file: Path,
    script: Sequence[str],
    *,
    nodes: int = 1,
    rendezvous: str | None = None,
    max_restarts: int = 0,
) -> int:
    """Run a script on this machine's share of a plan's ranks, and wait for its end.

    Args:
        plan: says how many ranks there are.
        file: of the plan, which :func:`autopar.runtime.job.given_plan` gives each rank.
        script: and its arguments.
        nodes: machines, on each of which this is called.
        rendezvous: ``HOST:PORT`` of one of them.
        max_restarts: how often all ranks are started anew after one has failed.

    Returns:
        The exit code of torchrun. SIGTERM is passed on to it, and by it to the ranks.

    Raises:
        UsageError: as :func:`command`; there is no such script.
    """
    if not Path(script[0]).is_file():
        raise UsageError.missing(f"script {script[0]}", fix="Give the path of a Python file")
    ranks = command(plan, script, nodes=nodes, rendezvous=rendezvous, max_restarts=max_restarts)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, PLAN: str(file.resolve())}
    with subprocess.Popen(ranks, env=environment) as job, _passed_on(job):
        while True:
            try:
                return job.wait()
            except KeyboardInterrupt:  # of the whole terminal: torchrun ends its ranks, and then itself
                continue


@contextmanager
def _passed_on(job: subprocess.Popen[bytes]) -> Iterator[None]:
    """Inside, SIGTERM goes to the job; Python lets its main thread alone decide about signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: job.terminate())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command(
    plan: Plan, script: Sequence[str], *, nodes: int = 1, rendezvous: str | None = None, max_restarts: int = 0
) -> list[str]:
    """What starts the ranks of one machine.

    Raises:
        UsageError: the ranks do not divide among the machines, or these have no place to meet.
    """
    ranks = plan.mesh.world_size
    if ranks % nodes:
        raise UsageError(
            f"{ranks} ranks do not divide among {nodes} machines",
            fix="Give a number of nodes that divides the plan's ranks",
        )
    if (nodes > 1) != (rendezvous is not None):
        raise UsageError(
            f"{nodes} machines need a place to meet" if nodes > 1 else "One machine alone meets nobody",
            fix="Give --nodes and --rendezvous HOST:PORT together",
        )
    again = [f"--max-restarts={max_restarts}"] if max_restarts else []
    place = ["--standalone"]
    if rendezvous is not None:
        place = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}", "--rdzv-id=autopar"]
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *place,
        f"--nproc-per-node={ranks // nodes}",
        *again,
        *script,
    ]
