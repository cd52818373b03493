"""Fits of measured collectives: curves by size for measured shapes of groups, and a link (latency, bandwidth) for all other shapes."""

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
"""Relative distance of a point (in log space) from which it weighs less than its square: a disturbed sample must not decide the fit."""


LinkPoint = tuple[str, tuple[tuple[int, ...], ...], float, float]
"""The kind of a collective, the groups that ran it at once, its bytes (as in ``CollectiveModel.time_s``), and its seconds."""


def fit_link(
    points: Sequence[LinkPoint],
    *,
    nodes: NodeGroup,
    name: Literal["intra_node", "nic"],
    library: CollectiveLibrary,
) -> tuple[Link, float]:
    """Return the link whose latency and bandwidth bring the library's algorithms closest to the points.

    Args:
        points: measurements that are all inside nodes, or all across them.
        nodes: the nodes of the measured job, with any device. The fit starts from their link; for ``nic`` their ``intra_node`` must be
            fitted.
        name: the link that is fitted.
        library: the collective library, of which the algorithms count and measured collectives do not.

    Returns:
        The link with its new latency and bandwidth (at most twice what any point reached), and the median relative distance of the points.
    """
    library = replace(library, measured=())
    start: Link = getattr(nodes, name)

    # without points that are large enough to show the bandwidth, the fit must not raise it without limit
    fastest = 2 * max(size * volume_factor(kind, len(groups[0])) / time_s for kind, groups, size, time_s in points)

    def link_at(variables: np.ndarray) -> Link:
        latency_s, bandwidth = math.exp(variables[0]), min(math.exp(variables[1]), fastest)
        return replace(
            start, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth, half_bandwidth_bytes=0.0, step_fraction=1.0
        )

    def logs(variables: np.ndarray) -> np.ndarray:
        link = link_at(variables)
        group = replace(nodes, nic=link) if name == "nic" else replace(nodes, intra_node=link, nic=link)
        cluster = Cluster(name="measured", groups=(group,), library=library)
        model = CollectiveModel(cluster)
        shapes = {groups: shapes_of(groups, cluster) for groups in dict.fromkeys(groups for _, groups, _, _ in points)}
        ratios = [
            max(model.shape_time_s(kind, size, shape) for shape in shapes[groups]) / time_s
            for kind, groups, size, time_s in points
        ]
        return np.log(ratios)

    def distance(variables: np.ndarray) -> float:
        return float(np.sum(np.sqrt(1.0 + (logs(variables) / ROBUST) ** 2) - 1.0))

    quickest = min(time_s for *_, time_s in points)
    # above its limit the bandwidth has no effect, so the fit starts below it
    initial = np.log([quickest / 4, fastest / 2])
    fit = minimize(distance, initial, method="Nelder-Mead", options={"xatol": 1e-4, "fatol": 1e-6, "maxfev": 400})
    return link_at(fit.x), float(np.median(np.abs(np.expm1(logs(fit.x)))))


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
    """Return the links of a measured job: a curve for every kind on every shape of groups, and a fitted link for each tier.

    Args:
        sets: the groups that were measured.
        points: ``[groups, kind, bytes, seconds, spread]``, as in ``autopar.measure.collective_times.LinkPoints``.
        nodes: the node of each rank of the job.
        machine: where the fits start; its link is kept for a tier that was not measured.
        library: name of the collective library that ran.
        where: device, software and date, for the provenance.
        points_name: name of the file of points.
        nics_per_node: network cards of a node; None scales the machine's number to the devices of a node.

    Raises:
        AutoparError: no collective was measured at two sizes.
    """
    by_name = {group_set.name: group_set for group_set in sets}
    per_node = min(list(nodes).count(node) for node in nodes)
    measured = _collectives(by_name, points, per_node, where)
    if not measured:
        raise AutoparError("Fewer than two sizes of each collective were measured", fix="Allow more time (--budget)")
    cards = nics_per_node or max(1, per_node * machine.node.num_nics // machine.node.num_devices)
    group = NodeGroup(
        device=machine.device, num_nodes=len(set(nodes)), devices_per_node=per_node, intra_node=machine.intra_node,
        nic=machine.nic, nics_per_node=cards,
    )  # fmt: skip
    tiers: tuple[tuple[str, Literal["intra_node", "nic"]], ...] = (("node", "intra_node"), ("network", "nic"))
    for tier, name in tiers:
        tier_points = [
            (kind, by_name[set_name].groups, size, time_s)
            for set_name, kind, size, time_s, _ in points
            if by_name[set_name].tier == tier
        ]
        if len(tier_points) < 2:
            continue
        fitted, distance = fit_link(tier_points, nodes=group, name=name, library=load_library(library))
        note = f"{where}: fitted to {len(tier_points)} points, median distance {distance:.0%}"
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
    """Return curves of the collectives that all groups ran at once; contiguous and strided ranks share a curve."""
    by_shape: dict[tuple[str, int, int, int], list[tuple[float, float]]] = {}
    for name, kind, size, time_s, _ in points:
        group = sets[name]
        if not group.alone:
            key = (kind, group.size, group.num_nodes, group.ranks_per_node)
            by_shape.setdefault(key, []).append((float(size), float(time_s)))
    times = []
    for (kind, size, num_nodes, ranks_per_node), curve_points in by_shape.items():
        if len({num_bytes for num_bytes, _ in curve_points}) < 2:
            continue
        pieces = fit_pieces(curve_points)
        low, high = min(curve_points)[0], max(curve_points)[0]
        times.append(
            CollectiveTime(
                kind=kind, size=size, num_nodes=num_nodes, ranks_per_node=ranks_per_node, devices_per_node=per_node,
                pieces=pieces, residual=residual(pieces, curve_points),
                provenance=f"{where}: {len(curve_points)} points from {low:.0f} to {high:.0f} bytes, all groups at once",
            )
        )  # fmt: skip
    return tuple(times)


# --- curves: time by size in as few straight pieces as the points need

MAX_PIECES = 3
LEAST_POINTS = 3
"""Fewest points of a piece, if there are several pieces."""
GOOD_ENOUGH = 0.03
"""Root mean square of relative distances below which no further piece is tried."""

Point = tuple[float, float]
"""Bytes and seconds."""


def fit_pieces(points: Sequence[Point]) -> tuple[Piece, ...]:
    """Return pieces ``latency_s + num_bytes * s_per_byte``, by least squares of relative distances; both coefficients are nonnegative.

    A further piece must halve the remaining distance. All cuts of the points into pieces are tried. Neighbouring pieces meet where their
    lines cross, if that is between their points, and otherwise half way between these (in log space).

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
        finer = _cuts(merged, count)
        if finer[0] > 0.25 * best[0]:  # a quarter of the squares is half of the distance
            break
        best = finer
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
    """Return the largest relative distance of a point from the pieces."""
    return max(abs(pieces_time_s(pieces, size) / time_s - 1.0) for size, time_s in points)


def _merged(points: Sequence[Point]) -> list[Point]:
    """Return one point for each size, with the geometric mean of its times."""
    by_size: dict[float, list[float]] = {}
    for size, time_s in points:
        by_size.setdefault(size, []).append(math.log(time_s))
    return [(size, math.exp(sum(logs) / len(logs))) for size, logs in sorted(by_size.items())]


def _line(points: Sequence[Point]) -> tuple[float, tuple[float, float]]:
    """Return the sum of squares of relative distances from the best line, and its latency and slope."""
    sizes, times = (np.array(column) for column in zip(*points, strict=True))
    scale = float(sizes.max())
    coefficients, distance = nnls(np.stack([1.0 / times, sizes / scale / times], axis=1), np.ones(len(points)))
    return float(distance) ** 2, (float(coefficients[0]), float(coefficients[1]) / scale)


def _cuts(points: Sequence[Point], count: int) -> tuple[float, list[tuple[int, int]]]:
    """Return the best cut of the points into ``count`` pieces: the sum of squares, and (start, stop) of each piece."""
    least = LEAST_POINTS if count > 1 else 1
    best: tuple[float, list[tuple[int, int]]] = (math.inf, [])
    starts = range(least, len(points) - least + 1)
    for cuts in combinations(starts, count - 1):
        spans = list(zip((0, *cuts), (*cuts, len(points)), strict=True))
        if all(stop - start >= least for start, stop in spans):
            cost = sum(_line(points[start:stop])[0] for start, stop in spans)
            best = min(best, (cost, spans))
    return best


def _meeting(left: tuple[float, float], right: tuple[float, float], low: float, high: float) -> float:
    """Return the bytes at which one piece ends and the next begins."""
    if left[1] != right[1]:
        crossing = (right[0] - left[0]) / (left[1] - right[1])
        if low <= crossing <= high:
            return crossing
    return math.sqrt(low * high)
