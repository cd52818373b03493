"""What a plan is asked for with (:mod:`autopar.api`), and the task of the search that it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autopar.errors import UsageError
from autopar.graph.compact import compact
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import PRECISIONS, Precision
from autopar.planner.planner import Planner, Task
from autopar.planner.sharding.batch_axis import solve_batch
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space, with_sampler
from autopar.planner.task import Progress

if TYPE_CHECKING:
    from autopar.tracing.trace import LossFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the verbs were called with, apart from the model and the cluster."""

    example_inputs: Mapping[str, Any] | Sequence[Any] | None
    global_batch_size: int
    pins: tuple[str, ...]
    precision: str
    optimizer: str
    space: str
    name: str = ""
    cache_dir: Path | None = None
    loss_fn: LossFunction | None = None
    opaque: tuple[str, ...] = ()
    sampler: str | None = None
    seed: int = 0

    @property
    def recipe(self) -> Precision:
        """By name.

        Raises:
            UsageError: there is no such one.
        """
        if self.precision not in PRECISIONS:
            raise UsageError.unknown("precision", self.precision, PRECISIONS)
        return PRECISIONS[self.precision]

    def trace(self, model: torch.nn.Module) -> Graph:
        """The graph that plans are for."""
        from autopar.models.graph_for_plan import trace_model  # the tracer is slow to import

        return trace_model(
            model,
            self.example_inputs,
            self.recipe,
            name=self.name,
            loss_fn=self.loss_fn,
            opaque=self.modules,
            global_batch_size=self.global_batch_size,
            samples_apart=samples_apart,
        )

    @property
    def modules(self) -> tuple[str, ...]:
        """Those that run as they are written, the pinned ones among them."""
        return tuple(dict.fromkeys((*self.opaque, *Pins.parse(self.pins).opaque)))


def samples_apart(graph: Graph) -> None:
    """Nothing, where no sample of a batch has to do with another up to the loss.

    Raises:
        RuleError: two meet; its place says where.
    """
    solve_batch(compact(graph))


def planner_of(
    model: torch.nn.Module | Graph, cluster: Cluster | str, request: Request, progress: Progress | None
) -> Planner:
    """A planner of the task; see :func:`task_of`."""
    return Planner(task_of(model, cluster, request, progress))


def task_of(
    model: torch.nn.Module | Graph, cluster: Cluster | str, request: Request, progress: Progress | None
) -> Task:
    """What a search is asked, the model traced where it is no graph yet.

    Raises:
        UsageError: malformed pins, cluster, space or precision.
        TraceError: the model cannot be traced.
    """
    pins, space, recipe = (
        Pins.parse(request.pins),
        with_sampler(load_space(request.space), request.sampler),
        request.recipe,
    )
    where = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if not isinstance(model, Graph):
        if progress is not None:
            progress("tracing the model", 0, 0)
        model = request.trace(model)
    if progress is not None:
        progress("laying out blocks", 0, 0)
    return Task(
        graph=model,
        cluster=where,
        global_batch_size=request.global_batch_size,
        precision=recipe,
        optimizer=request.optimizer,
        pins=pins,
        space=space,
        cache_dir=request.cache_dir,
        opaque=request.modules,
        seed=request.seed,
    )
