"""The verbs of autopar, where its packages are put together: search, estimate, parallelize, verify.

Each verb imports what it needs when it is called: who runs a plan loads no planner, who plans no runtime.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, RuntimeMismatchError
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.file import load_plan
from autopar.plan.plan import FP32, PRECISIONS, Plan, Precision, PrecisionName

if TYPE_CHECKING:
    from autopar.planner.request import Request
    from autopar.planner.task import Limits, Progress
    from autopar.runtime.parallel_model import Parallel
    from autopar.tracing.trace import LossFunction
    from autopar.verification.against_one_device import VerifyReport
    from autopar.verification.subject import Subject

__all__ = ["PRECISIONS", "estimate", "parallelize", "search", "trace_model", "verify"]

_LOGGER = logging.getLogger("autopar")

SAMPLES_PER_RANK = 8
"""Of the global batch of :func:`parallelize` where neither it nor example inputs are given."""


def search(  # noqa: PLR0913  keywords of the public call
    model: torch.nn.Module | Graph,
    *,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    cluster: Cluster | str,
    global_batch_size: int,
    pins: Sequence[str] = (),
    precision: PrecisionName = "fp32",
    optimizer: str = "adamw",
    space: str = "default",
    trials: int | None = None,
    timeout_s: float | None = None,
    max_step_time_s: float | None = None,
    storage: str | None = None,
    study_name: str | None = None,
    workers: int | None = None,
    sampler: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    loss_fn: LossFunction | None = None,
    opaque: Sequence[str] = (),
    name: str = "",
    cache_dir: Path | None = None,
) -> Plan:
    """The fastest plan that fits.

    Args:
        model: on any device, meta included; or its graph, traced in the dtype of ``precision``.
        example_inputs: a batch, by name or in order; made from its config for a Hugging Face model.
        cluster: a :class:`Cluster` or what :meth:`Cluster.parse` reads (``h100-sxm5-80gb:4x8``).
        global_batch_size: samples of one optimizer step.
        pins: constraints, as ``tp<=4`` (see ``autopar.planner.space.pins``).
        precision: ``bf16``: computation in bfloat16, parameters at rest and sums in float32; ``fp16``: in float16 likewise, and the
            loss is scaled (``Parallel.grad_scaler``); ``tf32``: float32 with products as GPUs make them under
            ``torch.set_float32_matmul_precision("high")``, which the training script sets; ``fp64``: all in float64; ``fp8`` is planned, and not run.
        optimizer: ``adamw``, ``adam``, ``momentum``, ``sgd`` or ``adafactor``; ``adamw:bytes=2`` declares the bytes of
            states for each element (8-bit optimizers).
        space: what may be chosen: a name or a TOML file.
        trials, timeout_s: stop after so many evaluations or seconds.
        max_step_time_s: slower plans do not count.
        storage: an Optuna URL (``sqlite:///study.db``, ``postgresql://...``, ``journal:///study.log``), in which every
            trial is recorded; a search that finds trials of an earlier one there goes on from them.
        study_name: of the study in the storage; None for one that says what it is of.
        workers: processes that share the work; the plan does not depend on their number. None: as many as there are cores, at
            most 4, where nothing else runs in this process (other threads, a CUDA device, a process group): one there.
        sampler: ``tpe``, ``cmaes`` or ``nsga2`` asks for a part of the candidates, however few there are, ``none`` for nothing; None: as
            the space says, where there are too many to be searched to the end.
        seed: of the sampler; a search without draws no random numbers.
        progress: called with (what, done, total).
        loss_fn: ``loss_fn(output, batch)`` gives the scalar loss, where the model does not.
        opaque: modules that run as they are written, by path, pattern or class name; see ``autopar.tracing.opaque.regions``.
        name: of the model in the plan.
        cache_dir: where rules that are found by execution are kept; nowhere when None.

    An interrupt (Ctrl-C) ends the search with the best plan so far, which its notes say.

    Raises:
        UsageError: malformed pins, cluster, space or batch; a storage that cannot be opened; a study of something else.
        TraceError: the model cannot be traced.
        KeyboardInterrupt: before there was any plan.
        InfeasibleError: no plan satisfies the constraints; names the smallest set that conflicts.
    """
    from autopar.planner.planner import Planner
    from autopar.planner.request import Request, task_of
    from autopar.planner.studies.workers import shared
    from autopar.planner.task import Limits

    sharing = shared(storage, study_name, 1 if workers is None else workers)
    request = Request(
        example_inputs=example_inputs,
        global_batch_size=global_batch_size,
        pins=_texts(pins),
        precision=precision,
        optimizer=optimizer,
        space=space,
        name=name,
        cache_dir=cache_dir,
        loss_fn=loss_fn,
        opaque=_texts(opaque),
        sampler=sampler,
        seed=seed,
    )
    task = task_of(model, cluster, request, progress)
    limits = Limits(trials=trials, timeout_s=timeout_s, max_step_time_s=max_step_time_s)
    processes = _idle_cores() if workers is None else workers
    return Planner(task).search(limits=limits, sharing=sharing, progress=progress, processes=processes)


def _idle_cores() -> int:
    """For copies of this process: none where threads, devices or other ranks would not know of them."""
    from autopar.planner.branch_and_bound.process_group import cores

    is_busy = torch.cuda.is_initialized() or (dist.is_available() and dist.is_initialized())  # type: ignore[no-untyped-call]
    return cores() if threading.active_count() == 1 and not is_busy else 1


def _texts(texts: Sequence[str]) -> tuple[str, ...]:
    """Pins or names; a text alone is one of them, and not one for each of its letters.

    >>> _texts("tp=2"), _texts(["tp=2", "pp=1"])
    (('tp=2',), ('tp=2', 'pp=1'))
    """
    return (texts,) if isinstance(texts, str) else tuple(texts)


def trace_model(
    model: torch.nn.Module,
    example_inputs: Mapping[str, Any] | Sequence[Any] | torch.Tensor | None,
    precision: Precision,
    *,
    global_batch_size: int | None = None,
    name: str = "",
    loss_fn: LossFunction | None = None,
    opaque: Sequence[str] = (),
) -> Graph:
    """The graph that plans of this model, precision and global batch are for; see :func:`autopar.models.graph_for_plan.trace_model`."""
    from autopar.models.graph_for_plan import trace_model as traced

    return traced(
        model,
        example_inputs,
        precision,
        global_batch_size=global_batch_size,
        name=name,
        loss_fn=loss_fn,
        opaque=opaque,
        samples_apart=_samples_apart,
    )


def estimate(  # noqa: PLR0913  keywords of the public call
    model: torch.nn.Module | Graph,
    *,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    cluster: Cluster | str,
    global_batch_size: int,
    pins: Sequence[str] = (),
    precision: PrecisionName = "fp32",
    optimizer: str = "adamw",
    space: str = "default",
    progress: Progress | None = None,
    loss_fn: LossFunction | None = None,
    opaque: Sequence[str] = (),
    name: str = "",
    cache_dir: Path | None = None,
) -> Plan:
    """The plan that the pins describe, without a search over what they leave open; arguments as in :func:`search`.

    Raises:
        InfeasibleError: it does not exist or does not fit.
    """
    from autopar.planner.request import Request, planner_of

    request = Request(
        example_inputs=example_inputs,
        global_batch_size=global_batch_size,
        pins=_texts(pins),
        precision=precision,
        optimizer=optimizer,
        space=space,
        name=name,
        cache_dir=cache_dir,
        loss_fn=loss_fn,
        opaque=_texts(opaque),
    )
    return planner_of(model, cluster, request, progress).estimate()


def operator_calls(  # noqa: PLR0913  keywords of the public call
    model: torch.nn.Module | Graph,
    *,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    cluster: Cluster | str,
    global_batch_size: int | None = None,
    pins: Sequence[str] = (),
    precision: PrecisionName = "fp32",
    space: str = "default",
    progress: Progress | None = None,
    opaque: Sequence[str] = (),
    name: str = "",
) -> tuple[str, ...]:
    """Every operator at every local shape that a search with these arguments can ask the time of, each once.

    Args:
        global_batch_size: 8 a rank when None; the rest as in :func:`search`.

    Returns:
        Calls as :class:`autopar.hardware.measured_times.OperatorTime` has them.
    """
    from autopar.planner.planner import operator_calls as calls_of
    from autopar.planner.request import Request, planner_of

    where = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    samples = global_batch_size or SAMPLES_PER_RANK * where.world_size
    request = Request(
        example_inputs=example_inputs,
        global_batch_size=samples,
        pins=_texts(pins),
        precision=precision,
        optimizer="adamw",
        space=space,
        name=name,
        opaque=_texts(opaque),
    )
    return calls_of(planner_of(model, where, request, progress), progress=progress)


def parallelize(  # noqa: PLR0913  keywords of the public call
    model: torch.nn.Module,
    *,
    cluster: Cluster | str | None = None,
    plan: Plan | str | Path | None = None,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    global_batch_size: int | None = None,
    pins: Sequence[str] = (),
    precision: PrecisionName = "fp32",
    optimizer: str = "adamw",
    space: str = "default",
    trials: int | None = None,
    search_timeout_s: float | None = None,
    weights: str | Path | None = None,
    loss_fn: LossFunction | None = None,
    opaque: Sequence[str] = (),
    seed: int = 0,
    timeout_s: float = 600.0,
    log_dir: str | Path | None = None,
) -> Parallel:
    """This rank's part of ``model`` under the best plan, or a given one; called on every rank of a torchrun job.

    Args:
        model: with weights (those of rank 0 count) or on meta: then initialised or read part by part.
        cluster: the machines; None: those that the ranks stand on, of shipped profiles where the devices have one, measured where
            they have not.
        plan: a plan or its file, instead of a search.
        example_inputs: a batch; made from its config for a Hugging Face model.
        global_batch_size: samples of one step over all ranks; those of ``example_inputs``, or 8 a
            rank, when None.
        pins, precision, optimizer, space, trials, loss_fn, opaque: as in :func:`search`; a plan names its opaque
            modules itself.
        search_timeout_s: of the search.
        weights: folder of safetensors files, read slice by slice: of parameters, and of buffers that a ``state_dict()`` has.
        seed: of dropout, and of the initialisation of a model on meta.
        timeout_s: of every collective, the wait for the search included.
        log_dir: where rank 0 writes measured against predicted times of the first steps, for
            ``autopar validate --from-run``; what is beyond the prediction is a warning of the logger ``autopar`` in any case.

    Raises:
        RuntimeMismatchError: the job has another number of ranks than the cluster or the plan, or its precision is one
            that is planned alone; a launcher other than torchrun started several processes and did not tell torch; without
            ``cluster`` the ranks of a node are not numbered one after the other, or stand on devices of which some are unknown.
        PlanError: the plan is for another model.
        InfeasibleError: no plan satisfies the constraints.
    """
    from autopar.hardware.detect.places import cluster_at, gathered_places
    from autopar.runtime.guard.checks import check_can_run
    from autopar.runtime.guard.collective_calls import ordinary
    from autopar.runtime.job import check_alone, how_to_start, start
    from autopar.runtime.launch import launch

    plan = load_plan(Path(plan)) if isinstance(plan, str | Path) else plan
    if plan is not None or precision in PRECISIONS:
        check_can_run(PRECISIONS[precision] if plan is None else plan.precision)
    where = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    device_type = _device_type(plan, where)
    is_alone = start(device_type, timeout_s=timeout_s)
    ranks = _job_size(None if plan is not None else where)
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
            return plan, _graph_of(plan, model, example_inputs, loss_fn)
        from autopar.models.graph_for_plan import samples_of
        from autopar.planner.request import Request
        from autopar.planner.task import Limits

        request = Request(
            example_inputs=example_inputs,
            global_batch_size=global_batch_size or samples_of(example_inputs) or SAMPLES_PER_RANK * ranks,
            pins=_texts(pins),
            precision=precision,
            optimizer=optimizer,
            space=space,
            loss_fn=loss_fn,
            opaque=_texts(opaque),
        )
        limits = Limits(trials=trials, timeout_s=search_timeout_s)
        return _searched(model, where or cluster_at(places), request, limits)

    log = None if log_dir is None else Path(log_dir)
    return launch(model, make, device_type=device_type, weights=weights, seed=seed, timeout_s=timeout_s, log_dir=log)


def _graph_of(
    plan: Plan,
    model: torch.nn.Module,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None,
    loss_fn: LossFunction | None,
    precision: Precision | None = None,
) -> Graph:
    """The graph that a given plan is for. The plan's own typing of axis ``batch`` says whether samples are apart, without a planner."""
    from autopar.lower.read_plan import check_batch_typing
    from autopar.models.graph_for_plan import trace_model as traced

    def samples_apart(graph: Graph) -> None:
        try:
            check_batch_typing(plan, graph)
        except AutoparError:  # of another model, or samples meet: then the typing says where
            _samples_apart(graph)

    return traced(
        model,
        example_inputs,
        plan.precision if precision is None else precision,
        name=plan.model.name,
        loss_fn=loss_fn,
        opaque=plan.opaque,
        global_batch_size=plan.global_batch_size,
        samples_apart=samples_apart,
    )


def _samples_apart(graph: Graph) -> None:
    """Raises RuleError where samples meet, by the planner's typing of axis ``batch``."""
    from autopar.planner.request import samples_apart

    samples_apart(graph)


def _searched(model: torch.nn.Module, cluster: Cluster, request: Request, limits: Limits) -> tuple[Plan, Graph]:
    """The plan that a search finds, and the graph that it is for."""
    from autopar.planner.request import planner_of

    graph = request.trace(model)
    return planner_of(graph, cluster, request, None).search(limits=limits), graph


def _device_type(plan: Plan | None, cluster: Cluster | None) -> str:
    """``cuda`` or ``cpu``: what the plan or the cluster is for, as far as it is here."""
    from autopar.runtime.job import choose_device_type

    if plan is not None:
        return choose_device_type(plan.cluster)
    is_cpu = cluster is not None and cluster.devices[0].kind == "cpu"
    return choose_device_type("cpu" if is_cpu else "")


def _job_size(cluster: Cluster | None) -> int:
    """Ranks of the running job.

    Raises:
        RuntimeMismatchError: ``cluster`` has another number.
    """
    from autopar.runtime.job import how_to_start

    size = dist.get_world_size()
    if cluster is not None and cluster.world_size != size:
        raise RuntimeMismatchError(
            f"This job has {size} rank{'s' * (size > 1)}, but the cluster {cluster.name} has {cluster.world_size} devices",
            fix=f"{how_to_start(cluster.world_size)}, or pass a cluster of {size}",
        )
    return size


def verify(
    subject: Subject,
    plan: Plan,
    graph: Graph | None = None,
    *,
    steps: int = 3,
    timeout_s: float = 300.0,
    precision: Literal["fp32", "fp64"] = "fp32",
    loss_fn: LossFunction | None = None,
) -> VerifyReport:
    """Runs ``plan`` on local gloo processes and compares losses, gradients and parameters with one process, in fp32.

    What is past the limits is run again in fp64, which tells rounding from a wrong program.

    Args:
        subject: what ``autopar.models.resolve.resolve_model`` gives, or anything else that builds the model
            and makes batches.
        plan: for the subject's model.
        graph: the traced model; made from ``subject`` when None.
        steps: of AdamW.
        timeout_s: processes are killed after it.
        precision: ``fp64`` compares in float64 alone, within far tighter limits.
        loss_fn: as in :func:`search`; a function that can be imported, as every rank does.
    """
    from autopar.verification.against_one_device import verify as compare

    if graph is None:
        batch = subject.make_batch(2, seed=0, padded=True)
        graph = _graph_of(plan, subject.build(), batch, loss_fn, FP32)
    return compare(
        subject, plan, graph, steps=steps, timeout_s=timeout_s, precision=PRECISIONS[precision], loss_fn=loss_fn
    )
