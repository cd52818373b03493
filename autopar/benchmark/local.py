"""``autopar benchmark local`` apart from its options."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch

from autopar import api
from autopar.benchmark.batches import Launch, Outcome, benchmark, local_ranks
from autopar.benchmark.chosen_plans import Advance, Choice, choose, variants
from autopar.benchmark.rank_links import measured_cluster
from autopar.benchmark.rank_runs import Job
from autopar.errors import UsageError
from autopar.hardware.cluster import Cluster
from autopar.hardware.detect.machine import default_cache_dir, fingerprint, machine_profile, profile_path
from autopar.models.resolve import ModelSource, resolve_model
from autopar.planner.planner import Task
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space, load_space
from autopar.verification.reference import trained_alone

GPU_PRECISIONS = ("fp32", "bf16")
MAX_AGE_S = 6 * 3600.0
"""How long a measured speed of this machine is believed: a shared one is a third faster at one time than at another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for; the options of the command."""

    model: str
    num_ranks: int = 4
    global_batch_size: int = 16
    space: str = "default"
    sample: int | None = None
    seed: int = 0
    sequence: int | None = None
    precision: str = "fp32"
    optimizer: str = "adamw"
    pins: tuple[str, ...] = ()
    rounds: int = 3
    steps: int = 3
    warm_up: int = 2
    timeout_s: float = 300.0
    slowest: float | None = None
    """Plans that are predicted to take more than so many times the picked one's step are not run."""
    fresh: bool = False
    """The machine's speed is measured although it was a short time ago."""
    as_rank: int | None = None
    """Plans for ``num_ranks`` ranks are run as this one of them, alone: see ``autopar.benchmark.rank_runs.Job``."""

    @property
    def title(self) -> str:
        """What measurements belong to."""
        parts = [self.model, f"batch {self.global_batch_size}", self.precision, self.optimizer]
        if self.sequence is not None:
            parts.append(f"sequence {self.sequence}")
        if self.as_rank is not None:
            parts.append(f"rank {self.as_rank} alone")
        return ", ".join(parts)


def run_local(
    wish: Wish, *, results: Path | None = None, cache_dir: Path | None = None, advance: Advance | None = None
) -> Outcome:
    """On this machine: ranks on its CPU, or every variant on its one GPU; or one rank of plans for more.

    Raises:
        AutoparError: the model cannot make a step on one device.
        InfeasibleError: no plan fits.
        UsageError: there is no such rank.
    """
    _check_rank(wish)
    source = resolve_model(wish.model, sequence_length=wish.sequence)  # which may be none: before minutes of measuring
    if wish.as_rank is None and not torch.cuda.is_available():  # one rank may have a part of what fits nowhere whole
        _check_runs(source)
    profile = profile_path(cache_dir)
    again, note = whether_again(profile, fresh=wish.fresh)
    if again and advance is not None:
        advance(note, 0, 1)
    machine = machine_profile(cache_dir=cache_dir, refresh=again)
    if wish.as_rank is not None:
        outcome = _as_rank(wish, results=results, cache_dir=cache_dir, advance=advance)
    elif torch.cuda.is_available():
        outcome = _on_gpu(wish, results=results, cache_dir=cache_dir, advance=advance)
    else:
        kept = (cache_dir or default_cache_dir()) / f"ranks-{fingerprint()}-{wish.num_ranks}.json"
        with local_ranks(wish.num_ranks, timeout_s=wish.timeout_s) as launch:
            if wish.num_ranks > 1:
                again, note = whether_again(kept, fresh=wish.fresh or again)
                if again and advance is not None:
                    advance(note, 0, 1)
                cluster = measured_cluster("local", machine, (1, wish.num_ranks), launch, kept=kept, again=again)
            else:
                cluster = Cluster.parse("local?ranks=1", cache_dir=cache_dir)
            outcome = on_cluster(wish, cluster, launch, results=results, advance=advance)
    return replace(outcome, machine=note)


def _check_rank(wish: Wish) -> None:
    if not 0 <= (wish.as_rank or 0) < wish.num_ranks:
        raise UsageError(
            f"The plans have no rank {wish.as_rank or 0}: they are for {wish.num_ranks} ranks",
            where="--as-rank",
            fix="Say how many ranks the plans are for with --ranks",
        )


def _check_runs(source: ModelSource) -> None:
    """Nothing, where the model as it is written makes one step of a few samples; what cannot, no plan can either."""
    batch = source.make_batch(source.batch_size)
    trained_alone(source.build(), [batch], "One device alone cannot train the model")


