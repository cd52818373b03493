import re
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import UsageError
from autopar.plan.schedule import check_schedule
from autopar.planner.space.candidates import (
    _conflict_domain,
    candidates,
    conflict,
    num_micro_batches,
    remedies,
    strict_constraints,
)
from autopar.planner.space.constraints import Problem, usual_constraints
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space
from tests.support.said import refuses

PROBLEM = Problem(
    world_size=64, devices_per_node=8, global_batch_size=512, num_blocks=82, heads=(64,), space=load_space("default")
)


@settings(max_examples=40, deadline=None)
@given(world=st.integers(1, 48), per_node=st.integers(1, 8), batch=st.integers(1, 96), blocks=st.integers(1, 12))
def test_every_candidate_can_run(world: int, per_node: int, batch: int, blocks: int) -> None:
    problem = replace(PROBLEM, world_size=world, devices_per_node=per_node, global_batch_size=batch, num_blocks=blocks)
    found = candidates(problem, Pins())
    assert bool(found) or batch % world, "replicas alone can always run"
    for one in found:
        mesh = one.mesh
        assert (mesh.world_size, batch) == (world, one.micro_batch_size * one.num_micro_batches * mesh.data)
        assert (one.zero_stage == 0) == (mesh.dp_shard == 1) and (one.zero_stage != 2 or mesh.pp == 1)
        assert mesh.pp * one.virtual_stages <= blocks
        check_schedule(one.schedule, mesh.pp, one.virtual_stages, one.num_micro_batches)


def test_practice_is_among_them_and_heads_of_attention_are_no_law_of_tp() -> None:
    found = candidates(PROBLEM, Pins())
    assert len(found) < 5000 and any(c.mesh.tp == 8 and c.mesh.pp == 4 and c.zero_stage == 1 for c in found)
    assert any(c.mesh.dp_shard == 8 and c.mesh.dp_replicate == 8 and c.zero_stage == 3 for c in found)
    assert max(c.mesh.tp for c in found) == 8
    most = candidates(replace(PROBLEM, space=load_space("exhaustive")), Pins())
    assert {c.mesh.tp for c in most} == {1, 2, 4, 8, 16}, "groups of tp may span nodes where the space says so"
    others = candidates(replace(PROBLEM, heads=(1, 2, 5)), Pins())  # blocks whose heads it does not divide split less
    assert {c.mesh.tp for c in others} == {c.mesh.tp for c in found}
    three = candidates(replace(PROBLEM, world_size=24, global_batch_size=96), Pins.parse(["tp=3"]))
    assert {c.mesh.tp for c in three} == {3}


@pytest.mark.slow
@pytest.mark.parametrize("world", [8, 24, 128])
def test_each_space_holds_the_smaller_one(world: int) -> None:
    shape = {"experts": (8,), "sequences": (32768,), "key_heads": (8,), "world_size": world}
    quick, default, wide, most = (
        set(candidates(replace(PROBLEM, space=load_space(name), **shape), Pins()))
        for name in ("quick", "default", "wide", "exhaustive")
    )
    assert quick < default == wide < most  # optimizers on the host are added to a pool where profiles have the link


def test_virtual_stages_divide_the_layers_of_a_rank_unless_pinned() -> None:
    known = replace(PROBLEM, num_layers=14)  # 4 ranks have 4 layers at most, 2 have 7
    found = {(c.mesh.pp, c.virtual_stages) for c in candidates(known, Pins()) if c.virtual_stages > 1}
    assert {v for pp, v in found if pp == 4} == {2, 4} and {v for pp, v in found if pp == 2} <= {7}
    pinned = candidates(known, Pins.parse(["virtual_stages=3"]))
    assert any(c.mesh.pp == 4 and c.virtual_stages == 3 for c in pinned)


def test_what_a_space_leaves_out_is_named_where_laws_and_pins_leave_something() -> None:
    small, pins = replace(PROBLEM, world_size=2, num_blocks=4, num_layers=2), Pins.parse(["schedule=Interleaved1F1B"])
    assert candidates(small, pins) == []
    names = conflict(small, pins)
    usual = "virtual_stages divides the layers of a pipeline rank, 2 / pp rounded up (the space default)"
    assert {usual, "schedule=Interleaved1F1B"} <= set(names)
    (remedy,) = remedies(small, pins, names)
    assert remedy.startswith("pin virtual_stages, which lifts")
    assert candidates(small, Pins.parse(["schedule=Interleaved1F1B", "virtual_stages=2"]))


