"""Node groups that differ: the orders in which ranks may count them, and on which of them pipeline ranks then lie.

Pipeline ranks take consecutive ranks, and ranks count the nodes group by group. So each pipeline rank lies on one node
group, or on several where the groups do not divide evenly, and then runs as the slowest of them. Which groups come first
is a choice of the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cluster import Cluster
from autopar.cost.network.placement import places_of
from autopar.errors import UsageError
from autopar.plan import RankGroup
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.pins import Pins


def in_orders(pool: Sequence[Candidate], cluster: Cluster, pins: Pins | None = None) -> list[Candidate]:
    """Each candidate in each order of the node groups that puts its pipeline ranks on other groups; the given one first.

    Raises:
        UsageError: pins allow none of the orders.
    """
    every = cluster.orders
    orders = [order for order in every if pins is None or pins.allows("groups", "-".join(map(str, order)))]
    if not orders:
        raise UsageError(
            "a pin of groups leaves an order of the cluster's node groups",
            value=", ".join(pin.text for pin in pins.pins if pin.text.startswith("groups")) if pins else "",
            place=cluster.name,
            remedy=f"the orders are {', '.join('-'.join(map(str, order)) for order in every)}",
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
        found += [
            candidate if order == candidate.order else replace(candidate, order=order) for order in known[pipeline]
        ]
    return found


def origins(candidate: Candidate, cluster: Cluster) -> tuple[frozenset[int], ...]:
    """For each pipeline rank the node groups that it lies on, by position in the cluster as given."""
    if not candidate.order:
        return places_of(candidate.mesh, cluster)
    order = candidate.order
    return tuple(frozenset(order[i] for i in own) for own in places_of(candidate.mesh, cluster.reordered(order)))


def rank_groups(candidate: Candidate, cluster: Cluster) -> tuple[RankGroup, ...]:
    """Which ranks stand on which devices; nothing where all nodes are equal."""
    if cluster.is_homogeneous:
        return ()
    found, start = [], 0
    for group in cluster.reordered(candidate.order).groups if candidate.order else cluster.groups:
        found.append(RankGroup(start=start, stop=start + group.num_devices, device=group.device.name))
        start += group.num_devices
    return tuple(found)
