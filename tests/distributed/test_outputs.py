"""What a model returns, under any plan: on every rank the outputs that one device computes in ``eval()``."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar import api
from autopar.graph.graph import Graph
from autopar.lower.program import lower
from autopar.models.resolve import resolve_model
from autopar.plan.plan import Plan
from autopar.rules.local_calls import layout_of
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.clusters import two_kinds
from tests.support.distributed import returning
from tests.support.distributed.layouts import LAYOUTS, on_batch, on_ranks
from tests.support.distributed.plans import estimated, make_plan
from tests.support.distributed.returning import Returning, plain
from tests.support.zoo import description

PINS = {
    "tp2": ["tp=2"], "tp4 lengthened": ["tp=4", "tokens.weight=tp:S(0)"],
    "dp4 ZeRO 3": ["dp_shard=4", "zero=3", "micro_batch=1"],
    "dp2 x tp2": ["dp_shard=2", "tp=2", "zero=3", "micro_batch=2"],
    "pp2 x dp2": ["pp=2", "dp_replicate=2", "micro_batch=1"], "pp2 x tp2": ["pp=2", "tp=2", "micro_batch=2"], "cp2": ["cp=2", "cp_attention=gather", "micro_batch=4"],
    "cp2 x dp2 ring": ["cp=2", "dp_shard=2", "cp_attention=ring", "micro_batch=2"],
    "dp2 recomputed": ["dp_replicate=2", "recompute=full", "micro_batch=2"],
    "dp2 made again": ["dp_shard=2", "recompute=selective", "micro_batch=2"],
}  # fmt: skip
MODELS = {
    "gpt2": description("gpt2"), "llama": description("llama").replace("vocab_size=96", "vocab_size=97"),
    "t5": description("t5", 1), "bert": description("bert", 1),
}  # fmt: skip


@cache
def traced(kind: str) -> tuple[Any, Graph]:
    if kind in returning.BUILDERS:
        own = Returning(kind)
        return own, own.trace()
    subject = resolve_model(MODELS[kind], sequence_length=16)
    return subject, api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0))


def planned(kind: str, layout: str) -> tuple[Any, Plan, Graph]:
    subject, graph = traced(kind)
    world = 4 if any(f"{axis}4" in layout or f"x {axis}2" in layout for axis in ("dp", "tp", "pp")) else 2
    pins = [*PINS[layout], "vocab_multiple=1"]
    return subject, estimated(graph, cluster=f"cpu:1x{world}", global_batch_size=8, pins=pins), graph


def split(kind: str, layout: str) -> tuple[Any, Plan, Graph]:
    """Where memory is dear: logits are parts of a sum, or split by vocabulary."""
    subject, graph = traced(kind)
    mesh, options = LAYOUTS[layout]
    return subject, make_plan(graph, mesh, global_batch_size=8, micro_batch_size=2, **options), graph


def wanted(subject: Any, batch: dict[str, Tensor]) -> Any:
    with torch.no_grad():
        return plain(subject.build().eval()(**{name: value for name, value in batch.items() if name != "nothing"}))


def assert_same(found: Any, expected: Any, place: str) -> None:
    """Of one structure, with tensors that are close; where the model keeps a cache there is nothing."""
    if isinstance(expected, dict):
        for name, value in expected.items():
            if name != "past_key_values":
                assert_same(found[name], value, f"{place} {name}")
        assert found.keys() == expected.keys(), place
    elif isinstance(expected, list):
        assert len(found) == len(expected), place
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{place} {number}")
    elif isinstance(expected, Tensor):
        assert_close(found, expected, place=place)
    else:
        assert (type(found), found) == (type(expected), expected), place


def check(pool: WorkerPool, subject: Any, plan: Plan, graph: Graph, *sizes: int, own: bool = False) -> None:
    """Outputs of batches of these sizes, one after the other; ``own``: also of a rank's own samples."""
    batches = [subject.make_batch(size, seed=1) for size in sizes]
    expected = [wanted(subject, batch) for batch in batches]
    for rank in on_ranks(pool, returning.predicted, subject, plan, graph, batches, own):
        for size, found, outputs in zip(sizes, rank, expected, strict=True):
            for way in ("complete", "split", "called"):
                assert_same(found[way], outputs, f"{size} samples, {way}")
            if own:
                start, stop = found["samples"]
                assert_close(found["own"]["logits"], outputs["logits"][start:stop], place=f"{size} samples, own")
            first, again, _ = found["losses"]
            assert first == again


CASES = [
    *(("metrics", layout, (3, 8, 6, 7)) for layout in ("dp4 ZeRO 3", "pp2 x dp2")),
    *(("metrics", layout, (8,)) for layout in (
        "tp4 lengthened", "dp2 x tp2", "cp2", "cp2 x dp2 ring", "dp2 recomputed",
    )),
    ("llama", "pp2 x dp2", (8,)), ("t5", "pp2 x dp2", (8,)), ("bert", "pp2 x tp2", (8,)), ("pair", "dp2 x tp2", (8,)),
]  # fmt: skip
"""With numbers of samples: of the plan, and fewer."""


