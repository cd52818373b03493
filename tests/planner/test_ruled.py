"""Layouts by rule: what the rule is, that it holds at every size, and the search of such a space against all of its plans."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from autopar.api import PRECISIONS
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.graph.compact import compact
from autopar.graph.ir import Graph
from autopar.graph.padding import lengths
from autopar.layout import I, P, S
from autopar.lower.check import typecheck
from autopar.lower.program import lower
from autopar.models import resolve_model
from autopar.plan import Plan
from autopar.planner import planner as planning
from autopar.planner.branch_and_bound.process_group import ProcessGroup
from autopar.planner.evaluate.evaluator import Evaluation
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.types import LayoutKey, Load, PricedLayout
from autopar.planner.outcome import Limits
from autopar.planner.planner import Planner, Task
from autopar.planner.sharding.batch_axis import solve_batch
from autopar.planner.sharding.block_chain import AxisSolution
from autopar.planner.sharding.ruled import sources
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space, load_space
from autopar.rules import default_table
from autopar.rules.table import Rule
from tests.campaigns import product
from tests.campaigns.brute import task_of
from tests.campaigns.product import Small, every_plan
from tests.campaigns.small import draw
from tests.lower.moe import mixture_graph

from .graphs import llama_block, mlp

SIZES = [(1, 2), (2, 2), (3, 4), (4, 4), (8, 8), (6, 2)]
"""Micro-batches and degrees."""


@pytest.fixture(scope="module")
def space() -> Space:
    return replace(load_space("quick"), layouts="rule")


def planner(graph: Graph, space: Space, *pins: str, cluster: str = "h100-sxm5-80gb:1x8", batch: int = 48) -> Planner:
    task = Task(
        graph=graph, cluster=Cluster.parse(cluster), global_batch_size=batch, precision=PRECISIONS["bf16"],
        optimizer="adamw", pins=Pins.parse(pins), space=space,
    )  # fmt: skip
    return Planner(task)


def option_of(layouts: Layouts, micro_batch_size: int, tp: int, ep_data: int = 1) -> PricedLayout:
    split = LayoutKey(micro_batch_size=micro_batch_size, tp=tp, ep_data=ep_data)
    (draft,) = layouts.drafts(split, Load(num_micro_batches=4, in_flight=1))
    return layouts.option(draft)


def solution_of(layouts: Layouts, micro_batch_size: int, tp: int) -> AxisSolution:
    found = option_of(layouts, micro_batch_size, tp).solution
    assert found is not None
    return found


@lru_cache
def gpt(vocabulary: int = 250, dtype: torch.dtype = torch.float16) -> Graph:
    spec = f"gpt:layers=5,hidden=64,heads=8,vocab={vocabulary}"
    return resolve_model(spec, sequence_length=32, dtype=dtype).trace()


def test_the_rule_is_that_of_megatron(space: Space) -> None:
    layouts = planner(llama_block(batch=2), space).evaluator.layouts
    for size, tp in SIZES:
        found = solution_of(layouts, size, tp)
        names = {name: strategy.name for name, strategy in found.typing.strategies.items()}
        rests = found.typing.parameters
        assert rests["table"].is_split
        for i in range(2):
            assert {names[f"{k}{i}"] for k in ("q", "k", "v", "gate", "up")} == {"split n"}
            assert {rests[f"w{k}{i}"] for k in "qkvgu"} == {S(0)}
            assert names[f"core{i}"] == "split h"
            assert rests[f"wo{i}"] == rests[f"wd{i}"] == S(1)
            assert found.typing.strategies[f"o{i}"].outputs == (P,)
            assert rests[f"n{i}"] == rests[f"na{i}"] == I
            assert not found.typing.strategies[f"norm{i}"].outputs[0].is_split


@pytest.mark.parametrize("order", [SIZES, SIZES[::-1]], ids=["up", "down"])
def test_what_was_asked_before_changes_nothing(space: Space, order: list[tuple[int, int]]) -> None:
    graph = gpt()
    layouts, again = (planner(graph, space).evaluator.layouts for _ in range(2))
    found = {size: solution_of(layouts, *size) for size in order}
    for size in SIZES:
        alone = solution_of(again, *size)
        assert alone.typing == found[size].typing
        assert alone.signature == found[size].signature == found[SIZES[0]].signature
        assert alone.time_s == found[size].time_s


@pytest.mark.parametrize("graph", [gpt(), llama_block(batch=2)], ids=["gpt", "llama"])
def test_no_block_takes_less_than_its_first_bound_says(space: Space, graph: Graph) -> None:
    layouts = planner(graph, space).evaluator.layouts
    for size, tp in SIZES:
        option = option_of(layouts, size, tp)
        assert option.solution is not None
        total_s = 0.0
        for cost, least_s in zip(option.costs, option.solution.blocks_s, strict=True):
            own_s = cost.forward_s + cost.backward_s
            sent_s = cost.communication_forward_s + cost.communication_backward_s
            assert least_s <= (own_s + sent_s) * (1 + 1e-9)
            total_s += own_s + sent_s
        assert graph.name != "llama" or sum(option.solution.blocks_s) > 0.7 * total_s  # it says something


@pytest.mark.parametrize("pins", [(), ("transformer.h.2.mlp*=tp:I",), ("transformer.h.*.attn*=tp:I",)], ids=len)
@pytest.mark.parametrize(
    "graph", [gpt(), gpt(9001), mixture_graph(), llama_block(batch=2)], ids=["gpt", "odd", "moe", "llama"]
)
def test_blocks_that_feed_their_equals_move_no_less(space: Space, graph: Graph, pins: tuple[str, ...]) -> None:
    """What is told of collectives before a layout is solved, beside those of the layout."""
    if pins and "gpt" not in graph.name:
        return
    layouts = planner(graph, space, *pins).evaluator.layouts
    counts = [len(members) for members in layouts.compact.members]
    shares = []
    for size, tp in (*SIZES, (12, 6), (3, 8)):
        least_s = layouts.solving.least_moved_s(LayoutKey(micro_batch_size=size, tp=tp))
        sent = [c.communication_forward_s + c.communication_backward_s for c in option_of(layouts, size, tp).costs]
        inner_s = sum(n * own_s for n, own_s in zip(counts, sent, strict=True) if n > 1)
        assert least_s <= inner_s * (1 + 1e-9)
        shares.append(least_s / inner_s if inner_s else 1.0)
    assert layouts.solving.least_moved_s(LayoutKey(micro_batch_size=4)) == 0.0
    if max(counts) > 1 and not pins:
        assert min(shares[:4]) > 0.95  # it says something, and all where nothing but the way counts


def test_degrees_that_do_not_divide_have_a_solution_of_their_own(space: Space) -> None:
    """Hidden units that two divides and four does not: at four they are whole, or it would be no layout."""
    graph = mlp(layers=2, batch=2, width=64, hidden=66)
    layouts = planner(graph, space).evaluator.layouts
    two, four = (solution_of(layouts, 4, tp).typing for tp in (2, 4))
    assert two.parameters["up0"] == S(0) and two.parameters["down0"] == S(1)
    assert four.parameters["up0"] != S(0)
    assert [s.tp for s in sources(LayoutKey(micro_batch_size=4, tp=4))] == [2, 4, 4]
    assert [s.micro_batch_size for s in sources(LayoutKey(micro_batch_size=4, tp=6))] == [3, 7, 4]


def test_vocabularies_are_padded_as_they_are_in_a_search(space: Space) -> None:
    graph = gpt(vocabulary=9001)
    option = option_of(planner(graph, space).evaluator.layouts, 4, 8)
    assert {entry.parameter: entry.length for entry in option.padding} == lengths(graph, 8)
    assert option.padding


# --- pins


def test_a_pinned_weight_rests_as_the_pin_says_at_every_size(space: Space) -> None:
    layouts = planner(llama_block(batch=2), space, "w[go]*=tp:I").evaluator.layouts
    for size, tp in SIZES:
        found = solution_of(layouts, size, tp).typing
        assert found.parameters["wo0"] == found.parameters["wg0"] == I
        assert found.parameters["wu0"] == S(0)


def test_a_pin_that_does_not_divide_is_named(space: Space) -> None:
    graph = mlp(layers=2, batch=2, width=64, hidden=66)
    layouts = planner(graph, space, "layers.0.up=tp:S(0)").evaluator.layouts
    assert solution_of(layouts, 4, 2).typing.parameters["up0"] == S(0)
    with pytest.raises(InfeasibleError, match=r"layers\.0\.up of shape \(66, 64\) as S\(0\) with tp=4"):
        solution_of(layouts, 4, 4)


@pytest.mark.parametrize(("pins", "rest"), [(("ep=4", "ep_data=1"), S(0)), (("ep=1",), None)])
def test_experts_are_split_as_pins_of_ep_say(space: Space, pins: tuple[str, ...], rest: object) -> None:
    plan = planner(mixture_graph(), space, "tp=4", *pins, cluster="cpu:1x4", batch=16).search(limits=Limits())
    typings = [t for layout in plan.layouts for t in layout.typings if t.axis == "tp"]
    names = ((name, kind) for t in typings for name, kind in zip(t.parameter_names, t.parameters, strict=True))
    experts = {kind for name, kind in names if "experts" in name}
    assert plan.mesh.ep == (1 if rest is None else 4)
    assert all(kind.is_split for kind in experts)
    assert (experts == {S(0)}) == (rest is not None)
    assert typecheck(lower(plan, mixture_graph())) > 10


# --- the search


def test_plans_by_rule_lower_and_check(space: Space) -> None:
    graph = gpt()
    plan = planner(graph, space, "tp=8", "pp=1", "micro_batch=3").search(limits=Limits())
    assert typecheck(lower(plan, graph)) > 10


RULED = [(3, 4), (5, 1), (13, 2), (14, 2), (17, 3)]
"""Seeds of small problems and fractions of the memory that the fastest plan needs; ``tp`` is free in each."""


@pytest.mark.parametrize(("seed", "share"), RULED)
def test_no_plan_by_rule_is_quicker_than_that_of_the_search(
    seed: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product of all plans, with the one layout by rule for each micro-batch and degree."""
    small = replace(draw(seed), splits=True, is_whole=False)
    space = replace(load_space("exhaustive"), layouts="rule")
    layouts = searched(small, space, None).evaluator.layouts
    monkeypatch.setattr(product, "typings", lambda graph, tp: [solution_of(layouts, graph.batch_size, tp).typing])
    whole = every_plan(small)
    fastest = whole.best(math.inf)
    assert fastest is not None and whole.layouts == 1
    peak = whole.least_bytes + (fastest[1].peak_bytes - whole.least_bytes) // share
    model = layouts.model
    memory_bytes = math.ceil(peak * model.memory_spread)
    tight = searched(small, space, memory_bytes)
    plan, best = tight.fastest(Limits()), whole.best(tight.evaluator.limit_bytes)
    assert plan is not None and best is not None
    assert plan.predicted.step_time_s == pytest.approx(best[1].time_s, rel=1e-9)
    assert plan.search.lower_bound_s <= best[1].time_s * (1 + 1e-9)
    assert any(c.mesh.tp > 1 for c in whole.fronts)


