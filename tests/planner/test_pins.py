import re
from dataclasses import replace

import pytest

from autopar.errors import UsageError
from autopar.models.resolve import resolve_model
from autopar.plan.mesh import S
from autopar.plan.plan import BUCKET_BYTES
from autopar.planner.space import pin_syntax
from autopar.planner.space.pin_syntax import PIN_KINDS, PinKind, parse_pin
from autopar.planner.space.pins import Pins
from tests.support.cli_runner import Run
from tests.support.planner.graphs import mlp
from tests.support.said import refuses


@pytest.mark.parametrize(
    ("text", "key", "good", "bad"),
    [
        ("tp=4", "tp", 4, 2), ("cp<=2", "cp", 2, 3), ("pp!=8", "pp", 4, 8), ("micro_batch>=2", "micro_batch", 2, 1),
        ("zero=1", "zero", 1, 3), ("zero_stage=1", "zero", 1, 3), ("virtual_stages<3", "virtual_stages", 2, 3),
        ("dp>2", "dp", 3, 2), ("schedule=1f1b", "schedule", "1F1B", "GPipe"), ("schedule!=GPipe", "schedule", "1F1B", "GPipe"),
        ("precision=bf16", "precision", "bf16", "fp32"), ("precision=fp8", "precision", "fp8", "fp32"),
    ],
)  # fmt: skip
def test_a_pin_allows_what_it_says(text: str, key: str, good: int | str, bad: int | str) -> None:
    pins = Pins.parse([text])
    assert pins.allows(key, good) and not pins.allows(key, bad)
    assert pins.allows("other", bad)


def test_blocks_are_selected_by_ranges_and_patterns_and_unknown_ones_refused() -> None:
    graph = mlp(layers=6)
    pins = Pins.parse(["recompute=full@layers.0-2", "stage@layers.*=0", "recompute=none@layers.1"])
    assert pins.recompute(graph) == {1: "full", 2: "none", 3: "full"}
    assert pins.stages(graph) == dict.fromkeys(range(1, 7), 0)
    assert set(Pins.parse(["recompute=full"]).recompute(graph)) == set(range(8))
    for text, said in (("recompute=full@layer.0-3", "layers.1"), ("layers.*.upp=tp:S(0)", "layers.0.up")):
        refuses(UsageError, said, Pins.parse([text]).check, mlp(layers=2))


def test_blocks_of_several_modules_are_selected_by_one_of_them_unless_another_has_its_name() -> None:
    graph = resolve_model("llama:layers=2,hidden=32,heads=4,ffn=64,vocab=65", sequence_length=8).trace()
    labels = ["embed_tokens", "model.layers.0", "model.layers.1", "norm+lm_head"]
    assert [block.label for block in graph.blocks] == labels
    for selector in ("norm+lm_head", "lm_head", "norm", "lm_*"):
        assert Pins.parse([f"stage@{selector}=1"]).stages(graph) == {3: 1}
    named = replace(graph, blocks=(replace(graph.blocks[0], label="norm"), *graph.blocks[1:]))
    assert Pins.parse(["stage@norm=0"]).stages(named) == {0: 0}


def test_parameters_are_matched_by_pattern() -> None:
    pin = parse_pin("model.layers.*.mlp.up_proj.weight=tp:S(0)")
    assert (pin.axis, pin.type) == ("tp", S(0)) and pin.matches(["model.layers.11.mlp.up_proj.weight"])
    assert not pin.matches(["model.layers.11.mlp.down_proj.weight"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("offload=host", "activations@BLOCKS, none, optimizer"),
        ("offload=activations@", "does not say which activations are offloaded"),
        ("offload!=activations", "does not say which activations are offloaded"),
        ("schedule<=1F1B", "'<=' does not go with schedule"), ("recompute=half", "Choose none, selective or full"),
        ("recompute=full@", "Choose none, selective or full"), ("stage@layers.0=x", "Count stages from 0"),
        ("w=tq:S(0)", "Did you mean 'tp'"), ("w=tp:P", "cannot be stored as P"), ("w=tp:Q", "cannot be stored as Q"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    refuses(UsageError, re.escape(said), parse_pin, text)


def test_sizes_of_buckets() -> None:
    usual = (2**20, BUCKET_BYTES)
    assert Pins().buckets(usual) == (BUCKET_BYTES, 2**20)
    assert Pins.parse(["bucket_bytes=1000"]).buckets(usual) == (1000,)
    assert Pins.parse(["bucket_bytes<1048576"]).buckets(usual) == (2**20 - 1,)
    assert Pins.parse(["bucket_bytes!=26214400"]).buckets(usual) == (2**20,)
    refuses(
        UsageError, r"No bucket size holds for bucket_bytes=0\. Write", Pins.parse(["bucket_bytes=0"]).buckets, usual
    )


# --- the table of pins

SAME = {"zero_stage", "micro_batch_size"}
"""Other names of what the table has."""


@pytest.mark.parametrize("kind", PIN_KINDS, ids=lambda kind: kind.example)
def test_each_example_is_a_pin_of_its_form(kind: PinKind) -> None:
    assert parse_pin(kind.example).text == kind.example
    name = re.split(r"[ =@\[]", kind.form)[0]
    assert name in kind.example or name == "PARAMETER"


def test_every_name_has_a_row_that_the_shell_shows(run: Run) -> None:
    named = {re.split(r"[ =\[]", form)[0] for kind in PIN_KINDS for form in kind.form.split(", ")}
    known = {name.partition("=")[0] for name in pin_syntax._KEYS}
    assert known - SAME == named
    text = run("pins").out
    assert all(kind.example in text for kind in PIN_KINDS)
    assert run("pins", "--json").json["zero=1"]["holds"] == "ZeRO stage, 0 to 3"
