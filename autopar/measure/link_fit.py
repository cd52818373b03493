"""Latency and bandwidth of links from measured collectives: what groups of other shapes are priced with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Literal

import numpy as np
from scipy.optimize import minimize, nnls

from autopar.cost.network.collectives import CollectiveModel, volume_factor
from autopar.cost.network.placement import shapes_of
from autopar.errors import AutoparError
from autopar.hardware.cluster import Cluster, NodeGroup
from autopar.hardware.link import CollectiveLibrary, CollectiveTime, Link, Piece, pieces_time_s
from autopar.hardware.read import Links, MachineProfile, load_library
from autopar.measure.job_of_ranks import GroupSet

ROBUST = 0.3
"""Relative distance (in log space) from which a point counts less: a disturbed sample must not decide."""


LinkPoint = tuple[str, tuple[tuple[int, ...], ...], float, float]
"""Kind of a collective, groups that made it at once, bytes (see ``CollectiveModel.time_s``), seconds."""


def fit_link(
    points: Sequence[LinkPoint],
    *,
    nodes: NodeGroup,
    name: Literal["intra_node", "nic"],
    library: CollectiveLibrary,
) -> tuple[Link, float]:
    """The link whose latency and bandwidth bring the collective library's algorithms closest to the points.

    Args:
        points: all inside nodes, or all across them.
        nodes: of the job that measured, with any device; the fit begins at their link, and that inside nodes is known before ``nic``.
        name: of the link that is fitted.
        library: its algorithms; its measured collectives do not count.

    Returns:
        The link with its new latency and bandwidth (at most twice what any point reached), and the median relative distance of the points from it.
    """
    library = replace(library, measured=())
    start: Link = getattr(nodes, name)

    # where no point is large enough to say, the bandwidth must not run away
    fastest = 2 * max(size * volume_factor(kind, len(groups[0])) / time_s for kind, groups, size, time_s in points)

    def link_at(variables: np.ndarray) -> Link:
        latency_s, bandwidth = math.exp(variables[0]), min(math.exp(variables[1]), fastest)
        return replace(
            start, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth, half_bandwidth_bytes=0.0, step_fraction=1.0
        )

    def logs(variables: np.ndarray) -> np.ndarray:
        link = link_at(variables)
        own = replace(nodes, nic=link) if name == "nic" else replace(nodes, intra_node=link, nic=link)
        cluster = Cluster(name="measured", groups=(own,), library=library)
        model = CollectiveModel(cluster)
        shapes = {groups: shapes_of(groups, cluster) for groups in dict.fromkeys(groups for _, groups, _, _ in points)}
        found = [
            max(model.shape_time_s(kind, size, shape) for shape in shapes[groups]) / time_s
            for kind, groups, size, time_s in points
        ]
        return np.log(found)

    def distance(variables: np.ndarray) -> float:
        return float(np.sum(np.sqrt(1.0 + (logs(variables) / ROBUST) ** 2) - 1.0))

    quickest = min(time_s for *_, time_s in points)
    # where the bandwidth is cut off it has no effect, so the fit begins below
    begin = np.log([quickest / 4, fastest / 2])
    done = minimize(distance, begin, method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-6, "maxfev": 400})
    return link_at(done.x), float(np.median(np.abs(np.expm1(logs(done.x)))))


def links_of(
    sets: Sequence[GroupSet],
    points: Sequence[Sequence[Any]],
    *,
    nodes: Sequence[int],
    machine: MachineProfile,
    library: str,
    where: str,
    points_name: str,
    nics_per_node: int | None = None,
) -> Links:
    """The file of measured links: a fit of every kind on every shape of groups, and the links behind them.

    Args:
        sets: groups that were measured.
        points: ``[groups, kind, bytes, seconds, spread]``, as ``autopar.measure.collective_times.LinkPoints`` has them.
        nodes: the node of each rank of the job.
        machine: where the fits begin; its link stands where a tier was not measured.
        library: name of the collective library that ran.
        where: device, software, date: for the provenance.
        points_name: file of the raw points.
        nics_per_node: cards of a node; as many as the machine has for so many devices when None.

    Raises:
        AutoparError: no collective inside a node and none across nodes has two points.
    """
    by_name = {found.name: found for found in sets}
    per_node = min(list(nodes).count(node) for node in nodes)
    measured = _collectives(by_name, points, per_node, where)
    if not measured:
        raise AutoparError("Fewer than two sizes of each collective were measured", fix="Allow more time (--budget)")
    cards = nics_per_node or max(1, per_node * machine.num_nics // machine.num_devices)
    group = NodeGroup(
        device=machine.device, num_nodes=len(set(nodes)), devices_per_node=per_node, intra_node=machine.intra_node,
        nic=machine.nic, nics_per_node=cards,
    )  # fmt: skip
    tiers: tuple[tuple[str, Literal["intra_node", "nic"]], ...] = (("node", "intra_node"), ("network", "nic"))
    for tier, name in tiers:
        own = [
            (kind, by_name[found].groups, size, time_s)
            for found, kind, size, time_s, _ in points
            if by_name[found].tier == tier
        ]
        if len(own) < 2:
            continue
        fitted, distance = fit_link(own, nodes=group, name=name, library=load_library(library))
        note = f"{where}: fitted to {len(own)} points, median distance {distance:.0%}"
        link = replace(fitted, name=f"measured {tier}", provenance=note)
        group = replace(group, nic=link) if name == "nic" else replace(group, intra_node=link)
    intra_node, nic = group.intra_node, group.nic
    if group.num_nodes == 1:
        nic = replace(intra_node, provenance="one node: as inside it, nothing else was measured")
    return Links(
        library=library, measured=measured, points=points_name, provenance=where, intra_node=intra_node, nic=nic
    )


def _collectives(
    sets: dict[str, GroupSet], points: Sequence[Sequence[Any]], per_node: int, where: str
) -> tuple[CollectiveTime, ...]:
    """Fits of what was measured with all siblings at once; patterns of ranks count alike."""
    found: dict[tuple[str, int, int, int], list[tuple[float, float]]] = {}
    for name, kind, size, time_s, _ in points:
        group = sets[name]
        if not group.alone:
            key = (kind, group.size, group.num_nodes, group.ranks_per_node)
            found.setdefault(key, []).append((float(size), float(time_s)))
    made = []
    for (kind, size, num_nodes, ranks_per_node), own in found.items():
        if len({num_bytes for num_bytes, _ in own}) < 2:
            continue
        pieces = fit_pieces(own)
        low, high = min(own)[0], max(own)[0]
        made.append(
            CollectiveTime(
                kind=kind, size=size, num_nodes=num_nodes, ranks_per_node=ranks_per_node, devices_per_node=per_node,
                pieces=pieces, residual=residual(pieces, own),
                provenance=f"{where}: {len(own)} points from {low:.0f} to {high:.0f} bytes, all groups at once",
            )
        )  # fmt: skip
    return tuple(made)


# --- Fits latency and bandwidth to times of a collective by size, in as few straight pieces as the points need.

MAX_PIECES = 3
LEAST_POINTS = 3
"""Of a piece where there are several."""
GOOD_ENOUGH = 0.03
"""Root of the mean square of relative distances below which no further piece is tried."""

Point = tuple[float, float]
"""Bytes and seconds."""


def fit_pieces(points: Sequence[Point]) -> tuple[Piece, ...]:
    """Pieces ``latency_s + num_bytes * s_per_byte`` by least squares of relative distances, neither part below zero.

    A further piece has to halve the distance that is left; which points belong to which piece is found by trying all
    cuts. Neighbouring pieces meet where their lines cross if that lies between their points, else half way between
    (in log space).

    Args:
        points: bytes and seconds, both above zero, of at least two sizes.

    >>> [piece] = fit_pieces([(1e3, 21e-6), (1e6, 1020e-6), (1e8, 100020e-6)])
    >>> round(1e6 * piece.latency_s, 6), round(1 / piece.s_per_byte)
    (20.0, 1000000000)
    """
    merged = _merged(points)
    best = _cuts(merged, 1)
    for count in range(2, min(MAX_PIECES, len(merged) // LEAST_POINTS) + 1):
        if math.sqrt(best[0] / len(merged)) <= GOOD_ENOUGH:
            break
        more = _cuts(merged, count)
        if more[0] > 0.25 * best[0]:  # squares: half of the distance
            break
        best = more
    lines = [_line(merged[start:stop])[1] for start, stop in best[1]]
    pieces = []
    for i, (latency, slope) in enumerate(lines):
        end = 0.0
        if i + 1 < len(lines):
            stop = best[1][i][1]
            end = _meeting((latency, slope), lines[i + 1], merged[stop - 1][0], merged[stop][0])
        pieces.append(Piece(up_to_bytes=end, latency_s=latency, s_per_byte=slope))
    return tuple(pieces)


def residual(pieces: Sequence[Piece], points: Sequence[Point]) -> float:
    """The largest relative distance of a point from the pieces."""
    return max(abs(pieces_time_s(pieces, size) / time_s - 1.0) for size, time_s in points)


def _merged(points: Sequence[Point]) -> list[Point]:
    """One point for each size: the geometric mean."""
    by_size: dict[float, list[float]] = {}
    for size, time_s in points:
        by_size.setdefault(size, []).append(math.log(time_s))
    return [(size, math.exp(sum(logs) / len(logs))) for size, logs in sorted(by_size.items())]


def _line(points: Sequence[Point]) -> tuple[float, tuple[float, float]]:
    """Sum of squares of relative distances, latency and slope."""
    sizes, times = (np.array(column) for column in zip(*points, strict=True))
    scale = float(sizes.max())
    found, distance = nnls(np.stack([1.0 / times, sizes / scale / times], axis=1), np.ones(len(points)))
    return float(distance) ** 2, (float(found[0]), float(found[1]) / scale)


def _cuts(points: Sequence[Point], count: int) -> tuple[float, list[tuple[int, int]]]:
    """The best way to cut the points into ``count`` pieces: sum of squares, and (start, stop) of each."""
    least = LEAST_POINTS if count > 1 else 1
    best: tuple[float, list[tuple[int, int]]] = (math.inf, [])
    starts = range(least, len(points) - least + 1)
    for cuts in combinations(starts, count - 1):
        spans = list(zip((0, *cuts), (*cuts, len(points)), strict=True))
        if all(stop - start >= least for start, stop in spans):
            cost = sum(_line(points[start:stop])[0] for start, stop in spans)
            best = min(best, (cost, spans))
    return best


def _meeting(one: tuple[float, float], other: tuple[float, float], low: float, high: float) -> float:
    if one[1] != other[1]:
        crossing = (other[0] - one[0]) / (one[1] - other[1])
        if low <= crossing <= high:
            return crossing
    return math.sqrt(low * high)
