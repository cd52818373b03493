import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.measure.collective_times import COLLECTIVES
from tests.support.distributed import fit_script

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS = 12


def run(
    folder: Path, *pins: str, faults: str = "", ranks: int = 2, restarts: int = 0, script: str = fit_script.__file__
) -> Any:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"),
        *(f"--max-restarts={restarts}", script, str(folder), *pins),
    ]
    told = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "FIT_FAULTS": faults, "FIT_DROPOUT": "0"}
    found = subprocess.run(command, env=os.environ | told, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    return found


def log(folder: Path, rank: int = 0) -> dict[str, str]:
    lines = (folder / f"log.{rank}").read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines)


def losses_of_one_device() -> list[float]:
    torch.manual_seed(0)
    model, found = fit_script.Net(0.0), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * STEPS)
    for step in range(STEPS):
        batch = fit_script.batches()[step % 5]
        loss = model(**batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        found.append(loss.item())
    return found


@pytest.mark.usefixtures("known_machine")  # fewer ranks plan for the machine that is there
def test_a_job_goes_on_after_a_rank_was_killed_and_with_fewer_ranks_after_it_was_told_to_end(tmp_path: Path) -> None:
    """Ranks ask each other after their first step, the fifth of the second start, whether one was told to end."""
    first = run(tmp_path, "dp_shard=2", "zero=3", faults="SIGKILL,5,1 SIGTERM,5,1", restarts=1)
    assert {path.name for path in tmp_path.glob("faulted.*")} == {"faulted.SIGKILL", "faulted.SIGTERM"}
    lines = (tmp_path / "log.1").read_text().splitlines()
    assert [line.split()[0] for line in lines].count("5") == 2, "the step after the checkpoint was made twice"
    assert "SIGTERM: training ends after step" in first.stderr
    done = log(tmp_path)
    assert "end" not in done
    assert done.pop("told") == log(tmp_path, 1)["told"]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000004", f"step-{len(done):08d}"]
    again = run(tmp_path, ranks=1)
    assert "the cluster cpu:1x2 has 2 devices, and this job 1 rank" in again.stderr
    found = log(tmp_path)
    del found["told"]
    assert list(found) == [*map(str, range(1, STEPS + 1)), "end"]
    losses = [float(value) for key, value in found.items() if key != "end"]
    assert losses == pytest.approx(losses_of_one_device(), rel=1e-5)


KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from autopar.measure.collective_times import measure_links
from autopar.measure.job_of_ranks import torchrun_job

def killed(job):
    while not job.store.check(["task2"]):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)

with torchrun_job(1024, 5.0, 20.0) as job:
    if (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]) == ("0", "1"):
        threading.Thread(target=killed, args=(job,), daemon=True).start()
    found = measure_links(job, Path(sys.argv[1]) / "points.json")
    if found is not None:
        (Path(sys.argv[1]) / "found").write_text(f"{len(found.points)} {len(found.failed)}")
"""
"""Links are measured; one rank is killed by the time that it is given its second task, and all start again with the same store."""


def test_links_are_measured_after_a_rank_was_killed(tmp_path: Path) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    run(tmp_path, restarts=1, script=str(tmp_path / "killed.py"))
    assert (tmp_path / "found").read_text() == f"{len(COLLECTIVES)} 0"


EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = f'exec {sys.executable} -m torch.distributed.run "$@"'
MEETS = """
import sys
import torch
from pathlib import Path
from typing import Any
from autopar.runtime.job import start

start("cpu")
number = torch.tensor(1.0 + torch.distributed.get_rank())
torch.distributed.all_reduce(number)
Path(f"{sys.argv[1]}{torch.distributed.get_rank()}").write_text(str(number.item()))
"""
"""What each rank has after a sum over all."""


def start(script: str, folder: Path, *command: str, torchrun: str = TORCHRUN, **environment: str) -> Any:
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
    program = ["bash", str(EXAMPLES / script), *command]
    return subprocess.Popen(program, env=found, cwd=EXAMPLES.parent, stderr=subprocess.PIPE, text=True)


def test_several_nodes_meet(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    meets = tmp_path / "meets.py"
    meets.write_text(MEETS)
    place = {"HEAD": "localhost", "NODES": "2", "GPUS": "1", "PORT": port, "RESTARTS": "0"}
    command = (str(meets), str(tmp_path / "rank"))
    jobs = [start("multi_node.sh", tmp_path / f"bin{node}", *command, **place) for node in range(2)]
    said = [job.communicate(timeout=300)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["3.0", "3.0"]


def test_slurm_starts_torchrun_on_each_node(tmp_path: Path) -> None:
    """What torchrun is started with; that it starts ranks by these options is tested above."""
    told = tmp_path / "told"
    slurm = {"SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_GPUS_ON_NODE": "2"}
    torchrun = f'printf "%s\\n" "$@" > {told}'
    command = (str(EXAMPLES / "train_gpt2.py"), "--cluster=cpu:1x2", "--steps=2")
    job = start("slurm.sbatch", tmp_path / "bin", *command, torchrun=torchrun, SLURM_JOB_ID="7", RESTARTS="0", **slurm)
    said = job.communicate(timeout=300)[1]
    assert job.returncode == 0, said
    options = told.read_text().splitlines()
    assert options[-3:] == [*command]
    where = options[:-3]
    named = dict(zip(where[::2], where[1::2], strict=True))
    assert (named["--nnodes"], named["--nproc-per-node"], named["--rdzv-endpoint"]) == ("1", "2", "localhost:20007")