@pytest.mark.parametrize("is_even", [False, True], ids=["any stages", "equal stages"])
@pytest.mark.parametrize("cluster", ["h100-sxm5-80gb:1x4", "cpu:1x4?cores=2", "cpu:1x4?memory=4.26e8"])
def test_first_bounds_are_below_every_plan(space: Space, cluster: str, is_even: bool) -> None:
    """Those of work alone, those with the data axes and those with the least of collectives, which are worked out before any row."""
    graph = gpt(4000, torch.bfloat16)
    evaluator = (made := planner(graph, replace(space, equal_stages=is_even), cluster=cluster, batch=16)).evaluator
    found = [evaluator.evaluate(candidate) for candidate in made.pool]
    times = [one.prediction.step_time_s if isinstance(one, Evaluation) else math.inf for one in found]
    work, data = evaluator.work_bounds_s(made.pool), evaluator.data_bounds_s(made.pool)
    assert evaluator.by_rule
    assert all(
        min(pair) > 0 and max(pair) <= time_s * (1 + 1e-9) for *pair, time_s in zip(work, data, times, strict=True)
    )
    moved = evaluator.moved_bounds_s(made.pool, 0.0)
    assert {c for c in made.pool if c.mesh.tp > 1} == moved.keys()
    for candidate, first_s, time_s in zip(made.pool, data, times, strict=True):
        assert first_s <= moved.get(candidate, first_s) <= time_s * (1 + 1e-9)
    close = [time_s for *pair, time_s in zip(work, data, times, strict=True) if max(pair) > 0.3 * time_s]
    assert len(close) > 4 and min(times) < math.inf
    assert (math.inf in times) == (math.inf in work) == ("memory" in cluster)


