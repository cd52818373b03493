"""The scripts that start examples on several machines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(150)]

EXAMPLES = Path(__file__).parents[2] / "examples"


TORCHRUN = f'exec {sys.executable} -m torch.distributed.run "$@"'
MEETS = """
import sys
import torch
from pathlib import Path
from autopar.runtime.job import start

start("cpu")
number = torch.tensor(1.0 + torch.distributed.get_rank())
torch.distributed.all_reduce(number)
Path(f"{sys.argv[1]}{torch.distributed.get_rank()}").write_text(str(number.item()))
"""
"""What each rank has after a sum over all."""


def start(
    script: str, folder: Path, *command: str, torchrun: str = TORCHRUN, **environment: str
) -> subprocess.Popen[str]:
    """A launcher's script with torchrun of this Python, and Slurm's commands as far as the script needs them."""
    programs = {
        "torchrun": torchrun,
        "scontrol": "echo localhost",
        "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    }
    folder.mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    found = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent), "PATH": path} | environment
    return subprocess.Popen(
        ["bash", str(EXAMPLES / script), *command], env=found, cwd=EXAMPLES.parent, stderr=subprocess.PIPE, text=True
    )


def test_several_nodes_meet(tmp_path: Path) -> None:
    """Two launchers of one rank each, as on two nodes."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    meets = tmp_path / "meets.py"
    meets.write_text(MEETS)
    place = {"HEAD": "localhost", "NODES": "2", "GPUS": "1", "PORT": port, "RESTARTS": "0"}
    jobs = [
        start("multi_node.sh", tmp_path / f"bin{node}", str(meets), str(tmp_path / "rank"), **place)
        for node in range(2)
    ]
    said = [job.communicate(timeout=120)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["3.0", "3.0"]


def test_slurm_starts_torchrun_on_each_node(tmp_path: Path) -> None:
    """What torchrun is started with; that it starts ranks by these options is tested above."""
    told = tmp_path / "told"
    slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2"}
    torchrun = f'printf "%s\\n" "$@" > {told}'
    command = (str(EXAMPLES / "train_gpt2.py"), "--cluster=cpu:1x2", "--steps=2")
    job = start("slurm.sbatch", tmp_path / "bin", *command, torchrun=torchrun, SLURM_JOB_ID="7", RESTARTS="0", **slurm)
    said = job.communicate(timeout=120)[1]
    assert job.returncode == 0, said
    options = told.read_text().splitlines()
    assert options[-3:] == [*command]
    where = options[:-3]
    named = dict(zip(where[::2], where[1::2], strict=True))
    assert (named["--nnodes"], named["--nproc-per-node"], named["--rdzv-endpoint"]) == ("1", "2", "localhost:20007")
