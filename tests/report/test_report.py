import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from rich.cells import cell_len

from autopar.errors import PlanError, UsageError
from autopar.plan.plan import Plan, RankGroup
from autopar.plan.run_log import CATEGORIES, FILE_NAME, RankTimes, read_log, record_of, step_of, write_log
from autopar.plan.text import TIME_PARTS, render_plan
from autopar.report.pictures import perfetto_trace, render_html, timeline
from autopar.report.summaries import render_comparison, render_run
from tests.support.cli_runner import Run
from tests.support.example_plans import llama_plan, schedule_actions, single_plan
from tests.support.said import refuses
from tests.support.strategies import plans


def test_printed_plans(golden: Callable[[str, str], None]) -> None:
    golden("plan_llama.txt", f"{llama_plan()}\n")
    golden("plan_single.txt", f"{single_plan()}\n")
    golden("compare.txt", render_comparison(llama_plan(), single_plan(), names=("before.json", "after.json")) + "\n")


def test_plans_without_names_and_with_characters_of_two_columns_are_printed() -> None:
    base = llama_plan()
    bare = [
        replace(own, typings=tuple(replace(typing, parameter_names=()) for typing in own.typings))
        for own in base.layouts
    ]
    assert "tp S(0)   5 parameters" in render_plan(replace(base, layouts=tuple(bare)))

    named = tuple(replace(block, label=chr(ord("a") + block.index) + "\u2e80" * 9) for block in base.blocks)
    text = render_plan(replace(base, model=replace(base.model, name="\u2e80" * 70), blocks=named))
    assert text.count("\u2e80") >= 70 + 9 * len(named)  # nothing is cut off
    assert max(map(cell_len, text.splitlines())) <= 100


@settings(max_examples=25)
@given(plans())
def test_any_plan_prints_within_the_width(plan: Plan) -> None:
    plan = replace(plan, pins=tuple(f"pin{i}" * 9 for i in range(9)))
    lines = render_plan(plan).splitlines()
    # some characters have no width
    assert not [line for line in lines if cell_len(line) > 100 or line != line.rstrip()]


def test_page_is_whole_draws_every_part_of_a_step_and_escapes_names() -> None:
    script = "<script>alert(1)</script>"
    shared = replace(single_plan(), groups=(RankGroup(start=0, stop=1, device=script),), data_shares=(1,))
    assert "<script" not in render_html(shared)
    page = render_html(replace(llama_plan(), pins=(script,)))
    tags, unclosed = re.findall(r"<(/?)(\w+)[^>]*?(/?)>", page), list[str]()
    for end, tag, alone in tags:
        if end:
            assert unclosed.pop() == tag
        elif not alone and tag != "meta":
            unclosed.append(tag)
    names = [tag for end, tag, _ in tags if not end]
    assert unclosed == []
    assert "script" not in names
    assert names.count("rect") == len(timeline(llama_plan()))
    assert not re.search(r"(src|href)=|https?://(?!www\.w3\.org)|url\(", page)
    every = replace(llama_plan().predicted.breakdown, **{name: 1.0 for _, name in TIME_PARTS})
    page = render_html(replace(llama_plan(), predicted=replace(llama_plan().predicted, breakdown=every)))
    assert [name for name, _ in TIME_PARTS if f"</span>{name} 1 s" not in page] == []


def test_trace_keeps_the_order_of_the_schedule() -> None:
    plan = llama_plan()
    events = json.loads(json.dumps(perfetto_trace(plan)))["traceEvents"]
    for rank, actions in enumerate(schedule_actions("1F1B", 2, 1, 16)):
        work = [event for event in events if event["ph"] == "X" and event["tid"] == rank]
        assert [event["name"] for event in work] == [*map(str, actions), "data parallel", "optimizer"]
        for one, after in itertools.pairwise(work):
            assert one["ts"] + one["dur"] <= after["ts"] + 1e-6


def test_timeline_of_equal_stages_is_the_closed_form() -> None:
    plan = llama_plan()
    breakdown = replace(plan.predicted.breakdown, data_parallel_s=0.0, optimizer_s=0.0)
    times = ((1.0, 2.0), (1.0, 2.0))
    plan = replace(plan, predicted=replace(plan.predicted, breakdown=breakdown, stage_times=times))
    assert max(span.end_s for span in timeline(plan)) == (16 + 2 - 1) * 3.0
    assert "<svg" not in render_html(single_plan())  # which has no stage times
    refuses(PlanError, r"predicted\.stage_times: Missing predicted times of the stages", timeline, single_plan())


# --- runs beside their plans


def rank(number: int, compute_s: float, waiting_s: float) -> RankTimes:
    seconds = dict.fromkeys(CATEGORIES, 0.0) | {"compute": compute_s, "pipeline": waiting_s}
    return RankTimes(rank=number, seconds=seconds, between_s=0.5, measured_bytes=200, predicted_bytes=100)


def test_a_record_takes_the_slowest_step_and_the_parts_of_who_computes_longest() -> None:
    plan = llama_plan()
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
    plan = llama_plan()
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
    plan = llama_plan()
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
    record = record_of(llama_plan(), [rank(0, 1.0, 3.0)], num_steps=5, memory_kind="resident")
    write_log(tmp_path / FILE_NAME, record, [], [])
    event = json.loads((tmp_path / FILE_NAME).read_text()) | {field: value}
    (tmp_path / FILE_NAME).write_text(json.dumps(event) + "\n")
    done = run("validate", "--from-run", tmp_path)
    assert done.code == 2
    assert f"{FILE_NAME}:1: This line is not an event that autopar wrote: UsageError" in done.error
    assert f"Wrong value of '{field}" in done.error
    assert "Delete it" in done.error
