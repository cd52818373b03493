import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore

import autopar
from autopar import api
from autopar.errors import RankFailedError, RuntimeMismatchError, UsageError
from autopar.plan.plan import RankGroup
from autopar.runtime import job
from autopar.runtime.failure_watch import Alarm
from autopar.runtime.launch import _wait_for
from tests.support.cli_runner import Run
from tests.support.example_plans import llama_plan
from tests.support.said import refuses, said

GROUPS = (RankGroup(start=0, stop=2, device="a100-sxm4-40gb"), RankGroup(start=2, stop=4, device="h100-sxm5-80gb"))
A100, H100 = "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(("names", "fits"), [
    ([A100, A100, H100, H100], True),
    (["one", "one", "other", "other"], True),  # devices without a shipped profile: nothing is known
    ([H100, H100, A100, A100], False),
    ([A100, H100, A100, H100], False),
    (["one", "other", H100, H100], False),
])  # fmt: skip
def test_nodes_in_another_order_than_the_plans_are_refused_with_the_remedy(names: list[str], fits: bool) -> None:
    with nullcontext() if fits else pytest.raises(RuntimeMismatchError, match="--node-rank"):
        job.check_groups(GROUPS, names)


MODEL = torch.nn.Linear(4, 4)
OPTIONS: dict[str, Any] = {
    "example_inputs": [torch.randn(8, 4)], "loss_fn": lambda output, _: output.square().mean()
}  # fmt: skip
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def test_a_launcher_that_speaks_as_torchrun_does_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    try:
        assert not job.start("cpu")
        assert dist.get_world_size() == 1
    finally:
        job.stop()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR")
    refuses(RuntimeMismatchError, r"only some of RANK, WORLD_SIZE.*MASTER_ADDR expected.*torchrun", job.start, "cpu")
    assert not dist.is_initialized()


def test_a_process_that_a_launcher_started_among_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun and mpirun do not tell torch: each process would train by itself. One that names its cluster may."""
    monkeypatch.setenv("SLURM_NTASKS", "4")
    job.check_alone()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    try:
        with pytest.raises(RuntimeMismatchError, match=r"4 processes .OMPI_COMM_WORLD_SIZE=4.* Start 4 ranks with"):
            api.parallelize(MODEL, **OPTIONS)
        assert api.parallelize(MODEL, cluster="cpu:1x1", **OPTIONS).plan.mesh.world_size == 1
    finally:
        job.stop()
    for told in ({}, {"SLURM_STEP_NUM_TASKS": "1"}, {"PMI_SIZE": "(null)"}):
        job.check_alone(told)


@pytest.mark.usefixtures("known_machine")
def test_a_process_of_which_no_launcher_says_anything_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    try:
        plan = api.parallelize(MODEL, **OPTIONS).plan
        assert plan.mesh.world_size == 1
        assert "not started as one of several ranks" in caplog.text
        assert "Start N ranks with torchrun (another launcher has to set RANK" in caplog.text
        caplog.clear()
        api.parallelize(MODEL, plan=plan, **OPTIONS)
        assert "one of several ranks" not in caplog.text
    finally:
        job.stop()


@pytest.mark.parametrize(
    ("local_rank", "count", "index"),
    [(0, 8, 0), (7, 8, 7), (0, 1, 0), (12, 1, 0), (3, 2, None), (8, 8, None), (-1, 4, None)],
)
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one(local_rank: int, count: int, index: int | None) -> None:
    if index is not None:
        assert job.device_index(local_rank, count) == index
        return
    with pytest.raises(RuntimeMismatchError, match=rf"LOCAL_RANK={local_rank} sees only {count} GPUs. Start as many"):
        job.device_index(local_rank, count)


def devices(identities: list[str]) -> list[str]:
    """What each rank of a job says of its GPU's identity; empty where all is well."""
    store, size = HashStore(), len(identities)

    def rank(number: int) -> str:
        return said(RuntimeMismatchError, job.check_devices, store, number, size, identities[number])

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


def test_two_ranks_on_one_gpu_are_refused_on_all_ranks() -> None:
    assert devices(["a, 0", "a, 1", "b, 0"]) == [""] * 3
    (text,) = set(devices(["a, 0", "a, 1", "a, 0", "b, 0"]))
    assert "ranks 0 and 2 on a, 0" in text or "ranks 2 and 0 on a, 0" in text
    assert "LOCAL_RANK" in text


@pytest.mark.parametrize(("device_type", "config", "said"), [
    ("cuda", "cpu:gloo,cuda:nccl", ""),
    ("cuda", "cuda:nccl", ""),
    ("cpu", "cpu:gloo,cuda:gloo", ""),
    ("cuda", "cpu:gloo,cuda:gloo", r"on cuda \(its backend is gloo\)\. Call init_process_group\(.nccl.\)"),
    ("cuda", "cpu:gloo", r"on cuda \(its backends are cpu:gloo\)\. Call init_process_group\(.nccl.\)"),
    ("cpu", "cuda:nccl", r"on cpu \(its backends are cuda:nccl\)\. Call init_process_group\(.gloo.\)"),
])  # fmt: skip
def test_a_group_that_does_not_carry_the_devices_tensors_is_refused(device_type: str, config: str, said: str) -> None:
    with pytest.raises(RuntimeMismatchError, match=said) if said else nullcontext():
        job.check_backend(device_type, config)


def test_a_plan_is_waited_for_until_it_is_there_or_rank_0_is_gone() -> None:
    store = HashStore()
    threading.Timer(0.5, store.set, ("made", "")).start()
    _wait_for(store)
    gone = mock.Mock(check=mock.Mock(side_effect=dist.DistNetworkError("Connection closed by peer")))
    refuses(RankFailedError, r"Rank 0 ended before it had a plan: Connection closed", _wait_for, gone)


