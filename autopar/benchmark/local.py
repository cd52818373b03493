"""``autopar benchmark local`` without its options: the choice of plans, all of a space or a sample, and their run on this machine."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from autopar.benchmark.batches import Advance, Choice, Entry, Launch, Outcome, benchmark, local_ranks
from autopar.benchmark.rank_runs import OPTIMIZERS, Job, measured_cluster
from autopar.errors import InfeasibleError, UsageError
from autopar.hardware.cluster import Cluster
from autopar.hardware.machine import fingerprint, machine_profile, profile_path
from autopar.models.resolve import ModelSource, resolve_model
from autopar.plan.file import plan_to_dict
from autopar.plan.plan import Plan
from autopar.plan.text import short_text
from autopar.planner.planner import Planner
from autopar.planner.search import Limits, Task
from autopar.planner.search import task_of as planned
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space, load_space
from autopar.request import Request
from autopar.util.files import default_cache_dir
from autopar.verification.reference import trained_alone

GPU_PRECISIONS = ("fp32", "bf16")
"""Precisions whose plans are run on one GPU."""
MAX_RANKS = 1024
"""Most processes that are started on this machine: more are a mistake, or a job for several machines."""
MAX_AGE_S = 6 * 3600.0
"""Age in seconds up to which a measured speed of this machine is used: a shared machine may be a third faster at another time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkRequest(Request):
    """The request: the options of the command."""

    model: str
    num_ranks: int = 4
    global_batch_size: int = 16
    sample: int | None = None
    sample_seed: int = 0
    sequence: int | None = None
    rounds: int = 3
    steps: int = 3
    warm_up: int = 2
    run_timeout_s: float = 300.0
    slowest: float | None = None
    """Plans with a predicted step longer than this multiple of the picked plan's are not run."""
    fresh: bool = False
    """Whether the speed of the machine is measured even if a recent measurement exists."""
    as_rank: int | None = None
    """The rank as which plans for ``num_ranks`` ranks are run, alone: see ``autopar.benchmark.rank_runs.Job``."""

    @property
    def title(self) -> str:
        """The title under which measurements are kept."""
        parts = [self.model, f"batch {self.global_batch_size}", self.precision, self.optimizer]
        if self.sequence is not None:
            parts.append(f"sequence {self.sequence}")
        if self.as_rank is not None:
            parts.append(f"rank {self.as_rank} alone")
        return ", ".join(parts)


def run_local(
    request: BenchmarkRequest,
    *,
    results: Path | None = None,
    cache_dir: Path | None = None,
    advance: Advance = lambda *_: None,
) -> Outcome:
    """Run plans on this machine: on ranks of its CPU, every variant on its one GPU, or one rank of plans for more.

    Args:
        request: the request.
        results: a file that keeps measurements.
        cache_dir: the folder with measurements of this machine.
        advance: called with the progress.

    Raises:
        AutoparError: the model cannot make a step on one device.
        InfeasibleError: no plan fits.
        UsageError: the plans do not have the rank of ``as_rank``, or too many ranks; there is no such space; torch has no such
            optimizer.
    """
    _check_ranks(request)
    if request.optimizer.lower() not in OPTIMIZERS:
        raise UsageError.unknown("optimizer of a benchmark", request.optimizer, OPTIMIZERS, where="--optimizer")
    load_space(request.space)  # before long measurements, as the model
    source = resolve_model(request.model, sequence_length=request.sequence)
    is_gpu = torch.cuda.is_available()
    if request.as_rank is None and not is_gpu:  # as one rank, the model may be too large for a device
        trained_alone(source.build(), [source.make_batch(source.batch_size)])  # if it fails, every plan fails
    again, note = whether_again(profile_path(cache_dir), fresh=request.fresh)
    if again:
        advance(note, 0, 1)
    machine = machine_profile(cache_dir=cache_dir, refresh=again)
    is_alone = request.as_rank is not None or is_gpu
    with local_ranks(1 if is_alone else request.num_ranks, run_timeout_s=request.run_timeout_s) as launch:
        if request.as_rank is not None:
            # no other rank runs: on a CPU it has a core to itself; without other stages nothing sends it shapes, hence pp=1
            cores = "" if is_gpu else f"&cores={request.num_ranks}"
            cluster = Cluster.parse(f"local?ranks={request.num_ranks}{cores}", cache_dir=cache_dir)
            request = replace(request, pins=(*request.pins, "pp=1"))
        elif is_alone or request.num_ranks == 1:
            cluster = Cluster.parse("local?ranks=1", cache_dir=cache_dir)
        else:
            kept = (cache_dir or default_cache_dir()) / f"ranks-{fingerprint()}-{request.num_ranks}.json"
            again, note = whether_again(kept, fresh=request.fresh or again)
            if again:
                advance(note, 0, 1)
            cluster = measured_cluster("local", machine, (1, request.num_ranks), launch, kept=kept, again=again)
        outcome = on_cluster(request, source, cluster, launch, results=results, advance=advance)
    return replace(outcome, machine=note)