def searched(small: Small, space: Space, memory_bytes: int | None) -> Planner:
    return Planner(task_of(small, memory_bytes, ("offload=none", "bucket_bytes=26214400"), space), explains=False)


def test_what_searches_keep_with_a_graph_changes_no_plan(space: Space) -> None:
    """Searches of another space and batch before it, and a copy of the graph, which has nothing of them."""
    graph = gpt()
    new = pickle.loads(pickle.dumps(graph))
    planner(graph, load_space("quick"), batch=24).search(limits=Limits())
    copied = pickle.loads(pickle.dumps(graph))
    assert graph.passes and not copied.passes and not new.passes
    assert copied._index.made == graph._index.made and copied._index.users == graph._index.users
    assert not copied._index.named
    plans = [planner(one, space).search(limits=Limits()) for one in (graph, graph, new)]
    timeless = [replace(plan, search=replace(plan.search, wall_time_s=0.0)) for plan in plans]
    assert timeless[0] == timeless[1] == timeless[2]


def test_rules_that_change_are_asked_for_again() -> None:
    graph = gpt()
    typing = solve_batch(compact(graph))
    assert compact(graph) is compact(graph) and solve_batch(compact(graph)) is typing
    table = default_table()
    table.put("mylib.unused.default", Rule(line="b... -> b..."))
    try:
        assert solve_batch(compact(graph)) is not typing
        assert solve_batch(compact(graph)) == typing
    finally:
        del table.rules["mylib.unused.default"]


def test_several_processes_give_the_plan_and_the_bound_of_one(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = planner(gpt(), space).search(limits=Limits())
    monkeypatch.setattr(planning, "ProcessGroup", lambda size=1: ProcessGroup(size, many=0))
    plan = planner(gpt(), space).search(limits=Limits(), processes=2)
    neutral = {"wall_time_s": 0.0, "evaluated": 0}
    assert replace(plan, search=replace(plan.search, **neutral)) == replace(
        alone, search=replace(alone.search, **neutral)
    )


def test_a_search_by_rule_is_no_better_than_one_of_layouts() -> None:
    graph = gpt()

    def step_s(space: Space) -> Plan:
        return planner(graph, space).search(limits=Limits())

    usual = load_space("quick")
    free, ruled = step_s(replace(usual, price_ratios=(0.0,))), step_s(replace(usual, layouts="rule"))
    assert free.search.lower_bound_s <= ruled.predicted.step_time_s
    assert ruled.search.lower_bound_s <= ruled.predicted.step_time_s
