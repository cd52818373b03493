"""Questions of size about a model, a cluster, a batch and pins: the smallest or cheapest cluster, the longest sequence, the largest batch.

The planner's search answers each of them, exactly over the sizes that are tried; this module has no cost model.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from autopar.errors import InfeasibleError, UsageError
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.models.graph_for_plan import traced
from autopar.plan.plan import Plan
from autopar.planner.layouts.layout import LayoutKey
from autopar.planner.planner import Planner
from autopar.planner.search import Evaluation, Limits, Progress, task_of
from autopar.planner.sharding.input_axes import samples_apart
from autopar.planner.space.constraints import divisors
from autopar.planner.space.pin_syntax import NumberPin
from autopar.planner.space.pins import Pins
from autopar.planner.space.preferences import leanness
from autopar.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask(Request):
    """The request that all questions have in common.

    Attributes:
        graph_at: returns the traced model for (global batch, tokens of a sample); tokens None means the model's default length.
        cluster: the cluster as a text.
        cache_dir: the folder with measurements of this machine; None is the user's cache directory.
        max_step_time_s: slower plans do not count.
        processes: processes of each search.
    """

    graph_at: Callable[[int, int | None], Graph]
    cluster: str
    global_batch_size: int
    cache_dir: Path | None = None
    sequence: int | None = None
    max_step_time_s: float | None = None
    progress: Progress = lambda *_: None
    processes: int = 1

    def planner(self, cluster: Cluster) -> Planner:
        """Return a planner for ``cluster``. Its pool is empty if there are no candidates."""
        changes: dict[str, Any] = {"cluster": cluster}
        graph = self.graph_at(self.global_batch_size, self.sequence)
        return Planner(task_of(graph, replace(self, **changes)), explains=False)

    def fastest(self, cluster: Cluster) -> Plan | None:
        """Return the fastest plan for ``cluster`` within ``max_step_time_s``, or None."""
        return self.planner(cluster).fastest(Limits(max_step_time_s=self.max_step_time_s), processes=self.processes)

    @property
    def within(self) -> str:
        """The time limit as the end of a sentence; empty without a limit."""
        return "" if self.max_step_time_s is None else f" within {self.max_step_time_s:g} s"

    def say(self, what: str) -> None:
        """Report what is tried."""
        self.progress(what, 0, 0)


def tracer(
    model: str, precision: str, opaque: Sequence[str], *, cache_dir: Path, advance: Progress
) -> Callable[[int, int | None], Graph]:
    """Return a function that traces a MODEL once for each length, for :class:`Ask`.

    A graph whose samples depend on each other is traced once for each batch size too.
    """
    graphs: dict[tuple[int | None, int | None], Graph] = {}

    def at(samples: int, tokens: int | None) -> Graph:
        for key in ((None, tokens), (samples, tokens)):
            if key in graphs:
                return graphs[key]
        graph = traced(
            model, sequence=tokens, precision=precision, opaque=opaque, global_batch_size=samples,
            samples_apart=samples_apart, cache_dir=cache_dir, advance=advance,
        )  # fmt: skip
        graphs[samples if graph.exact else None, tokens] = graph
        return graph

    return at


_SHAPE = re.compile(r"^(?P<device>[^?]+):(?P<nodes>\d+)x(?P<per_node>\d+)(?P<options>\?.*)?$")

MAX_SEQUENCE = 2**26
"""Longest sequence that is tried, in tokens, where a model has no longest sequence and everything fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A size that was tried.

    Attributes:
        value: the size as a text.
        plan: its plan; None if none keeps the limits, for the reason ``missing``.
        cost: cost of a step, if prices are given.
    """

    value: str
    num_devices: int
    plan: Plan | None
    cost: float | None = None
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a question: the size as a text, its plan, and all sizes that were tried, in order.

    Attributes:
        cost: cost of a step, if prices are given.
        limit: says that larger sizes are not tried, if the answer is the largest one that is.
    """

    value: str
    plan: Plan
    trials: tuple[Trial, ...]
    cost: float | None = None
    limit: str = ""


