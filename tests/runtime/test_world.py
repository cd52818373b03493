"""Jobs are met as their launcher says; nodes with different devices are numbered as the plan counts them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autopar import api
from autopar.errors import RuntimeMismatchError
from autopar.plan import RankGroup
from autopar.runtime.job import check_alone, check_groups, start, stop

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
    with pytest.raises(RuntimeMismatchError, match=r"all of RANK, WORLD_SIZE.*found .*MASTER_ADDR expected.*torchrun"):
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
        with pytest.raises(
            RuntimeMismatchError, match=r"4 processes.*found OMPI_COMM_WORLD_SIZE=4 .*; start 4 ranks with"
        ):
            api.parallelize(model, **options)  # type: ignore[arg-type]
        assert api.parallelize(model, cluster="cpu:1x1", **options).plan.mesh.world_size == 1  # type: ignore[arg-type]
    finally:
        stop()
    for told in ({}, {"SLURM_STEP_NUM_TASKS": "1"}, {"PMI_SIZE": "(null)"}):
        check_alone(told)


def test_a_process_of_which_no_launcher_says_anything_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(4, 4)
    options = {"example_inputs": [torch.randn(8, 4)], "loss_fn": lambda output, _: output.square().mean()}
    try:
        plan = api.parallelize(model, **options).plan  # type: ignore[arg-type]
        assert plan.mesh.world_size == 1
        assert "nothing says that this process is one of several ranks" in caplog.text
        assert "start N ranks with torchrun (another launcher: set RANK" in caplog.text
        caplog.clear()
        api.parallelize(model, plan=plan, **options)  # type: ignore[arg-type]
        assert "one of several ranks" not in caplog.text
    finally:
        stop()
