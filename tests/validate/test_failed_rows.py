"""Rows that cannot be predicted are told, each with its reason, and the others are predicted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.validate.runs import FailedRow, read_rows
from tests.support.cli_runner import Run
from tests.support.published import OWN, read_runs, with_cells

FAULTS = {
    2: {"device": "h100-sxm5-88gb"},
    3: {"layers": "four"},
    4: {"precision": "fp8", "device": "a100-sxm4-80gb"},
    5: {"precision": "bf16", "device": "v100-sxm2-16gb"},
}
"""Cells by row: a device without a profile, one without sense, products of layers and of fp8 that a device has no rate for."""


def test_one_bad_cell_leaves_the_other_rows(tmp_path: Path) -> None:
    path = with_cells(tmp_path, {3: {"layers": "four"}})
    rows = read_rows(path)
    assert [row.line for row in rows if isinstance(row, FailedRow)] == [3]
    assert len(rows) == len(read_runs(OWN))
    with pytest.raises(UsageError, match="row 3, column layers"):
        read_runs(path)


@pytest.mark.slow
def test_rows_that_fail_are_reported_beside_the_others(run: Run, tmp_path: Path) -> None:
    path = with_cells(tmp_path, FAULTS)
    page, html = tmp_path / "page.md", tmp_path / "page.html"
    done = run("validate", path, "--json", "--markdown", page, "--html", html)
    found = json.loads(done.out)
    assert done.code == 1
    assert found["failed_rows"] == len(FAULTS)
    assert [row["row"] for row in found["rows"]] == [2, 3, 4, 5, 6, 7]
    errors = {row["row"]: row["error"] for row in found["rows"] if "error" in row}
    assert set(errors) == set(FAULTS)
    for row, said in (
        (2, "Did you mean 'h100-sxm5-80gb'"),
        (3, "column layers"),
        (4, "float8_e4m3fn"),
        (5, "bfloat16"),
    ):
        assert said in errors[row]
        assert f"row {row}" in errors[row]
    whole = {row["row"]: row for row in json.loads(run("validate", OWN, "--json").out)["rows"]}
    assert [row for row in found["rows"] if "error" not in row] == [whole[row] for row in (6, 7)]
    for text in (page.read_text(), html.read_text()):
        assert "4 of 6 rows failed" in text
        assert "column layers" in text


@pytest.mark.slow
def test_the_summary_counts_rows_that_failed(run: Run, tmp_path: Path) -> None:
    done = run("validate", with_cells(tmp_path, {2: FAULTS[2]}), OWN)
    assert done.code == 1
    assert "1 of 12 rows failed:\n- own a: " in done.out
    done = run("validate", OWN)
    assert done.code == 0
    assert "failed" not in done.out


def test_a_table_of_which_nothing_can_be_predicted_has_no_scores(run: Run, tmp_path: Path) -> None:
    path = with_cells(tmp_path, {row: {"device": "h100-sxm5-88gb"} for row in range(2, 8)})
    done = run("validate", path)
    assert done.code == 1
    assert "6 of 6 rows failed" in done.out
    done = run("validate", path, "--calibrate", "all", "-o", tmp_path)
    assert done.code == 2
    assert "4 timed runs" in done.error


def test_fitted_profiles_are_printed_unless_a_folder_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    shipped = {path.name: path.read_bytes() for path in (checkout / "profiles").glob("*.toml")}
    done = run("validate", "--calibrate", "all", OWN)
    assert done.code == 0, done.err
    assert "# h100-sxm5-80gb.toml\n" in done.out
    assert "autopar validate --calibrate" in done.out
    assert {path.name: path.read_bytes() for path in (checkout / "profiles").glob("*.toml")} == shipped
    folder = tmp_path / "fitted"
    done = run("validate", "--calibrate", "all", OWN, "--out", folder, "--json")
    assert "profiles" not in json.loads(done.out)
    assert (folder / "h100-sxm5-80gb.toml").exists()
    assert list(tmp_path.iterdir()) == [folder]
    assert "--out goes with --calibrate alone" in run("validate", OWN, "--out", folder).error
