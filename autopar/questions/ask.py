"""What every question to the planner is asked about: a model, a cluster, a batch, pins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.models.graph_cache import traced
from autopar.planner.planner import Planner
from autopar.planner.sharding.batch_axis import samples_apart
from autopar.planner.task import Progress, task_of
from autopar.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What the questions have in common.

    Attributes:
        graph_at: the traced model for (global batch, tokens of a sample); None: the model's own length.
        cluster: as a text; ``global_batch_size``, ``pins`` and so on as in :class:`~autopar.request.Request`.
        max_step_time_s: slower plans do not count.
        processes: of each search.
    """

    graph_at: Callable[[int, int | None], Graph]
    cluster: str
    global_batch_size: int
    sequence: int | None = None
    pins: tuple[str, ...] = ()
    precision: str = "fp32"
    optimizer: str = "adamw"
    space: str = "default"
    max_step_time_s: float | None = None
    opaque: tuple[str, ...] = ()
    cache_dir: Path | None = None
    progress: Progress | None = None
    processes: int = 1

    def planner(self, cluster: Cluster, *, pins: Sequence[str] = (), explains: bool = False) -> Planner:
        """A planner for ``cluster``, with more pins."""
        request = Request(
            cluster=cluster,
            global_batch_size=self.global_batch_size,
            pins=(*self.pins, *pins),
            precision=self.precision,
            optimizer=self.optimizer,
            space=self.space,
            opaque=self.opaque,
            cache_dir=self.cache_dir,
        )
        graph = self.graph_at(self.global_batch_size, self.sequence)
        return Planner(task_of(graph, request), explains=explains)

    def say(self, what: str) -> None:
        """Tells the user what is tried."""
        if self.progress is not None:
            self.progress(what, 0, 0)


def tracer(model: str, *, precision: str, opaque: Sequence[str], cache_dir: Path) -> Callable[[int, int | None], Graph]:
    """Traces a MODEL at each length once, for :class:`Ask`; a graph in which samples meet once for each batch too."""

    @cache
    def at_batch(samples: int, tokens: int | None) -> Graph:
        return traced(
            model, sequence=tokens, precision=precision, opaque=opaque, global_batch_size=samples,
            samples_apart=samples_apart, cache_dir=cache_dir,
        )  # fmt: skip

    free: dict[int | None, Graph] = {}

    def at(samples: int, tokens: int | None) -> Graph:
        if tokens not in free:
            graph = at_batch(samples, tokens)
            if graph.exact:
                return graph
            free[tokens] = graph
        return free[tokens]

    return at
