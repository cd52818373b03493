from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.network.placement import shapes_of
from autopar.errors import AutoparError, UsageError
from autopar.hardware.cluster import Cluster
from autopar.hardware.link import Link, pieces_time_s
from autopar.hardware.read import load_profile
from autopar.measure.job_of_ranks import GroupSet, group_sets
from autopar.measure.link_fit import fit_pieces, links_of, residual
from autopar.plan.mesh import Mesh
from autopar.util.toml import Table
from tests.support.said import refuses

NODES = (0, 0, 1, 1)
SIZES = [1024 * 4**i for i in range(11)]
KINDS = ("all_reduce", "all_gather", "all_to_all", "broadcast")
GIVEN = {"machine": load_profile("cpu"), "library": "gloo", "where": "example", "points_name": "points.json"}


@pytest.fixture(scope="module")
def true() -> Cluster:
    """Two nodes of two ranks, with these links."""
    (group,), link = Cluster.parse("cpu:2x2").groups, partial(Link, provenance="example")
    inside = link(name="inside", bandwidth_bytes_per_s=3e9, latency_s=2e-5)
    outside = link(name="outside", bandwidth_bytes_per_s=1e8, latency_s=5e-4)
    return replace(Cluster.parse("cpu:2x2"), groups=(replace(group, intra_node=inside, nic=outside),))


def test_known_links_are_found_again_and_survive_their_file(true: Cluster, tmp_path: Path) -> None:
    sets, model = group_sets(NODES), CollectiveModel(true)
    points = [
        [s.name, kind, n, max(model.shape_time_s(kind, n, shape) for shape in shapes_of(s.groups, true)), 0.0]
        for s, kind, n in product(sets, KINDS, SIZES)
    ]
    links = links_of(sets, points, nodes=NODES, **GIVEN)
    group = true.groups[0]
    for found, known in ((links.intra_node, group.intra_node), (links.nic, group.nic)):
        assert found.latency_s == pytest.approx(known.latency_s, rel=0.02)
        assert found.bandwidth_bytes_per_s == pytest.approx(known.bandwidth_bytes_per_s, rel=0.02)
    (tmp_path / "links.toml").write_text(tomli_w.dumps(asdict(links)), encoding="utf-8")
    by_option = Cluster.parse(f"cpu:2x2?links={tmp_path}/links.toml")
    text = 'links = "links.toml"\n[[group]]\ndevice = "cpu"\nnum_nodes = 2\ndevices_per_node = 2\n'
    (tmp_path / "cluster.toml").write_text(text, encoding="utf-8")
    by_file = Cluster.load(tmp_path / "cluster.toml")
    assert by_file.library == by_option.library
    assert by_file.library.measured == links.measured
    assert Cluster.from_dict(by_file.to_dict()) == by_file
    for mesh, axis in ((Mesh(dp_shard=2, tp=2), "tp"), (Mesh(dp_shard=2, tp=2), "dp_shard"), (Mesh(tp=4), "tp")):
        for num_bytes in (*SIZES, 3000, 5e8):
            times = [CollectiveModel(c).time_s("all_gather", num_bytes, mesh, (axis,)) for c in (by_file, true)]
            assert times[0] == pytest.approx(times[1], rel=0.02)
    # twice as many nodes: not measured, priced by the fitted links
    wide = replace(true, groups=(replace(true.groups[0], num_nodes=4),))
    clusters, mesh = (Cluster.parse(f"cpu:4x2?links={tmp_path}/links.toml"), wide), Mesh(dp_shard=4, tp=2)
    times = [CollectiveModel(c).time_s("all_gather", 1e8, mesh, ("dp_shard",)) for c in clusters]
    assert times[0] == pytest.approx(times[1], rel=0.05)