# --- clusters


def smallest_cluster(ask: Ask) -> Answer:
    """Return the fewest devices of ``ask.cluster`` with a plan within ``max_step_time_s``.

    The sizes are the divisors of one node, then whole nodes up to those of the cluster. They are tried from the smallest one whose
    computation alone, without communication, keeps the time limit.

    Raises:
        UsageError: the cluster is not ``DEVICE:NODESxPER_NODE``.
        InfeasibleError: no size has a plan.
    """
    trials = []
    for text, cluster in _with_time(ask, ask.cluster):
        ask.say(f"trying {text}")
        plan = ask.fastest(cluster)
        missing = "" if plan else _none_within(ask)
        trials.append(Trial(value=text, num_devices=cluster.world_size, plan=plan, missing=missing))
        if plan is not None:
            return Answer(value=text, plan=plan, trials=tuple(trials))
    raise _no_cluster(ask, (ask.cluster,))


def cheapest_cluster(ask: Ask, prices: Mapping[str, float], others: Sequence[str] = ()) -> Answer:
    """Return the cluster on which a step costs least within ``max_step_time_s``.

    Args:
        ask: the request, with its cluster.
        prices: the price of a device and hour by the device's name.
        others: further clusters. The sizes of each are tried as in :func:`smallest_cluster`.

    Raises:
        UsageError: a device has no price, a price is not above zero, or no cluster has the device of a price.
        InfeasibleError: no size has a plan.
    """
    trials: list[Trial] = []
    best: Trial | None = None
    price_by_cluster = prices_of(ask, prices, others)
    for kind, price in price_by_cluster.items():
        for text, cluster in _with_time(ask, kind):
            ask.say(f"trying {text}")
            per_second = price * cluster.world_size / 3600
            as_cheap_s = best.cost / per_second if best and best.cost else math.inf
            most_s = min(math.inf if ask.max_step_time_s is None else ask.max_step_time_s, as_cheap_s)
            plan = replace(ask, max_step_time_s=None if most_s == math.inf else most_s).fastest(cluster)
            cost = plan.predicted.step_time_s * per_second if plan else None
            missing = "" if plan else "none cheaper" if most_s == as_cheap_s < math.inf else _none_within(ask)
            trials.append(Trial(value=text, num_devices=cluster.world_size, plan=plan, cost=cost, missing=missing))
            if cost is not None and (best is None or best.cost is None or cost < best.cost):
                best = trials[-1]
    if best is None or best.plan is None:
        raise _no_cluster(ask, (ask.cluster, *others))
    return Answer(value=best.value, plan=best.plan, trials=tuple(trials), cost=best.cost)


def prices_of(ask: Ask, prices: Mapping[str, float], others: Sequence[str] = ()) -> dict[str, float]:
    """Return the price of a device and hour for each cluster that is considered.

    Raises:
        UsageError: none of them has the device of a price, a device has no price, or a price is not above zero.
    """
    devices = {kind: Cluster.parse(kind, cache_dir=ask.cache_dir).devices[0].name for kind in (ask.cluster, *others)}
    unused = next((name for name in prices if name not in devices.values()), None)
    if unused is not None:
        raise UsageError.unknown("device with a price", unused, set(devices.values()), where="--price")
    for device in devices.values():
        if not 0 < prices.get(device, 0.0) < math.inf:
            raise UsageError(
                f"The price of {device} is {prices[device]:g}" if device in prices else f"Missing price of {device}",
                where="--price",
                fix=f"Write {device}=2.5 for a price of 2.5 a device and hour",
            )
    return {kind: prices[device] for kind, device in devices.items()}


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """Return prices by device from texts ``DEVICE=P``, several of which may stand in one text with commas between them.

    Raises:
        UsageError: a text is malformed, or a device has two prices.

    >>> parse_prices(["cpu=0.1,h100-sxm5-80gb=2.5"])
    {'cpu': 0.1, 'h100-sxm5-80gb': 2.5}
    """
    prices: dict[str, float] = {}
    for text in (part for entry in texts for part in entry.split(",")):
        name, _, value = text.partition("=")
        if name.strip() in prices:
            raise UsageError(f"The device in '{text}' has two prices", where="--price", fix="Leave one of them out")
        try:
            prices[name.strip()] = float(value)
        except ValueError as error:
            raise UsageError(
                f"'{text}' is not of the form DEVICE=NUMBER",
                where="--price",
                fix="Write for example h100-sxm5-80gb=2.5",
            ) from error
    return prices


