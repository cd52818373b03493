"""The table of shipped devices."""

from __future__ import annotations

import json

from autopar.hardware.describe import peaks, shipped_devices
from autopar.hardware.read import known_devices
from tests.support.cli_runner import Run


def test_every_profile_is_listed_with_its_memory_and_a_peak() -> None:
    found = shipped_devices()
    assert [device.name for device in found] == list(known_devices())
    assert all(device.memory_bytes > 2**30 and peaks(device) for device in found)


def test_the_table_in_the_shell(run: Run) -> None:
    text = run("devices").out
    assert [line.split()[0] for line in text.splitlines()[1:]] == list(known_devices())
    row = next(line for line in text.splitlines() if line.startswith("a100-sxm4-80gb"))
    assert row.split()[1:] == ["79.1", "GiB", "19.5", "156", "312", "312", "-"]
    found = json.loads(run("devices", "--json").out)
    assert found["h100-sxm5-80gb"]["peak_flops_per_s"]["bf16"] == 989e12
