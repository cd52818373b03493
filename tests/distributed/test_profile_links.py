import json
from pathlib import Path

import pytest

from autopar.measure.collective_times import COLLECTIVES, FEWEST, Limits, LinkPoints
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed.linking import LARGEST, SlowLink, leave, measure

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]


def test_every_collective_is_timed_and_a_second_run_adds_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    (points, failed), other = pool.run(measure, str(path), "", 20.0, size=2, timeout_s=60.0)
    assert (other, failed) == (None, [])
    assert {(kind, size) for _, kind, size, _, _ in points} == {
        (k, n) for k in COLLECTIVES for n in (1024, 4096, LARGEST)
    }
    assert all(time_s > 0 for *_, time_s, _ in points)
    kept = LinkPoints.load(path)
    assert kept.points == points
    assert kept.job["nodes"] == [0, 0]
    data = json.loads(path.read_text(encoding="utf-8"))
    dropped = data["points"].pop(4)
    data["trying"] = [dropped[0], "broadcast", 65536]
    path.write_text(json.dumps(data), encoding="utf-8")
    (again, lost), _ = pool.run(measure, str(path), "", 20.0, size=2, timeout_s=60.0)
    assert [p for p in again if p[:3] != dropped[:3]] == data["points"]
    assert [p[:3] for p in again if p not in data["points"]] == [dropped[:3]]
    assert lost == [[*data["trying"], "the job ended while this was measured"]]


def test_a_collective_that_fails_is_told_and_skipped(pool: WorkerPool, tmp_path: Path) -> None:
    (points, failed), _ = pool.run(measure, str(tmp_path / "points.json"), "all_gather", 2.0, size=2, timeout_s=60.0)
    ((_, kind, size, reason),) = failed
    assert (kind, size) == ("all_gather", 1024)
    assert "rank 1: ValueError: refused" in reason
    assert "rank 0: " in reason  # waited until the time limit of the collective
    assert {p[1] for p in points} == set(COLLECTIVES) - {"all_gather"}


def test_a_rank_that_is_gone_is_an_error_not_a_wait(pool: WorkerPool, tmp_path: Path) -> None:
    text, _ = pool.run(leave, str(tmp_path / "points.json"), size=2, timeout_s=60.0)
    assert "in vain for an answer of rank 1" in text


def test_time_that_is_up_ends_a_collective_once_its_bytes_show() -> None:
    """Behind 15 MB/s and 25 ms sizes up to 64 KB took one time, from which 4 MB were predicted to take a third of theirs."""
    limits = Limits(max_bytes=2**24, growth=8, batch_s=0.01)
    slow = SlowLink(25e-3, 15e6, limits)
    assert slow.sizes(allowed_s=0.5) == [1024, 8192, 65536, 524288, 4194304]  # 25, 25, 29, 60 and 305 ms
    assert slow.asked[-1][1:] == (1, FEWEST)
    assert slow.sizes(allowed_s=0.5) == SlowLink(25e-3, 15e6, limits).sizes(allowed_s=0.0)
    fast = SlowLink(1e-3, 15e6, limits)
    assert fast.sizes(allowed_s=0.01)[-1] == 65536  # 5 ms beside 1
    assert (
        len(SlowLink(25e-3, 15e6, Limits(max_bytes=2**24, growth=8, collective_timeout_s=0.3)).sizes(allowed_s=0.0)) < 5
    )
