"""What a search is asked: the model, where it is to run, and what may be chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, UsageError
from autopar.graph.ir import Graph
from autopar.plan import Precision
from autopar.planner.space.pins import ChoicePin, Pins
from autopar.planner.space.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a plan is wanted for.

    Attributes:
        pins: hold beside those that the graph carries from the modules of the model.
        cache_dir: where rules that are found by execution are kept; None for the user's cache directory.
        opaque: modules that the user named so, for the plan to say.
        seed: of the space's sampler.
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
        raise UsageError("the global batch is a whole number of samples, at least one", value=batch)
    if graph.exact and batch != graph.batch_size:
        raise UsageError(
            "a graph in which samples are counted or meet is for one global batch size",
            value=f"{batch}, traced at {graph.batch_size}",
            place=graph.mixing or graph.name,
            remedy="trace the model at this global batch, or give the model instead of its graph",
        )
    pins.check(graph)
    if not pins.allows("precision", task.precision.name):
        on_precision = [pin.text for pin in pins.pins if isinstance(pin, ChoicePin) and pin.key == "precision"]
        raise InfeasibleError(
            "pins and options agree",
            value=f"precision {task.precision.name} and {', '.join(on_precision)}",
            remedy="change one of them",
        )
    return task
