import math
import random
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

import autopar
from autopar import api
from autopar.errors import InfeasibleError, UsageError
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import FP64
from autopar.planner.layouts.layout import LayoutKey
from autopar.planner.search import Evaluation, Limits, Misfit
from autopar.planner.space.space import load_space
from autopar.verification.against_one_device import in_dtype
from tests.support.clusters import in_pieces
from tests.support.distributed.mixtures import mixture_graph
from tests.support.planner.graphs import family, llama_block, mlp
from tests.support.planner.tasks import CLUSTER, ROUNDING, check_search, planner_of, plans_of
from tests.support.said import refuses


def test_modes_of_recompute_stand_in_the_order_of_the_space() -> None:
    """In that of a set programs of chains have their variables in another order in each process, and other solutions."""
    graph = family("gpt:layers=2,hidden=64,heads=4,vocab=256", 32)
    evaluator = planner_of(graph, space="default").evaluator
    assert len(evaluator.context.modes) > 1
    assert {*evaluator.cascade.maker.floors.blocks.modes} == {evaluator.context.modes}


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "is_even"), [(256, True), (200_000, False)])
def test_a_stage_is_longer_than_an_even_share_only_where_the_rest_takes_a_block(vocabulary: int, is_even: bool) -> None:
    """Four layers on two stages: a head that is less than a layer is no reason for a stage of three."""
    evaluator = planner_of(family(f"gpt:layers=4,hidden=64,heads=4,vocab={vocabulary}", 32)).evaluator
    unsplit = evaluator.layouts.unsplit(LayoutKey(micro_batch_size=2))
    most = evaluator.cascade.maker.floors.blocks.most_blocks(unsplit, 2)
    assert most >= 2 and (most == 2) == is_even


def test_branch_and_bound_finds_the_best_of_all_where_layers_follow_in_turn() -> None:
    check_search(lambda: planner_of(mlp(layers=12, batch=2, width=64, hidden=256, turn=3), "pp>=2"))


def test_the_size_of_buckets_is_the_best_of_the_space(graph: Graph) -> None:
    space = load_space("quick")
    sizes = (2**-10, 2**-6, 2**-2, 2**5)
    for zero in (0, 3):
        planner = planner_of(graph, space=replace(space, bucket_mib=sizes))
        candidate = next(c for c in planner.pool if c.mesh.dp_replicate * c.mesh.dp_shard == 4 and c.zero_stage == zero)
        some = planner.evaluator.evaluate(candidate)
        each = [planner_of(graph, space=replace(space, bucket_mib=(size,))) for size in sizes]
        found = [one.evaluator.evaluate(candidate) for one in each]
        times = [one.prediction.step_time_s for one in found if isinstance(one, Evaluation)]
        assert len(times) == len(sizes) and (len(set(times)) > 1) == (zero == 0)
        assert some.prediction.step_time_s == min(times) == times[sizes.index(some.bucket_bytes / 2**20)]
        assert planner.evaluator.closest_s(candidate, math.inf)[0] <= min(times) * ROUNDING


@pytest.mark.parametrize(("layers", "virtual_stages"), [(8, 2), (10, 3), (9, 3)])
def test_virtual_stages_are_cut_evenly_unless_stages_are_pinned(layers: int, virtual_stages: int) -> None:
    """No stage has more equal blocks than an even split of the time, rounded up; the limit gives way to pins."""
    stages = 2 * virtual_stages
    big = mlp(layers=layers, batch=2, width=64, hidden=256)
    pins = ["pp=2", f"virtual_stages={virtual_stages}", "tp=1", "micro_batch=1"]
    plan = api.estimate(big, cluster=CLUSTER, global_batch_size=16, pins=pins)
    assert max(min(s.stop, layers + 1) - max(s.start, 1) for s in plan.stages) <= layers // stages + 1
    uneven = api.estimate(big, cluster=CLUSTER, global_batch_size=16, pins=["stage@layers.0-3=0", *pins])
    assert uneven.stages[0].stop >= 5 and uneven.search.lower_bound_s <= uneven.predicted.step_time_s


