from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar import api
from autopar.errors import UsageError
from autopar.graph.rewrites import vocabulary_sizes
from autopar.hardware.cluster import Cluster
from autopar.plan.file import plan_from_dict, plan_to_dict
from autopar.plan.plan import BF16, PRECISIONS, PrecisionName
from autopar.planner.space.candidates import candidates
from autopar.planner.space.constraints import Problem
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space
from autopar.tracing.trace import trace
from tests.support.planner.graphs import family
from tests.support.planner.tasks import check_search, planner_of
from tests.support.said import refuses

A100 = "a100-sxm4-80gb:1x8"
PLAIN = "gpt:layers=2,hidden=512,heads=8,vocab=20011"
MIXED = "a100 and v100"


def mixed() -> Cluster:
    first, second = Cluster.parse("a100-sxm4-80gb:1x2"), Cluster.parse("v100-sxm2-32gb:1x2")
    return replace(first, name=MIXED, groups=(*first.groups, *second.groups))


ODD = [
    # model, tokens, cluster, batch, pins
    ("gpt:layers=3,hidden=516,heads=6,vocab=20011", 60, A100, 48, ()),  # heads of 86, rows of 516
    ("llama:layers=2,hidden=512,heads=8,ffn=1370,vocab=20011", 50, "a100-sxm4-80gb:2x2", 24, ()),
    ("llama:layers=2,hidden=256,heads=4,vocab=20011", 252, A100, 8, ("cp>=2", "cp_attention=ring")),
    (PLAIN, 63, "h100-sxm5-80gb:1x4", 12, ("micro_batch<=3",)),
    (PLAIN, 64, MIXED, 16, ()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "seq", "cluster", "batch", "pins"), ODD)
def test_no_candidate_beats_the_plan(spec: str, seq: int, cluster: str, batch: int, pins: tuple[str, ...]) -> None:
    """All that a split or padding aligns: vocabularies, heads, widths, sequences, micro-batches."""
    precision: PrecisionName = "fp16" if cluster == MIXED else "bf16"
    where = mixed() if cluster == MIXED else Cluster.parse(cluster)
    graph = family(spec, seq, precision)
    task: dict[str, Any] = {"cluster": where, "global_batch_size": batch, "precision": PRECISIONS[precision]}
    _, plans = check_search(lambda: planner_of(graph, *pins, **task))
    assert len(plans) > 3


@pytest.mark.parametrize("pins", [("tp=1",), ("tp=4",), ("pp=2",), ("dp_shard=8", "zero=3")])
def test_rows_are_aligned_where_the_device_loses_by_it(pins: tuple[str, ...]) -> None:
    graph = family(PLAIN, 64, "bf16")
    plan, plain = (
        api.search(graph, cluster=A100, global_batch_size=64, precision="bf16", pins=[*pins, *more], workers=1)
        for more in ((), ("vocab_multiple=1",))
    )
    assert plan.vocab_multiple == 64
    assert [entry.length % (64 * plan.mesh.tp) for entry in plan.padding if "wte" in entry.parameter] == [0]
    assert plan.predicted.step_time_s < plain.predicted.step_time_s
    assert any("20011 padded to" in note for note in plan.notes)
    assert f"multiple of {plan.vocab_multiple}" in str(plan)
    assert plan_from_dict(plan_to_dict(plan)) == plan


def test_what_unaligned_rows_cost_is_said_with_its_source() -> None:
    notes = {}
    for device, precision in (("a100-sxm4-80gb", "bf16"), ("v100-sxm2-32gb", "fp16")):
        options = {"global_batch_size": 64, "precision": precision, "pins": ["vocab_multiple=1"]}
        plan = api.estimate(family(PLAIN, 64, precision), cluster=f"{device}:1x8", **options)
        notes[device] = [note for note in plan.notes if "16 bytes" in note]
    assert "0.45 of the rate" in notes["a100-sxm4-80gb"][0] and "profile" in notes["a100-sxm4-80gb"][0]
    assert "assumed" in notes["v100-sxm2-32gb"][0]
    aligned = api.estimate(family(PLAIN, 64, "bf16"), cluster=A100, global_batch_size=64, precision="bf16")
    assert not [note for note in aligned.notes if "16 bytes" in note]


def test_spaces_that_try_the_unlikely_try_both() -> None:
    graph = family(PLAIN, 64, "bf16")
    task: dict[str, Any] = {"global_batch_size": 64, "precision": BF16}
    pools = {name: planner_of(graph, cluster=A100, space=name, **task).pool for name in ("default", "exhaustive")}
    assert {c.vocab_multiple for c in pools["default"]} == {64}
    assert {c.vocab_multiple for c in pools["exhaustive"]} == {1, 64, 128}
    assert {c.vocab_multiple for c in planner_of(graph, cluster="cpu:1x8", space="default", **task).pool} == {1}


def test_vocabularies_are_counted_with_all_that_has_their_rows_and_without_any_there_is_none_to_pad() -> None:
    assert vocabulary_sizes(family(PLAIN, 64, "bf16")) == ((20011, 512),)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    graph = trace(model, (torch.randn(4, 8),), loss_fn=lambda y, _: y.square().mean())
    given = {"cluster": "cpu:1x2", "global_batch_size": 4, "pins": ["vocab_multiple=64"]}
    refuses(UsageError, "no vocabulary that vocab_multiple could pad", api.estimate, graph, **given)


def test_the_multiple_is_that_of_the_least_work() -> None:
    """Padding by half does not pay where unaligned rows keep 0.9 of the rate; 1 is taken where nothing is gained."""
    problem = Problem(
        world_size=8, devices_per_node=8, global_batch_size=64, num_blocks=4, heads=(8,), space=load_space("default"),
        vocabularies=((85, 512),), unaligned_fraction=0.5,
    )  # fmt: skip
    for fraction, sizes, wanted in ((0.5, 85, 64), (0.9, 85, 1), (0.5, 128, 1), (1.0, 85, 1)):
        one = replace(problem, vocabularies=((sizes, 512),), unaligned_fraction=fraction)
        assert {c.vocab_multiple for c in candidates(one, Pins.parse(["tp=1"]))} == {wanted}
