"""The cluster of a running job, from what its ranks say of their places."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from autopar.errors import RuntimeMismatchError
from autopar.hardware import places
from autopar.hardware.cluster import Cluster
from autopar.hardware.places import Place, cluster_at
from autopar.hardware.read import load_profile

H100, A100, L40S, EPYC = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L40S", "AMD EPYC 7713"
BYTES = {H100: 84932978278, A100: 84986665369, L40S: 47_000_000_000, EPYC: 2**38}


def job(*nodes: tuple[str, str, int]) -> list[Place]:
    """Ranks in order, by (host, device, how many)."""
    return [
        Place(host=(host, ""), kind="cpu" if device == EPYC else "cuda", device=device, memory_bytes=BYTES[device])
        for host, device, count in nodes
        for _ in range(count)
    ]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A measurement of this machine is that of a shipped profile; how often there was one."""
    calls: list[str] = []

    def machine_profile(**_: object) -> object:
        calls.append("")
        return load_profile("l4-24gb")

    monkeypatch.setattr(places, "machine_profile", machine_profile)
    return calls


def shape(cluster: Cluster) -> list[tuple[str, int, int]]:
    return [(group.device.name, group.num_nodes, group.devices_per_node) for group in cluster.groups]


def test_two_nodes_of_eight_are_two_nodes() -> None:
    cluster = cluster_at(job(("a", H100, 8), ("b", H100, 8)))
    assert shape(cluster) == [("h100-sxm5-80gb", 2, 8)]
    assert cluster.groups == Cluster.parse("h100-sxm5-80gb:2x8").groups
    assert cluster.library == Cluster.parse("h100-sxm5-80gb:2x8").library
    assert cluster.tier_of([0, 7]) == "node"
    assert cluster.tier_of([0, 8]) == "network"


def test_one_node_is_as_it_is_detected() -> None:
    cluster = cluster_at(job(("a", H100, 4)))
    assert (cluster.name, shape(cluster)) == ("local", [("h100-sxm5-80gb", 1, 4)])


def test_nodes_of_other_devices_or_sizes_are_groups_of_their_own() -> None:
    nodes = (("a", A100, 8), ("b", A100, 8), ("c", H100, 8), ("d", H100, 4))
    cluster = cluster_at(job(*nodes))
    assert shape(cluster) == [("a100-sxm4-80gb", 2, 8), ("h100-sxm5-80gb", 1, 8), ("h100-sxm5-80gb", 1, 4)]
    assert [cluster.node_of(rank) for rank in (0, 15, 16, 24, 27)] == [0, 1, 2, 3, 3]


def test_containers_of_one_machine_and_machines_of_one_name_are_told_apart() -> None:
    ranks = job(("a", H100, 1), ("b", H100, 1))
    same_name = [Place(host=("node", boot), kind="cuda", device=H100, memory_bytes=BYTES[H100]) for boot in "xy"]
    for found in (ranks, same_name):
        assert shape(cluster_at(found)) == [("h100-sxm5-80gb", 2, 1)]


def refused(ranks: Sequence[Place]) -> str:
    with pytest.raises(RuntimeMismatchError) as caught:
        cluster_at(ranks)
    return str(caught.value)


def test_ranks_of_a_node_that_are_not_numbered_one_after_the_other_are_refused() -> None:
    text = refused(job(("a", H100, 1), ("b", H100, 1), ("a", H100, 1), ("b", H100, 1)))
    assert "ranks 0, 2 of one node are not numbered" in text
    assert "ranks 0, 2" in text
    assert "host a" in text


def test_different_devices_in_one_node_are_refused(measured: list[str]) -> None:
    text = refused(job(("a", H100, 2), ("a", L40S, 2)))
    assert "devices of this node differ" in text
    assert not measured


def test_an_unknown_device_is_measured_on_the_first_rank_for_all_that_are_like_it(
    measured: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    cluster = cluster_at(job(("a", L40S, 4), ("b", L40S, 4)))
    assert len(measured) == 1
    assert [(g.num_nodes, g.devices_per_node, g.nics_per_node) for g in cluster.groups] == [(2, 4, 1)]
    assert "the network between the 2 nodes of this job was not measured" in caplog.text
    caplog.clear()
    cluster_at(job(("a", L40S, 4)))
    assert not caplog.text


@pytest.mark.parametrize("nodes", [(("a", H100, 8), ("b", L40S, 8)), (("a", L40S, 8), ("b", "other L40S", 8))])
def test_an_unknown_device_on_another_node_is_refused(
    nodes: tuple[tuple[str, str, int], ...], measured: list[str]
) -> None:
    BYTES.setdefault("other L40S", BYTES[L40S])
    text = refused(job(*nodes))
    assert "host b" in text
    assert "autopar profile all" in text


def test_an_unknown_device_of_another_size_is_refused(measured: list[str]) -> None:
    ranks = job(("a", L40S, 1))
    other = Place(host=("b", ""), kind="cuda", device=L40S, memory_bytes=BYTES[L40S] // 2)
    assert "GiB, and rank 0, which is measured, is on NVIDIA L40S with" in refused([*ranks, other])


def test_cpus_are_told_apart_by_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "machine_profile", lambda **_: load_profile("cpu"))
    cluster = cluster_at(job(("a", EPYC, 2), ("b", EPYC, 2)))
    assert shape(cluster) == [("cpu", 2, 2)]
    assert cluster.library.name == "gloo"


def test_this_rank_says_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "boot").write_text("17\n")
    monkeypatch.setattr(places, "_BOOT_ID", tmp_path / "boot")
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    assert places.place_here().host == ("here", "17")
    monkeypatch.setattr(places, "_BOOT_ID", tmp_path / "absent")
    assert places.place_here().host == ("here", "")