def test_measured_times_go_before_the_algorithms(true: Cluster, tmp_path: Path) -> None:
    sets = tuple(s for s in group_sets((0, 0)) if not s.alone)
    points = [[sets[0].name, "all_reduce", n, 1e-3 + n * 1e-8, 0.0] for n in SIZES]
    links = links_of(sets, points, nodes=(0, 0), **GIVEN)
    (tmp_path / "links.toml").write_text(tomli_w.dumps(asdict(links)), encoding="utf-8")
    two = CollectiveModel(Cluster.parse(f"cpu:1x2?links={tmp_path}/links.toml"))
    assert two.time_s("all_reduce", 12345, Mesh(tp=2), ("tp",)) == pytest.approx(1e-3 + 12345e-8)
    four = CollectiveModel(Cluster.parse(f"cpu:1x4?links={tmp_path}/links.toml"))  # other siblings on the node
    shape = four.time_s("all_reduce", 12345, Mesh(dp_shard=2, tp=2), ("tp",))
    assert shape != pytest.approx(1e-3 + 12345e-8, rel=1e-6)
    assert links.nic.provenance.startswith("one node")


def test_no_measurement_and_a_damaged_file_are_errors(tmp_path: Path) -> None:
    refuses(AutoparError, "Fewer than two sizes", links_of, (), [], nodes=(0, 0), **GIVEN)
    (tmp_path / "links.toml").write_text('library = "gloo"\n', encoding="utf-8")
    refuses(UsageError, r"links\.toml: Missing key 'intra_node'", Cluster.parse, f"cpu:1x2?links={tmp_path}/links.toml")


# --- pieces


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e12))
def test_one_line_is_found_again(latency_s: float, bytes_per_s: float) -> None:
    points = [(size, latency_s + size / bytes_per_s) for size in SIZES]
    (piece,) = fit_pieces(points)
    assert piece.latency_s == pytest.approx(latency_s, rel=1e-3, abs=1e-6 * points[0][1])
    assert pieces_time_s((piece,), 2**30) == pytest.approx(points[-1][1], rel=1e-6)
    assert residual((piece,), points) < 1e-6


def test_two_protocols_are_two_pieces_that_meet_where_they_cross() -> None:
    def seconds(size: float) -> float:
        return min(10e-6 + size / 1e9, 110e-6 + size / 10e9)

    points = [(size, seconds(size)) for size in SIZES]
    low, high = fit_pieces(points)
    assert (low.latency_s, 1 / low.s_per_byte) == (pytest.approx(10e-6), pytest.approx(1e9))
    assert (high.latency_s, 1 / high.s_per_byte) == (pytest.approx(110e-6), pytest.approx(10e9))
    assert low.up_to_bytes == pytest.approx(100e-6 / (1e-9 - 1e-10))
    assert pieces_time_s((low, high), 50_000) == pytest.approx(seconds(50_000))


@given(st.lists(st.floats(0.5, 2.0), min_size=len(SIZES), max_size=len(SIZES)), st.floats(1, 1e9), st.floats(1, 1e9))
def test_more_bytes_never_take_less_time_whatever_was_measured(noise: list[float], few: float, more: float) -> None:
    pieces = fit_pieces([(size, (20e-6 + size / 1e9) * n) for size, n in zip(SIZES, noise, strict=True)])
    assert 0 <= pieces_time_s(pieces, few) <= pieces_time_s(pieces, few + more)


@given(st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 8]))
def test_groups_are_disjoint_and_as_large_as_they_say(num_nodes: int, width: int) -> None:
    nodes = [node for node in range(num_nodes) for _ in range(width)]
    found = group_sets(nodes)
    assert len({one.name for one in found}) == len(found)
    for one in found:
        ranks = [rank for group in one.groups for rank in group]
        assert len(ranks) == len(set(ranks)) == len(one.groups) * one.size
        for group in one.groups:
            on = [nodes[rank] for rank in group]
            assert len(set(on)) == one.num_nodes
            assert min(on.count(node) for node in on) == one.ranks_per_node
        assert one.alone == (len(one.groups) == 1 and one.size < len(nodes)) or not one.alone
        assert GroupSet.from_table(Table(one.to_table(), file="points")) == one
