"""What one rank does beyond dense steps, on the host and on a GPU: experts, dropout, offloading, checkpoints, no waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.errors import UsageError
from autopar.graph.graph import Graph
from autopar.models.resolve import resolve_model
from autopar.plan.mesh import Mesh
from autopar.runtime.job import stop
from autopar.runtime.launch import launch
from autopar.runtime.parallel_model import ParallelModel
from autopar.tracing.trace import trace
from autopar.verification.reference import adamw, loss_of
from tests.support.distributed.plans import make_plan
from tests.support.distributed.subjects import HfSubject

BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
MIXTRAL = (
    "hf:mixtral?hidden_size=64&intermediate_size=128&num_hidden_layers=2&num_attention_heads=4&num_key_value_heads=2&"
    "vocab_size=96&max_position_embeddings=64&num_local_experts=4&num_experts_per_tok=2"
)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    yield
    stop()


@cache
def graph_of(subject: Any) -> Graph:
    return trace(subject.build(), kwargs=subject.make_batch(2, seed=0))


def parallel_of(subject: Any, device: str, **options: Any) -> ParallelModel:
    graph = graph_of(subject)
    plan = make_plan(graph, Mesh(), global_batch_size=8, micro_batch_size=4)
    return launch(subject.build(), lambda: (replace(plan, **options), graph), device_type=device)


def trained(parallel: ParallelModel, subject: Any, seeds: range) -> list[float]:
    optimizer = adamw(parallel.parameters())
    losses = []
    for seed in seeds:
        losses.append(parallel.train_step(subject.make_batch(8, seed=seed)).item())
        parallel.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def alone(subject: Any, device: str, seeds: range) -> list[float]:
    model = subject.build().to(device)
    optimizer = adamw(model.parameters())
    losses = []
    for seed in seeds:
        batch = {name: value.to(device) for name, value in subject.make_batch(8, seed=seed).items()}
        loss = loss_of(model(**batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.slow
@BOTH
def test_experts_train_as_the_model_itself(device: str) -> None:
    subject = resolve_model(MIXTRAL, sequence_length=16)
    found = trained(parallel_of(subject, device), subject, range(3))
    assert found == pytest.approx(alone(subject, device, range(3)), rel=1e-3)


@BOTH
def test_dropout_is_the_same_for_the_same_seed_and_none_in_an_evaluation(device: str) -> None:
    subject, quiet = HfSubject("gpt2", dropout=0.3), HfSubject("gpt2")
    runs = []
    for _ in range(2):
        parallel = parallel_of(subject, device)
        batch = subject.make_batch(8, seed=0)
        evaluated = parallel.evaluate(batch).item()
        runs.append(trained(parallel, subject, range(2)))
        stop()
    assert runs[0] == pytest.approx(runs[1], rel=1e-6)
    (wanted,) = alone(quiet, device, range(1))
    assert evaluated == pytest.approx(wanted, rel=1e-4)
    assert abs(runs[0][0] - wanted) > 1e-3 * wanted


@BOTH
def test_an_optimizer_on_the_host_steps_as_one_on_the_device(device: str) -> None:
    subject = HfSubject("llama")
    found = trained(parallel_of(subject, device, offload=("optimizer",)), subject, range(4))
    assert found == pytest.approx(alone(subject, device, range(4)), rel=1e-3)


@BOTH
def test_a_checkpoint_goes_on_where_it_was(device: str, tmp_path: Path) -> None:
    subject, losses = HfSubject("llama"), list[list[float]]()
    for is_first in (True, False):
        parallel = parallel_of(subject, device)
        optimizer = adamw(parallel.parameters())
        steps = range(4) if is_first else range(2, 4)
        if not is_first:
            parallel.load(tmp_path / "kept", optimizer)
        losses.append([])
        for seed in steps:
            if is_first and seed == 2:
                parallel.save(tmp_path / "kept", optimizer)
            losses[-1].append(parallel.train_step(subject.make_batch(8, seed=seed)).item())
            optimizer.step()
            optimizer.zero_grad()
        stop()
    assert losses[1] == pytest.approx(losses[0][2:], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_step_never_waits_for_its_device(kind: str) -> None:
    subject = HfSubject(kind, dropout=0.1 if kind == "gpt2" else 0.0)
    parallel = parallel_of(subject, "cuda")
    optimizer = adamw(parallel.parameters())
    parallel.monitor.close()
    batch: dict[str, Tensor] = subject.make_batch(8, seed=0)
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
        with pytest.raises(UsageError, match='precision="tf32"'):
            parallel.train_step(subject.make_batch(8, seed=0))
    finally:
        torch.set_float32_matmul_precision("highest")
    parallel.train_step(subject.make_batch(8, seed=0))
