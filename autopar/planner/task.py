"""What a search is asked, when it is to stop, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from autopar.errors import InfeasibleError, UsageError
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Precision
from autopar.plan.prediction import Prediction
from autopar.planner.evaluate.evaluation import Evaluation, Misfit
from autopar.planner.space.pin_syntax import ChoicePin
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space, load_space, with_sampler
from autopar.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a plan is wanted for.

    Attributes:
        pins: hold beside those that the graph carries from the modules of the model.
        cache_dir: where rules that are found by execution are kept; None for the user's cache directory.
        opaque: modules that the user named so, for the plan to say.
        sampler_seed: of the space's sampler.
    """

    graph: Graph
    cluster: Cluster
    global_batch_size: int
    precision: Precision
    optimizer: str
    pins: Pins
    space: Space
    cache_dir: Path | None = None
    opaque: tuple[str, ...] = ()
    sampler_seed: int = 0


def task_of(model: torch.nn.Module | Graph, request: Request, progress: Progress | None = None) -> Task:
    """What a planner is asked, the model traced where it is no graph yet.

    Raises:
        UsageError: malformed pins, cluster, space or precision; neither cluster nor global batch.
        TraceError: the model cannot be traced.
    """
    cluster, batch = request.cluster, request.global_batch_size
    if cluster is None:
        raise UsageError.missing("cluster", fix="Write for example cluster='h100-sxm5-80gb:4x8'")
    if batch is None:
        raise UsageError.missing("global batch", fix="Write for example global_batch_size=512")
    pins, space, precision = (
        Pins.parse(request.pins), with_sampler(load_space(request.space), request.sampler), request.recipe
    )  # fmt: skip
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if not isinstance(model, Graph):
        if progress is not None:
            progress("tracing the model", 0, 0)
        model = graph_of(model, request)
    if progress is not None:
        progress("laying out blocks", 0, 0)
    return Task(
        graph=model,
        cluster=cluster,
        global_batch_size=batch,
        precision=precision,
        optimizer=request.optimizer,
        pins=pins,
        space=space,
        cache_dir=request.cache_dir,
        opaque=_opaque(request),
        sampler_seed=request.sampler_seed,
    )


def graph_of(model: torch.nn.Module, request: Request) -> Graph:
    """The graph that plans of a request are for; see :func:`autopar.models.graph_for_plan.trace_model` for errors."""
    from autopar.models.graph_for_plan import trace_model  # the tracer is slow to import
    from autopar.planner.sharding.input_axes import samples_apart

    return trace_model(
        model,
        request.example_inputs,
        request.recipe,
        name=request.name,
        loss_fn=request.loss_fn,
        opaque=_opaque(request),
        global_batch_size=request.global_batch_size,
        samples_apart=samples_apart,
    )


def _opaque(request: Request) -> tuple[str, ...]:
    """Modules that run as they are written, the pinned ones among them."""
    return tuple(dict.fromkeys((*request.opaque, *Pins.parse(request.pins).opaque)))


def checked(task: Task) -> Task:
    """The task with the pins of its graph among its own.

    Raises:
        UsageError: a global batch below one, or of another size than the graph is for; pins that name nothing of the model.
        InfeasibleError: pins and options disagree on the precision.
    """
    pins = Pins.parse(dict.fromkeys((*task.graph.pins, *task.pins.texts)))
    task = replace(task, pins=pins, opaque=tuple(dict.fromkeys((*task.opaque, *pins.opaque))))
    batch, graph = task.global_batch_size, task.graph
    if not isinstance(batch, int) or batch < 1:
        raise UsageError(f"The global batch is {batch!r}", fix="Give a whole number of samples, at least 1")
    if graph.exact and batch != graph.batch_size:
        raise UsageError(
            f"The graph was traced for a global batch of {graph.batch_size} and holds for no other, but {batch} is asked for",
            where=graph.mixing or graph.name,
            fix="Trace the model at this global batch, or give the model instead of its graph",
        )
    pins.check(graph)
    if not pins.allows("precision", task.precision.name):
        on_precision = [pin.text for pin in pins.pins if isinstance(pin, ChoicePin) and pin.key == "precision"]
        raise InfeasibleError(
            f"The precision {task.precision.name} does not satisfy {', '.join(on_precision)}",
            fix="Change the precision, or drop the pin",
        )
    return task


Progress = Callable[[str, int, int], None]
"""``(what, done, total)``; ``total`` 0 while it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a search stops: after so many trials or seconds; None for no limit.

    ``trials``: of all searches that share a ledger together, those that were made before among them.
    ``max_step_time_s``: slower plans do not count, and what cannot be faster by its bound is not looked at.

    Raises:
        UsageError: less than one trial, or negative seconds.
    """

    trials: int | None = None
    search_timeout_s: float | None = None
    max_step_time_s: float | None = None

    def __post_init__(self) -> None:
        """Nothing is searched by such limits."""
        if self.trials is not None and self.trials < 1:
            raise UsageError(
                f"A search of {self.trials} trials finds nothing",
                where="trials",
                fix="Give 1 or more, or leave it out for no limit",
            )
        for name in ("search_timeout_s", "max_step_time_s"):
            if (seconds := getattr(self, name)) is not None and seconds < 0:
                raise UsageError(f"The limit of time is {seconds}", where=name, fix="Give a number of seconds from 0")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What a search found.

    Attributes:
        best: the fastest plan that fits; None when none of those evaluated does.
        candidates: how many there were.
        evaluated: how many of them were looked at; the others cannot fit in any layout, or are slower by a bound.
        lower_bound_s: no candidate that may fit is faster.
        misfits: those that failed, with their reasons.
        finished: False where a limit or an interrupt stopped the search.
        interrupted: by the user.
    """

    best: Evaluation | None
    candidates: int
    evaluated: int
    lower_bound_s: float
    misfits: tuple[Misfit, ...]
    finished: bool
    interrupted: bool = False


def peak_bytes(prediction: Prediction) -> int:
    """The upper end of the predicted peak."""
    return int(max((prediction.peak_memory_bytes, *prediction.peak_memory_interval_bytes)))
