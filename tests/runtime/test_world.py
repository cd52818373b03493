"""Jobs are met as their launcher says; nodes with different devices are numbered as the plan counts them."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from autopar import api
from autopar.errors import RankFailedError, RuntimeMismatchError
from autopar.plan.plan import RankGroup
from autopar.runtime.job import check_alone, check_backend, check_devices, check_groups, device_index, start, stop
from autopar.runtime.launch import _wait_for

GROUPS = (RankGroup(start=0, stop=2, device="a100-sxm4-40gb"), RankGroup(start=2, stop=4, device="h100-sxm5-80gb"))
A100, H100 = "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3"


def test_nodes_in_the_order_of_the_plan_are_accepted() -> None:
    check_groups(GROUPS, [A100, A100, H100, H100])
    check_groups(GROUPS, ["one", "one", "other", "other"])  # devices without a shipped profile: nothing is known


@pytest.mark.parametrize("names", [[H100, H100, A100, A100], [A100, H100, A100, H100], ["one", "other", H100, H100]])
def test_another_order_is_refused_with_the_remedy(names: list[str]) -> None:
    with pytest.raises(RuntimeMismatchError, match="--node-rank"):
        check_groups(GROUPS, names)


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def test_a_launcher_that_speaks_as_torchrun_does_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    try:
        assert not start("cpu")
        assert dist.get_world_size() == 1
    finally:
        stop()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(RuntimeMismatchError, match=r"only some of RANK, WORLD_SIZE.*MASTER_ADDR expected.*torchrun"):
        start("cpu")
    assert not dist.is_initialized()


def test_a_process_that_a_launcher_started_among_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun and mpirun do not tell torch: each process would train by itself. One that names its cluster may."""
    model = torch.nn.Linear(4, 4)
    options = {"example_inputs": [torch.randn(8, 4)], "loss_fn": lambda output, _: output.square().mean()}
    monkeypatch.setenv("SLURM_NTASKS", "4")
    check_alone()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    try:
        with pytest.raises(RuntimeMismatchError, match=r"4 processes .OMPI_COMM_WORLD_SIZE=4.* Start 4 ranks with"):
            api.parallelize(model, **options)  # type: ignore[arg-type]
        assert api.parallelize(model, cluster="cpu:1x1", **options).plan.mesh.world_size == 1  # type: ignore[arg-type]
    finally:
        stop()
    for told in ({}, {"SLURM_STEP_NUM_TASKS": "1"}, {"PMI_SIZE": "(null)"}):
        check_alone(told)


@pytest.mark.usefixtures("known_machine")
def test_a_process_of_which_no_launcher_says_anything_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(4, 4)
    options = {"example_inputs": [torch.randn(8, 4)], "loss_fn": lambda output, _: output.square().mean()}
    try:
        plan = api.parallelize(model, **options).plan  # type: ignore[arg-type]
        assert plan.mesh.world_size == 1
        assert "not started as one of several ranks" in caplog.text
        assert "Start N ranks with torchrun (another launcher has to set RANK" in caplog.text
        caplog.clear()
        api.parallelize(model, plan=plan, **options)  # type: ignore[arg-type]
        assert "one of several ranks" not in caplog.text
    finally:
        stop()


@pytest.mark.parametrize(
    ("local_rank", "count", "index"), [(0, 8, 0), (3, 8, 3), (7, 8, 7), (3, 1, 0), (0, 1, 0), (12, 1, 0)]
)
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one(local_rank: int, count: int, index: int) -> None:
    assert device_index(local_rank, count) == index


@pytest.mark.parametrize(("local_rank", "count"), [(3, 2), (8, 8), (-1, 4)])
def test_a_rank_without_a_gpu_is_refused(local_rank: int, count: int) -> None:
    with pytest.raises(RuntimeMismatchError, match=rf"LOCAL_RANK={local_rank} sees only {count} GPUs. Start as many"):
        device_index(local_rank, count)


def devices(identities: list[str]) -> list[str]:
    """What each rank of a job says of its GPU's identity; empty where all is well."""
    store, said = HashStore(), [""] * len(identities)

    def rank(number: int) -> None:
        try:
            check_devices(store, number, len(identities), identities[number])
        except RuntimeMismatchError as error:
            said[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(identities))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    return said


def test_two_ranks_on_one_gpu_are_refused_on_all_ranks() -> None:
    assert devices(["a, 0", "a, 1", "b, 0"]) == [""] * 3
    said = devices(["a, 0", "a, 1", "a, 0", "b, 0"])
    assert len(set(said)) == 1
    assert "ranks 0 and 2 on a, 0" in said[0] or "ranks 2 and 0 on a, 0" in said[0]
    assert "LOCAL_RANK" in said[0]


@pytest.mark.parametrize(
    ("device_type", "config"), [("cuda", "cpu:gloo,cuda:nccl"), ("cuda", "cuda:nccl"), ("cpu", "cpu:gloo,cuda:gloo")]
)
def test_groups_that_carry_the_devices_tensors_are_taken(device_type: str, config: str) -> None:
    check_backend(device_type, config)


@pytest.mark.parametrize(
    ("device_type", "config", "said"),
    [
        ("cuda", "cpu:gloo,cuda:gloo", r"on cuda \(its backend is gloo\)\. Call init_process_group\(.nccl.\)"),
        ("cuda", "cpu:gloo", r"on cuda \(its backends are cpu:gloo\)\. Call init_process_group\(.nccl.\)"),
        ("cpu", "cuda:nccl", r"on cpu \(its backends are cuda:nccl\)\. Call init_process_group\(.gloo.\)"),
    ],
)
def test_a_group_of_another_backend_is_refused_by_name(device_type: str, config: str, said: str) -> None:
    with pytest.raises(RuntimeMismatchError, match=said):
        check_backend(device_type, config)


def test_a_plan_is_waited_for_until_it_is_there_or_rank_0_is_gone() -> None:
    store = HashStore()
    threading.Timer(0.5, store.set, ("made", "")).start()
    _wait_for(store)
    gone = mock.Mock(check=mock.Mock(side_effect=dist.DistNetworkError("Connection closed by peer")))
    with pytest.raises(RankFailedError, match=r"Rank 0 ended before it had a plan: Connection closed"):
        _wait_for(gone)
