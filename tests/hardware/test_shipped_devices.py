from dataclasses import replace
from pathlib import Path

import pytest

from autopar.errors import RuntimeMismatchError
from autopar.hardware import places
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import peaks, shipped_devices, shipped_profile_name
from autopar.hardware.places import Place, cluster_at
from autopar.hardware.read import known_devices, load_profile
from tests.support.cli_runner import Run
from tests.support.said import refuses

GIB = 2**30

SHIPPED = [
    ("NVIDIA H100 80GB HBM3", 79.11, "h100-sxm5-80gb"), ("NVIDIA H100", 95.04, "h100-hbm2e-96gb"),
    ("NVIDIA H200", 139.81, "h200-sxm-141gb"), ("NVIDIA B200", 178.35, "b200-sxm-180gb"),
    ("NVIDIA GB200", 184.0, "gb200"), ("NVIDIA A100-SXM4-80GB", 79.15, "a100-sxm4-80gb"),
    ("A100-SXM-80GB", 79.35, "a100-sxm4-80gb"), ("NVIDIA A100-SXM4-40GB", 39.38, "a100-sxm4-40gb"),
    ("A100-SXM4-40GB", 39.59, "a100-sxm4-40gb"), ("NVIDIA A10G", 22.06, "a10g-24gb"), ("NVIDIA L4", 22.03, "l4-24gb"),
    ("NVIDIA L40S", 44.42, "l40s-48gb"), ("NVIDIA L40S", 44.53, "l40s-48gb"),
    ("NVIDIA GeForce RTX 4090", 23.64, "rtx4090-24gb"), ("NVIDIA RTX A6000", 47.53, "a6000-48gb"),
    ("Tesla V100-SXM2-16GB", 15.78, "v100-sxm2-16gb"), ("NVIDIA Tesla V100-SXM2-16GB", 15.78, "v100-sxm2-16gb"),
    ("Tesla V100-SXM2-32GB", 31.74, "v100-sxm2-32gb"), ("Tesla V100-SXM2-32GB-LS", 31.74, "v100-sxm2-32gb"),
    ("AMD Instinct MI300X", 191.69, "mi300x-192gb"), ("AMD Instinct MI300X VF", 191.5, "mi300x-192gb"),
]  # fmt: skip

OTHERS = [
    ("NVIDIA H100 PCIe", 79.1),
    ("NVIDIA H100 NVL", 93.1),
    ("NVIDIA H100", 79.1),  # nothing says that it is SXM
    ("NVIDIA H100 SXM5 96GB", 95.0),
    ("NVIDIA H200 NVL", 139.8),
    ("NVIDIA H800", 79.1),
    ("NVIDIA GH200 480GB", 94.5),
    ("NVIDIA A100 80GB PCIe", 79.2),
    ("NVIDIA A100-SXM-64GB", 63.4),
    ("NVIDIA A10", 22.1),
    ("NVIDIA A40", 44.4),
    ("NVIDIA L40", 44.4),
    ("NVIDIA GeForce RTX 4090 D", 23.5),
    ("NVIDIA RTX 6000 Ada Generation", 47.4),
    ("Tesla V100-PCIE-16GB", 15.8),
    ("Tesla V100-SXM3-32GB", 31.7),
    ("AMD Instinct MI325X", 255.0),
]


@pytest.mark.parametrize(("reported", "gib"), OTHERS)
def test_a_device_without_a_profile_is_not_taken_for_another(reported: str, gib: float) -> None:
    assert shipped_profile_name(reported, round(gib * GIB)) is None
    assert shipped_profile_name(reported) is None


@pytest.mark.parametrize(("reported", "gib", "name"), SHIPPED)
def test_a_shipped_profile_is_of_the_whole_device_by_its_reported_name(reported: str, gib: float, name: str) -> None:
    assert shipped_profile_name(reported, round(gib * GIB)) == name
    assert shipped_profile_name(f"{reported} MIG 1g.10gb", round(gib * GIB)) is None
    assert shipped_profile_name(reported, round(gib * GIB / 2)) is None
    assert shipped_profile_name(reported, round(gib * GIB * 1.2)) is None


def test_every_profile_is_listed_with_its_memory_and_a_peak_and_every_gpu_found_by_some_name() -> None:
    found = shipped_devices()
    assert [device.name for device in found] == list(known_devices())
    assert all(device.memory_bytes > 2**30 and peaks(device) for device in found)
    of_gpus = {name for name in known_devices() if load_profile(name).device.kind == "cuda"}
    assert {name for _, _, name in SHIPPED} == of_gpus


