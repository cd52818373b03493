import re
import tomllib
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import networkx
import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.network.placement import Fabric, shapes_of
from autopar.errors import UsageError
from autopar.hardware.cluster import NETWORK, Cluster, Tier
from autopar.hardware.device import CurvePoint
from autopar.hardware.link import Link
from autopar.hardware.read import known_devices, load_library, load_profile
from autopar.plan.mesh import Mesh
from autopar.util.files import data_directory
from tests.support.said import refuses

TWO_RACKS = """
name = "two-racks"

[[group]]
device = "a100-sxm4-80gb"
num_nodes = 2
devices_per_node = 4
nics_per_node = 2

[[group]]
device = "a100-sxm4-40gb"
num_nodes = 2
devices_per_node = 8
memory_bytes = 2e10
[group.nic]
name = "slow"
bandwidth_bytes_per_s = 1e9
latency_s = 3e-6
provenance = "example"

[[tier]]
name = "rack"
num_nodes = 2
[tier.uplink]
name = "uplink"
bandwidth_bytes_per_s = 5e8
latency_s = 1e-6
provenance = "example"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", known_devices())
def test_every_shipped_profile_gives_a_cluster_that_survives_a_round_trip(name: str) -> None:
    cluster = Cluster.parse(f"{name}:2x4")
    assert cluster.world_size == 8 and cluster.is_homogeneous
    assert cluster.devices[0].reserved_bytes < cluster.devices[0].memory_bytes
    written = tomllib.loads(tomli_w.dumps(cluster.to_dict()))
    assert Cluster.from_dict(written) == cluster


@pytest.mark.parametrize("path", sorted(data_directory("profiles").rglob("*.toml")), ids=lambda path: path.stem)
def test_every_number_of_a_profile_stands_beside_its_provenance(path: Path) -> None:
    def check(table: dict[str, object], place: str, covered: bool) -> None:
        covered = covered or bool(table.get("provenance"))
        for key, value in table.items():
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, dict):
                    check(item, f"{place}.{key}", covered)
                elif isinstance(item, int | float) and not isinstance(item, bool):
                    assert covered, f"{path.name}: {place}.{key} = {item} has no provenance"

    check(tomllib.loads(path.read_text(encoding="utf-8")), "", covered=False)


def test_the_gpu_numbers_are_those_of_their_sources() -> None:
    h100 = Cluster.parse("h100-sxm5-80gb:1x8").groups[0]
    assert h100.device.rate("bfloat16").ceiling_flops_per_s == 794.5e12
    assert h100.device.rate("bfloat16").datasheet_flops_per_s == 989e12
    assert 78 * 2**30 < h100.device.memory_bytes < 80 * 2**30
    assert 46e9 <= h100.nic.bandwidth_bytes_per_s <= 48e9
    assert 365e9 <= h100.intra_node.bandwidth_bytes_per_s <= 370e9
    assert Cluster.parse("a100-sxm4-40gb:1x8").devices[0].memory_bytes < 40 * 2**30
    simple = next(a for a in load_library("nccl").algorithms if (a.name, a.protocol) == ("ring", "Simple"))
    assert (simple.base_s, simple.intra_step_s, simple.inter_step_s) == (8.4e-6, 3.4e-6, 14e-6)


def test_cpu_ranks_divide_the_memory_of_their_node_and_share_its_cores() -> None:
    profile = load_profile("cpu")
    four = Cluster.parse("cpu:1x4").devices[0]
    assert four.memory_bytes == profile.device.memory_bytes // 4
    shared = Cluster.parse("cpu:1x4?cores=2").devices[0]
    assert shared.rate("float32").ceiling_flops_per_s == four.rate("float32").ceiling_flops_per_s / 2
    assert shared.memory_bandwidth_bytes_per_s == four.memory_bandwidth_bytes_per_s / 2
    assert "0.5" in shared.rate("float32").provenance
    links = [Cluster.parse(f"cpu:1x4{cores}").groups[0].intra_node for cores in ("", "?cores=2")]
    assert links[1].bandwidth_bytes_per_s == links[0].bandwidth_bytes_per_s / 2  # messages are work of the cores too
    assert links[1].latency_s == links[0].latency_s * 2
    assert Cluster.parse("cpu:1x4?cores=8").devices[0] == four


def test_memory_and_network_cards_can_be_stated_on_the_command_line() -> None:
    sizes = {"1e9": 10**9, "80GB": 80 * 10**9, "80gib": 80 * 2**30, "512MiB": 2**29, "7b": 7}
    for text, num_bytes in sizes.items():
        device = Cluster.parse(f"cpu:1x4?memory={text}").devices[0]
        assert device.memory_bytes == num_bytes and device.provenance["memory"] == "stated by the user"
    group = Cluster.parse("h100-sxm5-80gb:2x8?nics=4&nic_bandwidth=25GB").groups[0]
    assert (group.nics_per_node, group.nic.bandwidth_bytes_per_s) == (4, 25e9)
    known, stated = (Cluster.parse(f"h100-sxm5-80gb:1x8{more}").devices[0].host for more in ("", "?host_memory=64GiB"))
    assert (known.memory_bytes, stated.memory_bytes) == (250_000_000_000, 64 * 2**30)
    assert stated.to_host_bytes_per_s == known.to_host_bytes_per_s == 63e9
    assert stated.provenance.endswith("memory stated by the user")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cpu:1x4?host_memory=1GB", "Add [device.host] to the profile"), ("local:1x2", "local?ranks=2"),
        ("cpu:1x4?memroy=1e9", "Did you mean 'memory'"), ("cpu:1x4?memory=much", "number of bytes"),
        ("cpu:1x4?memory=1.2.3", "number of bytes"), ("cpu:1x4?memory=1e999", "number of bytes"),
        ("cpu:1x4?memory=.", "number of bytes"), ("cpu:1x4?cores=0", "whole number from 1"),
    ],
)  # fmt: skip
def test_a_bad_description_is_refused_with_a_remedy(text: str, says: str) -> None:
    caught = refuses(UsageError, re.escape(says), Cluster.parse, text)
    assert caught.exit_code == 2


def test_a_file_can_mix_devices_links_and_tiers(tmp_path: Path) -> None:
    path = write(tmp_path, TWO_RACKS)
    cluster = Cluster.parse(str(path))
    assert Cluster.load(path) == Cluster.load(str(path)) and Cluster.load(path).groups == cluster.groups
    assert (cluster.world_size, cluster.num_nodes, cluster.devices_per_node) == (24, 4, 4)
    assert not cluster.is_homogeneous
    assert [device.name for device in cluster.devices] == ["a100-sxm4-80gb", "a100-sxm4-40gb"]
    assert cluster.devices[1].memory_bytes == 2 * 10**10
    assert Fabric(cluster).nodes[[3, 4, 8, 23]].tolist() == [0, 1, 2, 3]
    assert Cluster.from_dict(cluster.to_dict()) == cluster


@pytest.mark.parametrize(
    ("old", "new", "line", "problem"),
    [
        ("num_nodes = 2\ndevices_per_node = 4", "num_nodes = -2\ndevices_per_node = 4", 6,
         "Wrong value of 'group[0].num_nodes'"),
        ('device = "a100-sxm4-40gb"', 'device = "a100-sxm4-40"', 11, "Unknown device profile 'a100-sxm4-40'"),
        ("bandwidth_bytes_per_s = 1e9", 'bandwidth_bytes_per_s = "fast"', 17,
         "Wrong value of 'group[1].nic.bandwidth_bytes_per_s'"),
        ("bandwidth_bytes_per_s = 1e9", "bandwidth_bytes_per_s = 1e-300", 17,
         "Wrong value of 'group[1].nic.bandwidth_bytes_per_s'"),
        ("latency_s = 1e-6", "latency_s = 1e300", 27, "Wrong value of 'tier[0].uplink.latency_s'"),
        ("latency_s = 1e-6", "latency_s = inf", 27, "Wrong value of 'tier[0].uplink.latency_s'"),
        ('name = "uplink"', 'name = "uplink"\nspeed = 3', 26, "Unknown key 'speed'"),
    ],
)  # fmt: skip
def test_a_malformed_file_names_file_line_and_key(tmp_path: Path, old: str, new: str, line: int, problem: str) -> None:
    path = write(tmp_path, TWO_RACKS.replace(old, new, 1))
    caught = refuses(UsageError, "", Cluster.parse, str(path))
    assert (caught.where, caught.problem) == (f"{path}, line {line}", problem)


@pytest.mark.parametrize("text", ["name = " + 100_000 * "[", "name = 1" + 5000 * "0"], ids=["nested", "digits"])
def test_what_the_reader_of_toml_cannot_hold_is_refused(tmp_path: Path, text: str) -> None:
    refuses(UsageError, r"^Cannot read .*Check the path and the file", Cluster.load, write(tmp_path, text))


def test_what_is_no_description_or_degree_is_refused() -> None:
    for wrong in (None, 3, b"cpu:1x2", ["cpu:1x2"]):
        refuses(UsageError, "A cluster is a text, and not", Cluster.parse, wrong)
    for wrong in (0, -1, True, 2.0, "2", None):
        refuses(UsageError, f"The degree of tp is {wrong!r}. Give a whole number, at least 1", Mesh, tp=wrong)


def test_a_group_without_nodes_a_library_or_a_rank_are_refused(tmp_path: Path) -> None:
    refuses(UsageError, "at least one", Cluster.load, write(tmp_path, 'name = "empty"'))
    mixed = 'name = "mixed"\n' + "".join(
        f'[[group]]\ndevice = "{name}"\nnum_nodes = 1\ndevices_per_node = 1\n' for name in ("cpu", "h100-sxm5-80gb")
    )
    refuses(UsageError, "Missing collective library of the cluster", Cluster.load, write(tmp_path, mixed))
    path = write(tmp_path, mixed.replace("\n", '\nlibrary = "mpi"\n', 1))
    refuses(UsageError, r"line 2: Unknown collective library 'mpi'.*nccl", Cluster.load, path)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_larger_matmul_is_never_less_efficient_on_a_rising_curve(one: int, other: int) -> None:
    points = ((1, 0.04), (16, 0.5), (64, 0.8), (256, 1.0))
    curve = tuple(CurvePoint(smallest_dim=size, efficiency=value) for size, value in points)
    rate = replace(load_profile("cpu").device.rate("float32"), curve=curve)
    small, large = sorted((one, other))
    assert 0.04 <= rate.efficiency(small) <= rate.efficiency(large) <= 1.0
    assert all(rate.efficiency(size) == pytest.approx(value) for size, value in points)


# --- the fabric

BASE = Cluster.parse("a100-sxm4-80gb:12x4")


def uplink(rate: float, latency_s: float, **half: float) -> Link:
    return Link(name="up", bandwidth_bytes_per_s=rate, latency_s=latency_s, provenance="test", **half)


RACKS_AND_PODS = replace(
    BASE,
    groups=(
        replace(BASE.groups[0], num_nodes=4, nics_per_node=1),
        replace(BASE.groups[0], num_nodes=8, nics_per_node=2, nic=uplink(9e9, 5e-6, half_bandwidth_bytes=7.0)),
    ),
    tiers=(
        Tier(name="rack", num_nodes=2, uplink=uplink(11e9, 1e-6)),
        Tier(name="pod", num_nodes=6, uplink=uplink(8e9, 2e-6)),
    ),
)


def test_the_topology_has_every_device_card_and_switch() -> None:
    graph = RACKS_AND_PODS.topology()
    kinds = [kind for _, kind in graph.nodes(data="kind")]
    assert (kinds.count("device"), kinds.count("nic")) == (48, 4 * 1 + 8 * 2)
    assert networkx.is_connected(graph)
    inside = ["device:16", "nic:4.0", "rack:2", "nic:5.1", "device:23"]
    assert networkx.shortest_path(graph, "device:16", "device:23") == inside
    assert graph.edges["rack:0", "pod:0"]["bandwidth_bytes_per_s"] == 11e9
    path = networkx.shortest_path(graph, "device:0", "device:47")
    latency_s = (BASE.groups[0].nic.latency_s + 5e-6) / 2 + 1e-6 + 2e-6
    assert sum(graph.edges[edge]["latency_s"] for edge in pairwise(path)) == pytest.approx(latency_s)
    assert min(graph.edges[edge]["bandwidth_bytes_per_s"] for edge in pairwise(path)) == 8e9
    assert graph.nodes["device:47"] == {"kind": "device", "device": BASE.groups[0].device.name}


def links_up(domain: str) -> tuple[Link, int]:
    """The link from a node or a switch to the next tier, and how many it has."""
    tier, _, number = domain.partition(":")
    if tier == "node":
        group = RACKS_AND_PODS.groups[int(number) >= 4]
        return group.nic, group.nics_per_node
    return next(t.uplink for t in RACKS_AND_PODS.tiers if t.name == tier), 1


def by_hand(group: list[int], groups: list[list[int]]) -> tuple[float, float]:
    """Egress and delay of one group beside others, by walking up the tree from each of its nodes."""
    nodes = [[rank // 4 for rank in own] for own in groups]
    paths = [[[f"node:{n}", f"rack:{n // 2}", f"pod:{n // 6}", NETWORK] for n in own] for own in nodes]
    mine = paths[groups.index(group)]
    egress, latency_s = float("inf"), 0.0
    for depth in range(3):
        if len({path[depth] for path in mine}) == 1:
            continue
        latencies = []
        for domain, members in Counter(path[depth] for path in mine).items():
            others = [own for own in paths if any(p[depth] == domain for p in own)]
            leaving = sum(len({p[depth] for p in own}) > 1 for own in others)
            link, num_links = links_up(domain)
            share = min(members, num_links / leaving)
            egress = min(egress, link.rate_bytes_per_s * share)
            latencies.append(link.latency_s)
        latency_s += max(latencies)
    return egress, latency_s


@settings(max_examples=60, deadline=None)
@given(order=st.permutations(range(48)), size=st.sampled_from([2, 3, 4, 6, 8, 16]))
def test_the_bottleneck_of_a_group_is_that_of_the_links_on_its_way(order: list[int], size: int) -> None:
    groups = [order[i : i + size] for i in range(0, 48, size)]
    wanted = [pytest.approx(by_hand(group, groups)) for group in groups]
    found = [(shape.egress_bytes_per_s, shape.inter_latency_s) for shape in shapes_of(groups, RACKS_AND_PODS)]
    assert all(any(one == other for other in wanted) for one in found)
    assert all(any(one == other for one in found) for other in wanted)


@pytest.mark.parametrize(
    ("name", "num_nodes", "says"),
    [("rack", 4, "got rack, rack"), ("network", 4, "got rack, network"), ("pod", 3, "pod of 3 nodes over rack of 2")],
)
def test_tiers_that_are_no_tree_are_refused(name: str, num_nodes: int, says: str, tmp_path: Path) -> None:
    data = RACKS_AND_PODS.to_dict()
    data["tier"][1] |= {"name": name, "num_nodes": num_nodes}
    refuses(UsageError, says, Cluster.from_dict, data)
