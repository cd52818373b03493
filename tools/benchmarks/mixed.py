"""Two kinds of devices: stages cut by their speed against equal stages.

``python -m tools.benchmarks.mixed plan [--model SPEC] [--page docs/evidence/mixed.md]`` plans a GPT for 128 A100 and 384 V100, with stages as the search
cuts them and with the same number of layers on each, by the same cost model. ``python -m tools.benchmarks.mixed run`` runs
such plans on two CPU ranks, of which one gets half a core: by a quota of a control group where one can be made (root), else
beside a process that does nothing but turn on the same core. ``python -m tools.benchmarks.mixed shares`` does the same
without a pipeline, with samples shared by speed against equal numbers of samples. With ``--page`` each writes its own part of
that page.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from autopar.benchmark import rank_runs as ranks
from autopar.benchmark.batches import PRELOAD
from autopar.benchmark.rank_runs import Job
from autopar.errors import InfeasibleError, UsageError
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.hardware.machine import machine_profile
from autopar.hardware.read import load_library
from autopar.models.resolve import resolve_model
from autopar.plan.plan import FP32, Plan, Precision
from autopar.plan.text import micro_batch_text
from autopar.planner.planner import Planner
from autopar.planner.search import Limits, Task
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space
from autopar.util.files import write_text
from autopar.util.formatting import seconds
from autopar.verification.rank_pool import WorkerPool
from tools.revision import revision

FP16 = Precision(name="fp16", compute="float16", storage="float32", reduce="float32")
"""What both devices multiply fast; for planning alone, since nothing scales the loss."""

LARGE = "gpt:layers=32,hidden=5120,heads=40,vocab=51200"
SMALL = "gpt:layers=16,hidden=256,heads=4,vocab=256"
A100_V100 = """name = "a100-v100"
[[group]]
device = "a100-sxm4-40gb"
num_nodes = 16
devices_per_node = 8
[[group]]
device = "v100-sxm2-32gb"
num_nodes = 48
devices_per_node = 8
"""
SLOW_CORE_RANKS = 2
"""The slow rank is one of so many that share a core: it has the other's part of it taken away."""
PERIOD_US = 5000


def search(
    graph: Graph,
    cluster: Cluster,
    batch: int,
    precision: Precision,
    pins: Sequence[str],
    most_s: float | None = None,
    space: str = "default",
    processes: int = 1,
) -> Plan:
    task = Task(
        graph=graph,
        cluster=cluster,
        global_batch_size=batch,
        precision=precision,
        optimizer="adamw",
        pins=Pins.parse(tuple(pins)),
        space=load_space(space),
    )
    return Planner(task).search(limits=Limits(max_step_time_s=most_s), processes=processes)