@pytest.mark.slow
def test_embedding_and_head_may_be_stages_of_their_own() -> None:
    """Six layers on eight stages: planned with and without pins, below no bound, and the best of all candidates is found."""
    graph = family("llama:layers=6,hidden=64,heads=4,ffn=128,vocab=4000", 64)
    planner = planner_of(graph, "pp>=4", "tp=1", cluster="cpu:1x8", space="default")
    plans = plans_of(planner.evaluator, planner.pool)
    assert [*plans] == planner.pool
    assert {c.mesh.pp * c.virtual_stages for c in plans} >= {4, 8}
    assert {plan.stops for c, plan in plans.items() if c.mesh.pp * c.virtual_stages == 8} == {tuple(range(1, 9))}
    least_s = min(plan.prediction.step_time_s for plan in plans.values())
    assert planner.search(limits=Limits()).predicted.step_time_s <= least_s * ROUNDING


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins",
    [["stage@layers.0-1=0", "stage@layers.2=1"], ["stage@layers.0-6=0"], ["stage@layers.9=1", "stage@layers.10=2"]],
)
def test_bounds_read_pinned_stages(pins: list[str]) -> None:
    """Unequal stages: no bound is above a plan of them, and the tightest one is above that of stages as they are best."""
    graph = family("llama:layers=12,hidden=256,heads=4,ffn=1024,vocab=256", 64)
    planner, free = (planner_of(graph, "pp=4", "tp=1", *some, space="default") for some in (pins, ()))
    for candidate in planner.pool:
        found = planner.evaluator.evaluate(candidate)
        bound_s = planner.evaluator.closest_s(candidate, math.inf)[0]
        assert bound_s <= found.time_s * ROUNDING
        if candidate.micro_batch_size <= 2:
            assert bound_s > 1.05 * free.evaluator.closest_s(candidate, math.inf)[0]
    assert {candidate.schedule for candidate in planner.pool if candidate.micro_batch_size <= 2} >= {"GPipe", "1F1B"}


@pytest.mark.slow
def test_bounds_hold_where_links_are_measured_in_pieces() -> None:
    for seed, made in enumerate((mixture_graph(), family("gpt:layers=4,hidden=64,heads=4,vocab=300", 32))):
        cluster = in_pieces(Cluster.parse("cpu:2x2"), random.Random(seed))
        check_search(partial(planner_of, made, cluster=cluster))


@pytest.mark.slow
def test_what_is_too_large_needs_more_than_there_is() -> None:
    """The head alone needs more in passing than an equal share of a rank that runs four stages."""
    graph = family("gpt:layers=8,hidden=64,heads=4,vocab=20000", 64)
    options = {"cluster": "cpu:1x2?memory=560MB", "global_batch_size": 32, "space": "default"}
    planner = planner_of(graph, "pp=2", "schedule=Interleaved1F1B", **options)
    found = [planner.evaluator.evaluate(candidate) for candidate in planner.pool]
    misfits = [one for one in found if isinstance(one, Misfit)]
    assert {one.candidate.virtual_stages for one in misfits} >= {2, 4}
    assert all(one.needs_bytes > planner.evaluator.model.fitting_bytes for one in misfits)


def test_of_a_large_space_those_with_the_least_bounds_are_evaluated(graph: Graph) -> None:
    whole, part = (planner_of(graph).branch_and_bound(Limits(trials=trials)) for trials in (None, 12))
    whole.run()
    found = part.run()
    assert part.order == whole.order[:12]
    assert found.best is not None and found.finished == (len(whole.order) <= 12)


def test_the_package_is_the_verb_telling_progress(graph: Graph) -> None:
    told: list[tuple[str, int, int]] = []
    options = {"cluster": CLUSTER, "global_batch_size": 16, "space": "quick"}
    plan = autopar.search(graph, progress=lambda *event: told.append(event), **options)
    assert told[-1][1] >= 3 and any("best" in what for what, _, _ in told)
    assert plan.mesh.world_size == 4
    assert plan.predicted.peak_memory_bytes <= plan.predicted.memory_limit_bytes
    assert plan.search.lower_bound_s <= plan.predicted.step_time_s
    assert plan.search.gap == pytest.approx(plan.predicted.step_time_s / plan.search.lower_bound_s - 1)
    assert plan.search.reasons
    assert [s.start for s in plan.stages] + [len(graph.blocks)] == [0, *(s.stop for s in plan.stages)]


def test_an_estimate_takes_the_fastest_micro_batch_that_fits() -> None:
    big = mlp(layers=2, batch=2, width=64, hidden=256)
    options = {"global_batch_size": 256, "pins": ["dp_replicate=4"]}
    found, best = (verb(big, cluster=CLUSTER, **options) for verb in (api.estimate, api.search))
    assert found.micro_batch_size == best.micro_batch_size > 1
    slow = api.estimate(big, cluster=CLUSTER, global_batch_size=256, pins=[*options["pins"], "micro_batch=1"])
    assert found.predicted.step_time_s < slow.predicted.step_time_s


