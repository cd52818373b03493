import pytest

from autopar import api
from autopar.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.models import resolve_model
from autopar.plan import BF16
from autopar.search.layouts import Layouts
from autopar.search.options import Load, Split
from autopar.search.pins import Pins
from autopar.search.space import load_space

SAME = 1e-9
MODELS = {
    "gpt": ("gpt:layers=2,hidden=256,heads=4,vocab=1024", 64),
    "llama": (
        "hf:llama?hidden_size=256&intermediate_size=512&num_hidden_layers=2&num_attention_heads=8&num_key_value_heads=4&vocab_size=512",
        128,
    ),
    "gpt2": ("hf:gpt2?n_embd=128&n_layer=2&n_head=4&vocab_size=512&n_positions=64", 64),
}


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


def test_needs_are_not_known_where_a_vocabulary_may_be_padded() -> None:
    source = resolve_model("gpt:layers=1,hidden=64,heads=4,vocab=130", sequence_length=16)
    graph = api.trace_model(source.model, source.example_inputs, BF16, name="padded")
    model = CostModel(Cluster.parse("h100-sxm5-80gb:1x8"), BF16, "adamw")
    layouts = Layouts(graph, model, global_batch_size=8, pins=Pins.parse(()), space=load_space("default"))
    for tp, is_known in ((2, True), (4, False)):
        drafts = layouts.drafts(Split(micro_batch_size=1, tp=tp), Load(num_micro_batches=8, in_flight=1))
        assert all(bool(layouts.needs(draft)) == is_known for draft in drafts)
