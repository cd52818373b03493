"""One device measured: its profile with times of operators, and predictions held against its steps.

Steps and memory are measured once; they are held against predictions by the profile that is shipped and by the measured one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from autopar.benchmark.batches import Advance, Launch, Outcome, Row, benchmark
from autopar.benchmark.local import BenchmarkRequest, one_device_pins, task_of, variants
from autopar.benchmark.rank_runs import Job
from autopar.hardware.cluster import Cluster
from autopar.hardware.machine import identity, measured_host
from autopar.hardware.read import MachineProfile, load_library
from autopar.measure import timers as measure
from autopar.measure.operators import OperatorFile
from autopar.models.resolve import resolve_model
from autopar.planner.planner import Planner, operator_calls
from autopar.util.files import write_toml
from autopar.util.toml import as_table

DTYPES = {"cuda": (torch.bfloat16, torch.float16, torch.float32), "cpu": (torch.float32,)}
OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory")
BATCH = 6
"""Plans of a worker process: what it measured is written when it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model at a length and in a precision; every micro-batch that divides ``global_batch_size`` by every recompute is run."""

    model: str
    sequence: int
    precision: str
    global_batch_size: int = 4
    space: str = "wide"
    rounds: int = 2
    steps: int = 3

    @property
    def name(self) -> str:
        """For people and files."""
        return f"{self.precision}-{self.sequence}"

    @property
    def request(self) -> BenchmarkRequest:
        """As the benchmark's command has it."""
        return BenchmarkRequest(
            model=self.model, num_ranks=1, global_batch_size=self.global_batch_size, space=self.space,
            sequence=self.sequence, precision=self.precision, rounds=self.rounds, steps=self.steps, warm_up=1,
            run_timeout_s=600.0,
        )  # fmt: skip


MODEL = (
    "hf:llama?hidden_size=2048&intermediate_size=8192&num_hidden_layers=16&num_attention_heads=32"
    "&num_key_value_heads=8&vocab_size=32000&max_position_embeddings=8192"
)
"""Of 1.1 billion parameters; shapes of Llama 3.2 1B, the vocabulary of Llama 2."""

SETTINGS = tuple(
    Setting(model=MODEL, sequence=sequence, precision=precision)
    for precision, sequence in (("bf16", 2048), ("bf16", 4096), ("fp32", 2048))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A setting's measurements beside the predictions by each profile, by its name; all outcomes have the same plans."""

    setting: Setting
    outcomes: Mapping[str, Outcome]


# --- the profile


def measured_tables(machine: MachineProfile, device: torch.device, where: str) -> dict[str, Any]:
    """The tables of a machine's profile with what can be measured of one device in place of what it has.

    Ceilings of products, the bandwidth of a copy, the time of a launch, memory, the link to the host; how a step differs from
    products alone (waves, attention, interference) stays as the profile has it.
    """
    tables = as_table(replace(machine, device=replace(machine.device, operators=None)))
    own = tables["device"]
    for dtype in DTYPES[device.type]:
        name, other = str(dtype).removeprefix("torch."), measure.LARGE_DIM[device.type]
        best = max(measure.matmul_rates(device, dtype), key=lambda one: one["flops_per_s"])
        if name in own["matmul"]:
            note = f"ceiling {where}: [{best['smallest_dim']}, {other}] @ [{other}, {other}], random data, median of 5"
            own["matmul"][name] |= {
                "ceiling_flops_per_s": best["flops_per_s"],
                "provenance": f"{note}; before: {own['matmul'][name]['provenance']}",
            }
    own["bandwidth"] |= {
        "bytes_per_s": measure.copy_bandwidth_bytes_per_s(device),
        "provenance": f"bytes_per_s {where}: a large copy, read plus write; before: {own['bandwidth']['provenance']}",
    }
    own["launch"] |= {
        "time_s": measure.launch_s(device),
        "provenance": f"time_s {where}: one of a chain of small operators; before: {own['launch']['provenance']}",
    }
    if device.type == "cuda":
        own["memory"] = {
            "num_bytes": torch.cuda.mem_get_info(device)[1],
            "provenance": f"{where}: as the driver states it",
        }
        own["host"] = measured_host(measure.host_link(device), where)
    return tables


def write_profile(
    machine: MachineProfile,
    device: torch.device,
    settings: Sequence[Setting],
    path: Path,
    advance: Advance = lambda *_: None,
) -> OperatorFile:
    """Measures the device and every operator of the settings' plans, and writes ``path`` and its operators beside it.

    Operators that the file beside ``path`` has already are not timed again.
    """
    where = f"measured {time.strftime('%Y-%m-%d')} on {identity()}"
    operators = path.with_suffix(".operators.json")
    file = OperatorFile(operators, identity())
    cluster = cluster_of(machine, "device")
    calls: dict[str, None] = {}
    for setting in settings:
        source = resolve_model(setting.model, sequence_length=setting.sequence)
        calls |= dict.fromkeys(operator_calls(Planner(task_of(setting.request, source, cluster, setting.precision))))
    file.measure(list(calls), device, progress=advance)
    tables = measured_tables(machine, device, where)
    note = f"{where}: medians of warm calls, one operator at a time"
    tables["device"]["operators"] = {"file": operators.name, "provenance": note}
    write_toml(path, tables, comment="Written by 'make gpu'; use it as DEVICE in --cluster DEVICE:NODESxPER_NODE.")
    return file


def cluster_of(machine: MachineProfile, name: str) -> Cluster:
    """One device of this machine."""
    return Cluster(name=name, groups=(machine.group(1, 1),), library=load_library(machine.library))


# --- predictions and measurements


def compare(
    setting: Setting,
    clusters: Mapping[str, Cluster],
    launch: Launch,
    *,
    device_type: str,
    folder: Path,
    advance: Advance = lambda *_: None,
) -> Comparison:
    """Runs every plan of the setting that ``folder`` has no measurement of, and predicts all by each profile.

    Args:
        clusters: of one device, by the name of their profile; plans are made for the first.
        launch: of one rank.
    """
    request, outcomes = setting.request, {}
    source = resolve_model(request.model, sequence_length=request.sequence)
    for name, cluster in clusters.items():
        task = task_of(request, source, cluster, request.precision)
        choice = variants([task], one_device_pins(task.space, request))
        job = Job(
            source=source,
            graphs={task.precision.name: task.graph},
            plans={},
            device_type=device_type,
            rounds=request.rounds,
            steps=request.steps,
            warm_up=request.warm_up,
            collective_timeout_s=request.run_timeout_s,
            alone=True,
        )
        results = folder / f"{setting.name}.json"  # plans do not depend on the profile: the second finds all measured
        outcomes[name] = benchmark(
            job, choice, launch, title=request.title, results=results, batch=BATCH, advance=advance
        )
    return Comparison(setting=setting, outcomes=outcomes)


def false_fits(rows: Sequence[Row]) -> list[Row]:
    """Plans that were predicted to fit and ran out of memory."""
    return [row for row in rows if any(word in row.failure for word in OUT_OF_MEMORY)]


def to_dict(found: Sequence[Comparison]) -> dict[str, Any]:
    """As JSON values."""
    return {one.setting.name: {name: outcome.to_dict() for name, outcome in one.outcomes.items()} for one in found}
