"""Types of the sharded operators under the checker of spmd-types, on a fake mesh."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import spmd_types
import torch
import torch.distributed as dist
from spmd_types.checker import typecheck
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.ops import sharded as sharded_ops


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group(backend="fake", rank=1, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_types_of_the_vocabulary_parallel_operators(mesh: DeviceMesh, smoothing: float) -> None:
    with spmd_types.set_current_mesh(mesh), FakeTensorMode(), typecheck(strict_mode="strict", local=True):
        logits = torch.randn(3, 7, 6, requires_grad=True)
        target = torch.randint(0, 12, (3, 7))
        weight = torch.randn(6, 5, requires_grad=True)
        varying, replicated = spmd_types.V, spmd_types.R
        spmd_types.assert_type(logits, {"tp": varying, "dp": varying})
        spmd_types.assert_type(target, {"tp": replicated, "dp": varying})
        spmd_types.assert_type(weight, {"tp": varying, "dp": replicated})
        rows = sharded_ops.embedding_vocabulary(weight, target, "tp", 3)
        loss = sharded_ops.cross_entropy_vocabulary(logits, target, "tp", -100, smoothing)
        assert spmd_types.get_axis_local_type(rows, "tp") is spmd_types.P
        assert spmd_types.get_axis_local_type(loss, "tp") is spmd_types.I
        assert spmd_types.get_axis_local_type(loss, "dp") is varying
