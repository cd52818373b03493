"""When a measured speed of the machine is believed, and what is said of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from autopar.benchmark.command import MAX_AGE_S, whether_again


def test_an_old_speed_of_the_machine_is_measured_again(tmp_path: Path) -> None:
    kept = tmp_path / "ranks.json"
    again, line = whether_again(kept, fresh=False)
    assert again and line.endswith("measured now, for the first time")
    kept.write_text("{}", encoding="utf-8")
    assert whether_again(kept, fresh=False) == (
        False,
        "speed of this machine: measured 0 minutes ago (--fresh measures it again)",
    )
    again, line = whether_again(kept, fresh=True)
    assert again and line.endswith("the one before was 0 minutes old")
    before = time.time() - MAX_AGE_S - 1800
    os.utime(kept, (before, before))
    again, line = whether_again(kept, fresh=False)
    assert again and line.endswith("the one before was 6.5 hours old")


def test_a_shipped_profile_is_never_measured() -> None:
    again, line = whether_again(None, fresh=True)
    assert not again and "shipped profile" in line
