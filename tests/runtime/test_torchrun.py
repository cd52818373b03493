"""Scripts started on a plan's ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import autopar
from autopar.errors import UsageError
from autopar.plan.mesh import Mesh
from autopar.runtime.job import PLAN, command, given_plan
from tests.support.cli_runner import Run, run_fixture
from tests.support.example_plans import llama_plan

run = run_fixture

SCRIPT = """
import argparse, json, pathlib
import torch, autopar

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--debug", action="store_true")
options = parser.parse_args()
net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
par = autopar.parallelize(net, example_inputs=[torch.zeros(4, 8)], loss_fn=lambda y, batch: y.square().mean())
loss = par.train_step({"input": torch.ones(4, 8)}).item()
said = {"repr": repr(par), "debug": options.debug, "loss": loss}
pathlib.Path(f"{options.out}{torch.distributed.get_rank()}").write_text(json.dumps(said))
"""


def test_one_machine_takes_all_ranks_and_several_meet() -> None:
    plan = llama_plan()
    assert plan.mesh.world_size == 16
    alone = command(plan, ["train.py", "--steps", "3"])
    assert alone[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=16", "train.py", "--steps", "3",
    ]  # fmt: skip
    several = command(plan, ["train.py"], nodes=2, rendezvous="first:29500")
    assert several[-2:] == ["--nproc-per-node=8", "train.py"]
    assert {"--nnodes=2", "--rdzv-endpoint=first:29500"} <= set(several)
    assert command(plan, ["train.py"], max_restarts=3)[-3:] == ["--nproc-per-node=16", "--max-restarts=3", "train.py"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 3, "rendezvous": "first:29500"}, "16 ranks do not divide among 3 machines"),
        ({"nodes": 2}, "2 machines need a place to meet"),
        ({"rendezvous": "first:29500"}, "One machine alone meets nobody"),
    ],
)
def test_ranks_that_do_not_divide_or_meet_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        command(llama_plan(), ["train.py"], **options)  # type: ignore[arg-type]


def test_the_launcher_says_which_plan_it_was() -> None:
    assert given_plan({}) is None
    assert given_plan({PLAN: "/a/plan.json"}) == Path("/a/plan.json")


def test_a_script_that_is_not_there_is_named(run: Run) -> None:
    llama_plan().save("plan.json")
    done = run("run", "plan.json", "train.py", "--steps", "3")
    assert done.code == 2
    assert "Missing script train.py" in done.error


@pytest.mark.distributed
@pytest.mark.timeout(120)
def test_a_script_gets_the_plan_its_ranks_and_its_arguments(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    import torch

    monkeypatch.setenv("PYTHONPATH", str(checkout))
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    plan = autopar.estimate(
        net, example_inputs=[torch.zeros(4, 8)], loss_fn=lambda y, batch: y.square().mean(), cluster="cpu:1x2",
        global_batch_size=4, pins=["tp=2"],
    )  # fmt: skip
    assert plan.mesh == Mesh(tp=2)
    plan.save("plan.json")
    Path("train.py").write_text(SCRIPT)
    done = run("run", "plan.json", "train.py", "--out", tmp_path / "rank", "--debug")
    assert done.code == 0, done.err
    said = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert [found["debug"] for found in said] == [True, True]
    assert said[0]["loss"] == said[1]["loss"]
    assert "mesh=tp=2, rank=1 of 2, stage=0 of 1" in said[1]["repr"]
    monkeypatch.setattr("autopar.runtime.job.command", lambda *_, **__: ["sh", "-c", "exit 3"])
    assert run("run", "plan.json", "train.py").code == 3, "as the launcher ends"