def equal_pins(graph: Graph, pp: int, virtual_stages: int) -> tuple[str, ...] | None:
    """The same number of layers on each stage, what stands before and after them on the first and the last."""
    layers = [i for i, block in enumerate(graph.blocks) if block.label.rpartition(".")[2].isdigit()]
    stages = pp * virtual_stages
    if len(layers) % stages:
        return None
    share, pins = len(layers) // stages, [f"pp={pp}", f"virtual_stages={virtual_stages}"]
    for i, block in enumerate(graph.blocks):
        place = min(max((i - layers[0]) // share, 0), stages - 1)
        pins.append(f"stage@{block.label}={place}")
    return tuple(pins)


def best_equal(graph: Graph, cluster: Cluster, batch: int, precision: Precision, pins: Sequence[str]) -> Plan:
    """The best plan whose stages have the same number of layers, over everything else that may be chosen."""
    best: Plan | None = None
    for pp in (2, 4, 8, 16, 32):
        for virtual_stages in (1, 2, 4):
            equal = equal_pins(graph, pp, virtual_stages)
            if equal is None or pp > cluster.world_size or virtual_stages * pp > len(graph.blocks):
                continue
            try:
                most_s = best.predicted.step_time_s if best else None
                best = search(graph, cluster, batch, precision, (*pins, *equal), most_s)
            except InfeasibleError:
                continue
    if best is None:
        raise InfeasibleError("No plan has equal stages", fix="Take other degrees")
    return best


def described(name: str, plan: Plan) -> tuple[str, ...]:
    blocks = [stage.stop - stage.start for stage in plan.stages]
    choices = f"{plan.mesh}, {plan.schedule}, ZeRO {plan.zero_stage}, micro-batch {plan.micro_batch_size}"
    return name, seconds(plan.predicted.step_time_s), choices, " ".join(map(str, blocks))


def plan_large(model: str, batch: int, rounds: int, page: Path | None) -> None:
    cluster = cluster_from(A100_V100)
    graph = resolve_model(model, sequence_length=2048, dtype=torch.float16).trace()
    spent: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(rounds):
        for processes, own in spent.items():
            begin = time.perf_counter()
            picked = search(graph, cluster, batch, FP16, (), processes=processes)
            own.append(time.perf_counter() - begin)
    equal = best_equal(graph, cluster, batch, FP16, ())
    rows = [described("by speed", picked), described("equal", equal)]
    over = equal.predicted.step_time_s / picked.predicted.step_time_s
    record = picked.search
    text = (
        markdown(("stages", "step", "plan", "blocks of each stage"), rows)
        + f"\nThe best plan with as many layers on each stage, over everything else that may be chosen, takes {over - 1:.0%} longer. "
        f"The search takes\n{median(spent[2]):.1f} seconds on two cores and {median(spent[1]):.1f} on one without the trace (medians of {rounds}) "
        f"for {record.evaluated:,} of\n{record.candidates:,} candidates. No plan of the space takes less than {seconds(record.lower_bound_s)}, "
        f"a gap of {record.gap:.1%}.\n"
    )
    print(text)
    print(picked)
    if page is not None:
        write_part(page, "plan", text)


def cluster_from(text: str) -> Cluster:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(text, encoding="utf-8")
        return Cluster.load(path)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("|  |", "| |") for line in lines)


def write_part(page: Path, name: str, text: str) -> None:
    """Put ``text`` between the two comments of a page that name a part of it."""
    begin, end = f"<!-- {name}: written by its command -->\n", f"<!-- {name}: end -->\n"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise UsageError(f"No comments around the part '{name}'", where=str(page), fix="Write both")
    write_text(page, f"{before}{begin}Run at revision {revision()}.\n\n{text}{end}{after}", make_folder=True)


# --- on this machine


def two_ranks() -> Cluster:
    """A rank with a core of this machine, measured now, and one with a part of a core."""
    with tempfile.TemporaryDirectory() as folder:
        profile = machine_profile(cache_dir=Path(folder))
    fast = replace(profile.group(1, 1), nic=profile.intra_node)
    shared = profile.group(1, SLOW_CORE_RANKS, num_cores=1)
    device = replace(shared.device, name="cpu-slow", memory_bytes=fast.device.memory_bytes)
    slow = replace(shared, device=device, devices_per_node=1, nics_per_node=fast.nics_per_node, nic=profile.intra_node)
    return Cluster(name="two-ranks", groups=(fast, slow), library=load_library(profile.library))


@contextmanager
def slowed(share: float) -> Iterator[str]:
    """This process gets ``share`` of a core; gives how."""
    core = sorted(os.sched_getaffinity(0))[-1]
    os.sched_setaffinity(0, {core})
    group = _quota_group(share)
    if group is not None:
        yield "a quota of a control group"
        (group.parent / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
        group.rmdir()
        return
    other = multiprocessing.get_context("fork").Process(target=_turn, args=(core,), daemon=True)
    other.start()
    try:
        yield "a process beside it on its core"
    finally:
        other.terminate()
        other.join()


def _quota_group(share: float) -> Path | None:
    """A control group below this process's own, with a quota, that it has joined; None where that is not allowed."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        number, controllers, path = line.split(":", 2)
        if "cpu" not in controllers.split(",") and number != "0":
            continue
        root = Path("/sys/fs/cgroup") / (controllers if number != "0" else "")
        group = root / path.lstrip("/") / f"autopar-slow-{os.getpid()}"
        try:
            group.mkdir()
            if number == "0":
                (group / "cpu.max").write_text(f"{round(share * PERIOD_US)} {PERIOD_US}", encoding="utf-8")
            else:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US), encoding="utf-8")
                (group / "cpu.cfs_quota_us").write_text(str(round(share * PERIOD_US)), encoding="utf-8")
                (group / "cpu.shares").write_text("65536", encoding="utf-8")
            (group / "cgroup.procs").write_text(str(os.getpid()), encoding="utf-8")
        except OSError:
            if group.is_dir():
                group.rmdir()
            continue
        return group
    return None


def _turn(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        pass


def run_slowed(jobs: Sequence[tuple[Job, int]]) -> list[dict[str, Any]]:
    """On each rank: jobs, each with the rank that is slowed in it."""
    found: list[dict[str, Any]] = []
    for job, slow in jobs:
        if dist.get_rank() == slow:
            with slowed(1 / SLOW_CORE_RANKS) as how:
                found.append({"how": how, **ranks.run(job)})
        else:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            found.append(ranks.run(job))
    return found


def by_stages(graph: Graph, cluster: Cluster, batch: int) -> dict[str, Plan]:
    """Plans in two stages, the better one first."""
    pins = ("pp=2", "tp=1", "micro_batch=2", "schedule=1F1B")
    equal = best_equal(graph, cluster, batch, FP32, pins)
    return {"stages by speed": search(graph, cluster, batch, FP32, pins), "equal stages": equal}


def by_shares(graph: Graph, cluster: Cluster, batch: int) -> dict[str, Plan]:
    """Plans on two data ranks, the better one first."""
    pins = ("pp=1", "tp=1", "zero=0")
    names = {"shares by speed": "data_shares!=equal", "equal shares": "data_shares=equal"}
    return {name: search(graph, cluster, batch, FP32, (*pins, pin)) for name, pin in names.items()}


def run_small(model: str, batch: int, rounds: int, out: Path | None, page: Path | None, *, shares: bool) -> None:
    cluster, source = two_ranks(), resolve_model(model, sequence_length=64)
    graph = source.trace()
    plans = (by_shares if shares else by_stages)(graph, cluster, batch)
    found: dict[str, Any] = {}
    with WorkerPool(2, preload=PRELOAD) as pool:
        for name, plan in plans.items():
            slow = next(g.start for g in plan.groups if g.device == "cpu-slow")
            job = Job(source=source, graphs={"fp32": graph}, plans={name: plan}, rounds=rounds)
            by_rank = pool.run(run_slowed, [(job, slow)], timeout_s=300.0)
            steps = [max(pair) for pair in zip(*(own[0][name]["seconds"] for own in by_rank), strict=True)]
            found[name] = {
                "predicted_s": plan.predicted.step_time_s,
                "measured_s": median(steps),
                "blocks": [stage.stop - stage.start for stage in plan.stages],
                "samples": f"{plan.num_micro_batches} x {micro_batch_text(plan)}",
                "devices": [device for stage in plan.stages for device in plan.devices_of(stage.pp_rank)],
                "how": by_rank[slow][0]["how"],
                "steps": steps,
            }
    text = measured_part(found)
    print(text)
    if out is not None:
        out.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if page is not None:
        write_part(page, "shares" if shares else "run", text)


def measured_part(found: dict[str, Any]) -> str:
    """The table of two plans that ran, from what :func:`run_small` keeps of them."""
    rows = []
    for name, own in found.items():
        predicted_s, measured_s = own["predicted_s"], own["measured_s"]
        places = f"{', '.join(own['devices'])}: {', '.join(map(str, own['blocks']))}"
        cells = (seconds(predicted_s), seconds(measured_s), f"{measured_s / predicted_s:.2f}")
        rows.append([name, places, own["samples"], *cells])
    picked, equal = found.values()
    over = (f"{equal[part] / picked[part]:.2f}" for part in ("predicted_s", "measured_s"))
    rows.append(["equal over by speed", "", "", *over, ""])
    return markdown(("plan", "blocks", "micro-batches", "predicted", "measured", "over predicted"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("plan", "run", "shares"))
    parser.add_argument("--model")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="results of a run as JSON")
    parser.add_argument("--page", type=Path, help="write the part of this page")
    wish = parser.parse_args()
    if wish.what == "plan":
        plan_large(wish.model or LARGE, wish.batch or 1024, wish.rounds, wish.page)
    else:
        run_small(wish.model or SMALL, wish.batch or 16, wish.rounds, wish.out, wish.page, shares=wish.what == "shares")


if __name__ == "__main__":
    main()
