"""What a search is asked: the model, where it is to run, and what may be chosen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopar.cluster import Cluster
from autopar.graph.ir import Graph
from autopar.plan import Precision
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a plan is wanted for; ``cache_dir``: where rules that are found by execution are kept.

    ``seed``: of the space's sampler. ``pins`` hold beside those that the graph carries from the modules of the model. ``opaque``: modules that the user
    named so, for the plan to say.
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
    seed: int = 0
