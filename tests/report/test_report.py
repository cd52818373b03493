import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from rich.cells import cell_len

from autopar.errors import PlanError
from autopar.plan.plan import Plan, RankGroup
from autopar.plan.text import TIME_PARTS, render_plan
from autopar.report.pictures import perfetto_trace, render_html, timeline
from autopar.report.summaries import render_comparison
from tests.support.example_plans import llama_plan, schedule_actions, single_plan
from tests.support.strategies import plans

Golden = Callable[[str, str], None]


def test_printed_plans(golden: Golden) -> None:
    golden("plan_llama.txt", f"{llama_plan()}\n")
    golden("plan_single.txt", f"{single_plan()}\n")
    golden("compare.txt", render_comparison(llama_plan(), single_plan(), names=("before.json", "after.json")) + "\n")


def test_plans_without_names_and_with_characters_of_two_columns_are_printed() -> None:
    base = llama_plan()
    bare = replace(
        base,
        layouts=tuple(
            replace(one, typings=tuple(replace(typing, parameter_names=()) for typing in one.typings))
            for one in base.layouts
        ),
    )
    assert "tp S(0)   5 parameters" in render_plan(bare)

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


def test_page_is_whole_and_escapes_names() -> None:
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


def test_page_draws_every_part_of_a_step() -> None:
    plan = llama_plan()
    breakdown = replace(plan.predicted.breakdown, **{name: 1.0 for _, name in TIME_PARTS})
    page = render_html(replace(plan, predicted=replace(plan.predicted, breakdown=breakdown)))
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
    with pytest.raises(PlanError, match=r"predicted\.stage_times: Missing predicted times of the stages"):
        timeline(single_plan())
