"""The scripts that start examples on several machines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(150)]

EXAMPLES = Path(__file__).parents[2] / "examples"


TORCHRUN = f'exec {sys.executable} -m torch.distributed.run "$@"'


def start(
    script: str, record: Path, folder: Path, torchrun: str = TORCHRUN, **environment: str
) -> subprocess.Popen[str]:
    """A launcher's script with torchrun of this Python, and Slurm's commands as far as the script needs them."""
    commands = {
        "torchrun": torchrun,
        "scontrol": "echo localhost",
        "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    }
    folder.mkdir(exist_ok=True)
    for name, text in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    found = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent), "PATH": path} | environment
    command = ["bash", str(EXAMPLES / script), str(EXAMPLES / "train_gpt2.py"), "--cluster=cpu:1x2", "--steps=2"]
    return subprocess.Popen(
        [*command, f"--record={record}"], env=found, cwd=EXAMPLES.parent, stderr=subprocess.PIPE, text=True
    )


def test_several_nodes_meet(tmp_path: Path) -> None:
    """Two launchers of one rank each, as on two nodes."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    record = tmp_path / "record.json"
    place = {"HEAD": "localhost", "NODES": "2", "GPUS": "1", "PORT": port, "RESTARTS": "0"}
    jobs = [start("multi_node.sh", record, tmp_path / f"bin{node}", **place) for node in range(2)]
    said = [job.communicate(timeout=120)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert len(json.loads(record.read_text())["losses"]) == 2


def test_slurm_starts_torchrun_on_each_node(tmp_path: Path) -> None:
    """What torchrun is started with; that it starts ranks by these options is tested above."""
    record, told = tmp_path / "record.json", tmp_path / "told"
    slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2"}
    torchrun = f'printf "%s\\n" "$@" > {told}'
    job = start("slurm.sbatch", record, tmp_path / "bin", torchrun, SLURM_JOB_ID="7", RESTARTS="0", **slurm)
    said = job.communicate(timeout=120)[1]
    assert job.returncode == 0, said
    options = told.read_text().splitlines()
    assert options[-1] == f"--record={record}"
    where = options[: options.index(str(EXAMPLES / "train_gpt2.py"))]
    named = dict(zip(where[::2], where[1::2], strict=True))
    assert (named["--nnodes"], named["--nproc-per-node"], named["--rdzv-endpoint"]) == ("1", "2", "localhost:20007")
    assert {"--cluster=cpu:1x2", "--steps=2"} <= set(options)
