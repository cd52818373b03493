import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.hardware.link import pieces_time_s
from autopar.measure.job_of_ranks import GroupSet, group_sets
from autopar.measure.link_fit import fit_pieces, residual

SIZES = [1024 * 4**i for i in range(11)]


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
        assert GroupSet.from_dict(one.to_dict()) == one
