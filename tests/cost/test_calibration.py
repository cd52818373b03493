"""Predicted against published steps: MosaicML's MPT-7B runs under FSDP (rows of calibration.csv), nothing fitted.

Parameters stand at their priors. What is asserted is a loose band: this says that nothing is off by a factor, not that
the model is calibrated; docs/evidence/accuracy.md has the figures of all rows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from scipy import stats

from autopar.validate.session import Session
from tests.support.published import read_runs

TABLE = Path(__file__).parents[3] / "shared" / "validation" / "calibration.csv"


@pytest.mark.skipif(not TABLE.is_file(), reason=f"the table of measured steps is absent: {TABLE.name}")
def test_published_steps_are_met_within_a_loose_band(record_property: pytest.RecordProperty) -> None:
    """MPT-7B, 2048 tokens, 8 to 512 GPUs of three kinds."""
    runs = [r for r in read_runs(TABLE) if (r.family, r.hidden, r.seq, r.zero) == ("mpt", 4096, 2048, 3)]
    session = Session(runs)
    measured = [run.step_time_s or 0.0 for run in runs]
    found = session.times_s(session.start, range(len(runs)))
    ratios = [a / b for a, b in zip(found, measured, strict=True)]
    error = sum(abs(ratio - 1) for ratio in ratios) / len(ratios)
    rank = float(stats.spearmanr(found, measured).statistic)
    record_property("mean_absolute_error", error)
    record_property("rank_correlation", rank)
    assert len(runs) >= 10
    assert error < 0.4, ratios
    assert rank > 0.85