def test_the_table_in_the_shell(run: Run) -> None:
    text = run("devices").out
    assert [line.split()[0] for line in text.splitlines()[1:]] == list(known_devices())
    row = next(line for line in text.splitlines() if line.startswith("a100-sxm4-80gb"))
    assert row.split()[1:] == ["79.1", "GiB", "19.5", "156", "312", "312", "-"]
    found = run("devices", "--json").json
    assert found["h100-sxm5-80gb"]["peak_flops_per_s"]["bf16"] == 989e12


# --- the cluster of a running job

H100, A100, A40, EPYC = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA A40", "AMD EPYC 7713"
BYTES = {H100: 84932978278, A100: 84986665369, A40: 47_000_000_000, "other A40": 47_000_000_000, EPYC: 2**38}


def job(*nodes: tuple[str, str, int]) -> list[Place]:
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


def test_two_nodes_of_eight_are_two_nodes() -> None:
    cluster = cluster_at(job(("a", H100, 8), ("b", H100, 8)))
    assert cluster.groups == Cluster.parse("h100-sxm5-80gb:2x8").groups
    assert cluster.library == Cluster.parse("h100-sxm5-80gb:2x8").library
    assert (cluster.num_nodes, cluster.devices_per_node) == (2, 8)
    assert cluster_at(job(("a", H100, 4))).name == "local"


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        (job(("a", H100, 4)), [("h100-sxm5-80gb", 1, 4)]),
        (job(("a", A100, 8), ("b", A100, 8), ("c", H100, 8), ("d", H100, 4)),
         [("a100-sxm4-80gb", 2, 8), ("h100-sxm5-80gb", 1, 8), ("h100-sxm5-80gb", 1, 4)]),
        (job(("a", H100, 1), ("b", H100, 1)), [("h100-sxm5-80gb", 2, 1)]),
        ([replace(*job(("", H100, 1)), host=("node", boot)) for boot in "xy"], [("h100-sxm5-80gb", 2, 1)]),
        (job(("a", EPYC, 2), ("b", EPYC, 2)), [("cpu", 2, 2)]),
    ],
    ids=["one node", "other devices and sizes", "containers of a machine", "machines of one name", "CPUs"],
)  # fmt: skip
def test_nodes_of_equal_devices_and_sizes_are_one_group(
    monkeypatch: pytest.MonkeyPatch, ranks: list[Place], wanted: list[tuple[str, int, int]]
) -> None:
    monkeypatch.setattr(places, "machine_profile", lambda **_: load_profile("cpu"))
    cluster = cluster_at(ranks)
    assert [(group.device.name, group.num_nodes, group.devices_per_node) for group in cluster.groups] == wanted
    assert cluster.library.name == ("gloo" if wanted[0][0] == "cpu" else "nccl")


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        (job(*(("a", H100, 1), ("b", H100, 1)) * 2), "host a: The ranks 0, 2 of one node are not numbered"),
        (job(("a", H100, 2), ("a", A40, 2)), "host a: The devices of this node differ"),
        (job(("a", H100, 8), ("b", A40, 8)), "host b.*autopar profile all"),
        (job(("a", A40, 8), ("b", "other A40", 8)), "host b.*autopar profile all"),
        ([*job(("a", A40, 1)), replace(*job(("b", A40, 1)), memory_bytes=BYTES[A40] // 2)],
         "GiB, and rank 0, which is measured, is on NVIDIA A40 with"),
    ],
    ids=["not one after the other", "two devices", "unknown device", "another unknown device", "another size"],
)  # fmt: skip
def test_what_is_no_cluster_is_refused(measured: list[str], ranks: list[Place], said: str) -> None:
    refuses(RuntimeMismatchError, said, cluster_at, ranks)
    assert not measured or ranks[0].device == A40, "the first rank's device alone"


def test_an_unknown_device_is_measured_on_one_rank(measured: list[str], caplog: pytest.LogCaptureFixture) -> None:
    cluster = cluster_at(job(("a", A40, 4), ("b", A40, 4)))
    assert len(measured) == 1
    assert [(g.num_nodes, g.devices_per_node, g.nics_per_node) for g in cluster.groups] == [(2, 4, 1)]
    assert "the network between the 2 nodes of this job was not measured" in caplog.text
    caplog.clear()
    cluster_at(job(("a", A40, 4)))
    assert not caplog.text


def test_this_rank_says_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "boot").write_text("17\n")
    monkeypatch.setattr(places, "_BOOT_ID", tmp_path / "boot")
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    assert places.place_here().host == ("here", "17")
    monkeypatch.setattr(places, "_BOOT_ID", tmp_path / "absent")
    assert places.place_here().host == ("here", "")
