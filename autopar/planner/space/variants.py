"""The choices that multiply candidates: orders of node groups, offload to the host, and unequal shares of data ranks.

Pipeline ranks are consecutive ranks, and ranks count the nodes group by group. So each pipeline rank lies on one node group, or on several
where the groups do not divide evenly, and then runs at the speed of the slowest. The search chooses the order of the groups.

Where profiles have the link to the host, each candidate also occurs with its optimizer there. That never makes it faster at equal choices.
Its first bound adds the host's step and copies to what is known of the same candidate on the device, so that it gets tighter bounds only
where the memory that it frees may pay for them.

Data ranks on different devices may take unequal shares where there is no pipeline. Every rank runs equally many micro-batches, of a
different size for each node group (:mod:`autopar.cost.model`). For each number of micro-batches, :func:`nearest` gives the whole numbers
of samples for which all groups take about equally long. These are candidates besides those with equal shares.
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
    """Return each candidate in each order of node groups that puts its pipeline ranks on other groups, the cluster's order first.

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
    ordered: list[Candidate] = []
    by_pipeline: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for candidate in pool:
        pipeline = candidate.mesh.pp, candidate.mesh.world_size
        if pipeline not in by_pipeline:
            distinct: dict[tuple[frozenset[int], ...], tuple[int, ...]] = {}
            for order in orders if candidate.mesh.pp > 1 else orders[:1]:
                distinct.setdefault(origins(replace(candidate, order=order), cluster), order)
            by_pipeline[pipeline] = [order if order != every[0] else () for order in distinct.values()]
        ordered += [replace(candidate, order=order) if order else candidate for order in by_pipeline[pipeline]]
    return ordered


def _is_allowed(order: Sequence[int], pins: Pins) -> bool:
    return pins.allows("groups", "-".join(map(str, order)))


def origins(candidate: Candidate, cluster: Cluster) -> tuple[frozenset[int], ...]:
    """Return for each pipeline rank the node groups that it lies on, by position in the cluster as given."""
    order = candidate.order or tuple(range(len(cluster.groups)))
    return tuple(frozenset(order[i] for i in groups) for groups in places_of(candidate.mesh, cluster.reordered(order)))


def rank_groups(candidate: Candidate, cluster: Cluster) -> tuple[RankGroup, ...]:
    """Return the consecutive ranks of each kind of device; empty where all nodes are equal."""
    if cluster.is_homogeneous:
        return ()
    groups, start = [], 0
    for group in cluster.reordered(candidate.order or tuple(range(len(cluster.groups)))).groups:
        groups.append(RankGroup(start=start, stop=start + group.num_devices, device=group.device.name))
        start += group.num_devices
    return tuple(groups)


OFFLOAD = "offload"
"""The key of pins on offload."""


def offloaded(
    pool: Sequence[Candidate], cluster: Cluster, pins: Pins, tried: Sequence[Hosted], optimizer: str
) -> list[Candidate]:
    """Return the candidates, those with the optimizer on the host, and those whose blocks may keep activations there.

    Pins and the space decide which of these are tried.

    Args:
        tried: what the space may have on the host; pins widen it.
        optimizer: the optimizer's name.

    Raises:
        UsageError: pins want offload where it is impossible, or contradict each other.
    """
    stays, goes = pins.allows(OFFLOAD, "none"), pins.allows(OFFLOAD, "optimizer")
    texts = [pin.text for pin in pins.pins if isinstance(pin, ChoicePin) and pin.key == OFFLOAD]
    if not stays and not goes:
        raise UsageError(f"The pins {', '.join(texts)} leave nothing to choose", fix="Drop one of them")
    offloading = [pin.text for pin in pins.pins if isinstance(pin, ActivationPin)]
    if offloading and (none := [text for text in texts if text.replace("==", "=") == f"{OFFLOAD}=none"]):
        raise UsageError(f"The pins {', '.join((*offloading, *none))} contradict each other", fix="Drop one of them")
    if offloading and (fault := _without_link(cluster)):
        raise UsageError(fault[0], where=f"pin '{offloading[0]}'", fix=fault[1])
    reason = _reason_against(cluster, optimizer)
    if not stays and reason:
        raise UsageError(reason[0], where=f"pin '{texts[0]}'", fix=reason[1])
    variants = list(pool) if stays else []
    if goes and not reason and (texts or "optimizer" in tried):
        variants += [replace(candidate, offload=("optimizer",)) for candidate in pool]
    if "activations" in tried and pins.allows(OFFLOAD, "activations") and not offloading and not _without_link(cluster):
        variants += [replace(candidate, offloads_activations=True) for candidate in variants]
    return variants


