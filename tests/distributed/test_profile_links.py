import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.measure.collective_times import COLLECTIVES, FEWEST, Limits, LinkJob, LinkPoints, measure_links
from autopar.measure.job_of_ranks import GroupSet
from autopar.verification.rank_pool import WorkerPool

LARGEST = 16 * 1024


def measure(path: str, wrong: str, timeout_s: float) -> Any:
    """One rank's part, or its error; ``wrong``: what rank 1 refuses while rank 0 waits for it, or ``gone``: it has no part."""

    def refuse(x: torch.Tensor, ranks: tuple[int, ...], group: dist.ProcessGroup) -> object:
        if dist.get_rank() == 1:
            raise ValueError("refused")
        return COLLECTIVES[wrong](x, ranks, group)

    if wrong == "gone" and dist.get_rank() == 1:
        return None
    collectives = {kind: refuse if kind == wrong else run for kind, run in COLLECTIVES.items()}
    store, grace = dist.distributed_c10d._get_default_store(), {"grace_s": 0.5} if wrong == "gone" else {}
    limits = Limits(
        budget_s=1.0 if wrong == "gone" else 30.0, collective_timeout_s=timeout_s, max_bytes=LARGEST, **grace
    )
    job = LinkJob(store, node=0, device=torch.device("cpu"), limits=limits, collectives=collectives)
    try:
        found = measure_links(job, Path(path))
    except AutoparError as error:
        return str(error)
    return None if found is None else (found.points, found.failed)


class SlowLink(LinkJob):
    """A job whose collectives take a latency and their bytes, without ranks; ``asked``: bytes, calls and repeats."""

    def __init__(self, latency_s: float, bandwidth_bytes_per_s: float, limits: Limits) -> None:
        self.latency_s, self.bandwidth_bytes_per_s, self.limits = latency_s, bandwidth_bytes_per_s, limits
        self.device = torch.device("cpu")
        self.asked: list[tuple[int, int, int]] = []

    def sizes(self, allowed_s: float) -> list[int]:
        """The sizes of an all-reduce that are measured in so much time."""
        sets = [GroupSet(tier="network", pattern="contiguous", groups=((0, 1),), num_nodes=2, ranks_per_node=1)]
        found = LinkPoints(job={}, sets=sets)
        self._sizes(found, 0, "all_reduce", self.limits.max_bytes, allowed_s, None)
        return [point[2] for point in found.points]

    def _tell(self, do: str, **arguments: Any) -> list[Any]:
        self.asked.append((arguments["num_bytes"], arguments["calls"], arguments["repeats"]))
        return [[self.latency_s + arguments["num_bytes"] / self.bandwidth_bytes_per_s, 0.0]]


def test_every_collective_is_timed_and_a_second_run_adds_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    (points, failed), other = pool.run(measure, str(path), "", 20.0, size=2, timeout_s=300.0)
    assert (other, failed) == (None, [])
    assert {(kind, size) for _, kind, size, *_ in points} == {
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
    (again, lost), _ = pool.run(measure, str(path), "", 20.0, size=2, timeout_s=300.0)
    assert [p for p in again if p[:3] != dropped[:3]] == data["points"]
    assert [p[:3] for p in again if p not in data["points"]] == [dropped[:3]]
    assert lost == [[*data["trying"], "the job ended while this was measured"]]


def test_a_collective_that_fails_is_told_and_skipped(pool: WorkerPool, tmp_path: Path) -> None:
    (points, failed), _ = pool.run(measure, str(tmp_path / "points.json"), "all_gather", 2.0, size=2, timeout_s=300.0)
    ((_, kind, size, reason),) = failed
    assert (kind, size) == ("all_gather", 1024)
    assert "rank 1: ValueError: refused" in reason
    assert "rank 0: " in reason  # waited until the time limit of the collective
    assert {p[1] for p in points} == set(COLLECTIVES) - {"all_gather"}


def test_a_rank_that_is_gone_is_an_error_not_a_wait(pool: WorkerPool, tmp_path: Path) -> None:
    text, _ = pool.run(measure, str(tmp_path / "points.json"), "gone", 0.5, size=2, timeout_s=300.0)
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
    limits = Limits(max_bytes=2**24, growth=8, collective_timeout_s=0.3)
    assert len(SlowLink(25e-3, 15e6, limits).sizes(allowed_s=0.0)) < 5
