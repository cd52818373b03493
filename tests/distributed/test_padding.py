"""A vocabulary that does not divide: padded in the plan, as long as the model's in state dicts and checkpoints."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from autopar import api
from autopar.graph.graph import Graph
from autopar.models.resolve import resolve_model
from autopar.plan.plan import Plan
from autopar.verification.rank_pool import WorkerPool
from autopar.verification.reference import Subject
from tests.support.distributed.layouts import equals_one_device, goes_on

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

SPLIT = "transformer.wte.weight=tp:S(0)"
LAYOUTS = {
    "tp4": ["tp=4"],
    "pp2 x tp2": ["pp=2", "tp=2"],
    "tp2 x dp2 ZeRO 3": ["tp=2", "dp_shard=2", "zero=3"],
}


MODELS = {
    "tied": "hf:gpt2?n_embd=32&n_layer=2&n_head=4&vocab_size=257&n_positions=17",
    "untied": "hf:llama?num_hidden_layers=2&hidden_size=32&intermediate_size=64&num_attention_heads=4"
    "&num_key_value_heads=2&vocab_size=257&max_position_embeddings=16&tie_word_embeddings=false",
}
ALIGNED = {
    "dp4": ["dp_replicate=4", "zero=0"],
    "dp4 ZeRO 3": ["dp_shard=4", "zero=3"],
    "pp2 x dp2": ["pp=2", "dp_shard=2", "zero=1"],
    "tp2 x dp2 ZeRO 3": LAYOUTS["tp2 x dp2 ZeRO 3"],
    "cp2 x dp2": ["cp=2", "dp_replicate=2", "zero=0"],
}


@cache
def traced(kind: str = "tied") -> tuple[Subject, Graph]:
    subject = resolve_model(MODELS[kind])
    return subject, api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0, padded=True))


def planned(layout: str, *pins: str) -> Plan:
    return api.estimate(traced()[1], cluster="cpu:1x4", global_batch_size=8, pins=[*LAYOUTS[layout], *pins])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_257_tokens_and_17_positions_split(pool: WorkerPool, layout: str) -> None:
    subject, graph = traced()
    plan = planned(layout, SPLIT)
    length = 260 if plan.mesh.tp == 4 else 258
    positions = 20 if plan.mesh.tp == 4 else 18
    padded = {entry.parameter: entry.length for entry in plan.padding}
    assert padded == {"transformer.wte.weight": length, "transformer.wpe.weight": positions}
    assert any(f"257 padded to {length}" in note for note in plan.notes)
    equals_one_device(pool, subject, plan, graph)


@pytest.mark.parametrize("pins", [["transformer.wte.weight=tp:S(1)"], ["transformer.wte.weight=tp:I"]])
def test_a_table_that_is_not_split_by_rows_is_padded_likewise(pool: WorkerPool, pins: list[str]) -> None:
    """What is padded follows from the degree, not from the typing: one graph is solved for, priced and run."""
    subject, graph = traced()
    plan = planned("tp4", *pins)
    assert {entry.length for entry in plan.padding} == {260, 20}
    equals_one_device(pool, subject, plan, graph)


def test_checkpoints_hold_no_padding(pool: WorkerPool, tmp_path: Path) -> None:
    subject, graph = traced()
    batches = [subject.make_batch(8, seed=seed, padded=True) for seed in range(3)]
    plans = [planned(layout, SPLIT) for layout in ("pp2 x tp2", "tp4", "tp2 x dp2 ZeRO 3", "tp4")]
    goes_on(pool, subject, graph, batches, tmp_path, *plans)


def aligned(kind: str, layout: str) -> Plan:
    pins = [*ALIGNED[layout], "vocab_multiple=16"]
    return api.estimate(traced(kind)[1], cluster="cpu:1x4", global_batch_size=8, pins=pins)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("tied", layout) for layout in ("dp4", "pp2 x dp2", "tp2 x dp2 ZeRO 3")),
        *(("untied", layout) for layout in ("dp4 ZeRO 3", "pp2 x dp2", "cp2 x dp2")),
    ],
)
def test_aligned_vocabularies_train_as_one_device(pool: WorkerPool, kind: str, layout: str) -> None:
    """Loss, gradients, norms and weights after steps; 17 tokens of the tied model do not divide by cp=2."""
    subject, graph = traced(kind)
    plan = aligned(kind, layout)
    lengths = {entry.parameter: entry.length for entry in plan.padding}
    head = "transformer.wte.weight" if kind == "tied" else "lm_head.weight"
    assert lengths[head] == (288 if plan.mesh.tp == 2 else 272)
    assert plan.mesh.tp > 1 or list(lengths) == [head], "a table that is only looked up in gains nothing"
    assert plan.vocab_multiple == 16
    equals_one_device(pool, subject, plan, graph)


@pytest.mark.parametrize("kind", MODELS)
def test_checkpoints_of_aligned_vocabularies_are_read_by_plans_without(
    pool: WorkerPool, tmp_path: Path, kind: str
) -> None:
    subject, graph = traced(kind)
    batches = [subject.make_batch(8, seed=seed, padded=True) for seed in range(3)]
    plain = api.estimate(graph, cluster="cpu:1x4", global_batch_size=8, pins=ALIGNED["dp4"])
    assert plain.padding == ()
    plans = (aligned(kind, "dp4 ZeRO 3"), plain, aligned(kind, "pp2 x dp2"))
    goes_on(pool, subject, graph, batches, tmp_path, *plans)
