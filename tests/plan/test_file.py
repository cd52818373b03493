"""Plan files: laws of the round trip, and what is said about files that are not plans."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings

from autopar.errors import PlanError
from autopar.plan.diff import diff_plans
from autopar.plan.file import dumps, load_plan, plan_from_dict, plan_schema, plan_to_dict, save_plan
from autopar.plan.json_schema import schema_text
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from tests.support.example_plans import llama_plan, single_plan
from tests.support.strategies import plans

SCHEMA_FILE = Path(__file__).parents[2] / "docs" / "plan.schema.json"


@settings(max_examples=40, deadline=None)
@given(plans())
def test_round_trip_through_text_is_exact(plan: Plan) -> None:
    again = plan_from_dict(json.loads(dumps(plan_to_dict(plan))))
    assert again == plan
    assert repr(again) == repr(plan)  # floats bit by bit, and no int became a float


@settings(max_examples=20, deadline=None)
@given(plans(), plans())
def test_difference_is_empty_exactly_for_equal_plans(one: Plan, other: Plan) -> None:
    assert diff_plans(one, one) == []
    assert (diff_plans(one, other) == []) == (replace(other, search=one.search) == one)


def test_published_schema_is_current_and_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(plan_schema())
    remedy = "run: python -m autopar.plan.json_schema docs/plan.schema.json"
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), remedy


def test_file_is_readable_and_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    save_plan(llama_plan(), path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert load_plan(path) == llama_plan()
    assert max(map(len, lines)) <= 110
    assert '  "mesh": {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 4, "ep": 1, "ep_data": 1},' in lines
    assert len(lines) <= 165
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_write_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(llama_plan(), path)
    before = path.read_bytes()
    broken = replace(llama_plan(), predicted=replace(llama_plan().predicted, mfu=float("nan")))
    with pytest.raises(PlanError, match=r"predicted\.mfu: every number of a plan is finite"):
        save_plan(broken, path)
    assert path.read_bytes() == before
    with pytest.raises(PlanError, match="the plan can be written"):
        save_plan(llama_plan(), tmp_path / "missing" / "plan.json")


def test_missing_optional_fields_take_their_defaults() -> None:
    data = plan_to_dict(llama_plan())
    for key in ("notes", "written_by"):
        del data[key]
    assert plan_from_dict(data).notes == ()


BAD_TEXTS: dict[str, tuple[str, str]] = {
    "empty": ("", "a plan file is JSON, but found a file that is empty"),
    "binary words": ("hello", "line 1, column 1: a plan file is JSON"),
    "truncated": (dumps(plan_to_dict(llama_plan()))[:900], "but found a file that is cut off"),
    "list": ("[]", "a plan file holds one JSON object, but found list"),
    "not a number": ('{"version": NaN}', "every number of a plan is finite, but found NaN"),
    "key twice": ('{"version": 1, "version": 1}', "a key is given once, but found 'version' twice"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_corrupt_text_is_named(name: str, tmp_path: Path) -> None:
    text, expected = BAD_TEXTS[name]
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        load_plan(path)
    assert str(caught.value).startswith(str(path))
    assert expected in str(caught.value)


def test_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"nowhere\.json: the plan file can be read.*make one with 'autopar search"):
        load_plan(tmp_path / "nowhere.json")


def _set(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        inner: Any = data
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = value

    return change


BAD_VALUES: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (
        _set("layouts", 0, "typings", 1, "strategies", value=3),
        "p.json: layouts[0].typings[1].strategies: the value is of type array, but found 3",
    ),
    (_set("meshes", value={}), "every key of a plan is known, but found 'meshes'; did you mean 'mesh'?"),
    (_set("mesh", "tp", value=-1), "p.json: mesh.tp: the value is at least 0, but found -1"),
    (_set("mesh", "tp", value=0), "p.json: mesh: the degree of tp is at least 1, but found 0"),
    (
        _set("layouts", 1, "typings", 1, "parameters", 3, value="S(x)"),
        'layouts[1].typings[1].parameters[3]: a type is one of I, R, P, S(d), but found "S(x)"; write for example S(0)',
    ),
    (_set("layouts", 1, "typings", 1, "parameters", 3, value="P"), "a parameter at rest is I or S(d), but found P"),
    (_set("layouts", 1, "typings", 1, "parameter_names", value=["a"]), "one name for each parameter or none"),
    (_set("schedule", value="2F2B"), "the value is one of none, GPipe, 1F1B, Interleaved1F1B, but found"),
    (_set("schedule", value="none"), "the schedule is 'none' exactly where pp is 1, but found 'none' with pp=2"),
    (_set("virtual_stages", value=2), "more than one virtual stage needs the schedule Interleaved1F1B"),
    (
        _set("mesh", "tp", value=8),
        "number of ranks of cluster h100-sxm5-80gb:2x8, 16, but found pp=2 x dp_shard=2 x tp=8 = 32",
    ),
    (_set("global_batch_size", value=63), "divides global_batch_size, but found 2 * 1 * 2 and 63"),
    (_set("micro_batch_size", value=0), "micro_batch_size: the value is at least 1, but found 0"),
    (_set("zero_stage", value=0), "without ZeRO dp_shard is 1, but found dp_shard=2"),
    (_set("zero_stage", value=4), "the ZeRO stage is 0, 1, 2 or 3, but found 4"),
    (_set("blocks", 4, "layout", value=9), "blocks[4].layout: a block's layout is one of the 3 layouts, but found 9"),
    (_set("blocks", 4, "index", value=9), "blocks[4].index: blocks stand in order"),
    (_set("stages", value=[]), "there are pp * virtual_stages = 2 stages, but found 0"),
    (_set("stages", 1, "start", value=6), "stages[1]: the stage takes up the blocks where the one before ends, at 5"),
    (_set("stages", 1, "stop", value=9), "the stages cover all 10 blocks, but found 9"),
    (_set("stages", 1, "pp_rank", value=0), "stage 1 runs on pipeline rank 1, but found 0"),
    (_set("predicted", "stage_times", value=[[1, 2]]), "one pair of times for each stage or none, but found 1"),
    (_set("predicted", "step_time_interval_s", value=[1.0]), "step_time_interval_s: the list has 2 items, but found 1"),
    (_set("predicted", "memory", 1, "pp_rank", value=2), "a pipeline rank lies below pp=2, but found 2"),
    (_set("version", value="1"), "version: the value is 1"),
    (
        _set("precision", "compute", value="int8"),
        "precision.compute: the dtype is one of float64, float32, bfloat16, float16",
    ),
    (lambda data: data.pop("mesh"), "p.json: the key 'mesh' is given, but found nothing"),
    (lambda data: data["mesh"].update(dp=2), "p.json: mesh: every key of a plan is known, but found 'dp'"),
]


@pytest.mark.parametrize(("change", "expected"), BAD_VALUES, ids=[text[:40] for _, text in BAD_VALUES])
def test_broken_plan_is_named(change: Callable[[dict[str, Any]], None], expected: str) -> None:
    data = json.loads(dumps(plan_to_dict(llama_plan())))
    change(data)
    with pytest.raises(PlanError) as caught:
        plan_from_dict(data, place="p.json")
    assert expected in str(caught.value)


def test_newer_format_says_who_reads_it() -> None:
    data = {"version": 99, "written_by": "autopar 7.1.0", "new_key": {}}
    with pytest.raises(PlanError, match=r"reads plan formats up to version 1, but found version 99; .*autopar 7\.1\.0"):
        plan_from_dict(data)


def test_differences_are_paths_and_values() -> None:
    other = replace(llama_plan(), mesh=Mesh(pp=2, dp_shard=2, tp=4, ep=2), zero_stage=3, pins=())
    assert [str(change) for change in diff_plans(llama_plan(), other)] == [
        "mesh.ep: 1 -> 2",
        "zero_stage: 1 -> 3",
        'pins: ["tp<=4"] -> []',
    ]
    buckets = diff_plans(llama_plan(), replace(llama_plan(), bucket_bytes=2**20))
    assert [str(change) for change in buckets] == ["bucket_bytes: 26214400 -> 1048576"]
    assert any(change.path == "predicted.memory" for change in diff_plans(llama_plan(), single_plan()))