def _check_ranks(request: BenchmarkRequest) -> None:
    """Raise an error if the plans do not have the rank of ``as_rank``, or more ranks than one machine runs."""
    if request.as_rank is None and request.num_ranks > MAX_RANKS:
        raise UsageError(
            f"One machine does not run {request.num_ranks:,} ranks",
            where="--ranks",
            fix=f"Give at most {MAX_RANKS}, or measure one of them alone with --as-rank 0",
        )
    if not 0 <= (request.as_rank or 0) < request.num_ranks:
        raise UsageError(
            f"The plans have no rank {request.as_rank or 0}: they are for {request.num_ranks} ranks",
            where="--as-rank",
            fix="Say how many ranks the plans are for with --ranks",
        )


def whether_again(kept: Path | None, *, fresh: bool) -> tuple[bool, str]:
    """Return whether this machine is measured now, and a line that says so or gives the age of the measurement.

    Args:
        kept: the file of an earlier measurement; None for a shipped profile, which is never measured.
        fresh: whether it is measured in any case.
    """
    if kept is None:
        return False, "speed of this machine: a shipped profile, not measured here"
    if not kept.is_file():
        return True, "speed of this machine: measured now, for the first time"
    age_s = max(time.time() - kept.stat().st_mtime, 0.0)
    age = f"{age_s / 3600:.1f} hours" if age_s >= 3600 else f"{age_s / 60:.0f} minutes"
    if fresh or age_s > MAX_AGE_S:
        return True, f"speed of this machine: measured now, the one before was {age} old"
    return False, f"speed of this machine: measured {age} ago (--fresh measures it again)"


def on_cluster(
    request: BenchmarkRequest,
    source: ModelSource,
    cluster: Cluster,
    launch: Launch,
    *,
    results: Path | None = None,
    advance: Advance = lambda *_: None,
) -> Outcome:
    """Run plans on the ranks that ``launch`` reaches and ``cluster`` describes; on one GPU every variant of a plan.

    Args:
        request: the request.
        source: the model of the request.
        cluster: describes the ranks.
        launch: runs a job on them.
        results: a file that keeps measurements.
        advance: called with the progress.
    """
    device_type = cluster.devices[0].kind
    if device_type == "cuda" and request.as_rank is None:
        tasks = [task_of(request, source, cluster, precision) for precision in GPU_PRECISIONS]
        choice = variants(tasks, one_device_pins(tasks[0].space, request))
    else:
        tasks = [task_of(request, source, cluster, request.precision)]
        choice = choose(tasks[0], request, advance)
    job = Job(
        source=source,
        graphs={task.precision.name: task.graph for task in tasks},
        plans={},
        device_type=device_type,
        rounds=request.rounds,
        steps=request.steps,
        warm_up=request.warm_up,
        collective_timeout_s=request.run_timeout_s,
        alone=device_type == "cuda",  # several models may not fit in a GPU's memory
        as_rank=request.as_rank,
    )
    return benchmark(job, choice, launch, title=f"{request.title}, {cluster.name}", results=results, advance=advance)


