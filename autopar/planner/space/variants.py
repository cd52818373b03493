"""What multiplies the candidates: orders of node groups that differ, what of a plan may live on the host, shares of data ranks.

Pipeline ranks take consecutive ranks, and ranks count the nodes group by group. So each pipeline rank lies on one node group, or on several
where the groups do not divide evenly, and then runs as the slowest of them. Which groups come first is a choice of the search.

Where profiles have the link to the host, further candidates have their optimizer there. At equal choices such a plan is never quicker: its
first bound is the work of all ranks and the step on the host with its copies, from what is known of its twin on the device, so that it is
looked at more closely only where the memory that it frees may pay for them.

Shares of data ranks on different devices are tried where there is no pipeline. Every rank runs as many micro-batches, ranks of different
node groups of different sizes (:mod:`autopar.cost.model`). For each number of micro-batches the samples of one are dealt out in whole
numbers so that all groups take about as long; the nearest :data:`TRIED` ways to do so are candidates, beside those in which all ranks take
as many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from autopar.cost.network.placement import places_of
from autopar.cost.step.memory import OPTIMIZERS, optimizer_cost
from autopar.errors import InfeasibleError, UsageError
from autopar.hardware.cluster import Cluster
from autopar.plan.check import SHARES_ALONE, shares_fault
from autopar.plan.mesh import Mesh
from autopar.plan.plan import RankGroup
from autopar.planner.space.candidates import Candidate, candidates, conflict
from autopar.planner.space.constraints import Problem, divisors, is_pinned
from autopar.planner.space.pin_syntax import EQUAL, ActivationPin, ChoicePin, NumberPin
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Hosted


def in_orders(pool: Sequence[Candidate], cluster: Cluster, pins: Pins) -> list[Candidate]:
    """Each candidate in each order of the node groups that puts its pipeline ranks on other groups; the given one first.

    Raises:
        UsageError: pins allow none of the orders.
    """
    every = cluster.orders
    orders = [order for order in every if _is_allowed(order, pins)]
    if not orders:
        raise UsageError(
            "The cluster has no order of node groups that holds for "
            + ", ".join(pin.text for pin in pins.pins if pin.text.startswith("groups")),
            where=cluster.name,
            fix=f"Choose one of: {', '.join('-'.join(map(str, order)) for order in every)}",
        )
    if cluster.is_homogeneous:
        return list(pool)
    found: list[Candidate] = []
    known: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for candidate in pool:
        pipeline = candidate.mesh.pp, candidate.mesh.world_size
        if pipeline not in known:
            different: dict[tuple[frozenset[int], ...], tuple[int, ...]] = {}
            for order in orders if candidate.mesh.pp > 1 else orders[:1]:
                different.setdefault(origins(replace(candidate, order=order), cluster), order)
            known[pipeline] = [order if order != every[0] else () for order in different.values()]
        found += [replace(candidate, order=order) if order else candidate for order in known[pipeline]]
    return found


def _is_allowed(order: Sequence[int], pins: Pins) -> bool:
    return pins.allows("groups", "-".join(map(str, order)))


def origins(candidate: Candidate, cluster: Cluster) -> tuple[frozenset[int], ...]:
    """For each pipeline rank the node groups that it lies on, by position in the cluster as given."""
    order = candidate.order or tuple(range(len(cluster.groups)))
    return tuple(frozenset(order[i] for i in own) for own in places_of(candidate.mesh, cluster.reordered(order)))


def rank_groups(candidate: Candidate, cluster: Cluster) -> tuple[RankGroup, ...]:
    """Which ranks stand on which devices; nothing where all nodes are equal."""
    if cluster.is_homogeneous:
        return ()
    found, start = [], 0
    for group in cluster.reordered(candidate.order or tuple(range(len(cluster.groups)))).groups:
        found.append(RankGroup(start=start, stop=start + group.num_devices, device=group.device.name))
        start += group.num_devices
    return tuple(found)


OFFLOAD = "offload"


def offloaded(
    pool: Sequence[Candidate], cluster: Cluster, pins: Pins, tried: Sequence[Hosted], optimizer: str
) -> list[Candidate]:
    """The candidates, each with its optimizer on the host, and of all of these each whose blocks may keep there what they save.

    As far as pins and the space say.

    Args:
        tried: what the space may have on the host; pins widen it.

    Raises:
        UsageError: pins want it where it cannot be, or allow nothing.
    """
    stays, goes = pins.allows(OFFLOAD, "none"), pins.allows(OFFLOAD, "optimizer")
    texts = [pin.text for pin in pins.pins if isinstance(pin, ChoicePin) and pin.key == OFFLOAD]
    if not stays and not goes:
        raise UsageError(f"The pins {', '.join(texts)} leave nothing to choose", fix="Drop one of them")
    moved = [pin.text for pin in pins.pins if isinstance(pin, ActivationPin)]
    if moved and (none := [text for text in texts if text.replace("==", "=") == f"{OFFLOAD}=none"]):
        raise UsageError(f"The pins {', '.join((*moved, *none))} contradict each other", fix="Drop one of them")
    if moved and (against := _without_link(cluster)):
        raise UsageError(against[0], where=f"pin '{moved[0]}'", fix=against[1])
    reason = _reason_against(cluster, optimizer)
    if not stays and reason:
        raise UsageError(reason[0], where=f"pin '{texts[0]}'", fix=reason[1])
    found = list(pool) if stays else []
    if goes and not reason and (texts or "optimizer" in tried):
        found += [replace(candidate, offload=("optimizer",)) for candidate in pool]
    if "activations" in tried and pins.allows(OFFLOAD, "activations") and not moved and not _without_link(cluster):
        found += [replace(candidate, moves=True) for candidate in found]
    return found


def _reason_against(cluster: Cluster, optimizer: str) -> tuple[str, str] | None:
    """Why the optimizer has to stay on the device, and what to do; None where it need not."""
    if against := _without_link(cluster):
        return against
    if optimizer_cost(optimizer).is_factored:
        known = ", ".join(name for name, cost in OPTIMIZERS.items() if not cost.is_factored)
        return f"The optimizer {optimizer} cannot live on the host", f"Take one of {known}, or drop the pin"
    return None


def _without_link(cluster: Cluster) -> tuple[str, str] | None:
    missing = [device.name for device in cluster.devices if device.host is None]
    if missing:
        problem = f"Nothing can be offloaded to the host: the profile of {missing[0]} has no link to it"
        return problem, "Add [device.host] to the profile (profiles/README.md), or drop the pin"
    if not cluster.is_homogeneous:
        problem = f"Nothing can be offloaded to the host, as the nodes of {cluster.name} differ"
        return problem, "Drop the pin, or take equal nodes"
    return None


SHARES = "data_shares"
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
    wanted = fixed or not pins.allows(SHARES, EQUAL) or (problem.space.data_shares and len(cluster.devices) > 1)
    if not wanted or mixing or cluster.is_homogeneous:
        return []
    order = next((order for order in cluster.orders if _is_allowed(order, pins)), cluster.orders[0])
    ranks = [cluster.groups[place].num_devices for place in order]
    alone, others = _alone(problem, pins)
    meshes = sorted({(c.mesh, c.zero_stage, c.vocab_multiple) for c in candidates(alone, others)}, key=_degrees)
    found = []
    for count, sizes in _dealt(problem, pins, ranks, order, seconds, fixed) if meshes else ():
        for mesh, zero, multiple in meshes:
            if zero == 2 and count == 1 and problem.space.practice and not is_pinned(pins, "zero"):
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
    if pins.allows(SHARES, EQUAL):
        return None
    texts = [pin.text for pin in pins.pins if isinstance(pin, ChoicePin) and pin.key == SHARES]
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
            if pins.allows(SHARES, given) and all(pins.allows("micro_batch", share) for share in way):
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
        if isinstance(pin, ChoicePin) and pin.key == SHARES and pin.relation != "!=" and pin.value != EQUAL:
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
