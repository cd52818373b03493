"""Rows of measured runs: what is read, and that each bad cell is named with file, row, column and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import UsageError
from autopar.validate.express import stage_stops
from autopar.validate.runs import COLUMNS
from tests.support.published import OWN, read_runs, with_cells


def _with(folder: Path, column: str, text: str, row: int = 2) -> Path:
    return with_cells(folder, {row: {column: text}})


def test_a_row_is_read() -> None:
    run = read_runs(OWN)[0]
    assert (run.line, run.tp, run.zero, run.sequence_parallel, run.step_time_s) == (2, 2, 1, False, 0.2)
    assert run.peak_memory_bytes == 4 * 2**30
    assert (run.release, run.publisher) == ("made (1)", "made")
    assert read_runs(OWN)[1].sequence_parallel is None
    assert read_runs(OWN)[2].zero is None


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ("layers", "four"), ("hidden", "0"), ("family", "gtp"), ("precision", "bf61"), ("zero", "4"),
        ("recompute", "ful"), ("step_time_s", "-1"), ("peak_memory_gib", "nan"), ("devices", "9"), ("heads", "3"),
        ("kv_heads", "3"), ("dp", "1"), ("tp", ""), ("devices_per_node", "3"), ("memory_kind", "guess"),
        ("vocab", "9" * 400), ("layers", "1000000001"),
    ],
)  # fmt: skip
def test_a_bad_cell_is_named(tmp_path: Path, column: str, text: str) -> None:
    path = _with(tmp_path, column, text)
    with pytest.raises(UsageError) as error:
        read_runs(path)
    assert str(path) in str(error.value)
    assert "row 2" in str(error.value)
    assert column in str(error.value) or (column == "dp" and "devices" in str(error.value))
    assert error.value.fix


def test_virtual_stages_without_a_pipeline_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"row 4, column virtual_stages: The cell has a wrong value. Expected 1 without a pipeline"
    ):
        read_runs(_with(tmp_path, "virtual_stages", "2", row=4))


def test_a_row_with_a_cell_too_many_is_refused(tmp_path: Path) -> None:
    """A comma in a text would shift what follows."""
    path = _with(tmp_path, "source", "made (1), by hand")
    with pytest.raises(
        UsageError, match=r"changed\.csv, row 2: The row has more cells than there are columns.* double quotes"
    ):
        read_runs(path)


@pytest.mark.parametrize("text", ['"made (1)', '"made" (1)', "m" * 200_000])
def test_a_quote_that_is_not_closed_is_refused(tmp_path: Path, text: str) -> None:
    """All rows after it were one cell of its row; a cell without end was called a defect."""
    path = _with(tmp_path, "source", text)
    with pytest.raises(UsageError, match=r"changed\.csv: The file is not comma-separated values: .* Close each"):
        read_runs(path)


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    path.write_text(OWN.read_text().replace("micro_batch", "microbatch"))
    with pytest.raises(UsageError) as error:
        read_runs(path)
    assert "Missing column micro_batch" in str(error.value)
    assert f"{path}, row 1" in str(error.value)


@pytest.mark.parametrize(
    ("mark", "problem"), [(";", "separated by ';'"), ("\t", r"separated by '\\t'"), ("", "The first row is empty")]
)
def test_a_table_of_another_form_is_named(tmp_path: Path, mark: str, problem: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text(OWN.read_text().replace(",", mark) if mark else "")
    with pytest.raises(UsageError, match=rf"other\.csv, row 1: .*{problem}"):
        read_runs(path)


def test_a_column_that_is_there_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "twice.csv"
    lines = OWN.read_text().splitlines()
    path.write_text("\n".join([f"{lines[0]},layers", *(f"{line},5" for line in lines[1:])]))
    with pytest.raises(UsageError, match=r"twice\.csv, row 1: The column layers is there twice"):
        read_runs(path)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Cannot read"):
        read_runs(tmp_path / "none.csv")
    (tmp_path / "empty.csv").write_text(",".join(COLUMNS))
    with pytest.raises(UsageError, match="has a header but no run"):
        read_runs(tmp_path / "empty.csv")


@pytest.mark.parametrize(
    ("layers", "stages"),
    [
        (72, 12), (70, 12), (78, 12), (106, 12), (3, 2), (80, 20), (5, 5), (24, 16), (9, 8), (126, 128), (31, 32),
        (30, 32),
    ],
)  # fmt: skip
def test_stages_hold_every_block_once(layers: int, stages: int) -> None:
    stops = stage_stops(layers, stages, layers + 2)
    sizes = [b - a for a, b in zip((0, *stops), stops, strict=False)]
    assert len(stops) == stages
    assert stops[-1] == layers + 2
    assert min(sizes) >= 1
    inner = [size - (i == 0) - (i == stages - 1) for i, size in enumerate(sizes)]
    assert sum(inner) == layers
    assert min(inner[1:-1], default=1) >= 1


@pytest.mark.parametrize(
    ("layers", "expected"), [("1", "a layer, the embedding or the head for each of 4 stages"), ("2", ""), ("3", "")]
)
def test_embedding_and_head_may_be_stages_of_their_own(tmp_path: Path, layers: str, expected: str) -> None:
    path = _with(tmp_path, "layers", layers, row=6)  # of four stages
    if expected:
        with pytest.raises(UsageError, match=rf"row 6, column layers: .*Expected {expected}, got '1'"):
            read_runs(path)
    else:
        assert read_runs(path)[4].layers == int(layers)


def test_an_uneven_model_leaves_the_last_stage_what_is_left() -> None:
    stops = stage_stops(78, 12, 80)
    assert stops[-1] - stops[-2] == 2  # one layer and the head: BigScience, chronicles-prequel.md
