"""Jobs whose ranks are killed at random points of steps, saves and starts, held against undisturbed ones.

``python -m tools.campaigns.restarts --page docs/evidence/restarts.md [--kills 50] [--seed 0]``
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from autopar.util.revision import revision

from tests.support.distributed import fit_script

LAYOUTS = {
    "dp_shard=2, ZeRO 3": ("dp_shard=2", "zero=3"),
    "tp=2": ("tp=2",),
    "pp=2": ("pp=2",),
    "dp_replicate=2": ("dp_replicate=2",),
}
STEPS, KILLS_A_JOB = 40, 5
POINTS = ("step", "save", "start")


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Of one job: where its ranks were killed, how long it took from each kill to the next step, and what differs at its end."""

    layout: str
    asynchronous: bool
    points: list[str] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    difference: str = ""


def start(folder: Path, pins: tuple[str, ...], *, asynchronous: bool, restarts: int) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(f"--max-restarts={restarts}", "--monitor-interval=0.1", fit_script.__file__, str(folder), *pins),
    ]
    told = {"PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1", "FIT_STEPS": str(STEPS)}
    told |= {"FIT_ASYNCHRONOUS": "1"} if asynchronous else {}
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(command, env=os.environ | told, stdout=said, stderr=said)


def steps_of(folder: Path, rank: int = 0) -> list[str]:
    """The lines that a rank has written."""
    path = folder / f"log.{rank}"
    return path.read_text().splitlines() if path.exists() else []


def result(folder: Path, rank: int) -> dict[str, str]:
    """The last loss of each step, and the digest of the parameters at the end."""
    return dict(line.split(" ", 1) for line in steps_of(folder, rank))


def kill(folder: Path, rank: int, known: set[str]) -> bool:
    """Whether there was such a process of this start to kill."""
    path = folder / f"process.{rank}"
    with suppress(OSError, ValueError):
        text = path.read_text()
        if text not in known:
            os.kill(int(text), signal.SIGKILL)
            known.add(text)
            return True
    return False


def disturb(job: subprocess.Popen[bytes], folder: Path, outcome: Outcome, draw: random.Random) -> None:
    """Kills ranks until the job has ended, or has been disturbed often enough."""
    known: set[str] = set()
    for _ in range(KILLS_A_JOB):
        point, rank, ahead = draw.choice(POINTS), draw.randrange(2), draw.randrange(1, 6)
        before = len(steps_of(folder))
        delay_s = draw.uniform(0.0, 0.02)
        while job.poll() is None:
            began = len(steps_of(folder)) > before
            in_save = began and any(path.name.startswith(".step-") for path in (folder / "checkpoints").glob(".step-*"))
            is_there = {
                "step": len(steps_of(folder)) >= before + ahead,
                "save": in_save,
                "start": (folder / f"process.{rank}").exists() and not began,
            }[point]
            if is_there:
                time.sleep(delay_s if point != "save" else delay_s / 10)
                if kill(folder, rank, known):
                    break
            time.sleep(0.001)
        if job.poll() is not None:
            return
        killed, written = time.monotonic(), len(steps_of(folder))
        while job.poll() is None and len(steps_of(folder)) <= written and time.monotonic() < killed + 120.0:
            time.sleep(0.05)
        if point != "start" or len(steps_of(folder)) > written:
            outcome.recovery_s.append(time.monotonic() - killed)
        outcome.points.append(point)


def run(folder: Path, layout: str, wanted: dict[str, str], *, asynchronous: bool, draw: random.Random) -> Outcome:
    outcome = Outcome(layout=layout, asynchronous=asynchronous)
    job = start(folder, LAYOUTS[layout], asynchronous=asynchronous, restarts=KILLS_A_JOB + 3)
    try:
        disturb(job, folder, outcome, draw)
        code = job.wait(timeout=300.0)
    except subprocess.TimeoutExpired:
        job.kill()
        outcome.difference = "it did not end"
        return outcome
    if code:
        outcome.difference = f"exit code {code}: {(folder / 'said').read_text()[-300:]}"
        return outcome
    for rank in range(2):
        found = result(folder, rank)
        if found != wanted:
            keys = [key for key in wanted if found.get(key) != wanted[key]]
            outcome.difference = f"rank {rank}: {', '.join(keys[:3])}"
    return outcome


def undisturbed(folder: Path, layout: str) -> dict[str, str]:
    job = start(folder, LAYOUTS[layout], asynchronous=False, restarts=0)
    if job.wait(timeout=300.0):
        raise SystemExit(f"The undisturbed job of {layout} failed: {(folder / 'said').read_text()[-1000:]}")
    return result(folder, 0)


def page(outcomes: list[Outcome], seed: int) -> str:
    points = Counter(point for one in outcomes for point in one.points)
    times = [value for one in outcomes for value in one.recovery_s]
    lines = [
        "# Jobs whose ranks are killed",
        "",
        f"Written by `python -m tools.campaigns.restarts --page docs/evidence/restarts.md --seed {seed}`; do not edit. Revision {revision()}.",
        f"Each job trains {STEPS} steps under `torchrun --max-restarts` on 2 gloo ranks of one machine, saves every {fit_script.SAVE_EVERY}, and its",
        "ranks are killed by SIGKILL at random: between and inside of steps, while a checkpoint is written, and while ranks start. At its end",
        "every loss and the digest of all parameters have to be, bit for bit, those of a job that nothing has disturbed.",
        "",
        (
            f"{sum(points.values())} kills: {points['step']} in steps, {points['save']} in saves, {points['start']} in starts. "
            f"{sum(not one.difference for one in outcomes)} of {len(outcomes)} jobs end equal. From a kill to the next step: median "
            f"{median(times):.1f} s, at most {max(times):.1f} s (most of it imports and tracing; the machine was busy)."
        ),
        "",
        "| layout | checkpoints | killed in | at the end |",
        "|---|---|---|---|",
    ]
    for one in outcomes:
        kind = "asynchronous" if one.asynchronous else "synchronous"
        lines.append(f"| {one.layout} | {kind} | {', '.join(one.points)} | {one.difference or 'equal'} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    draw, outcomes = random.Random(given.seed), list[Outcome]()
    with tempfile.TemporaryDirectory() as place:
        wanted = {layout: undisturbed(Path(place) / "undisturbed" / str(i), layout) for i, layout in enumerate(LAYOUTS)}
        while sum(len(one.points) for one in outcomes) < given.kills:
            number = len(outcomes)
            layout = list(LAYOUTS)[number % len(LAYOUTS)]
            folder = Path(place) / str(number)
            outcomes.append(run(folder, layout, wanted[layout], asynchronous=number % 3 == 2, draw=draw))
            print(outcomes[-1], flush=True)
    if given.page is not None:
        given.page.write_text(page(outcomes, given.seed), encoding="utf-8")
    if bad := [one for one in outcomes if one.difference]:
        raise SystemExit(f"{len(bad)} of {len(outcomes)} jobs do not end as undisturbed ones")


if __name__ == "__main__":
    main()
