"""Compact graphs: what stands for what; and spaces read from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.graph.graph import Ref
from autopar.graph.rewrites import compact
from autopar.planner.space.space import load_space
from tests.support.planner.graphs import mlp


def test_a_run_is_cut_to_first_inner_and_last() -> None:
    small = compact(mlp(layers=9))
    assert [b.label for b in small.graph.blocks] == ["start", "layers.0", "layers.1", "layers.8", "loss"]
    assert small.members == ((0,), (1,), tuple(range(2, 9)), (9,), (10,))
    assert small.alike == ((Ref("r0"), Ref("r1")),)
    last = small.graph.blocks[3]
    assert small.graph.block_inputs(last) == (Ref("r1"),)
    assert {p.name for p in small.graph.parameters} == {"w_in", *(f"{k}{i}" for k in ("up", "down") for i in (0, 1, 8))}


def test_layers_in_turn_are_cut_to_their_first_one_inner_and_their_last_turn() -> None:
    small = compact(mlp(layers=14, turn=3))
    assert [b.label for b in small.graph.blocks[1:-1]] == [f"layers.{i}" for i in (0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13)]
    assert small.members[4:7] == ((4, 7), (5, 8), (6, 9))
    assert small.class_of == (0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    assert small.alike == ((Ref("r2"), Ref("r5")),)
    assert small.graph.block_inputs(small.graph.blocks[7]) == (Ref("r5"),)


def test_short_runs_stay_whole() -> None:
    graph = mlp(layers=3)
    assert compact(graph).graph.ops == graph.ops


def test_different_keys_are_not_merged() -> None:
    graph = mlp(layers=8)
    keys = ["a"] * 5 + ["b"] * 5
    small = compact(graph, keys=keys)
    assert small.members == ((0,), (1,), (2, 3), (4,), (5,), (6, 7), (8,), (9,))


def test_shipped_spaces_are_read() -> None:
    for name in ("default", "quick", "wide", "exhaustive"):
        assert load_space(name).name == name


def test_a_space_from_before_context_parallelism_has_its_usual_bounds(checkout: Path, tmp_path: Path) -> None:
    shipped = (checkout / "search" / "quick.toml").read_text(encoding="utf-8")
    path = tmp_path / "own.toml"
    path.write_text("\n".join(line for line in shipped.splitlines() if not line.startswith(("max_cp", "cp_from"))))
    own, usual = load_space(str(path)), load_space("default")
    assert (own.max_cp, own.cp_from) == (usual.max_cp, usual.cp_from)
    assert own.max_pp == load_space("quick").max_pp


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("hsdp = false", "hsdp = 3"), "true or false"),
        (("zero_stages = [0, 1, 3]", "zero_stages = [-1]"), "list of numbers from zero"),
        (
            ("zero_stages = [0, 1, 3]", "zero_stages = [4]"),
            "Wrong value of 'zero_stages'. Expected a list of whole numbers from 0 to 3, got [4.0]",
        ),
        (('schedules = ["1F1B"]', 'schedules = ["2F2B"]'), "list of none, GPipe"),
        (("max_pp = 16", "max_ppp = 16"), "max_pp"),
        (("trials = 60", "trials = 60\nmore = 1"), "more"),
        (('sampler = "tpe"', 'sampler = "some"'), "Unknown sampler 'some'"),
    ],
)
def test_malformed_spaces_name_file_and_key(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    text = (Path(__file__).parents[2] / "search" / "quick.toml").read_text()
    assert change[0] in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(*change))
    with pytest.raises(UsageError) as caught:
        load_space(str(path))
    assert "mine.toml" in str(caught.value)
    assert said in str(caught.value)
