"""Plans of which none is better in everything: step time, memory left over, devices, price.

Time is minimised for each limit of the others (the epsilon-constraint method of Haimes, Lasdon and Wismer, 1971): each
cluster's plan is searched as usual, then again with less memory than the one before took. Every point is a search of its
own, with its certificate. Where a space has a sampler and more candidates than are searched to the end, time and memory of a
cluster are those of the candidates that NSGA-II asks for (:mod:`autopar.planner.branch_and_bound.sampling`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from autopar.errors import InfeasibleError, UsageError
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import scaled
from autopar.plan.plan import Plan
from autopar.planner.task import Limits, peak_bytes
from autopar.questions.ask import Ask
from autopar.questions.sizing import prices_of, sizes_of

Objective = Literal["time", "memory", "devices", "price"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

MEMORY_STEP = 0.9
"""Each further plan takes at most so much of the memory that the one before took, intervals included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A plan of the front.

    Attributes:
        cluster: as it is written; ``num_devices``: of it.
        head_room: share of the smallest device's memory above the upper end of the predicted peak.
        cost: of a step, where prices are given.
    """

    cluster: str
    num_devices: int
    plan: Plan
    head_room: float
    cost: float | None = None

    def values(self, objectives: Sequence[Objective]) -> tuple[float, ...]:
        """What is minimised."""
        cost = float("inf") if self.cost is None else self.cost
        known = {
            "time": self.plan.predicted.step_time_s,
            "memory": -self.head_room,
            "devices": float(self.num_devices),
            "price": cost,
        }
        return tuple(known[objective] for objective in objectives)


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """``time,memory`` as objectives.

    Raises:
        UsageError: one is unknown or named twice, or there is one alone.

    >>> parse_objectives("time, devices")
    ('time', 'devices')
    """
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in OBJECTIVES]
    if unknown:
        raise UsageError.unknown("objective", unknown[0], OBJECTIVES, where="--objectives")
    found = tuple(name for name in OBJECTIVES if name in names)
    if len(found) < 2 or len(found) < len(names):
        raise UsageError(
            f"'{text}' does not name two different objectives or more",
            where="--objectives",
            fix=f"Write for example time,memory. Known: {', '.join(OBJECTIVES)}",
        )
    return found


def front(
    ask: Ask, objectives: Sequence[Objective], prices: Mapping[str, float] | None = None, others: Sequence[str] = ()
) -> tuple[Point, ...]:
    """The plans that no other one beats in every objective, by step time.

    Args:
        ask: its cluster is the only one, or the largest where devices or their price count: then all sizes of it are tried.
        prices: of a device and hour, by its name; for the objective ``price``.
        others: further clusters of which all sizes are tried.

    Raises:
        UsageError: a device has no price, or no cluster has the device of a price; or sizes are tried of a cluster that is not ``DEVICE:NODESxPER_NODE``.
        InfeasibleError: nothing fits.
    """
    kinds = (ask.cluster, *others)
    is_sized = bool({"devices", "price"} & set(objectives))
    of_kinds = prices_of(ask, prices or {}, others) if "price" in objectives else {}
    texts = [(size, of_kinds.get(kind)) for kind in kinds for size in (sizes_of(kind) if is_sized else (kind,))]
    found: list[Point] = []
    for text, price in texts:
        cluster = Cluster.parse(text, cache_dir=ask.cache_dir)
        for plan, head_room in _plans(ask, text, cluster, with_memory="memory" in objectives):
            cost = None if price is None else price * cluster.world_size / 3600 * plan.predicted.step_time_s
            found.append(Point(cluster=text, num_devices=cluster.world_size, plan=plan, head_room=head_room, cost=cost))
    if not found:
        raise InfeasibleError(
            f"No plan fits in memory on any of {', '.join(kinds)}", fix="Take more nodes, or drop a pin"
        )
    return undominated(found, objectives)


def undominated(points: Sequence[Point], objectives: Sequence[Objective]) -> tuple[Point, ...]:
    """Those that no other one equals or beats everywhere and beats somewhere; of equals the first."""
    values = [point.values(objectives) for point in points]
    kept = [
        point
        for i, point in enumerate(points)
        if not any(
            all(a <= b for a, b in zip(other, values[i], strict=True)) and (other != values[i] or j < i)
            for j, other in enumerate(values)
            if j != i
        )
    ]
    return tuple(sorted(kept, key=lambda point: point.plan.predicted.step_time_s))


def _plans(ask: Ask, text: str, cluster: Cluster, *, with_memory: bool) -> Iterator[tuple[Plan, float]]:
    """The fastest plan of a cluster and the memory that it leaves; then those with ever less memory."""
    whole = min(device.memory_bytes for device in cluster.devices)
    limits, factor = Limits(max_step_time_s=ask.max_step_time_s), 1.0
    if with_memory and (planner := ask.planner(cluster)).is_sampled:
        ask.say(f"trying {text}, time and memory")
        yield from ((plan, 1 - peak_bytes(plan.predicted) / whole) for plan in planner.front(limits))
        return
    while True:
        ask.say(f"trying {text}" + (f", {100 * factor:.0f} % of its memory" if factor < 1 else ""))
        limited = cluster if factor == 1.0 else scaled(cluster, {"device.memory": factor})
        plan = ask.planner(limited).fastest(limits, processes=ask.processes)
        if plan is None:
            return
        taken = peak_bytes(plan.predicted) / whole
        yield plan, 1 - taken
        factor = taken * MEMORY_STEP
        if not with_memory:
            return