POLL_S = 0.02
PATIENCE_S = 20.0
"""Of tests whose outcome does not depend on it: it is what they wait before they fail."""


class Pair:
    """The alarms of two ranks of one job in this process, whose device has done the work of calls once it is told so."""

    def __init__(self) -> None:
        store, self.is_done, self.ended, self.has_ended = HashStore(), False, list[str](), threading.Event()

        def end(alarm: Alarm, said: str) -> None:
            self.ended.append(said)
            self.has_ended.set()
            alarm._closed.set()

        with (
            mock.patch("autopar.runtime.failure_watch.own_store", return_value=PrefixStore("job", store)),
            mock.patch("autopar.runtime.failure_watch.dist.get_backend", return_value="nccl"),
        ):
            options: Any = {"poll_s": POLL_S, "grace_s": POLL_S, "launched": self.mark}
            self.alarms = [Alarm(rank, 2, **options) for rank in range(2)]
        for alarm in self.alarms:
            mock.patch.object(alarm, "_end", lambda said, alarm=alarm: end(alarm, said)).start()

    def mark(self) -> Callable[[], bool]:
        self.is_done = False
        return lambda: self.is_done

    def call(self, rank: int, what: str = "train_step", *, fails: bool = False) -> None:
        with self.alarms[rank].watched(what):
            self.alarms[rank].runs()
            if fails:
                raise ValueError("no such token")


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for alarm in made.alarms:
        alarm._closed.set()
    mock.patch.stopall()


@pytest.mark.parametrize("ahead", [1, 3])
def test_a_rank_whose_device_waits_is_ended_with_what_the_other_said(pair: Pair, ahead: int) -> None:
    for _ in range(ahead):
        pair.call(1)  # returns, and its work waits for rank 0
    refuses(ValueError, "no such token", pair.call, 0, fails=True)
    assert pair.has_ended.wait(PATIENCE_S)
    assert pair.ended == ["rank 0: ValueError: no such token"]


def test_a_rank_that_works_by_itself_is_told_by_its_next_call(pair: Pair) -> None:
    pair.call(1)
    pair.is_done = True
    refuses(ValueError, "no such token", pair.call, 0, fails=True)
    end = time.monotonic() + PATIENCE_S
    while not pair.alarms[1]._failure and time.monotonic() < end:
        time.sleep(POLL_S)
    assert not pair.ended
    refuses(RankFailedError, "rank 0: ValueError: no such token", pair.call, 1)


def test_a_device_that_waits_for_another_call_says_which(pair: Pair) -> None:
    pair.call(0, "evaluate")
    pair.call(1, "train_step")
    assert pair.has_ended.wait(PATIENCE_S)
    orders = "evaluate on rank 0, train_step on rank 1", "train_step on rank 1, evaluate on rank 0"
    assert any(f"{order}: different calls at the same time" in " ".join(pair.ended) for order in orders)


def test_ranks_whose_devices_take_long_are_left_alone(pair: Pair) -> None:
    for rank in range(2):
        for _ in range(2):
            pair.call(rank)
    assert not pair.has_ended.wait(20 * POLL_S)
    assert not any(alarm._failure for alarm in pair.alarms)


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
    alone = job.command(plan, ["train.py", "--steps", "3"])
    assert alone[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=16", "train.py", "--steps", "3",
    ]  # fmt: skip
    several = job.command(plan, ["train.py"], nodes=2, rendezvous="first:29500")
    assert several[-2:] == ["--nproc-per-node=8", "train.py"]
    assert {"--nnodes=2", "--rdzv-endpoint=first:29500"} <= set(several)
    restarted = job.command(plan, ["train.py"], max_restarts=3)
    assert restarted[-3:] == ["--nproc-per-node=16", "--max-restarts=3", "train.py"]


@pytest.mark.parametrize(("options", "message"), [
    ({"nodes": 3, "rendezvous": "first:29500"}, "16 ranks do not divide among 3 machines"),
    ({"nodes": 2}, "2 machines need a place to meet"),
    ({"nodes": 2, "rendezvous": "first"}, "'first' is no place to meet"),
    ({"rendezvous": "first:29500"}, "One machine alone meets nobody"),
])  # fmt: skip
def test_ranks_that_do_not_divide_or_meet_are_refused(options: dict[str, object], message: str) -> None:
    refuses(UsageError, message, job.command, llama_plan(), ["train.py"], **options)


def test_a_script_that_is_not_there_is_named(run: Run) -> None:
    llama_plan().save("plan.json")
    done = run("run", "plan.json", "train.py", "--steps", "3")
    assert done.code == 2
    assert "Missing script train.py" in done.error


@pytest.mark.distributed
def test_a_script_gets_its_plan_and_its_arguments(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    import torch

    monkeypatch.setenv("PYTHONPATH", str(checkout))
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    plan = autopar.estimate(
        net, example_inputs=[torch.zeros(4, 8)], loss_fn=lambda y, batch: y.square().mean(), cluster="cpu:1x1",
        global_batch_size=4,
    )  # fmt: skip
    plan.save("plan.json")
    Path("train.py").write_text(SCRIPT)
    done = run("run", "plan.json", "train.py", "--out", tmp_path / "rank", "--debug")
    assert done.code == 0, done.err
    said = json.loads((tmp_path / "rank0").read_text())
    assert said["debug"] and said["loss"] > 0
    assert "rank=0 of 1, stage=0 of 1" in said["repr"]
    monkeypatch.setattr("autopar.runtime.job.command", lambda *_, **__: ["sh", "-c", "exit 3"])
    assert run("run", "plan.json", "train.py").code == 3, "as the launcher ends"
