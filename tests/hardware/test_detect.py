import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from autopar.errors import AutoparError, UsageError
from autopar.hardware import machine as detect
from autopar.hardware.cluster import Cluster
from autopar.hardware.device import HostLink
from autopar.hardware.read import MachineProfile, load_profile
from autopar.measure import timers as measure
from autopar.measure import worker
from autopar.util.toml import Table, as_table
from tests.support.measured import MEASURED
from tests.support.said import refuses


def interpreter(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Workers are started by a shell script in place of Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


SMALLER = """
import runpy
from autopar.measure import timers
timers.SMALLEST_DIMS["cpu"], timers.LARGE_DIM["cpu"], timers.COPY_BYTES["cpu"] = (1, 16, 64), 64, 2**20
runpy.run_module("autopar.measure.worker", run_name="__main__", alter_sys=True)
"""
"""All that workers measure, of small matrices and copies."""


@pytest.mark.distributed
def test_this_machine_is_measured_once_and_kept(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"[ $2 = autopar.measure.worker ] && shift 2 && exec {sys.executable} -c '{SMALLER}' $*"
    interpreter(tmp_path_factory.mktemp("bin"), monkeypatch, script)
    cluster = Cluster.detect(num_ranks=3, cache_dir=tmp_path)
    assert cluster.world_size == 3
    device, link = cluster.devices[0], cluster.groups[0].intra_node
    assert min(device.rate("float32").ceiling_flops_per_s, device.memory_bandwidth_bytes_per_s, device.launch_s) > 0
    assert min(link.latency_s, link.bandwidth_bytes_per_s) > 0
    assert [path.suffix for path in tmp_path.iterdir()] == ([".toml"] if device.name == "local" else [])
    monkeypatch.setattr(detect, "_measure", lambda: pytest.fail("measured twice"))
    assert Cluster.parse("local?ranks=3", cache_dir=tmp_path).groups == cluster.groups


def test_a_dtype_that_the_device_multiplies_slowly_is_measured_on_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setitem(measure.SMALLEST_DIMS, "cpu", (1, 16, 128))
    monkeypatch.setitem(measure.LARGE_DIM, "cpu", 16)
    assert [point["smallest_dim"] for point in measure.matmul_rates(device, torch.float32)] == [1, 16, 128]
    monkeypatch.setattr(measure, "LONG_PRODUCT_S", 0.0)
    points = {"float32": measure.matmul_rates(device, torch.float32)}
    assert [point["smallest_dim"] for point in points["float32"]] == [1]
    measured = worker.measure_host(device, (torch.float32,), points)
    assert points["float32"][0]["backward_flops_per_s"] > 0
    assert measured["overheads"]["product_s"] >= 0


def test_a_measurement_becomes_a_profile_with_provenance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(detect, "num_cores", lambda: 2)
    profile = Table(detect.profile_dict(MEASURED), file="measured").record(MachineProfile)
    rate = profile.device.rate("float32")
    assert (rate.ceiling_flops_per_s, rate.calibrated) == (9e10, True)
    assert [point.efficiency for point in rate.curve] == [pytest.approx(1 / 3), 1.0, 1.0]
    assert "torch" in rate.provenance
    assert profile.device.memory_bytes == detect.host_memory_bytes()
    four = profile.group(1, 4).device
    assert four.memory_bytes == detect.host_memory_bytes() // 4
    assert four.rate("float32").ceiling_flops_per_s == 4.5e10


@pytest.mark.parametrize(("cores", "workers"), [(1, 2), (2, 2), (6, 6), (64, detect.MOST_WORKERS)])
def test_a_cpu_rank_is_measured_while_others_compute(cores: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(detect, "num_cores", lambda: cores)
    assert detect.num_workers() == workers
    assert f"{workers} processes computing at once" in detect.profile_dict(MEASURED)["node"]["provenance"]


def test_a_measured_link_to_the_host_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    rates = dict.fromkeys(("to_host_bytes_per_s", "to_device_bytes_per_s", "memory_bandwidth_bytes_per_s"), 2e10)
    table = detect.measured_host({**rates, "latency_s": 1e-5, "launch_s": 3e-6}, "measured here")
    host = Table(table, file="measured").record(HostLink)
    assert host.memory_bytes == detect.host_memory_bytes() // 4
    assert as_table(host) == table
    refuses(UsageError, "The device cpu has no link to a host", measure.host_link, torch.device("cpu"))


Gpus = Callable[..., None]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Makes this machine one of so many GPUs, of a name that no profile has unless another is given."""

    def pretend(count: int, name: str = "NVIDIA A40", memory_bytes: int = 47_000_000_000) -> None:
        properties = types.SimpleNamespace(name=name, total_memory=memory_bytes)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)

    return pretend


def test_an_unknown_gpu_has_assumed_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpus: Gpus
) -> None:
    gpus(1)
    assert detect.num_workers() == 1  # nobody to time a link with
    alone = {key: value for key, value in MEASURED.items() if key != "link"}
    monkeypatch.setattr(detect, "_measure", lambda: alone)
    profile = detect.machine_profile(cache_dir=tmp_path)
    stand_in = load_profile(detect.STAND_IN)
    assert profile.library == "nccl" and profile.device.memory_bytes == 47_000_000_000
    for link, assumed in ((profile.intra_node, stand_in.intra_node), (profile.nic, stand_in.nic)):
        assert link.bandwidth_bytes_per_s == assumed.bandwidth_bytes_per_s
        assert link.provenance.startswith("assumed, not measured here: as of l4-24gb")
        assert "gloo" not in link.provenance
    assert "no shipped profile is of NVIDIA A40" in caplog.text
    caplog.clear()
    detect.machine_profile(cache_dir=tmp_path)  # kept, and told again
    assert "5.31 GB/s are assumed" in caplog.text


def test_a_machine_whose_speed_cannot_be_kept_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detect, "_shipped_here", lambda: None)
    monkeypatch.setattr(detect, "_measure", None)
    (tmp_path / "taken").write_text("")
    refuses(UsageError, r"^Cannot write .*taken", detect.machine_profile, cache_dir=tmp_path / "taken")


def test_unknown_gpus_are_measured_by_nccl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gpus: Gpus
) -> None:
    gpus(4)
    assert detect.num_workers() == 4
    monkeypatch.setattr(detect, "_measure", lambda: {**MEASURED, "link_ranks": 4})
    profile = detect.machine_profile(cache_dir=tmp_path)
    assert profile.intra_node.bandwidth_bytes_per_s == 1.5e9
    assert profile.intra_node.latency_s == 0.0  # NCCL's delays stand with its algorithms
    assert "NCCL all-gather over 4 GPUs" in profile.intra_node.provenance
    assert profile.nic.provenance.startswith("assumed")
    assert not caplog.text
    kept = detect.profile_path(tmp_path)
    gpus(1)
    assert detect.profile_path(tmp_path) != kept  # what one GPU sees says nothing of links


def test_a_gpu_with_a_shipped_profile_is_not_measured(monkeypatch: pytest.MonkeyPatch, gpus: Gpus) -> None:
    gpus(1, "NVIDIA A10G", 23_686_744_637)
    monkeypatch.setattr(detect, "_measure", lambda: pytest.fail("measured"))
    assert detect.profile_path() is None
    assert Cluster.detect(num_ranks=8).devices[0].name == "a10g-24gb"


@pytest.mark.gpu
def test_copies_to_and_from_the_host_are_timed() -> None:
    found = measure.host_link(torch.device("cuda"))
    assert all(found[f"to_{side}_bytes_per_s"] > 0 for side in ("host", "device"))
    assert found["latency_s"] > 0


def test_a_kept_file_that_was_damaged_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(detect, "_measure", lambda: MEASURED)
    detect.machine_profile(cache_dir=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text(encoding="utf-8").replace('kind = "cpu"', 'kind = "tpu"'), encoding="utf-8")
    refuses(UsageError, r"line 5: Unknown kind 'tpu'", detect.machine_profile, cache_dir=tmp_path)
    assert detect.machine_profile(cache_dir=tmp_path, refresh=True).device.kind == "cpu"


def test_workers_that_fail_or_hang_end_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter(tmp_path, monkeypatch, "echo no torch here >&2\nexit 1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refuses(AutoparError, "no torch here", detect.machine_profile, cache_dir=tmp_path / "cache")
    interpreter(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(detect, "TIMEOUT_S", 0.3)
    refuses(AutoparError, "took longer than", detect.machine_profile, cache_dir=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())  # which is made first, as a test that it can be


def test_the_median_time_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which a call takes 0.1 ms: batches grow until one takes a millisecond."""
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1

    def clock(batch: Callable[[], None]) -> float:
        before = calls
        batch()
        return 1e-4 * (calls - before)

    monkeypatch.setattr(measure, "timer", lambda device: clock)
    assert measure.median_time_s(call, torch.device("cpu")) == pytest.approx(1e-4)
    assert calls == 1 + 1 + 2 + 4 + 8 + 16 + measure.REPEATS * 16


def test_measurements_belong_to_a_mode(gpus: Gpus) -> None:
    gpus(2)
    exact = detect.identity(), detect.fingerprint()
    torch.set_float32_matmul_precision("high")
    try:
        fast = detect.identity(), detect.fingerprint()
    finally:
        torch.set_float32_matmul_precision("highest")
    before, torch.backends.cudnn.conv.fp32_precision = torch.backends.cudnn.conv.fp32_precision, "ieee"
    try:
        slow = detect.identity(), detect.fingerprint()
    finally:
        torch.backends.cudnn.conv.fp32_precision = before
    assert len({exact[0], fast[0], slow[0]}) == len({exact[1], fast[1], slow[1]}) == 3
    assert "products in TF32" in fast[0] and "TF32" not in exact[0]
    assert slow[0].endswith(", convolutions without TF32")


def test_gpus_of_several_kinds_are_not_taken_for_the_first(monkeypatch: pytest.MonkeyPatch, gpus: Gpus) -> None:
    gpus(3)
    kinds = [types.SimpleNamespace(name=name, total_memory=size) for name, size in (("A", 80), ("A", 80), ("B", 40))]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: kinds[i])
    refuses(UsageError, r"A of 80 bytes, B of 40 bytes.*CUDA_VISIBLE_DEVICES", detect._check_alike)
