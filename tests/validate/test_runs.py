import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from autopar.errors import UsageError
from autopar.validate.express import stage_stops
from autopar.validate.runs import COLUMNS, Run
from tests.support.cli_runner import Run as Shell
from tests.support.published import NEEDS_PUBLISHED, OWN, PUBLISHED, read_runs, with_cells
from tests.support.said import refuses
from tools.evidence.noise import bound, bounds_table


def test_a_row_is_read() -> None:
    run = read_runs(OWN)[0]
    assert (run.line, run.tp, run.zero, run.sequence_parallel, run.step_time_s) == (2, 2, 1, False, 0.2)
    assert (run.release, run.publisher, run.peak_memory_bytes) == ("made (1)", "made", 4 * 2**30)
    assert (read_runs(OWN)[1].sequence_parallel, read_runs(OWN)[2].zero) == (None, None)


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
    path = with_cells(tmp_path, {2: {column: text}})
    error = refuses(UsageError, "", read_runs, path)
    assert str(path) in str(error) and "row 2" in str(error)
    assert column in str(error) or (column == "dp" and "devices" in str(error))
    assert error.fix


UNCLOSED = r": The file is not comma-separated values: .* Close each"


@pytest.mark.parametrize(
    ("column", "text", "row", "said"),
    [
        ("virtual_stages", "2", 4,
         r", row 4, column virtual_stages: Wrong value of 'virtual_stages'. Expected 1 without a"),
        # a comma in a text would shift what follows
        ("source", "made (1), by hand", 2, r", row 2: The row has more cells than there are columns.* double quotes"),
        # all rows after it were one cell of its row; a cell without end was called a defect
        *(("source", text, 2, UNCLOSED) for text in ('"made (1)', '"made" (1)', "m" * 200_000)),
        ("layers", "1", 6, r", row 6, column layers: .*Expected a layer, the embedding or the head for each of 4 stages"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_is_refused(tmp_path: Path, column: str, text: str, row: int, said: str) -> None:
    path = with_cells(tmp_path, {row: {column: text}})
    refuses(UsageError, rf"changed\.csv{said}", read_runs, path)


HEADER, *ROWS = OWN.read_text().splitlines()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([HEADER.replace("micro_batch", "microbatch"), *ROWS], r", row 1: .*Missing column micro_batch"),
        ([line.replace(",", ";") for line in (HEADER, *ROWS)], r", row 1: .*separated by ';'"),
        ([line.replace(",", "\t") for line in (HEADER, *ROWS)], r", row 1: .*separated by '\\t'"),
        ([], r", row 1: .*The first row is empty"),
        ([f"{HEADER},layers", *(f"{row},5" for row in ROWS)], r", row 1: The column layers is there twice"),
        ([",".join(COLUMNS)], "has a header but no run"),
    ],
)
def test_a_table_of_another_form_is_named(tmp_path: Path, lines: list[str], said: str) -> None:
    path = tmp_path / "other.csv"
    path.write_text("\n".join(lines))
    refuses(UsageError, rf"other\.csv.*{said}", read_runs, path)


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
    assert (len(stops), stops[-1]) == (stages, layers + 2)
    assert min(sizes) >= 1
    inner = [size - (i == 0) - (i == stages - 1) for i, size in enumerate(sizes)]
    assert sum(inner) == layers and min(inner[1:-1], default=1) >= 1
    if (layers, stages) == (78, 12):
        assert sizes[-1] == 2  # one layer and the head: BigScience, chronicles-prequel.md


@pytest.mark.parametrize("layers", [2, 3])
def test_embedding_and_head_may_be_stages_of_their_own(tmp_path: Path, layers: int) -> None:
    assert read_runs(with_cells(tmp_path, {6: {"layers": f"{layers}"}}))[4].layers == layers  # of four stages


FAULTS = {
    2: {"device": "h100-sxm5-88gb"},
    3: {"layers": "four"},
    4: {"precision": "fp8", "device": "a100-sxm4-80gb"},
    5: {"precision": "bf16", "device": "v100-sxm2-16gb"},
}
"""Cells by row: a device without a profile, one without sense, products of layers and of fp8 that a device has no rate for."""


@pytest.mark.slow
def test_rows_that_fail_are_reported_beside_the_others(run: Shell, tmp_path: Path) -> None:
    path = with_cells(tmp_path, FAULTS)
    done = run("validate", path, "--json")
    found = json.loads(done.out)
    assert (done.code, found["failed_rows"]) == (1, len(FAULTS))
    assert [row["row"] for row in found["rows"]] == [2, 3, 4, 5, 6, 7]
    errors = {row["row"]: row["error"] for row in found["rows"] if "error" in row}
    assert set(errors) == set(FAULTS) and "column device" in errors[2]
    told = {2: "Did you mean 'h100-sxm5-80gb'", 3: "column layers", 4: "float8_e4m3fn", 5: "bfloat16"}
    for row, said in told.items():
        assert said in errors[row] and f"row {row}" in errors[row]
    good = run("validate", OWN, "--json").json
    whole = {row["row"]: row for row in good["rows"]}
    assert good["failed_rows"] == 0
    assert [row for row in found["rows"] if "error" not in row] == [whole[row] for row in (6, 7)]
    text = run("validate", path, OWN).out
    assert "4 of 12 rows failed:\n- " in text and "\n- own a: " in text and "column layers" in text


def test_a_table_of_which_nothing_can_be_predicted_has_no_scores(run: Shell, tmp_path: Path) -> None:
    path = with_cells(tmp_path, {row: {"device": "h100-sxm5-88gb"} for row in range(2, 8)})
    done = run("validate", path)
    assert done.code == 1 and "6 of 6 rows failed" in done.out
    assert "4 timed runs" in run("validate", path, "--calibrate", "all", "-o", tmp_path).mistake


def test_fitted_profiles_are_printed_unless_a_folder_is_named(run: Shell, tmp_path: Path, checkout: Path) -> None:
    shipped = [path.read_bytes() for path in (checkout / "profiles").glob("*.toml")]
    text = run("validate", "--calibrate", "all", OWN).text
    assert "# h100-sxm5-80gb.toml\n" in text and "autopar validate --calibrate" in text
    assert [path.read_bytes() for path in (checkout / "profiles").glob("*.toml")] == shipped
    folder = tmp_path / "fitted"
    assert "profiles" not in run("validate", "--calibrate", "all", OWN, "--out", folder, "--json").json
    assert (folder / "h100-sxm5-80gb.toml").exists()
    assert list(tmp_path.iterdir()) == [folder]
    assert "--out goes with --calibrate alone" in run("validate", OWN, "--out", folder).error


# --- what repeated runs say


def _made(spread: float, plans: int = 24, step: float = 0.03, seed: int = 1) -> tuple[list[Run], list[float]]:
    """Plans whose true times are ``step`` apart, each measured twice, and these true times."""
    base, generator = read_runs(OWN)[0], np.random.default_rng(seed)
    runs, truth = [], []
    for i in range(plans):
        plan = replace(base, tp=2**i, virtual_stages=1 + i, name=f"plan {i}")
        for _ in range(2):
            truth.append(step * i)
            time_s = math.exp(step * i + spread * generator.standard_normal())
            runs.append(replace(plan, step_time_s=time_s, line=len(truth)))
    return runs, truth


def _in_order(runs: Sequence[Run], truth: Sequence[float]) -> float:
    times = [math.log(run.step_time_s or 1.0) for run in runs]
    told = [(i, j) for i, j in combinations(range(len(runs)), 2) if abs(times[i] - times[j]) > math.log(1.02)]
    return sum((times[i] - times[j]) * (truth[i] - truth[j]) > 0 for i, j in told) / len(told)


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.3])
def test_the_bound_is_what_the_true_times_that_made_the_runs_reach(spread: float) -> None:
    made = [_made(spread, seed=seed) for seed in range(6)]
    found = [bound(runs, draws=40) for runs, _ in made]
    real = [b for b in found if b is not None]
    assert [b.repeats for b in real] == [24] * len(made)
    assert np.mean([b.spread for b in real]) == pytest.approx(spread, rel=0.15)
    reached = np.mean([_in_order(runs, truth) for runs, truth in made])
    assert np.mean([b.ordered[0] for b in real]) == pytest.approx(reached, abs=0.03)
    assert all(b.ordered[1] < b.ordered[0] < b.ordered[2] for b in real)