def _reason_against(cluster: Cluster, optimizer: str) -> tuple[str, str] | None:
    """Return why the optimizer cannot live on the host, and the remedy; None if it can."""
    if fault := _without_link(cluster):
        return fault
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
"""The key of pins on shares."""

NUM_TRIED = 3
"""The number of vectors of shares that are tried for each number of micro-batches."""

MAX_COMBINATIONS = 20_000
"""The number of vectors of shares, around those in proportion to speed, among which these are chosen at most."""

ALONE = ("pp=1", "cp=1", "tp=1", "ep_data=1")
"""The pins that unequal shares imply: data ranks are the only axis."""

Seconds = Callable[[int, int], float]
"""Returns the approximate seconds of a micro-batch by node group (its position in the cluster as given) and samples."""

Line = tuple[float, float]
"""The time of a micro-batch as a line over its samples: the intercept in seconds, and the seconds of each sample."""


def shared(problem: Problem, pins: Pins, cluster: Cluster, seconds: Seconds, *, mixing: str = "") -> list[Candidate]:
    """Return the candidates whose data ranks take different numbers of samples.

    Args:
        problem: its space decides whether unequal shares are tried where no pin asks for them.
        seconds: returns the approximate time of a micro-batch.
        mixing: where samples of the model depend on each other; there are no such candidates then. Empty: nowhere.

    Raises:
        UsageError: pins ask for shares that are impossible.
    """
    pinned = _pinned_shares(pins)
    if pinned:
        _check(pinned, problem, cluster, mixing)
    wanted = pinned or not pins.allows(SHARES, EQUAL) or (problem.space.data_shares and len(cluster.devices) > 1)
    if not wanted or mixing or cluster.is_homogeneous:
        return []
    order = next((order for order in cluster.orders if _is_allowed(order, pins)), cluster.orders[0])
    ranks = [cluster.groups[place].num_devices for place in order]
    alone, others = _restricted(problem, pins)
    meshes = sorted({(c.mesh, c.zero_stage, c.vocab_multiple) for c in candidates(alone, others)}, key=_degrees)
    unequal = []
    for count, sizes in _share_choices(problem, pins, ranks, order, seconds, pinned) if meshes else ():
        for mesh, zero, multiple in meshes:
            if zero == 2 and count == 1 and problem.space.skips_unlikely and not is_pinned(pins, "zero"):
                continue  # with one micro-batch ZeRO-2 is ZeRO-1
            unequal.append(
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
    return unequal


def against(problem: Problem, pins: Pins) -> InfeasibleError | None:
    """Return the error that explains why pinned shares leave no candidate; None if pins allow equal shares."""
    if pins.allows(SHARES, EQUAL):
        return None
    texts = [pin.text for pin in pins.pins if isinstance(pin, ChoicePin) and pin.key == SHARES]
    sizes = [p.text for p in pins.pins if isinstance(p, NumberPin) and p.key in ("micro_batch", "num_micro_batches")]
    names = conflict(*_restricted(problem, pins))
    return InfeasibleError(
        "These constraints conflict",
        got="; ".join((*texts, *(names or sizes))),
        fix=f"Drop one of the pins named: unequal shares need {SHARES_ALONE}",
    )


def nearest(total: int, ranks: Sequence[int], lines: Sequence[Line]) -> list[tuple[int, ...]]:
    """Return the fastest vectors of unequal shares of ``total`` samples, at most :data:`NUM_TRIED`; a share is that of one rank of a group.

    >>> nearest(8, [1, 1], [(0.0, 1.0), (0.0, 3.0)])
    [(6, 2), (7, 1), (5, 3)]

    Args:
        ranks: the number of ranks of each group.
        lines: the time of a micro-batch on each group.
    """
    ideal = _balanced(total, ranks, lines)
    last = min(range(len(ranks)), key=lambda group: ranks[group])  # its share follows from the others'
    others = [group for group in range(len(ranks)) if group != last]
    width = min(int(MAX_COMBINATIONS ** (1 / len(others))) // 2, 2 * NUM_TRIED * max(ranks))
    ranges = [range(max(int(ideal[g]) - width, 1), int(ideal[g]) + width + 2) for g in others]
    timed = []
    for chosen in product(*ranges):
        remaining = total - sum(ranks[g] * share for g, share in zip(others, chosen, strict=True))
        if remaining < ranks[last] or remaining % ranks[last]:
            continue
        shares = [*chosen]
        shares.insert(last, remaining // ranks[last])
        if len(set(shares)) > 1:
            timed.append((max(a + b * share for (a, b), share in zip(lines, shares, strict=True)), tuple(shares)))
    return [shares for _, shares in sorted(timed)[:NUM_TRIED]]


def _balanced(total: int, ranks: Sequence[int], lines: Sequence[Line]) -> list[float]:
    """Return the real-valued shares with which all groups take equally long; groups that take longer with a single sample get one."""
    free = list(range(len(ranks)))
    while free:
        remaining = total - sum(ranks[g] for g in range(len(ranks)) if g not in free)
        time_s = remaining + sum(ranks[g] * lines[g][0] / lines[g][1] for g in free)
        time_s /= sum(ranks[g] / lines[g][1] for g in free)
        shares = {g: (time_s - lines[g][0]) / lines[g][1] for g in free}
        if min(shares.values()) >= 1.0:
            return [shares.get(g, 1.0) for g in range(len(ranks))]
        free = [g for g in free if shares[g] >= 1.0]
    return [1.0] * len(ranks)


def _share_choices(
    problem: Problem, pins: Pins, ranks: Sequence[int], order: Sequence[int], seconds: Seconds, pinned: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield numbers of micro-batches, each with shares in the order of ranks."""
    batch, sizes = problem.global_batch_size, problem.space.micro_batches
    for count in divisors(batch):
        total = batch // count
        if total < sum(ranks) or not pins.allows("num_micro_batches", count):
            continue
        if pinned:
            in_order = tuple(pinned[place] for place in order)
            choices = [in_order] if sum(n * share for n, share in zip(ranks, in_order, strict=True)) == total else []
        elif total <= max(sizes) * sum(ranks):
            probe = max((size for size in sizes if size * sum(ranks) <= total), default=1)
            choices = nearest(total, ranks, [_line(partial(seconds, place), probe, batch) for place in order])
        else:
            choices = []
        for shares in choices:
            text = "-".join(str(shares[order.index(place)]) for place in range(len(order)))
            if pins.allows(SHARES, text) and all(pins.allows("micro_batch", share) for share in shares):
                yield count, shares


def _line(seconds: Callable[[int], float], size: int, most: int) -> Line:
    """Return the line through the times of ``size`` samples and of twice as many; through zero if these exceed ``most`` or take no longer."""
    one_s = seconds(size)
    if 2 * size <= most:
        slope = (seconds(2 * size) - one_s) / size
        if slope > 0:
            return one_s - slope * size, slope
    return 0.0, one_s / size


def _pinned_shares(pins: Pins) -> tuple[int, ...]:
    """Return the shares that a pin names, in the order of the cluster's groups; empty if no pin does."""
    for pin in pins.pins:
        if isinstance(pin, ChoicePin) and pin.key == SHARES and pin.relation != "!=" and pin.value != EQUAL:
            return tuple(map(int, pin.value.split("-")))
    return ()


def _check(pinned: tuple[int, ...], problem: Problem, cluster: Cluster, mixing: str) -> None:
    """Check that a candidate can have the pinned shares.

    Raises:
        UsageError: says why none can.
    """
    place = f"pin 'data_shares={'-'.join(map(str, pinned))}'"
    ranks = [] if cluster.is_homogeneous else [group.num_devices for group in cluster.groups]
    fault = shares_fault(pinned, ranks, problem.global_batch_size)
    if fault is not None:
        expected, got, fix = fault
        raise UsageError("These shares do not fit", where=place, expected=expected, got=got, fix=fix)
    if mixing:
        raise UsageError(
            f"Samples of the batch depend on each other ({mixing}), so all data ranks must take equal numbers of them",
            where=place,
            fix="Drop the pin",
        )


def _restricted(problem: Problem, pins: Pins) -> tuple[Problem, Pins]:
    """Return the problem and pins whose candidates have the degrees and ZeRO stages of unequal shares, at one or two samples a rank."""
    sizes = ("micro_batch", "num_micro_batches")
    others = [pin for pin in pins.pins if not (isinstance(pin, NumberPin) and pin.key in sizes)]
    space = replace(problem.space, micro_batches=(1, 2))
    alone = replace(problem, global_batch_size=2 * problem.world_size, mixes_samples=False, space=space)
    return alone, Pins(pins=(*others, *Pins.parse(ALONE).pins))


def _degrees(choice: tuple[Mesh, int, int]) -> tuple[int, ...]:
    return (*choice[0].degrees, *choice[1:])
