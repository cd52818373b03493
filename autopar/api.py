"""What autopar is called for, where its packages are put together: trace, search, estimate, parallelize, verify.

Each function imports what it needs when it is called: who runs a plan loads no planner, who plans no runtime.
What a keyword means is said once, in :class:`autopar.request.Request`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, RuntimeMismatchError, UsageError
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import PRECISIONS, Plan, PrecisionName
from autopar.request import SAMPLES_PER_RANK, Request

if TYPE_CHECKING:
    from autopar.models.graph_for_plan import Inputs
    from autopar.planner.search import Limits, Progress
    from autopar.runtime.parallel_model import ParallelModel
    from autopar.tracing.trace import LossFunction
    from autopar.verification.results import VerifyReport

__all__ = ["PRECISIONS", "estimate", "parallelize", "search", "trace", "verify"]

_LOGGER = logging.getLogger("autopar")


def trace(
    model: torch.nn.Module,
    *,
    example_inputs: Inputs | None = None,
    precision: PrecisionName = "fp32",
    global_batch_size: int | None = None,
    loss_fn: LossFunction | None = None,
    opaque: Sequence[str] = (),
    name: str = "",
) -> Graph:
    """The graph of a model that :func:`search` and :func:`estimate` take in its place, to trace it once for several plans.

    Keywords are those of :class:`~autopar.request.Request`. Plans of the graph have the same ``precision``. Where samples of a
    batch meet (in batch statistics, or a loss over all pairs) the graph is for one ``global_batch_size``, without which such a
    model is refused. The model itself stays as it is, on whatever device it is.

    Raises:
        UsageError: no example inputs, and none can be made; a model that is parallel already.
        TraceError: the model cannot be traced.
    """
    from autopar.planner.search import graph_of

    request = Request(
        example_inputs=example_inputs, precision=precision, global_batch_size=global_batch_size, loss_fn=loss_fn,
        opaque=opaque, name=name,
    )  # fmt: skip
    return graph_of(model, request)


def search(  # noqa: PLR0913  keywords of the public call
    model: torch.nn.Module | Graph,
    *,
    cluster: Cluster | str,
    global_batch_size: int,
    example_inputs: Inputs | None = None,
    pins: Sequence[str] = (),
    precision: PrecisionName = "fp32",
    optimizer: str = "adamw",
    space: str = "default",
    trials: int | None = None,
    search_timeout_s: float | None = None,
    max_step_time_s: float | None = None,
    storage: str | None = None,
    study_name: str | None = None,
    workers: int | None = None,
    sampler: str | None = None,
    sampler_seed: int = 0,
    loss_fn: LossFunction | None = None,
    opaque: Sequence[str] = (),
    name: str = "",
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan that fits. Other keywords than these are those of :class:`~autopar.request.Request`.

    Args:
        model: on any device, meta included; or its graph, of :func:`trace`.
        trials, search_timeout_s: stop after so many evaluations or seconds, or at Ctrl-C, with the best plan so far.
        max_step_time_s: slower plans do not count.
        storage: an Optuna URL (``sqlite:///study.db``, ``postgresql://...``, ``journal:///study.log``) that keeps every trial;
            a search that finds trials of an earlier one there goes on from them.
        study_name: of the study in the storage; None for one that says what it is of.
        workers: processes; the plan does not depend on their number. None: one for each core, at most 4, where nothing else
            runs in this process (other threads, a CUDA device, a process group).
        progress: called with (what, done, total).

    Raises:
        UsageError: malformed pins, cluster, space or batch; a storage that cannot be opened; a study of something else.
        TraceError: the model cannot be traced.
        InfeasibleError: no plan satisfies the constraints; names the smallest set that conflicts.
        KeyboardInterrupt: before there was any plan.
    """
    from autopar.planner.branch_and_bound.process_group import idle_cores
    from autopar.planner.planner import Planner
    from autopar.planner.search import Limits, task_of
    from autopar.planner.studies.workers import shared

    request = Request(
        cluster=cluster, global_batch_size=global_batch_size, example_inputs=example_inputs, pins=pins, precision=precision,
        optimizer=optimizer, space=space, loss_fn=loss_fn, opaque=opaque, name=name, sampler=sampler,
        sampler_seed=sampler_seed, cache_dir=cache_dir,
    )  # fmt: skip
    limits = Limits(trials=trials, search_timeout_s=search_timeout_s, max_step_time_s=max_step_time_s)
    sharing = shared(storage, study_name, 1 if workers is None else workers)
    planner = Planner(task_of(model, request, progress))
    processes = idle_cores() if workers is None else workers
    return planner.search(limits=limits, sharing=sharing, progress=progress, processes=processes)


