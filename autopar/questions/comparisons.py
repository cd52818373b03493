"""Questions whose answer is several plans: sweeps over a number of the cluster, fronts of several objectives, and published layouts.

**Fronts.** Time is minimised for each limit on the other objectives (the epsilon-constraint method of Haimes, Lasdon and Wismer, 1971). A
cluster is searched as usual, then again with less memory than the last plan took. Every point has a search and a certificate of its own.
Where a space has a sampler and more candidates than are searched exhaustively, time and memory are those of the candidates that NSGA-II
chooses (:mod:`autopar.planner.branch_and_bound.sampling`).

**Published layouts.** A published layout is a set of pins. What its source leaves open is searched, in favour of the published plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args

from autopar.errors import InfeasibleError, UsageError
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import SCALES, scaled
from autopar.models.transformer import Sizes, build
from autopar.plan.plan import Plan
from autopar.planner.search import Limits, Progress, peak_bytes
from autopar.planner.space.pins import Pins
from autopar.questions.sizing import Ask, prices_of, sizes_of
from autopar.util.files import data_files
from autopar.util.toml import Table

Swept = tuple[float, Plan | None]
"""One factor of a sweep and its plan; None if nothing fits."""


def sweep(ask: Ask, name: str, factors: Sequence[float]) -> tuple[Swept, ...]:
    """Return the best plan for each factor by which the number ``name`` of the cluster is multiplied (``autopar.hardware.describe``).

    Raises:
        UsageError: the name is unknown, or a factor is not above zero.
    """
    cluster = Cluster.parse(ask.cluster, cache_dir=ask.cache_dir)
    swept = []
    for factor in factors:
        ask.say(f"{name} x {factor:g}")
        swept.append((factor, ask.fastest(scaled(cluster, {name: factor}))))
    return tuple(swept)


def parse_sweep(text: str) -> tuple[str, tuple[float, ...]]:
    """Return the name and factors of a text such as ``link.bandwidth=0.5,1,2``.

    Raises:
        UsageError: the text is malformed.

    >>> parse_sweep("link.bandwidth=0.5,1,2")
    ('link.bandwidth', (0.5, 1.0, 2.0))
    """
    name, _, values = text.partition("=")
    try:
        return name.strip(), tuple(float(value) for value in values.split(","))
    except ValueError as error:
        raise UsageError(
            f"'{text}' is not of the form NAME=FACTOR,FACTOR,...",
            where="--scale",
            fix="Write for example link.bandwidth=0.5,1,2",
        ) from error


Objective = Literal["time", "memory", "devices", "price"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

MEMORY_STEP = 0.9
"""Memory limit of the next plan of a front, as a share of what the last plan took, intervals included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A plan of the front.

    Attributes:
        cluster: the cluster as it is written.
        num_devices: its devices.
        plan: the plan.
        head_room: share of the smallest device's memory above the upper end of the predicted peak.
        cost: cost of a step, if prices are given.
    """

    cluster: str
    num_devices: int
    plan: Plan
    head_room: float
    cost: float | None = None

    def values(self, objectives: Sequence[Objective]) -> tuple[float, ...]:
        """Return the values that are minimised."""
        cost = float("inf") if self.cost is None else self.cost
        values = {
            "time": self.plan.predicted.step_time_s,
            "memory": -self.head_room,
            "devices": float(self.num_devices),
            "price": cost,
        }
        return tuple(values[objective] for objective in objectives)


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """Return the objectives of a text such as ``time,memory``.

    Raises:
        UsageError: an objective is unknown or named twice, or there is only one.

    >>> parse_objectives("time, devices")
    ('time', 'devices')
    """
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in OBJECTIVES]
    if unknown:
        raise UsageError.unknown("objective", unknown[0], OBJECTIVES, where="--objectives")
    objectives = tuple(name for name in OBJECTIVES if name in names)
    if len(objectives) < 2 or len(objectives) < len(names):
        raise UsageError(
            f"'{text}' does not name two different objectives or more",
            where="--objectives",
            fix=f"Write for example time,memory. Known: {', '.join(OBJECTIVES)}",
        )
    return objectives


def front(
    ask: Ask, objectives: Sequence[Objective], prices: Mapping[str, float] | None = None, others: Sequence[str] = ()
) -> tuple[Point, ...]:
    """Return the plans that no other plan dominates, by step time.

    Args:
        ask: the request. If devices or their price are objectives, its cluster is the largest, and all smaller sizes are tried too.
        objectives: what is minimised.
        prices: the price of a device and hour by the device's name, for the objective ``price``.
        others: further clusters, of which all sizes are tried.

    Raises:
        UsageError: a device has no price, or no cluster has the device of a price; or sizes are to be tried of a cluster that is not
            ``DEVICE:NODESxPER_NODE``.
        InfeasibleError: nothing fits.
    """
    clusters = (ask.cluster, *others)
    is_sized = bool({"devices", "price"} & set(objectives))
    price_of = prices_of(ask, prices or {}, others) if "price" in objectives else {}
    texts = [(size, price_of.get(kind)) for kind in clusters for size in (sizes_of(kind) if is_sized else (kind,))]
    found: list[Point] = []
    for text, price in texts:
        cluster = Cluster.parse(text, cache_dir=ask.cache_dir)
        for plan, head_room in _plans(ask, text, cluster, with_memory="memory" in objectives):
            cost = None if price is None else price * cluster.world_size / 3600 * plan.predicted.step_time_s
            found.append(Point(cluster=text, num_devices=cluster.world_size, plan=plan, head_room=head_room, cost=cost))
    if not found:
        raise InfeasibleError(
            f"No plan fits in memory on any of {', '.join(clusters)}", fix="Take more nodes, or drop a pin"
        )
    return undominated(found, objectives)


def undominated(points: Sequence[Point], objectives: Sequence[Objective]) -> tuple[Point, ...]:
    """Return the points that no other point dominates, by step time.

    A point dominates another one if it is nowhere worse and somewhere better. Of equal points the first is returned.
    """
    firsts: dict[tuple[float, ...], Point] = {}
    for point in points:
        firsts.setdefault(point.values(objectives), point)

    def is_dominated(values: tuple[float, ...]) -> bool:
        others = (other for other in firsts if other != values)
        return any(all(a <= b for a, b in zip(other, values, strict=True)) for other in others)

    kept = (point for values, point in firsts.items() if not is_dominated(values))
    return tuple(sorted(kept, key=lambda point: point.plan.predicted.step_time_s))


def _plans(ask: Ask, text: str, cluster: Cluster, *, with_memory: bool) -> Iterator[tuple[Plan, float]]:
    """Yield the fastest plan of a cluster and its head room, then plans with ever less memory."""
    memory_bytes = min(device.memory_bytes for device in cluster.devices)
    factor = 1.0
    if with_memory and (planner := ask.planner(cluster)).is_sampled:
        ask.say(f"trying {text}, time and memory")
        plans = planner.front(Limits(max_step_time_s=ask.max_step_time_s))
        yield from ((plan, 1 - peak_bytes(plan.predicted) / memory_bytes) for plan in plans)
        return
    while True:
        ask.say(f"trying {text}" + (f", {100 * factor:.0f} % of its memory" if factor < 1 else ""))
        limited = cluster if factor == 1.0 else scaled(cluster, {"device.memory": factor})
        plan = ask.fastest(limited)
        if plan is None:
            return
        used_share = peak_bytes(plan.predicted) / memory_bytes
        yield plan, 1 - used_share
        factor = used_share * MEMORY_STEP
        if not with_memory:
            return


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A published run.

    Attributes:
        name: the study's name.
        title: what it is.
        source: where it was published.
        measured: what the source measured.
        unsure: what the source does not say, and what was assumed instead.
        cluster, global_batch_size, sequence, precision: as in a request.
        scale: factors of numbers of the cluster (``autopar.hardware.describe``), for hardware without a profile.
        pins: the published layout.
        model: a MODEL of the command line, or sizes with a number of layers (``autopar.models.transformer``).
    """

    name: str
    title: str
    source: str
    measured: str = ""
    unsure: tuple[str, ...] = ()
    cluster: str
    scale: dict[str, float] = field(default_factory=dict)
    global_batch_size: int = field(metadata={"key": "global_batch"})
    sequence: int
    precision: str
    pins: tuple[str, ...]
    model: str | tuple[Sizes, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """The result of a study.

    Attributes:
        study: the study.
        ours: autopar's plan.
        published: the plan of the published layout; None if it does not fit by the cost model.
        reason: why it does not fit.
        trace_s: seconds for building and tracing the model, which ``wall_time_s`` of the plans does not include.
    """

    study: Study
    ours: Plan
    published: Plan | None
    reason: str
    trace_s: float

    @property
    def ratio(self) -> float | None:
        """Step time of the published layout over that of autopar's plan: above one autopar's is faster."""
        if self.published is None:
            return None
        return self.published.predicted.step_time_s / self.ours.predicted.step_time_s


def study_files() -> dict[str, Path]:
    """Return the files of the shipped studies by name."""
    return data_files("search/studies")


def load_study(name: str) -> Study:
    """Return a shipped study by name, or a study from a TOML file.

    Raises:
        UsageError: the name is unknown, or the file is malformed (the error names file, line and key).
    """
    shipped = study_files()
    if not name.endswith(".toml") and name not in shipped:
        raise UsageError.unknown("study", name, shipped, fix="or give the path of a .toml file")
    path = Path(name) if name.endswith(".toml") else shipped[name]
    table = Table.load(path)
    model = table.table("model")
    sizes = model.text("spec") if model.has("spec") else _sizes(model, table.integer("sequence"))
    study = table.record(Study, name=path.stem, model=sizes)
    model.finish()
    for key in study.scale:
        if key not in SCALES:
            raise UsageError.unknown("number of a cluster", key, SCALES, where=table.table("scale").place(key))
    return study


def _sizes(table: Table, sequence: int) -> tuple[Sizes, int]:
    """Return the sizes and layers of a study's transformer."""
    keys = ("family", "attention", "heads", "hidden", "ffn", "vocabulary")
    fields = table.fields_of(Sizes, {name: name for name in keys})
    kv_heads = table.integer("kv_heads", fields["heads"])
    return Sizes(**fields, kv_heads=kv_heads, sequence=sequence, dtype="float32"), table.integer("layers")


def cluster_of(study: Study) -> Cluster:
    """Return the study's cluster."""
    return scaled(Cluster.parse(study.cluster), study.scale)


def graph_of(study: Study) -> Graph:
    """Return the study's model, traced on the meta device."""
    from autopar import api

    inputs: Any
    if isinstance(study.model, str):
        from autopar.models.resolve import resolve_model

        source = resolve_model(study.model, sequence_length=study.sequence)
        model, inputs = source.model, source.example_inputs
    else:
        model, inputs = build(*study.model)
    return api.trace(
        model, example_inputs=inputs, precision=cast("Any", study.precision), name=study.name,
        global_batch_size=study.global_batch_size,
    )  # fmt: skip


def run_study(
    study: Study, *, space: str = "default", progress: Progress | None = None, workers: int | None = None
) -> StudyResult:
    """Search the best plan for a study, and the best plan with its published layout.

    Args:
        study: the study.
        space: the search space.
        progress: called with the progress of the search.
        workers: processes of the search.

    Raises:
        UsageError: the study names no cluster or pins that there are.
        InfeasibleError: nothing fits the cluster.
    """
    from autopar import api

    start, cluster = time.monotonic(), cluster_of(study)
    Pins.parse(study.pins)  # raises before the model is traced, and another plan searched
    if progress is not None:
        progress("tracing the model", 0, 0)
    graph = graph_of(study)
    trace_s = time.monotonic() - start

    def best(pins: tuple[str, ...]) -> Plan:
        return api.search(
            graph,
            cluster=cluster,
            global_batch_size=study.global_batch_size,
            pins=pins,
            precision=cast("Any", study.precision),
            space=space,
            progress=progress,
            workers=workers,
        )

    ours, published, reason = best(()), None, ""
    try:
        published = best(study.pins)
    except InfeasibleError as error:
        reason = str(error)
    return StudyResult(study=study, ours=ours, published=published, reason=reason, trace_s=trace_s)
