from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.benchmark.rank_runs import KINDS, LinkTask, measured_cluster
from autopar.cost.network.collectives import CollectiveModel
from autopar.errors import UsageError
from autopar.hardware.read import load_profile
from autopar.measure.job_of_ranks import group_sets
from autopar.plan.mesh import Mesh
from tests.support.said import refuses

SIZES = (1024, 8192, 65536)


def launched(task: LinkTask, tasks: list[LinkTask]) -> Sequence[Mapping[str, Mapping[str, Any]]]:
    """Ranks that share a core each with another one, at half the speed of the profile; 1 ms and 1 GB/s, all kinds alike."""
    tasks.append(task)
    sets = [s for s in group_sets(task.nodes) if not s.alone]
    points = [[s.name, kind, size, 1e-3 + size / 1e9, 0.0] for s in sets for kind in KINDS for size in SIZES]
    found = {"crowding": 2.5, "layers_s": 2e-4, "sets": [s.to_table() for s in sets], "points": points, "failed": []}
    return [{"links": found}, *({} for _ in task.nodes[1:])]


def test_a_cluster_is_as_its_ranks_measured_it(tmp_path: Path) -> None:
    machine = load_profile("cpu")
    overheads = replace(machine.device.overheads, layers_s=1e-4)
    machine = replace(machine, device=replace(machine.device, overheads=overheads))
    tasks: list[LinkTask] = []
    clusters = [
        measured_cluster("two", machine, (1, 4), lambda task: launched(task, tasks), kept=tmp_path / "ranks.json")
        for _ in range(2)
    ]
    assert [task.nodes for task in tasks] == [(0, 0, 0, 0)]  # the second one reads the file
    assert clusters[0] == clusters[1]
    kept = tmp_path / "ranks.json"
    measured_cluster("two", machine, (1, 4), lambda task: launched(task, tasks), kept=kept, again=True)
    assert len(tasks) == 2
    kept.write_text('{"when": "today"}')
    refuses(UsageError, r"ranks\.json: Missing key", measured_cluster, "two", machine, (1, 4), launched, kept=kept)
    device = clusters[0].devices[0]
    assert device.launch_s == pytest.approx(machine.device.launch_s * 2 * 2.5)
    times = CollectiveModel(clusters[0])
    assert times.time_s("all_reduce", 1e6, Mesh(tp=4), ("tp",)) == pytest.approx(2e-3)
    assert times.time_s("all_gather", 1e6, Mesh(dp_shard=2, tp=2), ("tp",)) == pytest.approx(2e-3)
