from functools import cache
from pathlib import Path

import pytest

from autopar import api
from autopar.graph.graph import Graph
from autopar.models.resolve import resolve_model
from autopar.plan.plan import Plan
from autopar.verification.compared_models import VerifiedModel
from autopar.verification.rank_pool import WorkerPool
from autopar.verification.reference import Subject
from tests.support.distributed.layouts import equals_one_device, goes_on
from tests.support.distributed.plans import estimated

pytestmark = pytest.mark.distributed

SPLIT = "transformer.wte.weight=tp:S(0)"
MODELS = {
    "tied": "hf:gpt2?n_embd=32&n_layer=2&n_head=4&vocab_size=257&n_positions=17",
    "untied": "hf:llama?num_hidden_layers=2&hidden_size=32&intermediate_size=64&num_attention_heads=4"
    "&num_key_value_heads=2&vocab_size=257&max_position_embeddings=16&tie_word_embeddings=false",
}


@cache
def traced(kind: str) -> tuple[Subject, Graph]:
    subject = VerifiedModel(resolve_model(MODELS[kind]), masked=True)
    return subject, api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0))


def planned(kind: str, pins: str) -> tuple[Subject, Plan, Graph]:
    subject, graph = traced(kind)
    return subject, estimated(graph, cluster="cpu:1x4", global_batch_size=8, pins=pins.split()), graph


@pytest.mark.parametrize(("pins", "length", "positions"), [
    (f"tp=4 {SPLIT}", 260, 20),
    (f"pp=2 tp=2 {SPLIT}", 258, 18),
    (f"tp=2 dp_shard=2 zero=3 {SPLIT}", 258, 18),
    # what is padded follows from the degree, not from the typing: one graph is solved for, priced and run
    ("tp=4 transformer.wte.weight=tp:S(1)", 260, 20),
    ("tp=4 transformer.wte.weight=tp:I", 260, 20),
])  # fmt: skip
def test_257_tokens_and_17_positions_split(pool: WorkerPool, pins: str, length: int, positions: int) -> None:
    subject, plan, graph = planned("tied", pins)
    padded = {entry.parameter: entry.length for entry in plan.padding}
    assert padded == {"transformer.wte.weight": length, "transformer.wpe.weight": positions}
    assert any(f"257 padded to {length}" in note for note in plan.notes)
    equals_one_device(pool, subject, plan, graph)


@pytest.mark.parametrize(("kind", "pins"), [
    ("tied", "dp_replicate=4 zero=0"),
    ("tied", "pp=2 dp_shard=2 zero=1"),
    ("tied", "tp=2 dp_shard=2 zero=3"),
    ("untied", "dp_shard=4 zero=3"),
    ("untied", "pp=2 dp_shard=2 zero=1"),
    ("untied", "cp=2 dp_replicate=2 zero=0"),  # by which the 17 tokens of the tied model do not divide
])  # fmt: skip
def test_aligned_vocabularies_train_as_one_device(pool: WorkerPool, kind: str, pins: str) -> None:
    subject, plan, graph = planned(kind, f"{pins} vocab_multiple=16")
    lengths = {entry.parameter: entry.length for entry in plan.padding}
    head = "transformer.wte.weight" if kind == "tied" else "lm_head.weight"
    assert lengths[head] == (288 if plan.mesh.tp == 2 else 272)
    assert plan.mesh.tp > 1 or list(lengths) == [head], "a table that is only looked up in gains nothing"
    assert plan.vocab_multiple == 16
    equals_one_device(pool, subject, plan, graph)


PLAIN = "dp_replicate=4 zero=0"
ALIGNED = ("dp_shard=4 zero=3 vocab_multiple=16", PLAIN, "pp=2 dp_shard=2 zero=1 vocab_multiple=16")


@pytest.mark.parametrize(("kind", "route"), [
    ("tied", [f"{pins} {SPLIT}" for pins in ("pp=2 tp=2", "tp=4", "tp=2 dp_shard=2 zero=3", "tp=4")]),
    ("tied", ALIGNED),
    ("untied", ALIGNED),
])  # fmt: skip
def test_checkpoints_hold_no_padding(pool: WorkerPool, tmp_path: Path, kind: str, route: list[str]) -> None:
    """So that plans without read those of aligned vocabularies."""
    subject, graph = traced(kind)
    batches = [subject.make_batch(8, seed=seed) for seed in range(3)]
    plans = [planned(kind, pins)[1] for pins in route]
    assert [bool(plan.padding) for plan in plans] == [pins != PLAIN for pins in route]
    goes_on(pool, subject, graph, batches, tmp_path, *plans)
