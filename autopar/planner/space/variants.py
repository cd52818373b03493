"""What multiplies the candidates: orders of node groups that differ, and what of a plan may live on the host.

Pipeline ranks take consecutive ranks, and ranks count the nodes group by group. So each pipeline rank lies on one node
group, or on several where the groups do not divide evenly, and then runs as the slowest of them. Which groups come first
is a choice of the search.

Where profiles have the link to the host, further candidates have their optimizer there. At equal choices such a plan is never quicker: its
first bound is the work of all ranks and the step on the host with its copies, from what is known of its twin on the device, so
that it is looked at more closely only where the memory that it frees may pay for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost.network.placement import places_of
from autopar.cost.step.memory import OPTIMIZERS, optimizer_cost
from autopar.errors import UsageError
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Offload, RankGroup
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.pin_syntax import ActivationPin, ChoicePin
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Hosted


def in_orders(pool: Sequence[Candidate], cluster: Cluster, pins: Pins | None = None) -> list[Candidate]:
    """Each candidate in each order of the node groups that puts its pipeline ranks on other groups; the given one first.

    Raises:
        UsageError: pins allow none of the orders.
    """
    every = cluster.orders
    orders = [order for order in every if pins is None or pins.allows("groups", "-".join(map(str, order)))]
    if not orders:
        raise UsageError(
            "The cluster has no order of node groups that holds for "
            + (", ".join(pin.text for pin in pins.pins if pin.text.startswith("groups")) if pins else "the pins"),
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


KEY = "offload"
OPTIMIZER: tuple[Offload, ...] = ("optimizer",)


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
    stays, goes = pins.allows(KEY, "none"), pins.allows(KEY, "optimizer")
    texts = [pin.text for pin in pins.pins if isinstance(pin, ChoicePin) and pin.key == KEY]
    if not stays and not goes:
        raise UsageError(f"The pins {', '.join(texts)} leave nothing to choose", fix="Drop one of them")
    moved = [pin.text for pin in pins.pins if isinstance(pin, ActivationPin)]
    if moved and (none := [text for text in texts if text.replace("==", "=") == f"{KEY}=none"]):
        raise UsageError(f"The pins {', '.join((*moved, *none))} contradict each other", fix="Drop one of them")
    if moved and (against := _without_link(cluster)):
        raise UsageError(against[0], where=f"pin '{moved[0]}'", fix=against[1])
    reason = _reason_against(cluster, optimizer)
    if not stays and reason:
        raise UsageError(reason[0], where=f"pin '{texts[0]}'", fix=reason[1])
    found = list(pool) if stays else []
    if goes and not reason and (texts or "optimizer" in tried):
        found += [replace(candidate, offload=OPTIMIZER) for candidate in pool]
    if "activations" in tried and pins.allows(KEY, "activations") and not moved and not _without_link(cluster):
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