def test_runs_without_repeats_that_differ_say_nothing_in_a_table_either() -> None:
    runs, truth = _made(0.02)
    assert bound([replace(run, step_time_s=math.exp(t)) for run, t in zip(runs, truth, strict=True)]) is None
    assert bound(runs[:6]) is None
    runs = runs[:12]
    other = [replace(run, source="once; address", name=str(i), tp=2**i) for i, run in enumerate(runs)]
    text = bounds_table([*runs, *other])
    assert "once" not in text and "repeats of a configuration" in text
    assert bounds_table(other) == ""


def test_equal_times_releases_and_the_worst_are_what_they_are_said_to_be() -> None:
    runs, _ = _made(0.02)
    printed_twice = [replace(run, line=run.line + 100) for run in runs]
    assert bound([*runs, *printed_twice], draws=2).repeats == bound(runs, draws=2).repeats
    releases = [replace(run, source=f"runs ({'ab'[i % 2]}); address") for i, run in enumerate(runs)]
    assert bound(releases, draws=2) is not None and bound(releases, releases=True, draws=2) is None
    far = [replace(runs[0], step_time_s=2.0 * (runs[0].step_time_s or 0.0)), *runs[1:]]
    wide, narrow = bound(far, draws=2), bound(far, without_worst=True, draws=2)
    assert wide is not None and narrow is not None
    assert narrow.spread < 0.5 * wide.spread and narrow.repeats == wide.repeats - 1


@NEEDS_PUBLISHED
def test_noise_explains_pairs_of_bigscience_but_not_its_rank_correlation() -> None:
    runs = [run for run in read_runs(PUBLISHED) if run.source.startswith("BigScience")]
    found = bound(runs, draws=200)
    assert found.pairs == 379 and found.ordered[2] * found.pairs < 342
    assert found.rho[1] > 0.92