@pytest.mark.parametrize(
    ("cluster", "pins", "said", "unsaid"),
    [
        ("cpu:1x4", ["tp=2", "pp=4", "zero!=2"], ["tp=2", "pp=4", "4 devices"], ["zero"]),
        ("cpu:1x1?memory=1e6", ["micro_batch<=2"], ["memory", "1 device"], ["micro_batch", "global batch"]),
        ("cpu:1x2", ["stage@layers.0=1", "stage@layers.1=0", "pp=2"], ["stage@layers.0=1", "stage@layers.1=0"], []),
        ("cpu:1x2", ["stage@layers.2-3=0", "pp=2", "stage@layers.0-1=1"], ["layers.0-1", "layers.2-3", "order"],
         ["pp=2"]),
        ("cpu:1x4", ["stage@layers.0=3", "tp=1"], ["stage@layers.0=3", "need 4 blocks"], ["tp=1"]),
        ("cpu:1x4", ["stage@layers.0=0", "stage@layers.1=2"], ["layers.0=0 and stage@layers.1=2", "none is empty"], []),
        ("cpu:1x4", ["stage@layers.0=1", "pp=1", "tp=4"], ["stage@layers.0=1", "pp=1"], ["tp=4"]),
        ("cpu:1x2", ["layers.*.up=tp:S(1)", "precision=bf16"], ["precision=bf16"], []),
    ],
)  # fmt: skip
def test_conflicts_are_named(graph: Graph, cluster: str, pins: list[str], said: list[str], unsaid: list[str]) -> None:
    for verb in (api.search, api.estimate):
        caught = refuses(InfeasibleError, "", verb, graph, cluster=cluster, global_batch_size=16, pins=pins)
        assert caught.exit_code == 3
        assert all(text in str(caught) for text in said), str(caught)
        assert not any(text in str(caught) for text in unsaid), str(caught)


def test_the_leanest_plan_needs_what_is_said_where_none_fits() -> None:
    graph = family("gpt:layers=4,hidden=128,heads=4,vocab=1024", 64)
    options = {"global_batch_size": 16, "pins": ["pp=4"]}
    said = "the leanest plan needs ([0-9.]+) MiB"
    caught = refuses(InfeasibleError, said, api.search, graph, cluster="cpu:1x4?memory=1e6", **options)
    needed = float(re.search(said, str(caught))[1])
    plan = api.search(graph, cluster=f"cpu:1x4?memory={(needed + 0.5) * 2**20:.0f}", **options)
    assert plan.predicted.peak_memory_interval_bytes[1] == pytest.approx(needed * 2**20, rel=0.05)


def test_limits_stop_a_search(graph: Graph) -> None:
    plan = api.search(graph, cluster=CLUSTER, global_batch_size=np.int64(16), trials=np.int64(1))
    assert plan.search.evaluated == 1 < api.search(graph, cluster=CLUSTER, global_batch_size=16).search.evaluated
    given = {"cluster": CLUSTER, "global_batch_size": 16, "search_timeout_s": 0.0}
    refuses(InfeasibleError, "search_timeout_s", api.search, graph, **given)


@pytest.mark.slow
def test_a_70b_model_is_spread_over_64_devices() -> None:
    big = llama_block(layers=80, batch=2)
    plan = api.search(big, cluster="h100-sxm5-80gb:8x8", global_batch_size=512, precision="bf16")
    assert plan.predicted.peak_memory_bytes <= plan.predicted.memory_limit_bytes
    assert plan.mesh.pp * plan.mesh.tp * plan.mesh.dp_shard >= 16  # its states alone take 16 devices
    assert 0.3 < plan.predicted.mfu < 0.8


def test_float64_is_planned_where_the_profile_has_its_rate(graph: Graph) -> None:
    pins = ["dp_replicate=4"]
    doubled = in_dtype(graph, torch.float32, torch.float64)
    plan = api.search(doubled, cluster="cpu:1x4", global_batch_size=16, precision="fp64", pins=pins)
    single = api.search(graph, cluster="cpu:1x4", global_batch_size=16, pins=pins)
    assert plan.precision == FP64
    assert plan.predicted.memory[0].parameters == 2 * single.predicted.memory[0].parameters
    said = r"device 'h100-sxm5-80gb': No matmul rate for float64.*, or add \[device.matmul.float64\]"
    refuses(UsageError, said, api.search, doubled, cluster="h100-sxm5-80gb:1x4", global_batch_size=16, precision="fp64")