def whether_again(kept: Path | None, *, fresh: bool) -> tuple[bool, str]:
    """Whether this machine is measured now, and a line that says so, or how old the measurement is that is kept.

    Args:
        kept: file of an earlier measurement; None: a shipped profile, never measured.
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
    wish: Wish, cluster: Cluster, launch: Launch, *, results: Path | None = None, advance: Advance | None = None
) -> Outcome:
    """On any ranks that ``launch`` reaches and ``cluster`` describes."""
    source = resolve_model(wish.model, sequence_length=wish.sequence)
    task = task_of(wish, source, cluster, wish.precision)
    choice = choose(task, sample=wish.sample, seed=wish.seed, slowest=wish.slowest, advance=advance)
    return _measured(wish, source, [task], choice, launch, "cpu", cluster.name, results=results, advance=advance)


def _as_rank(wish: Wish, *, results: Path | None, cache_dir: Path | None, advance: Advance | None) -> Outcome:
    """Compute and memory of one rank: on a CPU it has a core of its own, as none of the others runs.

    Without a pipeline: neighbours that are not there send no shapes.
    """
    is_gpu = torch.cuda.is_available()
    cores = "" if is_gpu else f"&cores={wish.num_ranks}"
    cluster = Cluster.parse(f"local?ranks={wish.num_ranks}{cores}", cache_dir=cache_dir)
    source = resolve_model(wish.model, sequence_length=wish.sequence)
    task = task_of(replace(wish, pins=(*wish.pins, "pp=1")), source, cluster, wish.precision)
    choice = choose(task, sample=wish.sample, seed=wish.seed, advance=advance)
    device_type = "cuda" if is_gpu else "cpu"
    with local_ranks(1, timeout_s=wish.timeout_s) as launch:
        return _measured(
            wish, source, [task], choice, launch, device_type, cluster.name, results=results, advance=advance
        )


def _on_gpu(wish: Wish, *, results: Path | None, cache_dir: Path | None, advance: Advance | None) -> Outcome:
    cluster = Cluster.parse("local?ranks=1", cache_dir=cache_dir)
    source = resolve_model(wish.model, sequence_length=wish.sequence)
    tasks = [task_of(wish, source, cluster, precision) for precision in GPU_PRECISIONS]
    choice = variants(tasks, one_device_pins(tasks[0].space, wish))
    with local_ranks(1, timeout_s=wish.timeout_s) as launch:
        return _measured(wish, source, tasks, choice, launch, "cuda", cluster.name, results=results, advance=advance)


def one_device_pins(space: Space, wish: Wish) -> list[tuple[str, ...]]:
    """Every micro-batch and recompute of a space, as pins beside the wish's own."""
    sizes = [size for size in space.micro_batches if wish.global_batch_size % size == 0]
    return [(*wish.pins, f"micro_batch={size}", f"recompute={mode}") for size, mode in product(sizes, space.recompute)]


def task_of(wish: Wish, source: ModelSource, cluster: Cluster, precision: str) -> Task:
    """What the planner is asked."""
    recipe = api.PRECISIONS[precision]
    graph = api.trace_model(
        source.model, source.example_inputs, recipe, name=source.name, global_batch_size=wish.global_batch_size
    )
    return Task(
        graph=graph,
        cluster=cluster,
        global_batch_size=wish.global_batch_size,
        precision=recipe,
        optimizer=wish.optimizer,
        pins=Pins.parse(wish.pins),
        space=load_space(wish.space),
    )


def _measured(  # noqa: PLR0913  what the two ways to get here differ in
    wish: Wish,
    source: ModelSource,
    tasks: list[Task],
    choice: Choice,
    launch: Launch,
    device_type: str,
    where: str,
    *,
    results: Path | None,
    advance: Advance | None,
) -> Outcome:
    job = Job(
        source=source,
        graphs={task.precision.name: task.graph for task in tasks},
        plans={},
        device_type=device_type,
        rounds=wish.rounds,
        steps=wish.steps,
        warm_up=wish.warm_up,
        timeout_s=wish.timeout_s,
        alone=device_type == "cuda",  # models of a GPU: many do not fit beside each other
        as_rank=wish.as_rank,
    )
    title = f"{wish.title}, {where}"
    return benchmark(job, choice, launch, title=title, results=results, advance=advance)
