"""Tables of runs for tests: one made by hand, and the published one where it stands beside the checkout."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from autopar.hardware.read import MachineProfile
from autopar.plan.prediction import Prediction
from autopar.validate import parameters as free
from autopar.validate.express import predict
from autopar.validate.practice import Site, cluster_of
from autopar.validate.runs import FailedRow, Run, read_rows
from autopar.validate.session import Session

_ROOT = Path(__file__).parents[2]
OWN = _ROOT / "tests" / "validate" / "runs.csv"
PUBLISHED = _ROOT.parent / "shared" / "validation" / "calibration.csv"
NEEDS_PUBLISHED = pytest.mark.skipif(not PUBLISHED.is_file(), reason="no ../shared/validation/calibration.csv")


def read_runs(path: Path) -> tuple[Run, ...]:
    runs = []
    for row in read_rows(path):
        if isinstance(row, FailedRow):
            raise row.error
        runs.append(row)
    return tuple(runs)


def with_cells(folder: Path, faults: Mapping[int, Mapping[str, str]]) -> Path:
    """The table made by hand with cells changed, by row and column."""
    lines = OWN.read_text().splitlines()
    header = lines[0].split(",")
    for row, cells in faults.items():
        lines[row - 1] = ",".join((dict(zip(header, lines[row - 1].split(","), strict=True)) | cells).values())
    path = folder / "changed.csv"
    path.write_text("\n".join(lines))
    return path


def at_sites(run: Run, *sites: Site) -> list[Prediction]:
    """Of a run in the layout and on the cluster that it has at the first site, with the practices of each."""
    session = Session([run], sites=sites[:1])
    cluster = cluster_of(run, session.profiles[run.device], sites[0])
    return [predict(run, session.structures[0], cluster, site) for site in sites]


def parameter_values(profile: MachineProfile) -> dict[str, float]:
    device, rate_fields = profile.device, free._RATE_FIELDS
    half = next(rate for rate in device.matmul if rate.dtype in free.HALVES)
    forward = half.triton_fraction or half.attention_fraction
    known = {
        "launch_s": device.launch_s,
        "blocking_launch_s": device.blocking_launch_s or device.launch_s,
        "kernel_fraction": device.kernel_fraction,
        "interference": device.interference,
        "link_fraction": profile.intra_node.step_fraction,
        "matmul": half.curve[-1].efficiency,
        "attention_backward": half.attention_backward_fraction or half.attention_fraction,
        "triton": forward,
        "triton_backward": half.triton_backward_fraction or forward,
    }
    if free.architecture_of(device.name) == "hopper":
        known["float8"] = device.rate(free.FLOAT8).curve[-1].efficiency
    known = {name: getattr(half, field) for name, field in rate_fields.items()} | known
    return {p.key: known[p.name] for p in free.parameters_of(device.name)}
