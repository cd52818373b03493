from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import UsageError
from autopar.models.resolve import resolve_model
from autopar.plan.mesh import Mesh
from autopar.plan.plan import BF16, FP16, FP32
from autopar.runtime.job import stop
from autopar.runtime.launch import launch
from autopar.runtime.parallel_model import ParallelModel
from autopar.tracing.trace import trace
from autopar.verification.reference import adamw
from tests.support.close import assert_close
from tests.support.distributed import jobs
from tests.support.distributed.plans import make_plan
from tests.support.distributed.subjects import HfSubject, graph_of
from tests.support.parallel import clip, train_step
from tests.support.said import refuses

BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
MIXTRAL = (
    "hf:mixtral?hidden_size=64&intermediate_size=128&num_hidden_layers=2&num_attention_heads=4&num_key_value_heads=2&"
    "vocab_size=96&max_position_embeddings=64&num_local_experts=4&num_experts_per_tok=2"
)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    yield
    stop()


def parallel_of(subject: Any, device: str, graph: Any = None, **options: Any) -> ParallelModel:
    graph = graph or graph_of(subject)
    plan = make_plan(graph, Mesh(), global_batch_size=8, micro_batch_size=4)
    return launch(subject.build(), lambda: (replace(plan, **options), graph), device_type=device)


def losses(model: nn.Module, subject: Any, count: int) -> list[float]:
    return jobs.train(model, [subject.make_batch(8, seed=seed) for seed in range(count)], 1.0)["losses"]


@BOTH
@pytest.mark.parametrize(
    ("kind", "precision"),
    [("gpt2", FP32), ("llama", FP32), ("llama", BF16), ("gpt2", FP16)],
    ids=["gpt2-fp32", "llama-fp32", "llama-bf16", "gpt2-fp16"],
)
def test_one_rank_trains_as_the_model_itself(kind: str, precision: Any, device: str) -> None:
    subject = HfSubject(kind)
    example = subject.make_batch(2, seed=0)
    graph = trace(subject.build().to(getattr(torch, precision.compute)), kwargs=example)
    recomputed = make_plan(graph, Mesh(), global_batch_size=8, micro_batch_size=4, recompute="full").blocks
    parallel = parallel_of(subject, device, graph, precision=precision, blocks=recomputed)
    assert dist.get_backend() == ("nccl" if device == "cuda" else "gloo")
    model = subject.build().to(device)
    scaler = parallel.grad_scaler(init_scale=1024.0)
    mine, theirs = adamw(parallel.parameters()), adamw(model.parameters())
    tolerance = 2e-2 if precision is not FP32 else 1e-4 if device == "cuda" else 1e-6
    for seed in range(3):
        batch = subject.make_batch(8, seed=seed)
        loss = train_step(model, batch)
        assert parallel.train_step(batch).item() == pytest.approx(loss.item(), rel=tolerance)
        scaler.unscale_(mine)
        assert {(p.dtype, p.grad.dtype) for p in parallel.parameters()} == {(torch.float32, torch.float32)}
        assert clip(parallel, 0.5) == pytest.approx(clip(model, 0.5), rel=10 * tolerance)
        scaler.step(mine)
        scaler.update()
        theirs.step()
        for optimizer in (mine, theirs):
            optimizer.zero_grad()
    if precision is FP32 and device == "cpu":
        found = parallel.full_state_dict()
        assert_close(found, dict(model.named_parameters()))
        assert kind != "gpt2" or torch.equal(found["lm_head.weight"], found["transformer.wte.weight"])


@BOTH
def test_dropout_is_the_same_for_the_same_seed_and_none_in_an_evaluation(device: str) -> None:
    subject, quiet = HfSubject("gpt2", dropout=0.3), HfSubject("gpt2")
    runs = []
    for _ in range(2):
        parallel = parallel_of(subject, device)
        evaluated = parallel.evaluate(subject.make_batch(8, seed=0)).item()
        runs.append(losses(parallel, subject, 2))
        stop()
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)
    (wanted,) = losses(quiet.build().to(device), quiet, 1)
    assert evaluated == pytest.approx(wanted, rel=1e-4)
    assert abs(runs[0][0] - wanted) > 1e-3 * wanted


@BOTH
@pytest.mark.parametrize("experts", [pytest.param(True, marks=pytest.mark.slow), False], ids=["experts", "on the host"])
def test_experts_and_steps_on_the_host_train_as_the_model_itself(experts: bool, device: str) -> None:
    subject = resolve_model(MIXTRAL, sequence_length=16) if experts else HfSubject("llama")
    found = losses(parallel_of(subject, device, offload=() if experts else ("optimizer",)), subject, 4)
    assert found == pytest.approx(losses(subject.build().to(device), subject, 4), rel=1e-3)


@BOTH
def test_a_checkpoint_goes_on_where_it_was(device: str, tmp_path: Path) -> None:
    subject, found = HfSubject("llama"), list[tuple[int, list[float]]]()
    data = [subject.make_batch(8, seed=seed) for seed in range(3)]
    for source, target in (("", tmp_path / "kept"), (tmp_path / "kept", tmp_path / "again")):
        found.append(jobs.go_on(parallel_of(subject, device), data, str(source), str(target), "autopar"))
        stop()
    assert found[1] == (1, pytest.approx(found[0][1], rel=1e-5))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_step_never_waits_for_its_device(kind: str) -> None:
    subject = HfSubject(kind, dropout=0.1 if kind == "gpt2" else 0.0)
    parallel = parallel_of(subject, "cuda")
    optimizer = adamw(parallel.parameters())
    parallel.monitor.close()
    batch = subject.make_batch(8, seed=0)
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first one makes what is kept
        try:
            parallel.train_step(batch)
            parallel.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_products_in_another_mode_than_the_plans_are_refused() -> None:
    subject = HfSubject("llama")
    parallel = parallel_of(subject, "cuda")
    torch.set_float32_matmul_precision("high")
    try:
        refuses(UsageError, 'precision="tf32"', parallel.train_step, subject.make_batch(8, seed=0))
    finally:
        torch.set_float32_matmul_precision("highest")
    parallel.train_step(subject.make_batch(8, seed=0))