def one_device_pins(space: Space, request: BenchmarkRequest) -> list[tuple[str, ...]]:
    """Return pins for every micro-batch and recompute of a space, with those of the request."""
    sizes = [size for size in space.micro_batches if request.global_batch_size % size == 0]
    return [
        (*request.pins, f"micro_batch={size}", f"recompute={mode}") for size, mode in product(sizes, space.recompute)
    ]


def task_of(request: BenchmarkRequest, source: ModelSource, cluster: Cluster, precision: str) -> Task:
    """Return the planner's task."""
    inputs = source.example_inputs
    full_request = replace(request, cluster=cluster, example_inputs=inputs, precision=precision, name=source.name)
    return planned(source.model, full_request)


# --- the choice of plans


def choose(task: Task, request: BenchmarkRequest, advance: Advance = lambda *_: None) -> Choice:
    """Return the best plan of each candidate of the space, or of a sample of candidates, with that of the search.

    Raises:
        InfeasibleError: no plan fits.
    """
    planner, sample, seed = Planner(task), request.sample, request.sample_seed
    pool = list(planner.pool)
    picked = entry_of(planner.search(limits=Limits()))
    drawn = pool if sample is None or sample >= len(pool) else random.Random(seed).sample(pool, sample)
    by_key, misfits = {picked.key: picked}, []
    for i, candidate in enumerate(drawn):
        advance("planning", i, len(drawn))
        planner.pool = [candidate]  # a search with one candidate returns its best plan
        try:
            entry = entry_of(planner.search(limits=Limits()))
        except InfeasibleError as error:
            misfits.append((str(candidate), str(error)))
            continue
        ratio = entry.plan.predicted.step_time_s / picked.plan.predicted.step_time_s
        if request.slowest is not None and ratio > request.slowest:
            misfits.append((entry.name, f"predicted {ratio:.3g} times as slow as the picked one: not run"))
            continue
        by_key.setdefault(entry.key, entry)
    entries = list(by_key.values())
    random.Random(seed).shuffle(entries)
    return Choice(entries=tuple(entries), picked=picked.key, num_candidates=len(pool), misfits=tuple(misfits))


def variants(tasks: Sequence[Task], pin_sets: Sequence[Sequence[str]]) -> Choice:
    """Return a plan on one device for each task (one for each precision) and set of pins (micro-batch, recompute).

    The picked plan is the one that is predicted fastest, since one search has one precision.

    Raises:
        InfeasibleError: no plan fits.
    """
    plans: dict[str, Entry] = {}
    misfits = []
    for task in tasks:
        for pins in pin_sets:
            try:
                entry = entry_of(Planner(replace(task, pins=Pins.parse(pins))).estimate())
            except InfeasibleError as error:
                misfits.append((f"{task.precision.name} {' '.join(pins)}", str(error)))
                continue
            plans.setdefault(entry.key, entry)
    if not plans:
        raise InfeasibleError(
            "No plan fits this device",
            got="; ".join(reason for _, reason in misfits[:2]) or None,
            fix="Take a smaller model or batch, or other pins",
        )
    best = min(plans.values(), key=lambda entry: entry.plan.predicted.step_time_s)
    return Choice(
        entries=tuple(plans.values()), picked=best.key, num_candidates=len(plans) + len(misfits), misfits=tuple(misfits)
    )


def entry_of(plan: Plan) -> Entry:
    """Return a plan with a name and a key, which do not depend on predictions, the search and notes."""
    data = plan_to_dict(plan)
    for key in ("predicted", "search", "notes", "pins", "cluster"):
        data.pop(key, None)
    digest = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]
    precision = "" if plan.precision.name == "fp32" else f" {plan.precision.name}"
    return Entry(key=digest, name=short_text(plan) + precision, plan=plan)
