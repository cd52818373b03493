import pickle
from dataclasses import replace

import pytest

from autopar.cost.model import CostModel
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import BF16
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.layout import LayoutKey, layout_key_of
from autopar.planner.planner import Planner
from autopar.planner.search import Limits
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space
from tests.support.planner.graphs import family
from tests.support.planner.tasks import planner_of

ROUNDING = 1e-9
CLUSTER = Cluster.parse("h100-sxm5-80gb:1x8")
MODELS = {
    "llama": (
        "hf:llama?hidden_size=256&intermediate_size=512&num_hidden_layers=2&num_attention_heads=8&num_key_value_heads=4&vocab_size=512",
        128,
    ),
    "gpt2": ("hf:gpt2?n_embd=128&n_layer=2&n_head=4&vocab_size=512&n_positions=64", 64),
    "padded": ("gpt:layers=4,hidden=32,heads=4,vocab=66", 16),  # words do not divide by 4: padded where they are split
    "mixtral": ("mixtral:layers=2,hidden=256,heads=8,kv_heads=4,ffn=512,vocab=512,experts=8,top_k=2", 128),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_no_priced_layout_is_quicker_than_its_typing_or_the_quickest_typing(name: str) -> None:
    layouts = Layouts(
        family(*MODELS[name], "bf16"), CostModel(CLUSTER, BF16, "adamw"), global_batch_size=64, pins=Pins.parse(()),
        space=load_space("default"),
    )  # fmt: skip
    share = compared = 0.0
    experts = [(2, 2, 1, 4), (2, 2, 2, 2)] if name == "mixtral" else []
    for size, tp, cp, ep in [(1, 2, 1, 1), (4, 4, 1, 1), (4, 2, 2, 1), *experts]:
        key = LayoutKey(micro_batch_size=size, tp=tp, cp=cp, ep_data=ep)
        quickest_s = min(layouts.solver(key, kind).quickest.value for kind in layouts.graphs.kinds(key))
        for typed in layouts.typed(key, num_micro_batches=8, in_flight=2):
            total_s = typed_s = 0.0
            blocks = zip(layouts.compact.members, layouts.price(typed).costs, typed.solution.block_s, strict=True)
            for members, cost, own_s in blocks:
                block_s = cost.forward_s + cost.backward_s
                block_s += cost.communication_forward_s + cost.communication_backward_s
                assert own_s <= block_s * (1 + ROUNDING)
                total_s += len(members) * block_s
                typed_s += len(members) * own_s
            assert quickest_s <= total_s * (1 + ROUNDING)
            share, compared = share + typed_s / total_s, compared + 1
    assert share > 0.8 * compared  # it says something


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_no_block_of_a_layout_is_quicker_than_its_floors(name: str) -> None:
    """Of all layouts of a candidate, and of each before it is priced; where experts are spread their tokens travel."""
    wanted = {"cluster": "h100-sxm5-80gb:2x4", "global_batch_size": 32, "precision": BF16, "space": "default"}
    planner = planner_of(family(*MODELS[name], "bf16"), **wanted)
    maker, context = planner.evaluator.cascade.maker, planner.evaluator.context
    different = {(layout_key_of(c), c.mesh, c.zero_stage): c for c in planner.pool if c.mesh.cp * c.mesh.tp > 1}
    compared = 0
    for candidate in list(different.values())[::3]:
        for typed in context.known_layouts(candidate):
            priced = maker.priced(candidate, context.layouts.price(typed)).floors[0].blocks
            for lower in (maker.perfect_split(candidate), maker.perfect_split(candidate, typed)):
                for floor, own in zip(lower.floors[0].blocks, priced, strict=True):
                    assert floor.forward_s <= own.forward_s * (1 + ROUNDING)
                    assert floor.least_s <= own.least_s * (1 + ROUNDING)
                    compared += 1
    assert compared > 100


@pytest.mark.slow
def test_what_searches_keep_with_a_graph_changes_no_plan() -> None:
    """Searches of another space and batch before it, and a copy of the graph, which has nothing of them."""
    graph = family("gpt:layers=5,hidden=64,heads=8,vocab=250", 32)

    def planner(graph: Graph, batch: int, space: str) -> Planner:
        return planner_of(graph, cluster=CLUSTER, global_batch_size=batch, precision=BF16, space=space)

    new = pickle.loads(pickle.dumps(graph))
    planner(graph, 24, "default").search(limits=Limits())
    copied = pickle.loads(pickle.dumps(graph))
    assert graph.passes and not copied.passes and not new.passes
    assert copied._index.made == graph._index.made and copied._index.users == graph._index.users
    plans = [planner(traced, 48, "quick").search(limits=Limits()) for traced in (graph, graph, new)]
    timeless = [replace(plan, search=replace(plan.search, wall_time_s=0.0)) for plan in plans]
    assert timeless[0] == timeless[1] == timeless[2]