@pytest.mark.parametrize(("kind", "layout", "sizes"), CASES)
def test_outputs_are_those_of_one_device(pool: WorkerPool, kind: str, layout: str, sizes: tuple[int, ...]) -> None:
    check(pool, *planned(kind, layout), *sizes, own=kind == "metrics" and sizes == (8,))


@pytest.mark.parametrize(("kind", "type_on_tp", "layout"), [
    *(("metrics", "P", layout) for layout in ("tp2", "pp2 x tp2")),
    *(("gpt2", "S(2)", layout) for layout in ("tp2 x dp2 ZeRO 3", "pp2 x tp2")),
])  # fmt: skip
def test_parts_of_logits_are_joined(pool: WorkerPool, kind: str, type_on_tp: str, layout: str) -> None:
    subject, plan, graph = split(kind, layout)
    logits = next(leaf.ref for leaf in graph.outputs.leaves if leaf.name == "logits")
    assert str(dict(layout_of(lower(plan, graph).graph, logits))["tp"]) == type_on_tp
    check(pool, subject, plan, graph, 8, 5)


@pytest.mark.parametrize("layout", [
    *("dp4 ZeRO 3", "dp2 recomputed", "dp2 made again", "tp2 x dp2 whole parameters", "tp2 x dp2 ZeRO 1"),
])  # fmt: skip
def test_a_call_in_training_gives_outputs_and_a_loss_with_gradients(pool: WorkerPool, layout: str) -> None:
    subject, plan, graph = (planned if layout in PINS else split)("gpt2", layout)
    batch, model = subject.make_batch(8, seed=1), subject.build()
    expected = model.train()(**batch)
    expected.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for found in on_ranks(pool, returning.called, subject, plan, graph, batch):
        for way in ("output", "silent"):
            assert_same(found[way], plain(expected), f"{layout} {way}")
        assert_close(found["gradients"], gradients)
        assert_close(found["twice"], {name: 2 * gradient for name, gradient in gradients.items()})


def test_other_outputs_of_a_training_call_say_what_they_are_not(pool: WorkerPool) -> None:
    for said in on_batch(pool, returning.read_in_training, *planned("metrics", "dp2 x tp2")):
        assert said["read"].startswith("The output more.accuracy is computed from complete values")
        assert said["stacked"].startswith("The output more.guess is computed from complete values")
        assert said["shown"] == "<more.accuracy: not computed in training, par.predict(batch) has it>"
        added = "The output logits of par(**batch) was made a part of a loss, but only the plan's"
        assert said["added"].startswith(added)
        assert said["inputs"] is False


def test_outputs_where_a_function_makes_the_loss_and_of_experts_over_data_ranks(pool: WorkerPool) -> None:
    subject, plan, graph = planned("scores", "pp2 x dp2")
    batch = subject.make_batch(8, seed=1)
    for (found,) in on_ranks(pool, returning.predicted, subject, plan, graph, [batch]):
        assert_same(found["called"], wanted(subject, {"idx": batch["idx"]}), "called")
    subject, graph = traced("experts")
    plan = estimated(graph, cluster="cpu:1x2", global_batch_size=8, pins=["dp_shard=2", "ep=2", "micro_batch=2"])
    assert plan.mesh.ep_data == 2
    expected = wanted(subject, batch)
    for (found,) in on_ranks(pool, returning.predicted, subject, plan, graph, [batch]):
        for name in ("loss", "logits"):
            assert_close(found["complete"][name], expected[name], place=name)


def test_outputs_of_unequal_shares(pool: WorkerPool) -> None:
    subject, graph = traced("metrics")
    plan = estimated(graph, cluster=two_kinds(1, 1, factor=3.0), global_batch_size=8, pins=["data_shares=3-1"])
    assert [len(plan.samples_of(rank)) for rank in range(2)] == [6, 2]
    check(pool, subject, plan, graph, 8, 5)


def test_split_outputs_stay_where_they_are(pool: WorkerPool) -> None:
    """Logits over samples and vocabulary; what is lengthened is whole."""
    cases = (
        (split("gpt2", "tp2 x dp2 ZeRO 3"), ["S(0)", "S(2)"]),
        (split("metrics", "tp2"), ["P"]),
        (planned("metrics", "cp2"), ["S(1)"]),
        (planned("llama", "tp2"), ["R"]),
    )
    for number, (planned_one, kinds) in enumerate(cases):
        ranks = on_batch(pool, returning.placements, *planned_one)
        assert list(ranks) == [kinds] * len(ranks), number