DRAWN = [
    "tp=3", "tp>=2", "tp<=2", "pp=2", "pp>=3", "dp=2", "dp_shard=4", "zero=2", "zero>=2", "zero=0", "micro_batch=3",
    "num_micro_batches=5", "num_micro_batches<=2", "virtual_stages=3", "ep=2", "ep_data=3", "cp=2", "schedule=1F1B",
    "schedule=Interleaved1F1B", "schedule!=1F1B",
]  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(
    world=st.sampled_from([1, 2, 4]),
    batch=st.integers(1, 24),
    blocks=st.integers(1, 6),
    texts=st.lists(st.sampled_from(DRAWN), max_size=3, unique=True),
    more=st.sampled_from([{}, {"experts": (4,)}, {"sequences": (32768,), "key_heads": (8,)}, {"mixes_samples": True}]),
)
def test_a_conflict_is_a_smallest(world: int, batch: int, blocks: int, texts: list[str], more: dict[str, Any]) -> None:
    problem = replace(PROBLEM, world_size=world, global_batch_size=batch, num_blocks=blocks, num_layers=blocks, **more)
    pins = Pins.parse(texts)
    names = conflict(problem, pins)
    assert bool(names) == (not candidates(problem, pins))
    values, _ = _conflict_domain(problem, pins)
    columns = np.array(list(product(*values.values())), dtype=np.int64).T
    table = dict(zip(values, columns, strict=True))
    table["num_micro_batches"] = num_micro_batches(table, batch)
    known = {c.name: c.holds(table) for c in (*strict_constraints(problem, pins), *usual_constraints(problem, pins))}
    for left_out in ((), *((name,) for name in names)):
        keep = np.ones(columns.shape[1], dtype=bool)
        for name in names:
            if name not in left_out:
                keep &= known[name]
        assert keep.any() == (bool(left_out) or not names), (names, left_out)


def test_a_space_from_before_context_parallelism_has_its_usual_bounds(checkout: Path, tmp_path: Path) -> None:
    shipped = (checkout / "search" / "quick.toml").read_text(encoding="utf-8")
    path = tmp_path / "own.toml"
    path.write_text("\n".join(line for line in shipped.splitlines() if not line.startswith(("max_cp", "cp_from"))))
    own, usual = load_space(str(path)), load_space("default")
    assert (own.max_cp, own.cp_from, own.max_pp) == (usual.max_cp, usual.cp_from, load_space("quick").max_pp)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("hsdp = false", "hsdp = 3"), "true or false"),
        (("zero_stages = [0, 1, 3]", "zero_stages = [-1]"),
         "Wrong value of 'zero_stages[0]'. Expected one of 0, 1, 2, 3, got -1"),
        (("zero_stages = [0, 1, 3]", "zero_stages = [4]"),
         "Wrong value of 'zero_stages[0]'. Expected one of 0, 1, 2, 3, got 4"),
        (('schedules = ["1F1B"]', 'schedules = ["2F2B"]'), "Unknown schedules[0] '2F2B'. Known: 1F1B, GPipe"),
        (("virtual_stages = [2]", "virtual_stages = []"), "The list 'virtual_stages' is empty"),
        (("micro_batches = [1, 2, 4]", "micro_batches = [1, 2.5]"), "Wrong value of 'micro_batches[1]'. Expected a whole number"),
        (("trials = 60", "trials = 60\nbucket_mib = [1e-7]"), "less than a byte"),
        (("trials = 60", "trials = 60\nmore = 1"), "more"),
        (('sampler = "tpe"', 'sampler = "some"'), "Unknown sampler 'some'"),
    ],
)  # fmt: skip
def test_malformed_spaces_name_file_and_key(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    text = (Path(__file__).parents[2] / "search" / "quick.toml").read_text()
    assert change[0] in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(*change))
    refuses(UsageError, rf"mine\.toml.*{re.escape(said)}", load_space, str(path))
