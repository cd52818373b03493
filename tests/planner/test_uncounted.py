from collections.abc import Sequence
from itertools import chain, combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar import api
from autopar.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.errors import InfeasibleError
from autopar.graph.ir import Graph
from autopar.graph.trace import trace
from autopar.models import resolve_model
from autopar.plan import BF16
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.remade import Freed, points_of
from autopar.planner.layouts.types import Load, Split
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space
from autopar.validate.families import Sizes, build

SAME = 1e-9
MODELS = {
    "gpt": ("gpt:layers=2,hidden=256,heads=4,vocab=1024", 64),
    "llama": (
        "hf:llama?hidden_size=256&intermediate_size=512&num_hidden_layers=2&num_attention_heads=8&num_key_value_heads=4&vocab_size=512",
        128,
    ),
    "gpt2": ("hf:gpt2?n_embd=128&n_layer=2&n_head=4&vocab_size=512&n_positions=64", 64),
}
MIXTURE = (
    "hf:mixtral?hidden_size=128&intermediate_size=256&num_hidden_layers=2&num_attention_heads=4&num_key_value_heads=2"
    "&vocab_size=512&num_local_experts=4&num_experts_per_tok=2"
)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_known_of_a_layout_is_no_more_than_its_price(name: str) -> None:
    text, length = MODELS[name]
    source = resolve_model(text, sequence_length=length, batch_size=2)
    graph = api.trace_model(source.model, source.example_inputs, BF16, name=name)
    model = CostModel(Cluster.parse("h100-sxm5-80gb:1x8"), BF16, "adamw")
    layouts = Layouts(graph, model, global_batch_size=64, pins=Pins.parse(()), space=load_space("default"))
    again = saved = compared = 0.0
    for size, tp, cp in ((1, 2, 1), (4, 4, 1), (4, 2, 2)):
        split = Split(micro_batch_size=size, tp=tp, cp=cp)
        least_s = layouts.least_s(split)
        for draft in layouts.drafts(split, Load(num_micro_batches=8, in_flight=2)):
            option = layouts.option(draft)
            for k, (cost, needs) in enumerate(zip(option.costs, layouts.needs(draft), strict=True)):
                own_s = cost.forward_s + cost.backward_s + cost.communication_forward_s + cost.communication_backward_s
                assert least_s[k] <= own_s * (1 + SAME)
                assert draft.blocks_s[k] <= own_s * (1 + SAME)
                assert needs.again_s <= cost.recompute_s("full") * (1 + SAME)
                assert needs.saved_bytes <= cost.saved_bytes
                again += needs.again_s / max(cost.recompute_s("full"), 1e-30)
                saved += needs.saved_bytes / max(cost.saved_bytes, 1)
                compared += 1
            assert draft.time_s == pytest.approx(
                sum(len(own) * own_s for own, own_s in zip(layouts.compact.members, draft.blocks_s, strict=True))
            )
    assert again > 0.8 * compared and saved > 0.6 * compared


def least_s(points: Sequence[Freed], freed_bytes: float) -> float:
    """Seconds on the lower hull of what selective recompute may free."""
    found = before_s = before = 0.0
    for own_s, own in points[1:]:  # the first is the one that takes the least
        found = max(found, before_s + (own_s - before_s) * (freed_bytes - before) / (own - before))
        before_s, before = own_s, own
    return found


class Scaled(torch.nn.Module):
    """Layers that read views of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
        self.scales = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(2, 64)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            y = layer(torch.nn.functional.gelu(x * scale[0]))
            x = x + torch.tanh(y.view(-1, 8, 8) * scale[1].view(8, 8)).reshape(-1, 64)
        return x.square().mean()


def graph_of(name: str) -> Graph:
    if name == "scaled":
        return api.trace_model(Scaled(), (torch.randn(2, 64),), BF16, name=name)
    if name == "scores":  # products of activations are made again too
        sizes = Sizes(family="gpt", hidden=128, ffn=512, heads=4, kv_heads=4, vocabulary=512, sequence=64,
                      attention="scores", dtype="bfloat16")  # fmt: skip
        model, batch = build(sizes, 2)
        return trace(model, (), batch, name=name)
    text, length = {**MODELS, "mixture": (MIXTURE, 64)}[name]
    source = resolve_model(text, sequence_length=length, batch_size=2)
    return api.trace_model(source.model, source.example_inputs, BF16, name=name)


@pytest.mark.parametrize("name", [*MODELS, "mixture", "scores", "scaled"])
def test_what_selective_recompute_takes_is_known_before_a_layout_is_priced(name: str) -> None:
    """Of no block more than its price says: bytes that it frees at the most, and seconds on a convex line below all choices."""
    costs = CostModel(Cluster.parse("h100-sxm5-80gb:1x8"), BF16, "adamw")
    layouts = Layouts(graph_of(name), costs, global_batch_size=64, pins=Pins.parse(()), space=load_space("wide"))
    share = compared = 0.0
    for size, tp, cp in ((1, 2, 1), (4, 4, 1), (4, 2, 2)):
        split = Split(micro_batch_size=size, tp=tp, cp=cp)
        try:
            drafts = layouts.drafts(split, Load(num_micro_batches=8, in_flight=2))
        except InfeasibleError:  # nothing that cp splits
            assert cp > 1
            continue
        for draft in drafts:
            for cost, needs in zip(layouts.option(draft).costs, layouts.needs(draft), strict=True):
                freed = needs.saved_bytes - cost.remade.saved_bytes
                assert freed <= max((own for _, own in needs.remade), default=0.0) + SAME * cost.saved_bytes
                known_s = least_s(needs.remade, freed)
                assert known_s <= cost.remade.time_s * (1 + SAME)
                if freed > 0:
                    assert needs.remade[0][0] <= cost.remade.time_s * (1 + SAME)
                    share += known_s / cost.remade.time_s
                    compared += 1
    assert share > 0.6 * compared > 0


@given(st.lists(st.tuples(st.floats(0.01, 4.0), st.floats(0.01, 4.0)), max_size=5))
def test_no_choice_of_groups_lies_below_their_points(groups: list[Freed]) -> None:
    points = points_of(groups)
    for some in chain.from_iterable(combinations(groups, n) for n in range(1, len(groups) + 1)):
        seconds, freed = sum(own_s for own_s, _ in some), sum(own for _, own in some)
        assert freed <= points[-1][1] * (1 + SAME)
        assert points[0][0] <= seconds
        assert least_s(points, freed) <= seconds * (1 + SAME) + SAME


def test_needs_are_not_known_where_a_vocabulary_may_be_padded() -> None:
    source = resolve_model("gpt:layers=1,hidden=64,heads=4,vocab=130", sequence_length=16)
    graph = api.trace_model(source.model, source.example_inputs, BF16, name="padded")
    model = CostModel(Cluster.parse("h100-sxm5-80gb:1x8"), BF16, "adamw")
    layouts = Layouts(graph, model, global_batch_size=8, pins=Pins.parse(()), space=load_space("default"))
    for tp, is_known in ((2, True), (4, False)):
        drafts = layouts.drafts(Split(micro_batch_size=1, tp=tp), Load(num_micro_batches=8, in_flight=1))
        assert all(bool(layouts.needs(draft)) == is_known for draft in drafts)
