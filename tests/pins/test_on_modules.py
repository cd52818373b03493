import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.cli.options import split_pins
from autopar.errors import UsageError
from autopar.pins.on_modules import pins_of
from autopar.plan.plan import Plan
from tests.support.said import refuses
from tests.support.small_models import model_of


def residual() -> nn.Module:
    forward = lambda self, x: x + self.down(torch.relu(self.up(x)))
    return model_of(forward, up=nn.Linear(8, 16), down=nn.Linear(16, 8))


def layered() -> nn.Module:
    layers = nn.Sequential(*(residual() for _ in range(4)))
    return model_of(lambda self, x: self.layers(x).square().mean(), layers=layers)


def planned(net: nn.Module, *pins: str) -> Plan:
    asked = {"example_inputs": [torch.randn(8, 8)], "cluster": "cpu:1x4", "global_batch_size": 8, "trials": 8}
    return autopar.search(net, pins=pins, **asked)


def test_a_search_holds_to_the_pins_of_modules() -> None:
    net = layered()
    autopar.pin(net.layers[1], recompute="full", stage=0)
    autopar.pin(net.layers[2], stage=0, parameters={"*.weight": "tp:I"})
    plan = planned(net, "pp=2", "tp=2")
    assert plan.pins == (
        "recompute=full@layers.1", "stage@layers.1=0", "stage@layers.2=0", "layers.2.*.weight=tp:I", "pp=2", "tp=2",
    )  # fmt: skip
    by_label = {block.label: block for block in plan.blocks}
    assert by_label["layers.1"].recompute == "full"
    first = plan.stages[0]
    assert by_label["layers.2"].index in range(first.start, first.stop)
    (tp,) = (typing for typing in plan.layouts[by_label["layers.2"].layout].typings if typing.axis == "tp")
    kept = {n: str(t) for n, t in zip(tp.parameter_names, tp.parameters, strict=True) if n.endswith("weight")}
    assert kept == {"up.weight": "I", "down.weight": "I"}


def test_pins_of_the_call_win_over_those_of_modules() -> None:
    net = layered()
    autopar.pin(net.layers[1], recompute="full")
    plan = planned(net, "recompute=none@layers.1", "pp=1")
    assert {block.recompute for block in plan.blocks if block.label == "layers.1"} == {"none"}


def test_copies_keep_pins_and_a_later_pin_wins() -> None:
    net = layered()
    assert autopar.pin(net.layers[3], recompute="full") is net.layers[3]
    autopar.pin(net.layers[3], recompute="none", stage=1)
    autopar.pin(net, recompute="full")
    expected = ("recompute=full", "recompute=none@layers.3", "stage@layers.3=1")
    assert pins_of(net) == pins_of(copy.deepcopy(net)) == expected
    assert "_autopar_pins" not in net.layers[3].state_dict()


def test_a_module_is_pinned_opaque() -> None:
    net = layered()
    autopar.pin(net.layers[2], opaque=True)
    plan = planned(net, "pp=1")
    assert plan.opaque == ("layers.2",)
    assert any("layers.2" in note for note in plan.notes)


@pytest.mark.parametrize(("wrong", "said"), [
    ({}, "Nothing is pinned"),
    ({"recompute": "some"}, "Unknown recompute 'some'.*'none', 'selective' or 'full'"),
    ({"stage": -1}, "The stage is -1.*counted from 0"),
    ({"opaque": "no"}, "opaque is 'no'. Write opaque=True"),
    ({"parameters": {3: "tp:I"}}, "The parameters are {3: 'tp:I'}"),
    ({"parameters": "weight"}, "The parameters are 'weight'. Write for example parameters="),
    ({"parameters": {"wieght": "tp:I"}}, "No parameter .* matches 'wieght'.*up.weight"),
    ({"parameters": {"*": "zz"}}, "cannot be stored as zz"), ({"parameters": {"*": "I"}}, "cannot be stored as I. Write tp:I"),
    ({"parameters": {"*": "dp:I"}}, "Unknown axis 'dp'"), ({"parameters": {"*": "tp:R"}}, "cannot be stored as R"),
])  # fmt: skip
def test_what_is_no_pin_is_refused_at_once(wrong: dict[str, object], said: str) -> None:
    refuses(UsageError, said, autopar.pin, residual(), **wrong)
    refuses(UsageError, "'0' is no module", autopar.pin, "0", stage=1)


def test_the_whole_model_has_no_stage() -> None:
    refuses(UsageError, "The complete model cannot be pinned", planned, autopar.pin(layered(), stage=0))


def test_a_module_inside_of_a_block_names_the_blocks() -> None:
    net = layered()
    autopar.pin(net.layers[0].up, recompute="full")
    refuses(UsageError, r"No block .*layers\.0\.up.*layers\.1", planned, net)


def test_pins_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "pins.txt"
    path.write_text("tp=2  # inside, of a node\n\n# a remark\nrecompute=full@layers.0-1, zero<=1\n")
    assert split_pins(["pp=2", f"@{path}"]) == ["pp=2", "tp=2", "recompute=full@layers.0-1", "zero<=1"]
    path.write_text("tp=2\n", encoding="utf-8-sig")
    assert split_pins([f"@{path}"]) == ["tp=2"], "an editor's mark of the encoding is no part of a pin"
    refuses(UsageError, "Give --pin @FILE", split_pins, [f"@{tmp_path / 'none.txt'}"])
    path.write_text("tp=2\nzero\n")
    refuses(UsageError, r"pins.txt, line 2: The pin 'zero' is not of the form", split_pins, [f"@{path}"])
