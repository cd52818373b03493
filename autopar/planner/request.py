"""What the verbs of ``api.py`` are called with, and the task of the search that it makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from autopar.errors import UsageError
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.models.graph_for_plan import trace_model
from autopar.plan.plan import BF16, FP8, FP16, FP32, FP64, TF32, Precision
from autopar.planner.planner import Planner, Task
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space, with_sampler
from autopar.planner.task import Progress
from autopar.tracing.trace import LossFunction
from autopar.util.toml import closest

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp64"]
PRECISIONS = {"fp32": FP32, "tf32": TF32, "bf16": BF16, "fp16": FP16, "fp8": FP8, "fp64": FP64}
"""The runtime runs all but fp8, which is priced; fp16 with a scaler (``Parallel.grad_scaler``)."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What the verbs were called with, apart from the model and the cluster."""

    example_inputs: Mapping[str, Any] | Sequence[Any] | None
    global_batch_size: int
    pins: tuple[str, ...]
    precision: str
    optimizer: str
    space: str
    name: str
    cache_dir: Path | None
    loss_fn: LossFunction | None
    opaque: tuple[str, ...]
    sampler: str | None = None
    seed: int = 0

    @property
    def recipe(self) -> Precision:
        """By name.

        Raises:
            UsageError: there is no such one.
        """
        if self.precision not in PRECISIONS:
            known = closest(self.precision, PRECISIONS)
            raise UsageError("the precision is known", value=repr(self.precision), remedy=known)
        return PRECISIONS[self.precision]

    def trace(self, model: torch.nn.Module) -> Graph:
        """The graph that plans are for."""
        return trace_model(
            model,
            self.example_inputs,
            self.recipe,
            name=self.name,
            loss_fn=self.loss_fn,
            opaque=self.modules,
            global_batch_size=self.global_batch_size,
        )

    @property
    def modules(self) -> tuple[str, ...]:
        """Those that run as they are written, the pinned ones among them."""
        return tuple(dict.fromkeys((*self.opaque, *Pins.parse(self.pins).opaque)))


def texts_of(texts: Sequence[str]) -> tuple[str, ...]:
    """Pins or names; a text alone is one of them, and not one for each of its letters.

    >>> texts_of("tp=2"), texts_of(["tp=2", "pp=1"])
    (('tp=2',), ('tp=2', 'pp=1'))
    """
    return (texts,) if isinstance(texts, str) else tuple(texts)


def planner_of(
    model: torch.nn.Module | Graph, cluster: Cluster | str, wish: Wish, progress: Progress | None
) -> Planner:
    """A planner of the task; see :func:`task_of`."""
    return Planner(task_of(model, cluster, wish, progress))


def task_of(model: torch.nn.Module | Graph, cluster: Cluster | str, wish: Wish, progress: Progress | None) -> Task:
    """What a search is asked, the model traced where it is no graph yet.

    Raises:
        UsageError: malformed pins, cluster, space or precision.
        TraceError: the model cannot be traced.
    """
    pins, space, recipe = Pins.parse(wish.pins), with_sampler(load_space(wish.space), wish.sampler), wish.recipe
    where = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if not isinstance(model, Graph):
        if progress is not None:
            progress("tracing the model", 0, 0)
        model = wish.trace(model)
    if progress is not None:
        progress("laying out blocks", 0, 0)
    return Task(
        graph=model,
        cluster=where,
        global_batch_size=wish.global_batch_size,
        precision=recipe,
        optimizer=wish.optimizer,
        pins=pins,
        space=space,
        cache_dir=wish.cache_dir,
        opaque=wish.modules,
        seed=wish.seed,
    )
