import json
import operator
import re
from dataclasses import replace
from functools import reduce
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings

from autopar.errors import PlanError, UsageError
from autopar.plan.file import load_plan, plan_from_dict, plan_to_dict, save_plan
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.plan.text import diff_plans
from autopar.util.files import dumps
from tests.support.example_plans import llama_plan, single_plan
from tests.support.said import refuses
from tests.support.strategies import plans
from tools.evidence.plan_schema import plan_schema, schema_text

SCHEMA_FILE = Path(__file__).parents[2] / "docs" / "reference" / "plan.schema.json"


@settings(max_examples=40, deadline=None)
@given(plans())
def test_round_trip_through_text_is_exact(plan: Plan) -> None:
    again = Plan.from_dict(json.loads(dumps(plan.to_dict())))
    assert again == plan
    assert repr(again) == repr(plan)  # floats bit by bit, and no int became a float


@settings(max_examples=20, deadline=None)
@given(plans(), plans())
def test_difference_is_empty_exactly_for_equal_plans(one: Plan, other: Plan) -> None:
    assert diff_plans(one, one) == []
    assert (diff_plans(one, other) == []) == (replace(other, search=one.search) == one)


def test_published_schema_is_current_and_valid() -> None:
    jsonschema.Draft202012Validator.check_schema(plan_schema())
    remedy = "run: python -m tools.evidence.plan_schema docs/reference/plan.schema.json"
    assert SCHEMA_FILE.read_text(encoding="utf-8") == schema_text(), remedy


def test_file_is_readable_and_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    llama_plan().save(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert Plan.load(path) == llama_plan()
    assert max(map(len, lines)) <= 110
    assert '  "mesh": {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 4, "ep": 1, "ep_data": 1},' in lines
    assert len(lines) <= 165
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]
    data = plan_to_dict(llama_plan())
    for key in ("notes", "written_by"):
        del data[key]
    assert plan_from_dict(data).notes == ()  # what is left out has its default


def test_write_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(llama_plan(), path)
    before = path.read_bytes()
    broken = replace(llama_plan(), predicted=replace(llama_plan().predicted, mfu=float("nan")))
    refuses(PlanError, r"predicted\.mfu' .*Expected a finite number below 1e\+30, got nan", save_plan, broken, path)
    assert path.read_bytes() == before
    refuses(PlanError, r"Cannot write .*missing/plan.json", save_plan, llama_plan(), tmp_path / "missing" / "plan.json")


BAD_TEXTS = {
    "empty": ("", "The plan file is empty"),
    "binary words": ("hello", "line 1, column 1: The plan file is not JSON"),
    "list": ("[]", "holds a JSON object, this one something else"),
    "not a number": ('{"version": NaN}', "A number of the plan is NaN"),
    "too many digits": ('{"version": 1' + 5000 * "0" + "}", "The plan file is not JSON"),
    "nested too deeply": (100_000 * "[", "The plan file is not JSON"),
    "key twice": ('{"version": 1, "version": 1}', "The key 'version' is given twice"),
}


@pytest.mark.parametrize("name", BAD_TEXTS)
def test_corrupt_text_is_named(name: str, tmp_path: Path) -> None:
    text, expected = BAD_TEXTS[name]
    path = tmp_path / "plan.json"
    path.write_text(text)
    refuses(PlanError, f"^{re.escape(str(path))}.*{re.escape(expected)}", load_plan, path)


def test_a_newer_format_says_who_reads_it() -> None:
    data = {"version": 99, "written_by": "autopar 7.1.0", "new_key": {}}
    refuses(PlanError, r"format version 99, but .* reads formats up to 1\. .*autopar 7\.1\.0", plan_from_dict, data)


ABSENT = object()

