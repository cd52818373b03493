"""A fault in one operator of a mixture of experts, of models with two towers and of convolutions is found in its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from autopar import api
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.hardware.scale import with_free_links
from autopar.lower.read_plan import local_graph
from autopar.models.resolve import resolve_model
from autopar.plan.plan import Plan
from autopar.verification.against_one_device import PRELOAD, in_dtype, loss_of
from autopar.verification.as_text import GRAPH_TOLERANCE
from autopar.verification.first_difference import bisect
from autopar.verification.rank_pool import WorkerPool
from autopar.verification.verified_model import VerifiedModel
from tests.support.distributed.faults import Fault, Faulty

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

SAMPLES = 4
_TEXT = "num_hidden_layers=1&hidden_size=16&num_attention_heads=2&intermediate_size=32&vocab_size=32"
_SPEECH = "&".join(
    f"{side}_{key}={value}"
    for side in ("encoder", "decoder")
    for key, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
)


@dataclass(frozen=True)
class Case:
    """A model and its plan, and a fault: the last operator with this target and strategy on ``tp``.

    Attributes:
        wrong: what is said of it.
    """

    model: str
    tokens: int | None
    pins: tuple[str, ...]
    module: str
    target: str
    fault: str
    wrong: str


CASES = {
    "Mixtral": Case(
        model=f"hf:mixtral?{_TEXT}&num_key_value_heads=2&num_local_experts=4&num_experts_per_tok=2",
        tokens=8,
        pins=("tp=2",),
        module="layers.0.mlp",
        target="autopar.experts",
        fault="gradient",
        wrong="the gradient that it passes back to ",
    ),
    "T5": Case(
        model="hf:t5?num_layers=1&d_model=16&d_kv=8&num_heads=2&d_ff=32&vocab_size=32",
        tokens=8,
        pins=("tp=2",),
        module="decoder.block.0.layer.1",
        target="aten.scaled_dot_product_attention.default",
        fault="one_rank",
        wrong="the value that it makes",
    ),
    "Whisper": Case(
        model=f"hf:whisper?{_SPEECH}&d_model=16&max_source_positions=8&vocab_size=32&max_target_positions=8&num_mel_bins=8",
        tokens=8,
        pins=("dp_replicate=2",),
        module="encoder",
        target="aten.conv1d.default",
        fault="value",
        wrong="the value that it makes",
    ),
    "ResNet": Case(
        model="hf:resnet?embedding_size=4&hidden_sizes=[4,8]&depths=[1,1]&layer_type=basic&num_labels=5",
        tokens=None,
        pins=("dp_replicate=2", "micro_batch=2"),
        module="stages.1",
        target="batch_norm",
        fault="gradient",
        wrong="the gradient that it passes back to ",
    ),
}


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    """Workers of their own: faults stay where they are planted."""
    with WorkerPool(2, preload=PRELOAD) as pool:
        yield pool


@cache
def planned(name: str) -> tuple[VerifiedModel, Graph, Plan]:
    case = CASES[name]
    subject = VerifiedModel(resolve_model(case.model, sequence_length=case.tokens), masked=True)
    graph = subject.trace()
    cluster = with_free_links(Cluster.parse("cpu:1x2"))
    return subject, graph, api.estimate(graph, cluster=cluster, global_batch_size=SAMPLES, pins=list(case.pins))


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_found_in_its_block_and_operator(workers: WorkerPool, name: str) -> None:
    case = CASES[name]
    subject, graph, plan = planned(name)
    local = local_graph(plan, graph)
    wrong = [op for op in local.ops if case.target in op.target and case.module in op.module][-1]
    batch = subject.make_batch(SAMPLES, seed=0, padded=True)
    found = bisect(
        Faulty(subject, Fault(wrong.name, case.fault)),
        plan,
        in_dtype(graph, torch.float32, torch.float64),
        [batch],
        [loss_of(subject.build()(**batch)).item()],
        pool=workers,
        timeout_s=90.0,
    )
    difference = found.difference
    assert difference is not None
    assert (difference.block, difference.op, difference.target) == (
        local.block_of(wrong.name),
        wrong.name,
        wrong.target,
    )
    assert difference.what.startswith(case.wrong)
    assert difference.module == wrong.module
    assert difference.mismatch.ranks == ((1,) if case.fault == "one_rank" else (0, 1))
    assert found.graph_loss < GRAPH_TOLERANCE
