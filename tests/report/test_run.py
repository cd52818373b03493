import json
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.plan.run_log import CATEGORIES, FILE_NAME, RankTimes, read_log, record_of, step_of, write_log
from autopar.report.summaries import render_run
from tests.support.cli_runner import Run
from tests.support.example_plans import llama_plan as example_plan
from tests.support.said import refuses


def rank(number: int, compute_s: float, waiting_s: float) -> RankTimes:
    seconds = dict.fromkeys(CATEGORIES, 0.0) | {"compute": compute_s, "pipeline": waiting_s}
    return RankTimes(rank=number, seconds=seconds, between_s=0.5, measured_bytes=200, predicted_bytes=100)


def test_a_record_takes_the_slowest_step_and_the_parts_of_who_computes_longest() -> None:
    plan = example_plan()
    record = record_of(plan, [rank(0, 1.0, 3.0), rank(1, 2.0, 1.0)], num_steps=5, memory_kind="allocator")
    assert record.measured_s == 4.0
    assert {part.name: part.measured_s for part in record.parts if part.measured_s} == {"compute": 2.0, "pipeline": 1.0}
    assert sum(part.predicted_s for part in record.parts) == pytest.approx(plan.predicted.breakdown.total_s)


def test_medians_of_categories_add_up_to_the_median_step() -> None:
    steps = [{"compute": 1.0, "optimizer": 1.0}, {"compute": 2.0, "optimizer": 1.0}, {"compute": 1.0, "optimizer": 4.0}]
    found = step_of(steps)
    assert sum(found.values()) == pytest.approx(3.0)
    assert found["compute"] == found["optimizer"] == pytest.approx(1.5)


def test_warnings_name_the_part_that_was_wrong() -> None:
    plan = example_plan()
    step_s = plan.predicted.step_time_s
    inside = replace(record_of(plan, [rank(0, 0.0, 0.0)], num_steps=5, memory_kind="resident"), measured_s=step_s)
    assert not inside.is_outside and inside.warning() == ""
    parts = tuple(replace(p, measured_s=p.predicted_s + 9 * step_s * (p.name == "data parallel")) for p in inside.parts)
    slow = replace(inside, measured_s=10 * step_s, parts=parts)
    assert slow.is_outside and slow.worst.name == "data parallel"
    assert "most of it is data parallel" in slow.warning() and "autopar profile links" in slow.warning()
    full = replace(inside, measured_bytes=10 * inside.predicted_bytes, memory_kind="allocator")
    assert full.is_over_memory and "peak memory" in full.warning()
    assert not replace(full, memory_kind="resident").is_over_memory


def test_the_log_is_read_back_and_printed(tmp_path: Path, run: Run) -> None:
    plan = example_plan()
    ranks = [rank(0, 1.0, 3.0), rank(1, 2.0, 1.0)]
    record = record_of(plan, ranks, num_steps=5, memory_kind="resident")
    write_log(tmp_path / FILE_NAME, record, ranks, [{"step": 2, "rank": 0, "seconds": {"compute": 1.0}}])
    assert read_log(tmp_path) == record
    done = run("validate", "--from-run", tmp_path)
    assert done.code == 0 and done.out.strip() == render_run(record).strip()
    assert "compute" in done.out and "peak memory (resident)" in done.out
    assert run("validate", "--from-run", tmp_path, "--json").json["worst"] in CATEGORIES


def test_what_is_no_log_is_named(tmp_path: Path, run: Run) -> None:
    refuses(UsageError, r"No autopar-run.jsonl in", read_log, tmp_path)
    (tmp_path / FILE_NAME).write_text('{"event": "step"}\n{"event": "comparison"}\n', encoding="utf-8")
    refuses(UsageError, rf"{FILE_NAME}:2", read_log, tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b"\xbc\xff")
    refuses(UsageError, "it is not UTF-8 text", read_log, tmp_path)
    assert run("validate").code == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [("measured_s", "slow"), ("predicted_s", 0.0), ("between_s", float("nan")), ("parts", []), ("interval_s", [1.0]),
     ("mesh", None), ("predicted_bytes", -1)],
)  # fmt: skip
def test_a_comparison_that_is_garbled_is_named(tmp_path: Path, run: Run, field: str, value: object) -> None:
    record = record_of(example_plan(), [rank(0, 1.0, 3.0)], num_steps=5, memory_kind="resident")
    write_log(tmp_path / FILE_NAME, record, [], [])
    event = json.loads((tmp_path / FILE_NAME).read_text()) | {field: value}
    (tmp_path / FILE_NAME).write_text(json.dumps(event) + "\n")
    done = run("validate", "--from-run", tmp_path)
    assert done.code == 2
    assert f"{FILE_NAME}:1: This line is not an event that autopar wrote: UsageError" in done.error
    assert f"Wrong value of '{field}" in done.error
    assert "Delete it" in done.error