BAD_VALUES: list[tuple[str, object, str]] = [
    ("layouts.0.typings.1.strategies", 3,
     "p.json: Wrong value of 'layouts[0].typings[1].strategies'. Expected a list, got 3."),
    ("meshes", {}, "Unknown key 'meshes'. Did you mean 'mesh'?"),
    ("mesh.tp", -1, "p.json: Wrong value of 'mesh.tp'. Expected a number from zero, got -1."),
    ("mesh.tp", 0, "p.json: mesh: The degree of tp is 0."),
    ("layouts.1.typings.1.parameters.3", "S(x)",
     "p.json: layouts[1].typings[1].parameters[3]: Unknown type 'S(x)'. Write I, R, P or S(d), for example S(0)."),
    ("layouts.1.typings.1.parameters.3", "P", "Expected I or S(d), got P."),
    ("layouts.1.typings.1.parameter_names", ["a"], "one name for each parameter or none"),
    ("schedule", "2F2B", "p.json: Unknown schedule '2F2B'. Known: 1F1B, GPipe, Interleaved1F1B, none."),
    ("schedule", "none", "Expected 'none' where pp is 1, and a pipeline schedule elsewhere, got 'none' with pp=2."),
    ("virtual_stages", 2, "Expected 1 (more only with the schedule Interleaved1F1B), got 2"),
    ("mesh.tp", 8, "product is 16, the number of devices of h100-sxm5-80gb:2x8, got pp=2 x dp_shard=2 x tp=8 = 32."),
    ("global_batch_size", 63,
     "Expected a multiple of micro_batch_size * dp_replicate * dp_shard, got 63 with 2 * 1 * 2."),
    ("global_batch_size", 2**26,
     "'global_batch_size' does not fit the plan. Expected at most 16,777,216, got 67108864."),
    ("micro_batch_size", 0, "'micro_batch_size' does not fit the plan. Expected at least 1, got 0."),
    ("zero_stage", 0, "Expected 1, 2 or 3 where dp_shard is above 1, got 0 with dp_shard=2."),
    ("micro_batch_size", 2**63, "Expected a whole number of at most 63 bits, got one of 64."),
    ("predicted.mfu", 10**400, "p.json: Wrong value of 'predicted.mfu'. Expected a finite number, got a larger one."),
    ("predicted.step_time_s", 1e308, "Expected a finite number below 1e+30, got 1e+308."),
    ("predicted.breakdown.compute_s", -1.0, "Expected a number from 0, got -1.0."),
    ("predicted.peak_memory_interval_bytes", [1], "Expected 2 items, or none, got 1."),
    ("zero_stage", 4, "Expected 0, 1, 2 or 3, got 4."),
    ("blocks.4.layout", 9,
     "'blocks[4].layout' does not fit the plan. Expected the number of one of the 3 layouts, got 9."),
    ("blocks.4.index", 9, "'blocks[4].index' does not fit the plan. Expected 4, got 9."),
    ("stages", [], "Expected pp * virtual_stages = 2 stages, got 0."),
    ("stages.1.start", 6, "'stages[1]' does not fit the plan. Expected one block or more, from block 5 on"),
    ("stages.1.stop", 9, "Expected stages of all 10 blocks, got stages of 9."),
    ("stages.1.pp_rank", 0, "'stages[1].pp_rank' does not fit the plan. Expected 1 (the stage modulo pp), got 0."),
    ("predicted.stage_times", [[1, 2]], "Expected 2 pairs of times, or none, got 1."),
    ("predicted.step_time_interval_s", [1.0], "step_time_interval_s'. Expected 2 items, got 1."),
    ("predicted.memory.1.pp_rank", 2, "Expected a pipeline rank below pp=2, got 2."),
    ("version", "1", "'version'. Expected a number, got '1'."),
    ("precision.compute", "int8",
     "'precision.compute' does not fit the plan. Expected one of float64, float32, bfloat16, float16, got 'int8'."),
    ("mesh", ABSENT, "p.json: Missing key 'mesh'."),
    ("prelude", ABSENT, "p.json: Missing key 'prelude'."),
    ("mesh.dp", 2, "p.json: mesh: Unknown key 'dp'."),
]  # fmt: skip
"""Where a plan is changed, to what, and what is said of it."""


@pytest.mark.parametrize(("path", "value", "expected"), BAD_VALUES, ids=[text[:40] for *_, text in BAD_VALUES])
def test_broken_plan_is_named(path: str, value: object, expected: str) -> None:
    data = json.loads(dumps(plan_to_dict(llama_plan())))
    *keys, last = (int(key) if key.isdigit() else key for key in path.split("."))
    inner = reduce(operator.getitem, keys, data)
    inner[last] = value
    if value is ABSENT:
        del inner[last]
    refuses(PlanError, re.escape(expected), plan_from_dict, data, place="p.json")


def test_differences_are_paths_and_values() -> None:
    other = replace(llama_plan(), mesh=Mesh(pp=2, dp_shard=2, tp=4, ep=2), zero_stage=3, pins=())
    changes = [str(change) for change in llama_plan().diff(other)]
    assert changes == ["mesh.ep: 1 -> 2", "zero_stage: 1 -> 3", 'pins: ["tp<=4"] -> []']
    (change,) = llama_plan().diff(replace(llama_plan(), bucket_bytes=2**20))
    assert str(change) == "bucket_bytes: 26214400 -> 1048576"
    assert any(change.path == "predicted.memory" for change in llama_plan().diff(single_plan()))
    refuses(UsageError, "takes a plan, but got 'plan.json'.* Plan.load", llama_plan().diff, "plan.json")
