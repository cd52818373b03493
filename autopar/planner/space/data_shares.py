"""Shares of data ranks on different devices: which numbers of samples are tried, where there is no pipeline.

Every rank runs as many micro-batches, ranks of different node groups of different sizes (:mod:`autopar.cost.model`). For each
number of micro-batches the samples of one are dealt out in whole numbers so that all groups take about as long; the nearest
:data:`TRIED` ways to do so are candidates, beside those in which all ranks take as many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from autopar.errors import InfeasibleError, UsageError
from autopar.hardware.cluster import Cluster
from autopar.plan.check import SHARES_ALONE, shares_fault
from autopar.plan.mesh import Mesh
from autopar.planner.space.candidates import Candidate, candidates
from autopar.planner.space.conflict import conflict
from autopar.planner.space.constraints import Problem, divisors
from autopar.planner.space.pin_syntax import EQUAL, ChoicePin, NumberPin
from autopar.planner.space.pins import Pins

KEY = "data_shares"
TRIED = 3
"""Ways to deal out the samples of a micro-batch that are tried for each number of micro-batches."""

WINDOW = 20_000
"""Combinations of shares that are looked at for these, around those in proportion to speed."""

ALONE = ("pp=1", "cp=1", "tp=1", "ep_data=1")
"""What shares need, as pins."""

Seconds = Callable[[int, int], float]
"""Of a micro-batch: node group, by its place in the cluster as given, and samples."""

Line = tuple[float, float]
"""Seconds of a micro-batch whatever its size, and for each of its samples."""


def equally_shared(pool: Sequence[Candidate], pins: Pins) -> list[Candidate]:
    """Of candidates in which all data ranks take as many samples those that the pins leave."""
    return list(pool) if pins.allows(KEY, EQUAL) else []


def shared(problem: Problem, pins: Pins, cluster: Cluster, seconds: Seconds, *, mixing: str = "") -> list[Candidate]:
    """Candidates whose data ranks take different numbers of samples.

    Args:
        problem: with the space, which says whether any are tried where no pin does.
        seconds: what micro-batches take, about.
        mixing: where samples of the model meet: there are none then.

    Raises:
        UsageError: pins want shares that cannot be.
    """
    fixed = _fixed(pins)
    if fixed:
        _check(fixed, problem, cluster, mixing)
    wanted = fixed or not pins.allows(KEY, EQUAL) or (problem.space.data_shares and len(cluster.devices) > 1)
    if not wanted or mixing or cluster.is_homogeneous:
        return []
    orders = (order for order in cluster.orders if pins.allows("groups", "-".join(map(str, order))))
    order = next(orders, cluster.orders[0])
    ranks = [cluster.groups[place].num_devices for place in order]
    alone, others = _alone(problem, pins)
    meshes = sorted({(c.mesh, c.zero_stage, c.vocab_multiple) for c in candidates(alone, others)}, key=_degrees)
    found = []
    for count, sizes in _dealt(problem, pins, ranks, order, seconds, fixed) if meshes else ():
        for mesh, zero, multiple in meshes:
            if zero == 2 and count == 1 and problem.space.practice and pins.equal_to("zero") != 2:
                continue  # with one micro-batch ZeRO 2 is ZeRO 1
            found.append(
                Candidate(
                    mesh=mesh,
                    micro_batch_size=max(sizes),
                    num_micro_batches=count,
                    zero_stage=zero,
                    schedule="none",
                    virtual_stages=1,
                    order=order if order != cluster.orders[0] else (),
                    shares=sizes,
                    vocab_multiple=multiple,
                )
            )
    return found


def against(problem: Problem, pins: Pins) -> InfeasibleError | None:
    """Why pinned shares leave no candidate; None where equal ones would do."""
    if pins.allows(KEY, EQUAL):
        return None
    texts = [pin.text for pin in pins.pins if isinstance(pin, ChoicePin) and pin.key == KEY]
    sizes = [p.text for p in pins.pins if isinstance(p, NumberPin) and p.key in ("micro_batch", "num_micro_batches")]
    names = conflict(*_alone(problem, pins))
    return InfeasibleError(
        "These constraints conflict",
        got="; ".join((*texts, *(names or sizes))),
        fix=f"Drop one of the pins named: unequal shares need {SHARES_ALONE}",
    )


def nearest(total: int, ranks: Sequence[int], lines: Sequence[Line]) -> list[tuple[int, ...]]:
    """The quickest ways to deal out ``total`` samples, at most :data:`TRIED`: shares of one rank of each group, not all equal.

    >>> nearest(8, [1, 1], [(0.0, 1.0), (0.0, 3.0)])
    [(6, 2), (7, 1), (5, 3)]

    Args:
        ranks: of each group.
        lines: what a micro-batch takes on each.
    """
    ideal = _ideal(total, ranks, lines)
    last = min(range(len(ranks)), key=lambda group: ranks[group])  # its share follows from the others'
    others = [group for group in range(len(ranks)) if group != last]
    width = min(int(WINDOW ** (1 / len(others))) // 2, 2 * TRIED * max(ranks))
    ranges = [range(max(int(ideal[g]) - width, 1), int(ideal[g]) + width + 2) for g in others]
    found = []
    for some in product(*ranges):
        left = total - sum(ranks[g] * share for g, share in zip(others, some, strict=True))
        if left < ranks[last] or left % ranks[last]:
            continue
        shares = [*some]
        shares.insert(last, left // ranks[last])
        if len(set(shares)) > 1:
            found.append((max(a + b * share for (a, b), share in zip(lines, shares, strict=True)), tuple(shares)))
    return [shares for _, shares in sorted(found)[:TRIED]]


def _ideal(total: int, ranks: Sequence[int], lines: Sequence[Line]) -> list[float]:
    """Shares with which all groups take as long, those aside that take longer with a single sample."""
    free = list(range(len(ranks)))
    while free:
        left = total - sum(ranks[g] for g in range(len(ranks)) if g not in free)
        level = left + sum(ranks[g] * lines[g][0] / lines[g][1] for g in free)
        level /= sum(ranks[g] / lines[g][1] for g in free)
        shares = {g: (level - lines[g][0]) / lines[g][1] for g in free}
        if min(shares.values()) >= 1.0:
            return [shares.get(g, 1.0) for g in range(len(ranks))]
        free = [g for g in free if shares[g] >= 1.0]
    return [1.0] * len(ranks)


def _dealt(
    problem: Problem, pins: Pins, ranks: Sequence[int], order: Sequence[int], seconds: Seconds, fixed: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Numbers of micro-batches, each with shares in the order of ranks."""
    batch, sizes = problem.global_batch_size, problem.space.micro_batches
    for count in divisors(batch):
        total = batch // count
        if total < sum(ranks) or not pins.allows("num_micro_batches", count):
            continue
        if fixed:
            own = tuple(fixed[place] for place in order)
            ways = [own] if sum(n * share for n, share in zip(ranks, own, strict=True)) == total else []
        elif total <= max(sizes) * sum(ranks):
            least = max((size for size in sizes if size * sum(ranks) <= total), default=1)
            ways = nearest(total, ranks, [_line(partial(seconds, place), least, batch) for place in order])
        else:
            ways = []
        for way in ways:
            given = "-".join(str(way[order.index(place)]) for place in range(len(order)))
            if pins.allows(KEY, given) and all(pins.allows("micro_batch", share) for share in way):
                yield count, way


