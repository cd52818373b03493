"""Predicted against published steps: MosaicML's MPT runs under FSDP (rows of calibration.csv), nothing fitted.

Their layer stands in as GPT-2 with fused attention; ALiBi and their loss kernel are not modelled. What is asserted is a
loose band: this says that nothing is off by a factor, not that the model is calibrated.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from scipy import stats

from autopar.cluster import Cluster
from autopar.cost.model import CostModel, StageCost, Step
from autopar.mesh import Mesh
from autopar.models import resolve_model
from autopar.plan import BF16, Prediction
from autopar.rules.apply import shard
from autopar.rules.types import Typing
from autopar.search.batch import solve_batch
from autopar.search.classes import Compact, compact

TABLE = Path(__file__).parents[3] / "shared" / "validation" / "calibration.csv"
LAYERS = 4
Row = dict[str, str]


@lru_cache
def graph_of(hidden: str, heads: str, vocab: str, seq: str) -> tuple[Compact, Typing]:
    sizes = f"n_layer={LAYERS}&n_embd={hidden}&n_head={heads}&vocab_size={vocab}&n_positions={seq}"
    spec = f"hf:gpt2?{sizes}&activation_function=gelu&resid_pdrop=0&attn_pdrop=0&embd_pdrop=0"
    found = compact(resolve_model(spec, sequence_length=int(seq), batch_size=2, dtype=torch.bfloat16).trace())
    return found, solve_batch(found)


def predicted(row: Row) -> Prediction:
    found, typing = graph_of(row["hidden"], row["heads"], row["vocab"], row["seq"])
    count = {
        key: int(row[key]) for key in ("layers", "devices", "devices_per_node", "dp", "micro_batch", "global_batch")
    }
    size = Fraction(found.graph.batch_size, count["micro_batch"])
    local = shard(
        found.graph,
        replace(typing, size=size),
        global_batch_size=count["global_batch"],
        micro_batch_size=count["micro_batch"],
    )
    per_node = min(count["devices_per_node"], count["devices"])
    model = CostModel(Cluster.parse(f"{row['device']}:{count['devices'] // per_node}x{per_node}"), BF16, "adamw")
    mesh = Mesh(dp_shard=count["dp"])
    costs = [model.block_cost(local, block, mesh) for block in local.blocks]
    inner = max(range(len(costs)), key=lambda i: len(found.members[i]))
    blocks = []
    for i, cost in enumerate(costs):
        more = count["layers"] - LAYERS if i == inner else 0
        blocks += [cost] * (len(found.members[i]) + more)
    again = row["recompute"] == "full"
    stage = StageCost(
        blocks=tuple(blocks), recompute=tuple(again and 0 < i < len(blocks) - 1 for i in range(len(blocks)))
    )
    step = Step(
        mesh=mesh,
        schedule="none",
        num_micro_batches=count["global_batch"] // (count["micro_batch"] * count["dp"]),
        zero_stage=int(row["zero"]),
        global_batch_size=count["global_batch"],
        flops_per_sample=1.0,
        tokens_per_sample=int(row["seq"]),
    )
    return model.predict([stage], step)


@pytest.mark.skipif(not TABLE.is_file(), reason=f"the table of measured steps is absent: {TABLE.name}")
def test_published_steps_are_met_within_a_loose_band(record_property: pytest.RecordProperty) -> None:
    """MPT-7B, 2048 tokens, 8 to 512 GPUs: 24% mean absolute error, all too fast (matmul curves are not calibrated)."""
    pytest.importorskip("transformers")
    with TABLE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["family"] == "mpt" and (row["tp"], row["pp"]) == ("1", "1")]
    rows = [row for row in rows if (row["hidden"], row["seq"], row["zero"]) == ("4096", "2048", "3")]
    measured = [float(row["step_time_s"]) for row in rows]
    found = [predicted(row).step_time_s for row in rows]
    ratios = [a / b for a, b in zip(found, measured, strict=True)]
    error = sum(abs(ratio - 1) for ratio in ratios) / len(ratios)
    rank = stats.spearmanr(found, measured).statistic
    record_property("mean_absolute_error", float(error))
    record_property("rank_correlation", float(rank))
    assert len(rows) >= 10
    assert error < 0.4, ratios
    assert rank > 0.85