def estimate(  # noqa: PLR0913  keywords of the public call
    model: torch.nn.Module | Graph,
    *,
    cluster: Cluster | str,
    global_batch_size: int,
    example_inputs: Inputs | None = None,
    pins: Sequence[str] = (),
    precision: PrecisionName = "fp32",
    optimizer: str = "adamw",
    space: str = "default",
    loss_fn: LossFunction | None = None,
    opaque: Sequence[str] = (),
    name: str = "",
    cache_dir: Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The plan that the pins describe, without a search over what they leave open, which is as usual, as far as it fits.

    Keywords are those of :class:`~autopar.request.Request`; ``progress`` and errors are as of :func:`search`.
    """
    from autopar.planner.planner import Planner
    from autopar.planner.search import task_of

    request = Request(
        cluster=cluster, global_batch_size=global_batch_size, example_inputs=example_inputs, pins=pins, precision=precision,
        optimizer=optimizer, space=space, loss_fn=loss_fn, opaque=opaque, name=name, cache_dir=cache_dir,
    )  # fmt: skip
    return Planner(task_of(model, request, progress)).estimate()


def parallelize(  # noqa: PLR0913  keywords of the public call
    model: torch.nn.Module,
    *,
    cluster: Cluster | str | None = None,
    plan: Plan | str | Path | None = None,
    example_inputs: Inputs | None = None,
    global_batch_size: int | None = None,
    pins: Sequence[str] = (),
    precision: PrecisionName = "fp32",
    optimizer: str = "adamw",
    space: str = "default",
    trials: int | None = None,
    search_timeout_s: float | None = None,
    on_resize: Literal["error", "replan"] = "error",
    collective_timeout_s: float = 600.0,
    weights: str | Path | None = None,
    loss_fn: LossFunction | None = None,
    opaque: Sequence[str] = (),
    seed: int = 0,
    log_dir: str | Path | None = None,
) -> ParallelModel:
    """This rank's part of ``model`` under the best plan, or a given one; called on every rank of a torchrun job.

    Other keywords than these are those of :func:`search`.

    Args:
        model: with weights (those of rank 0 count) or on meta: then initialised or read part by part.
        cluster: None: the machines that the ranks stand on.
        plan: a plan or its file, instead of a search; None: that of ``autopar run``, if that started this rank.
        global_batch_size: None: the samples of ``example_inputs``, or 8 a rank.
        on_resize: where the job has another number of ranks than the plan or the cluster: an ``error``, or ``replan``: a search
            for the machines that the ranks stand on, with the global batch and the precision of the plan that is given.
        collective_timeout_s: of every collective. A search is waited for without a limit.
        weights: a folder of safetensors files, read slice by slice: of parameters, and of buffers that a ``state_dict()`` has.
        seed: of dropout, and of the initialisation of a model on meta.
        log_dir: where rank 0 writes measured against predicted times of the first steps, for ``autopar validate --from-run``.

    Raises:
        RuntimeMismatchError: the job's ranks or devices are others than those of the cluster or plan, or were not told of each
            other; the precision is one that is planned alone.
        PlanError: the plan is for another model.
        InfeasibleError: no plan satisfies the constraints.
    """
    from autopar.runtime.checks import check_can_run
    from autopar.runtime.job import given_plan
    from autopar.runtime.launch import launch

    found = given_plan() if plan is None else plan
    plan = None if found is None else _loaded(found)
    if plan is not None or precision in PRECISIONS:
        check_can_run(PRECISIONS[precision] if plan is None else plan.precision)
    request = Request(
        cluster=cluster, global_batch_size=global_batch_size, example_inputs=example_inputs, pins=pins, precision=precision,
        optimizer=optimizer, space=space, loss_fn=loss_fn, opaque=opaque,
    )  # fmt: skip
    device_type, make = _prepared(model, plan, request, (trials, search_timeout_s), collective_timeout_s, on_resize)
    return launch(
        model, make, device_type=device_type, weights=weights, seed=seed, collective_timeout_s=collective_timeout_s,
        log_dir=log_dir,
    )  # fmt: skip


def _loaded(plan: Plan | str | Path) -> Plan:
    """A plan, or that of a file."""
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str | Path):
        raise UsageError(
            f"The plan {plan!r} is neither a Plan nor the path of a file", fix="Write for example plan='plan.json'"
        )
    return Plan.load(plan)


def _prepared(
    model: torch.nn.Module,
    plan: Plan | None,
    request: Request,
    limits: tuple[int | None, float | None],
    collective_timeout_s: float,
    on_resize: str,
) -> tuple[str, Callable[[], tuple[Plan, Graph]]]:
    """The kind of device of a job that has started, and what rank 0 gets its plan by, and the graph that it is for."""
    from autopar.hardware.places import cluster_at, gathered_places
    from autopar.runtime.failure_watch import ordinary
    from autopar.runtime.job import check_alone, choose_device_type, how_to_start, start

    where = Cluster.parse(request.cluster) if isinstance(request.cluster, str) else request.cluster
    is_cpu = where is not None and where.devices[0].kind == "cpu"
    device_type = choose_device_type(plan.cluster if plan is not None else "cpu" if is_cpu else "")
    is_alone = start(device_type, collective_timeout_s=collective_timeout_s)
    if on_resize not in {"error", "replan"}:
        raise UsageError(f"There is no on_resize={on_resize!r}", fix="Give error or replan")
    if on_resize == "replan":
        plan, where, request = _resized(plan, where, request)
    size = dist.get_world_size()
    if plan is None and where is not None and where.world_size != size:
        raise RuntimeMismatchError(
            f"This job has {size} rank{'s' * (size > 1)}, but the cluster {where.name} has {where.world_size} devices",
            fix=f"{how_to_start(where.world_size)}, or pass a cluster of {size}",
        )
    if is_alone and where is None and plan is None:
        check_alone()
        _LOGGER.warning(
            "This process was not started as one of several ranks, so the plan is for one device. %s, or name the cluster of one device "
            "where one is meant.",
            how_to_start("N"),
        )
    # rank 0 plans alone, and knows of its own machine alone
    with ordinary():
        places = gathered_places() if plan is None and where is None else ()

    def make() -> tuple[Plan, Graph]:
        if plan is not None:
            return plan, _graph_of(plan, model, request.example_inputs, request.loss_fn)
        from autopar.planner.search import Limits

        most = Limits(trials=limits[0], search_timeout_s=limits[1])
        return _searched(model, replace(request, cluster=where or cluster_at(places)), size, most)

    return device_type, make


def _resized(
    plan: Plan | None, cluster: Cluster | None, request: Request
) -> tuple[Plan | None, Cluster | None, Request]:
    """What is planned for: a plan or a cluster of another number of ranks than the job has gives way to the machines that there are."""
    size = dist.get_world_size()
    if plan is not None and plan.mesh.world_size != size:
        _LOGGER.warning(
            "the plan is for %d ranks, and this job has %d: a new one is searched", plan.mesh.world_size, size
        )
        samples = request.global_batch_size or plan.global_batch_size
        request = replace(request, global_batch_size=samples, precision=_precision_of(plan))
        plan, cluster = None, None
    if cluster is not None and cluster.world_size != size:
        _LOGGER.warning(
            "the cluster %s has %d devices, and this job %d ranks: it is left", cluster.name, cluster.world_size, size
        )
        cluster = None
    return plan, cluster, request


def _precision_of(plan: Plan) -> PrecisionName:
    """The name of the plan's precision, as a search takes it.

    Raises:
        RuntimeMismatchError: it has none.
    """
    for name, known in PRECISIONS.items():
        if known == plan.precision:
            return name
    raise RuntimeMismatchError(
        f"The precision {plan.precision.name} of the plan has no name by which a plan for another number of ranks could be searched",
        fix='Start as many ranks as it has, or give the precision and the cluster: parallelize(model, cluster=..., precision="bf16")',
    )


def _graph_of(
    plan: Plan,
    model: torch.nn.Module,
    example_inputs: Inputs | None,
    loss_fn: LossFunction | None,
) -> Graph:
    """The graph that a given plan is for. The plan's own typing of axis ``batch`` says whether samples are apart, without a planner."""
    from autopar.lower.read_plan import check_batch_typing
    from autopar.models.graph_for_plan import trace_model

    def samples_apart(graph: Graph) -> None:
        try:
            check_batch_typing(plan, graph)
        except AutoparError:  # of another model, or samples meet: then the typing says where
            from autopar.planner.sharding.input_axes import samples_apart as typed

            typed(graph)

    return trace_model(
        model,
        example_inputs,
        plan.precision,
        name=plan.model.name,
        loss_fn=loss_fn,
        opaque=plan.opaque,
        global_batch_size=plan.global_batch_size,
        samples_apart=samples_apart,
    )


def _searched(model: torch.nn.Module, request: Request, ranks: int, limits: Limits) -> tuple[Plan, Graph]:
    """The plan that a search finds, and the graph that it is for."""
    from autopar.models.graph_for_plan import samples_of
    from autopar.planner.planner import Planner
    from autopar.planner.search import graph_of, task_of

    samples = request.global_batch_size or samples_of(request.example_inputs) or SAMPLES_PER_RANK * ranks
    request = replace(request, global_batch_size=samples)
    graph = graph_of(model, request)
    task = task_of(graph, replace(request, example_inputs=None, loss_fn=None))
    return Planner(task).search(limits=limits), graph


def verify(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    plan: Plan | str | Path,
    *,
    example_inputs: Inputs | None = None,
    loss_fn: LossFunction | None = None,
    steps: int = 3,
    compare_in: Literal["fp32", "fp64"] = "fp32",
    run_timeout_s: float = 300.0,
) -> VerifyReport:
    """Runs ``plan`` on processes of this machine and compares losses, gradients and parameters with one process.

    What is past the limits of fp32 is run again in fp64, which tells rounding from a wrong program. ``report.check()`` raises
    where they differ. ``example_inputs`` and ``loss_fn`` are those of :class:`~autopar.request.Request`.

    Args:
        model: with weights on one device, or a function that builds it. Each process gets a copy, so that its class (or the
            function, and ``loss_fn``) stands in a module; a script calls this under ``if __name__ == "__main__":``.
        plan: for this model, or its file.
        example_inputs: with several different samples, of which all batches are made.
        steps: of AdamW.
        compare_in: ``fp64`` compares in float64 alone, within far tighter limits.
        run_timeout_s: processes are killed after it.

    Raises:
        UsageError: the model cannot be sent to other processes, or the plan has more ranks than are started here.
        PlanError: the plan is for another model.
        VerificationError: one device alone cannot train the model, or not in fp64.
    """
    from autopar.verification.against_one_device import verify as compare
    from autopar.verification.compared_models import build_module, user_model

    plan = _loaded(plan)
    module = build_module(model)
    subject = user_model(model, module, plan, example_inputs)
    graph = _graph_of(plan, module, example_inputs, loss_fn)
    return compare(
        subject, plan, graph, steps=steps, run_timeout_s=run_timeout_s, precision=PRECISIONS[compare_in], loss_fn=loss_fn
    )  # fmt: skip