def sizes_of(text: str) -> tuple[str, ...]:
    """Return the clusters of the same kind from one device to all of ``text``.

    Raises:
        UsageError: the cluster is not ``DEVICE:NODESxPER_NODE``, or there is no such one.

    >>> sizes_of("h100-sxm5-80gb:3x4")
    ('h100-sxm5-80gb:1x1', 'h100-sxm5-80gb:1x2', 'h100-sxm5-80gb:1x4', 'h100-sxm5-80gb:2x4', 'h100-sxm5-80gb:3x4')
    """
    shape = _SHAPE.match(text)
    if shape is None:
        raise UsageError(
            f"Fewer devices of the cluster '{text}' cannot be tried: it is not of the form DEVICE:NODESxPER_NODE",
            fix="Write for example h100-sxm5-80gb:64x8 for at most 64 nodes",
        )
    Cluster.parse(text)  # raises where it is too large to be counted
    device, nodes, per_node, options = shape["device"], int(shape["nodes"]), int(shape["per_node"]), shape["options"]
    inside = [(1, n) for n in divisors(per_node)]
    return tuple(
        f"{device}:{n}x{d}{options or ''}" for n, d in [*inside, *((n, per_node) for n in range(2, nodes + 1))]
    )


def _with_time(ask: Ask, text: str) -> Iterator[tuple[str, Cluster]]:
    """Yield the sizes of a cluster on which the computation alone keeps the time limit."""
    sizes = sizes_of(text)
    least_s = 0.0
    if ask.max_step_time_s is not None and not any(
        isinstance(p, NumberPin) and p.key in ("num_micro_batches", "micro_batch") for p in Pins.parse(ask.pins).pins
    ):
        planner = ask.planner(Cluster.parse(sizes[0], cache_dir=ask.cache_dir))
        # with batch statistics, or experts over data ranks, the computation itself depends on the number of devices
        least_s = 0.0 if planner.mixing or planner.problem.experts else _least_time_s(planner)
    for size in sizes:
        cluster = Cluster.parse(size, cache_dir=ask.cache_dir)
        if ask.max_step_time_s is None or least_s / cluster.world_size <= ask.max_step_time_s:
            yield size, cluster


def _least_time_s(planner: Planner) -> float:
    """Return a lower bound on the seconds that one device computes, over the micro-batches of the space.

    On n devices the step takes at least 1/n of it.
    """
    batch_size, evaluator = planner.task.global_batch_size, planner.evaluator
    keys = [LayoutKey(micro_batch_size=m, tp=batch_size) for m in planner.task.space.micro_batches if m <= batch_size]
    times = (
        evaluator.plans.rank_devices.least_s(evaluator.layouts.unsplit(key)) / key.micro_batch_size for key in keys
    )
    return batch_size * min(times, default=0.0)


def _none_within(ask: Ask) -> str:
    return f"none{ask.within or ' fits'}"


def _no_cluster(ask: Ask, kinds: Sequence[str]) -> InfeasibleError:
    """Return the error that no size of some clusters has a plan."""
    return InfeasibleError(
        f"No plan fits on any size up to {', '.join(kinds)}{ask.within}",
        fix="Allow more time, more nodes, or drop a pin",
    )


# --- the largest that fits


