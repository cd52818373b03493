"""One rank on a GPU, NCCL as its backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from autopar.plan.mesh import Mesh
from autopar.plan.plan import BF16, FP16, FP32
from autopar.runtime.job import stop
from autopar.runtime.launch import launch
from autopar.tracing.trace import trace
from autopar.verification.reference import adamw, loss_of
from tests.support.distributed.plans import make_plan
from tests.support.distributed.subjects import HfSubject

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", [FP32, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_one_gpu_trains_as_the_model_itself(kind: str, precision: Any) -> None:
    subject = HfSubject(kind)
    example = subject.make_batch(2, seed=0)
    graph = trace(subject.build().to(getattr(torch, precision.compute)), kwargs=example)
    plan = make_plan(graph, Mesh(), global_batch_size=8, micro_batch_size=4, precision=precision, recompute="full")
    parallel = launch(subject.build(), lambda: (plan, graph), device_type="cuda")
    assert dist.get_backend() == "nccl"
    model = subject.build().cuda()
    scaler = parallel.grad_scaler(init_scale=1024.0)
    mine, theirs = adamw(parallel.parameters()), adamw(model.parameters())
    tolerance = 1e-4 if precision is FP32 else 2e-2
    for seed in range(3):
        batch = subject.make_batch(8, seed=seed)
        loss = loss_of(model(**{name: value.cuda() for name, value in batch.items()}))
        loss.backward()
        assert parallel.train_step(batch).item() == pytest.approx(loss.item(), rel=tolerance)
        scaler.unscale_(mine)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert parallel.clip_grad_norm_(1.0).item() == pytest.approx(norm.item(), rel=10 * tolerance)
        scaler.step(mine)
        scaler.update()
        theirs.step()
        for optimizer in (mine, theirs):
            optimizer.zero_grad()
    stop()
