"""A fault in one operator of a mixture of experts, of models with two towers and of convolutions is found in its place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autopar import api
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import with_free_links
from autopar.lower.read_plan import local_graph
from autopar.models.resolve import resolve_model
from autopar.verification.against_one_device import in_dtype
from autopar.verification.compared_models import VerifiedModel
from autopar.verification.first_difference import bisect
from autopar.verification.rank_pool import WorkerPool
from autopar.verification.reference import loss_of
from autopar.verification.results import GRAPH_TOLERANCE
from tests.support.distributed.faults import Fault, Faulty

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

SAMPLES = 4
_TEXT = "num_hidden_layers=1&hidden_size=16&num_attention_heads=2&intermediate_size=32&vocab_size=32"
_SPEECH = "&".join(
    f"{side}_{key}={value}"
    for side in ("encoder", "decoder")
    for key, value in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
)


VALUE, GRADIENT = "the value that it makes", "the gradient that it passes back to "


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    """Workers of their own: faults stay where they are planted."""
    with WorkerPool(2) as pool:
        yield pool


@pytest.mark.parametrize(
    ("model", "tokens", "pins", "module", "target", "fault", "wrong"),
    [
        pytest.param(f"hf:mixtral?{_TEXT}&num_key_value_heads=2&num_local_experts=4&num_experts_per_tok=2", 8, "tp=2",
                     "layers.0.mlp", "autopar.experts", "gradient", GRADIENT, id="Mixtral"),
        pytest.param("hf:t5?num_layers=1&d_model=16&d_kv=8&num_heads=2&d_ff=32&vocab_size=32", 8, "tp=2",
                     "decoder.block.0.layer.1", "aten.scaled_dot_product_attention.default", "one_rank", VALUE, id="T5"),
        pytest.param(f"hf:whisper?{_SPEECH}&d_model=16&max_source_positions=8&vocab_size=32&max_target_positions=8&num_mel_bins=8",
                     8, "dp_replicate=2", "encoder", "aten.conv1d.default", "value", VALUE, id="Whisper"),
        pytest.param("hf:resnet?embedding_size=4&hidden_sizes=[4,8]&depths=[1,1]&layer_type=basic&num_labels=5", None,
                     "dp_replicate=2 micro_batch=2", "stages.1", "batch_norm", "gradient", GRADIENT, id="ResNet"),
    ],
)  # fmt: skip
def test_a_fault_is_found_in_its_block_and_operator(
    workers: WorkerPool, model: str, tokens: int | None, pins: str, module: str, target: str, fault: str, wrong: str
) -> None:
    """The fault is in the last operator with this target inside of the module."""
    subject = VerifiedModel(resolve_model(model, sequence_length=tokens), masked=True)
    graph = subject.trace()
    cluster = with_free_links(Cluster.parse("cpu:1x2"))
    plan = api.estimate(graph, cluster=cluster, global_batch_size=SAMPLES, pins=pins.split())
    local = local_graph(plan, graph)
    op = [op for op in local.ops if target in op.target and module in op.module][-1]
    batch = subject.make_batch(SAMPLES, seed=0, padded=True)
    found = bisect(
        Faulty(subject, Fault(op.name, fault)), plan, in_dtype(graph, torch.float32, torch.float64), [batch],
        [loss_of(subject.build()(**batch)).item()], pool=workers, timeout_s=90.0,
    )  # fmt: skip
    difference = found.difference
    assert difference is not None
    assert (difference.block, difference.op, difference.target) == (local.block_of(op.name), op.name, op.target)
    assert difference.what.startswith(wrong)
    assert difference.module == op.module
    assert difference.mismatch.ranks == ((1,) if fault == "one_rank" else (0, 1))
    assert found.graph_loss < GRAPH_TOLERANCE