def longest_sequence(ask: Ask, *, step: int) -> Answer:
    """Return the longest sequence, in multiples of ``step`` tokens, with a plan for ``ask.cluster``.

    It is found by doubling and bisection: lengths above one that does not fit are not tried.

    Raises:
        InfeasibleError: ``step`` tokens have no plan.
    """
    most, limit = max(MAX_SEQUENCE // step, 1), f"no longer ones than {MAX_SEQUENCE:,} are tried"
    return _largest(
        ask, lambda n: replace(ask, sequence=n * step), "tokens", lambda n: n * step, most=most, limit=limit
    )


def largest_batch(ask: Ask) -> Answer:
    """Return the largest global batch of at most ``ask.global_batch_size`` that fits in one micro-batch of each data rank.

    With gradient accumulation any multiple of it fits too. Divisors and multiples of the number of devices are tried; those above one that
    does not fit are not.

    Raises:
        InfeasibleError: not even one sample has a plan.
    """
    world = Cluster.parse(ask.cluster, cache_dir=ask.cache_dir).world_size
    small = divisors(world)

    def samples(n: int) -> int:
        return small[n - 1] if n <= len(small) else world * (n - len(small) + 1)

    def at(n: int) -> Ask:
        return replace(ask, global_batch_size=samples(n), pins=(*ask.pins, "num_micro_batches=1"))

    batch = ask.global_batch_size
    most = len(small) - 1 + batch // world if batch >= world else sum(size <= batch for size in small)
    limit = f"no larger ones than the global batch of {batch:,} are tried"
    return _largest(ask, at, "samples", samples, most=most, limit=limit)


def _fits(planner: Planner) -> bool:
    """Return whether some plan fits in memory, however slow it is. Candidates that need the least memory are tried first."""
    evaluator = planner.evaluator
    bounds_s = evaluator.bounds_s(0, planner.pool)
    may_fit = [c for c, bound_s in zip(planner.pool, bounds_s, strict=True) if bound_s < math.inf]
    return any(isinstance(evaluator.evaluate(c), Evaluation) for c in sorted(may_fit, key=leanness))


def _largest(
    ask: Ask,
    at: Callable[[int], Ask],
    unit: Literal["tokens", "samples"],
    value: Callable[[int], int],
    *,
    most: int,
    limit: str,
) -> Answer:
    """Return the largest n up to ``most`` with a plan, by doubling, then by bisection below the first n without one.

    ``at`` returns the request for n, and ``value`` its size in ``unit``. ``limit`` is the remark on an answer that reaches ``most``.
    """
    cluster = Cluster.parse(ask.cluster, cache_dir=ask.cache_dir)
    trials: dict[int, str] = {}

    def size(n: int) -> str:
        return f"{value(n):,} {unit if value(n) > 1 else unit.removesuffix('s')}"

    def tried(n: int) -> bool:
        ask.say(f"trying {size(n)}")
        try:
            asked = at(n)
            has_limit = asked.max_step_time_s is not None
            fits = asked.fastest(cluster) is not None if has_limit else _fits(asked.planner(cluster))
            trials[n] = "" if fits else _none_within(asked)
        except UsageError:  # the model has fewer positions
            if n == 1 or unit != "tokens":
                raise
            trials[n] = "the model takes no such length"
        return not trials[n]

    low, high = 0, 1
    while high <= most and tried(high):
        low, high = high, min(2 * high, most) if high < most else most + 1
    low += bisect_left(range(low + 1, high), True, key=lambda n: not tried(n))
    if low == 0:
        raise InfeasibleError(
            f"No plan fits {size(1)} on {ask.cluster}{ask.within}", fix="Take more devices, or drop a pin"
        )
    plan = at(low).fastest(cluster)
    assert plan is not None
    listed = (
        Trial(value=size(n), num_devices=cluster.world_size, plan=plan if n == low else None, missing=trials[n])
        for n in sorted(trials)
        if n == low or trials[n]
    )
    text, ends = size(low), low == most
    return Answer(value=text, plan=plan, trials=tuple(listed), limit=limit if ends else "")