def _line(seconds: Callable[[int], float], size: int, most: int) -> Line:
    """Through the times of ``size`` samples and of twice as many."""
    one_s = seconds(size)
    if 2 * size <= most:
        slope = (seconds(2 * size) - one_s) / size
        if slope > 0:
            return one_s - slope * size, slope
    return 0.0, one_s / size


def _fixed(pins: Pins) -> tuple[int, ...]:
    """The shares that a pin names, in the order of the cluster's file; none where no pin does."""
    for pin in pins.pins:
        if isinstance(pin, ChoicePin) and pin.key == KEY and pin.relation != "!=" and pin.value != EQUAL:
            return tuple(map(int, pin.value.split("-")))
    return ()


def _check(fixed: tuple[int, ...], problem: Problem, cluster: Cluster, mixing: str) -> None:
    """Refuse pinned shares that no candidate can have.

    Raises:
        UsageError: says why.
    """
    place = f"pin 'data_shares={'-'.join(map(str, fixed))}'"
    ranks = [] if cluster.is_homogeneous else [group.num_devices for group in cluster.groups]
    fault = shares_fault(fixed, ranks, problem.global_batch_size)
    if fault is not None:
        expected, got, fix = fault
        raise UsageError("These shares do not fit", where=place, expected=expected, got=got, fix=fix)
    if mixing:
        raise UsageError(
            f"Samples of the batch depend on each other ({mixing}), so all data ranks must take equal numbers of them",
            where=place,
            fix="Drop the pin",
        )


def _alone(problem: Problem, pins: Pins) -> tuple[Problem, Pins]:
    """Problem and pins whose candidates have the degrees and ZeRO stages that shares may have, at one or two samples a rank."""
    sizes = ("micro_batch", "num_micro_batches")
    rest = [pin for pin in pins.pins if not (isinstance(pin, NumberPin) and pin.key in sizes)]
    space = replace(problem.space, micro_batches=(1, 2))
    alone = replace(problem, global_batch_size=2 * problem.world_size, mixes_samples=False, space=space)
    return alone, Pins(pins=(*rest, *Pins.parse(ALONE).pins))


def _degrees(choice: tuple[Mesh, int, int]) -> tuple[int, ...]:
    return (*choice[0].degrees, *choice[1:])
