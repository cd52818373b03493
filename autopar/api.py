"""The public functions of autopar: trace, search, estimate, parallelize and verify.

They put the packages of autopar together. Each function imports what it needs when it is called, so that a job that runs a plan does not
load the planner, and a search does not load the runtime. Common keywords are documented in :class:`autopar.request.Request`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, RuntimeMismatchError, UsageError, check_counts, check_seconds, shown
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import PRECISIONS, Plan, PrecisionName
from autopar.request import SAMPLES_PER_RANK, Request

if TYPE_CHECKING:
    from autopar.models.graph_for_plan import Inputs
    from autopar.planner.search import Limits, Progress
    from autopar.runtime.parallel_model import ParallelModel
    from autopar.tracing.model_with_loss import LossFunction
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
    """Trace a model. :func:`search` and :func:`estimate` take the graph in place of the model, so that it is traced once for several plans.

    The keywords are those of :class:`~autopar.request.Request`. Plans for the graph must have the same ``precision``. If samples of a
    batch depend on each other (in batch statistics, or in a loss over all pairs), the graph holds for one ``global_batch_size``, and such
    a model is refused without it. The model is not changed and may be on any device.

    Raises:
        UsageError: there are no example inputs and none can be made, or the model is parallel already.
        TraceError: the model cannot be traced.
    """
    from autopar.planner.search import graph_of

    request = Request(
        example_inputs=example_inputs, precision=precision, global_batch_size=global_batch_size, loss_fn=loss_fn,
        opaque=opaque, name=name,
    )  # fmt: skip
    return graph_of(model, request, evaluates=True)


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
    progress: Progress | None = None,
) -> Plan:
    """Search the fastest plan that fits in memory. The keywords that are not listed here are those of :class:`~autopar.request.Request`.

    Args:
        model: the model, on any device or on meta; or its graph from :func:`trace`.
        trials, search_timeout_s: the number of evaluations or seconds after which the search stops with the best plan so far. Ctrl-C
            stops it in the same way.
        max_step_time_s: the longest step in seconds; slower plans are excluded.
        storage: an Optuna URL (``sqlite:///study.db``, ``postgresql://...``, ``journal:///study.log``) in which all trials are stored.
            The search continues from the trials of an earlier search that are found there.
        study_name: the name of the study in the storage; None for a name that is made from what is searched.
        workers: the number of processes, on which the plan does not depend. None uses one for each core, at most 4, if nothing else
            runs in this process (other threads, a CUDA device, a process group).
        progress: called with (what, done, total).

    Raises:
        UsageError: pins, cluster, space or batch are malformed; the storage cannot be opened; the study is of another search.
        TraceError: the model cannot be traced.
        InfeasibleError: no plan satisfies the constraints; the error names the smallest set of constraints that conflict.
        KeyboardInterrupt: the search was interrupted before it had any plan.
    """
    from autopar.planner.branch_and_bound.process_group import idle_cores
    from autopar.planner.planner import Planner
    from autopar.planner.search import Limits, task_of
    from autopar.planner.studies.workers import sharing_of

    request = Request(
        cluster=cluster, global_batch_size=global_batch_size, example_inputs=example_inputs, pins=pins, precision=precision,
        optimizer=optimizer, space=space, loss_fn=loss_fn, opaque=opaque, name=name, sampler=sampler,
        sampler_seed=sampler_seed,
    )  # fmt: skip
    limits = Limits(trials=trials, search_timeout_s=search_timeout_s, max_step_time_s=max_step_time_s)
    sharing = sharing_of(storage, study_name, 1 if workers is None else workers)
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
    progress: Progress | None = None,
) -> Plan:
    """Return the plan that the pins describe, without a search: all else is as usual in practice, as far as it fits in memory.

    The keywords are those of :class:`~autopar.request.Request`; ``progress`` and the errors are those of :func:`search`.
    """
    from autopar.planner.planner import Planner
    from autopar.planner.search import task_of

    request = Request(
        cluster=cluster, global_batch_size=global_batch_size, example_inputs=example_inputs, pins=pins, precision=precision,
        optimizer=optimizer, space=space, loss_fn=loss_fn, opaque=opaque, name=name,
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
    """Return this rank's part of ``model`` under the best plan or a given plan. Every rank of a torchrun job calls this function.

    The keywords that are not listed here are those of :func:`search`.

    Args:
        model: a model with weights, of which those of rank 0 are used; or a model on meta, which is initialised or loaded part by part.
        cluster: the cluster to plan for; None for the machines on which the ranks run.
        plan: a plan or its file, which replaces the search. None uses the plan of ``autopar run`` if that started this rank.
        global_batch_size: samples of a step; None for the number of samples in ``example_inputs``, or 8 for each rank without them.
        on_resize: what happens if the number of ranks is not that of the plan or the cluster: ``error`` raises, and ``replan`` searches a
            plan for the machines on which the ranks run, with the global batch and the precision of the given plan.
        collective_timeout_s: the timeout of every collective in seconds. Waiting for a search has no timeout.
        weights: a folder of safetensors files with the parameters, and the buffers of ``state_dict()``; it is read slice by slice.
        seed: the seed of dropout, and of the initialisation of a model on meta.
        log_dir: a folder in which rank 0 writes measured and predicted times of the first steps, for ``autopar validate --from-run``.

    Raises:
        RuntimeMismatchError: the ranks or devices of the job are not those of the cluster or plan; several processes run that do not know
            each other; or the precision can only be planned.
        PlanError: the plan is for another model.
        InfeasibleError: no plan satisfies the constraints.
    """
    from autopar.runtime.checks import check_can_run
    from autopar.runtime.job import given_plan
    from autopar.runtime.launch import launch

    source = given_plan() if plan is None else plan
    plan = None if source is None else _loaded(source)
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
    """Return a plan, which is read if its file is given."""
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
    """Start the job; return its kind of device, and the function by which rank 0 gets the plan and the graph that it is for.

    Args:
        limits: ``trials`` and ``search_timeout_s`` of a search.
    """
    from autopar.hardware.places import cluster_at, place_here
    from autopar.runtime.failure_watch import ordinary
    from autopar.runtime.job import check_alone, choose_device_type, how_to_start, start
    from autopar.runtime.world import Peers

    cluster = Cluster.parse(request.cluster) if isinstance(request.cluster, str) else request.cluster
    is_cpu = cluster is not None and cluster.devices[0].kind == "cpu"
    device_type = choose_device_type(plan.cluster if plan is not None else "cpu" if is_cpu else "")
    is_alone = start(device_type, collective_timeout_s=collective_timeout_s)
    if on_resize not in {"error", "replan"}:
        raise UsageError(f"There is no on_resize={on_resize!r}", fix="Give error or replan")
    if on_resize == "replan":
        plan, cluster, request = _resized(plan, cluster, request)
    size = dist.get_world_size()
    if plan is None and cluster is not None and cluster.world_size != size:
        raise RuntimeMismatchError(
            f"This job has {size} rank{'s' * (size > 1)}, but the cluster {cluster.name} has {cluster.world_size} devices",
            fix=f"{how_to_start(cluster.world_size)}, or pass a cluster of {size}",
        )
    if is_alone and cluster is None and plan is None:
        check_alone()
        _LOGGER.warning(
            "This process was not started as one of several ranks, so the plan is for one device. %s, or name the cluster of one device "
            "where one is meant.",
            how_to_start("N"),
        )
    # only rank 0 plans, and it can see only its own machine
    with ordinary():
        places = Peers(dist.group.WORLD).all_gather(place_here()) if plan is None and cluster is None else []

    def make() -> tuple[Plan, Graph]:
        if plan is not None:
            return plan, _graph_of(plan, model, request.example_inputs, request.loss_fn)
        from autopar.graph.operator_kinds import why_opaque
        from autopar.planner.search import Limits

        search_limits = Limits(trials=limits[0], search_timeout_s=limits[1])
        found, graph = _searched(model, replace(request, cluster=cluster or cluster_at(places)), size, search_limits)
        if why := why_opaque(found.notes, name=""):
            _LOGGER.warning("the whole model runs as it is written, and only data ranks share its work: %s", why)
        return found, graph

    return device_type, make


def _resized(
    plan: Plan | None, cluster: Cluster | None, request: Request
) -> tuple[Plan | None, Cluster | None, Request]:
    """Return the arguments without a plan or a cluster that has another number of ranks than the job.

    The plan is then searched for the machines of the job, with the global batch and the precision of the dropped plan.
    """
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
    """Return the name of the plan's precision in a request for a search.

    Raises:
        RuntimeMismatchError: the precision has no name there.
    """
    for name, known in PRECISIONS.items():
        if known == plan.precision:
            return name
    raise RuntimeMismatchError(
        f"The precision {plan.precision.name} of the plan has no name by which a plan for another number of ranks could be searched",
        fix='Start as many ranks as it has, or give the precision and the cluster: parallelize(model, cluster=..., precision="bf16")',
    )


def _graph_of(plan: Plan, model: torch.nn.Module, example_inputs: Inputs | None, loss_fn: LossFunction | None) -> Graph:
    """Return the graph that a plan is for. The plan's typing of axis ``batch`` shows whether samples are independent, without a planner."""
    from autopar.lower.read_plan import check_batch_typing
    from autopar.models.graph_for_plan import trace_model

    def samples_apart(graph: Graph) -> None:
        try:
            check_batch_typing(plan, graph)
        except AutoparError:
            # the plan is for another model, or samples depend on each other; the planner finds out where
            from autopar.planner.sharding.input_axes import samples_apart as check_samples_apart

            check_samples_apart(graph)

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
    """Return the plan that a search finds, and the graph that it is for."""
    from autopar.models.graph_for_plan import samples_of
    from autopar.planner.planner import Planner
    from autopar.planner.search import graph_of, task_of

    samples = request.global_batch_size or samples_of(request.example_inputs) or SAMPLES_PER_RANK * ranks
    request = replace(request, global_batch_size=samples)
    graph = graph_of(model, request, evaluates=True)
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
    """Run ``plan`` on processes of this machine, and compare losses, gradients and parameters with a run on one process.

    If differences exceed the limits of fp32, the comparison is repeated in fp64, which tells rounding from a wrong program.
    ``report.check()`` raises if the runs differ. ``example_inputs`` and ``loss_fn`` are those of :class:`~autopar.request.Request`.

    Args:
        model: a model with weights on one device, or a function that builds it. Each process gets a copy, so its class (or the
            function, and ``loss_fn``) must be importable; a script calls this function under ``if __name__ == "__main__":``.
        plan: a plan for this model, or its file.
        example_inputs: several different samples, from which all batches are made.
        steps: the number of AdamW steps.
        compare_in: ``fp64`` compares only in float64, within far tighter limits.
        run_timeout_s: seconds after which the processes are killed.

    Raises:
        UsageError: the model cannot be sent to other processes, or the plan has more ranks than this machine can start.
        PlanError: the plan is for another model.
        VerificationError: the model cannot be trained on one device, or not in fp64.
    """
    from autopar.verification.against_one_device import verify as compare
    from autopar.verification.compared_models import build_module, user_model

    check_counts(steps=steps)
    check_seconds(least=1.0, run_timeout_s=run_timeout_s)
    if compare_in not in ("fp32", "fp64"):
        raise UsageError(f"There is no compare_in={shown(compare_in)}", fix="Give fp32 or fp64")
    plan = _loaded(plan)
    module = build_module(model)
    subject = user_model(model, module, plan, example_inputs)
    graph = _graph_of(plan, module, example_inputs, loss_fn)
    return compare(
        subject, plan, graph, steps=steps, run_timeout_s=run_timeout_s, precision=PRECISIONS[compare_in], loss_fn=loss_fn
    )  # fmt: skip
