from pathlib import Path

import pytest

from autopar.benchmark.batches import Choice, Outcome, Row, benchmark, measured, render, score
from autopar.errors import UsageError
from autopar.validate.scores import rank_correlation
from tests.support.said import refuses


def row(key: str, predicted_s: float, measured_s: float | None, **others: object) -> Row:
    return Row(
        key=key, name=f"plan {key}", predicted_s=predicted_s, interval_s=(predicted_s / 2, predicted_s * 2),
        predicted_bytes=110, predicted_parts={}, measured_s=measured_s,
        measured_bytes=None if measured_s is None else 100,
        failure="" if measured_s is not None else "Traceback\nValueError: no", **others,
    )  # fmt: skip


def test_a_file_of_results_without_any_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"title": "t"}')
    choice = Choice(entries=(), picked="", num_candidates=0, misfits=())
    refuses(UsageError, "results.json: Missing key 'measured'", benchmark, None, choice, None, title="t", results=path)


def test_score_of_known_values_and_no_regret_where_the_picked_plan_failed() -> None:
    rows = [row("a", 1.0, 2.0), row("b", 2.0, 1.6), row("c", 3.0, 4.0), row("d", 4.0, 16.0), row("e", 0.5, None)]
    found = score(rows, "a")
    assert (found.plans, found.failures, found.best, found.picked) == (4, 1, "b", "a")
    assert found.regret == pytest.approx(2.0 / 1.6 - 1)
    assert found.rho == pytest.approx(0.8)  # one neighbouring pair of four is exchanged
    assert found.mape == pytest.approx((0.5 + 0.25 + 0.25 + 0.75) / 4)
    assert found.bias == pytest.approx((-0.5 + 0.25 - 0.25 - 0.75) / 4)
    assert found.coverage == pytest.approx(3 / 4)  # 16 s lies outside of 2 to 8 s
    assert found.memory_mape == pytest.approx(0.1)
    found = score([row("a", 1.0, None), row("b", 2.0, 1.0)], "a")
    assert found.regret is None and found.rho is None and found.best == "b"


def test_ranks_that_are_equal_correlate_by_their_mean() -> None:
    assert rank_correlation([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486833)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([3, 2, 1], [1, 2, 3]) == pytest.approx(-1.0)


def test_a_step_is_over_when_the_slowest_rank_is_done() -> None:
    time_s, spread = measured([[1.0, 4.0, 1.0], [3.0, 2.0, 2.0]])
    assert time_s == 3.0  # of 3, 4, 2
    assert spread == pytest.approx((3.5 - 2.5) / 2 / 3.0)


def test_the_table_marks_what_was_picked_and_names_failures() -> None:
    rows = (row("a", 1.0, 2.0), row("e", 0.5, None))
    choice = Choice(entries=(), picked="a", num_candidates=9, misfits=(("x", "memory"),))
    text = render(Outcome(title="t", rows=rows, score=score(rows, "a"), num_candidates=9, misfits=choice.misfits))
    assert "* plan a" in text and "failed: plan e: ValueError: no" in text
    assert "regret 0.0 %" in text and "1 candidates have no plan that fits" in text
