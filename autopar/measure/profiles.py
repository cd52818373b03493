"""``autopar profile``: measure operators and links of a job, fit them, and write them as profiles that ``--cluster`` takes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, Store

from autopar.errors import AutoparError, UsageError
from autopar.hardware.cluster import Cluster
from autopar.hardware.machine import identity, machine_profile, measured_host
from autopar.hardware.read import Links, MachineProfile, load_profile
from autopar.measure.collective_times import IDLE_S, LinkJob, LinkPoints, measure_links
from autopar.measure.job_of_ranks import local_device
from autopar.measure.operators import OperatorFile
from autopar.measure.timers import host_link
from autopar.models.resolve import resolve_model
from autopar.planner.planner import Planner, operator_calls
from autopar.planner.search import Progress, task_of
from autopar.request import SAMPLES_PER_RANK, Request
from autopar.util.files import write_toml
from autopar.util.toml import as_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiling:
    """The output of a measurement, and the functions that report on it.

    Attributes:
        output: the profile's file.
        say: takes a remark for the user.
        advance: takes what is measured, the number done, and the total.
        cache_dir: the folder with measurements of this machine; None for the user's cache directory.
        nics: network cards of a node; None for one for each rank of a node.
    """

    output: Path
    say: Callable[[str], None]
    advance: Progress
    cache_dir: Path | None = None
    nics: int | None = None

    def part(self, name: str) -> Profiling:
        """Return the same with another file in the output's folder."""
        return replace(self, output=self.output.with_name(f"{self.output.stem}.{name}.toml"))

    # --- operators

    def operators(
        self, machine: MachineProfile | None, calls_of: Callable[[], list[str]], job: LinkJob | None = None
    ) -> dict[str, Any] | None:
        """Time the operators that the file next to the output does not have, write the profile, and return a summary.

        Several ranks time a share each. Rank 0 collects and writes all; the others return None.

        Args:
            machine: the profile of the machine; None on other ranks than 0, whose devices are assumed to be equal.
            calls_of: returns the operators; called on rank 0 alone.
            job: the ranks; None if there is one.

        Raises:
            UsageError: this machine has no device of the kind.
            AutoparError: no operator could be timed.
        """
        device = device_of(machine)
        store, rank, world = (HashStore(), 0, 1) if job is None else (job.store, job.rank, job.world)
        path = self.output.with_suffix(".operators.json")
        file = OperatorFile(path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}.json"), identity())
        num_before = len(file.times)
        if rank == 0:
            store.set("calls", json.dumps([call for call in calls_of() if call not in file.times]))
        file.measure(_waited(store, "calls")[rank::world], device, progress=self.advance)
        if machine is None:
            store.set(f"times{rank}", json.dumps([list(file.times.values()), file.failed]))
            file.path.unlink(missing_ok=True)
            return None
        for other in range(1, world):
            try:
                times, failed = _waited(store, f"times{other}")
            except RuntimeError:
                self.say(f"rank {other} gave no times within {IDLE_S:g} s")
                continue
            file.times |= {item["call"]: item for item in times}
            file.failed |= failed
        file.save()
        return {**self._device_written(machine, path, file, device), "timed_now": len(file.times) - num_before}

    def machine(self) -> MachineProfile:
        """Return the profile of this machine."""
        return machine_profile(cache_dir=self.cache_dir)

    def _device_written(
        self, machine: MachineProfile, path: Path, file: OperatorFile, device: torch.device
    ) -> dict[str, Any]:
        """Write the machine's profile with its operator times, and return a summary.

        Raises:
            AutoparError: no operator could be timed.
        """
        for call, why in file.failed.items():
            self.say(f"not measured: {call[:120]}: {why}")
        if not file.times:
            raise AutoparError(
                f"None of {len(file.failed)} operators can be timed alone",
                where=str(path),
                fix="See the reasons in the lines above",
            )
        data = as_table(replace(machine, device=replace(machine.device, operators=None)))
        where = f"measured {time.strftime('%Y-%m-%d')} on {identity()}"
        note = f"{where}: medians of warm calls, one operator at a time"
        data["device"]["operators"] = {"file": path.name, "provenance": note}
        if machine.device.kind == "cuda":
            data["device"]["host"] = measured_host(host_link(device), where)
        write_toml(
            self.output, data,
            comment="Written by 'autopar profile'; use it as DEVICE in --cluster DEVICE:NODESxPER_NODE.",
        )  # fmt: skip
        self.say(f"wrote {self.output} and {path.name}")
        return {"profile": str(self.output), "operators": len(file.times), "operators_failed": len(file.failed)}

    # --- links

    def links(self, job: LinkJob) -> None:
        """Measure links. Rank 0 fits them and writes them."""
        path = self.output.with_suffix(".points.json")
        points = measure_links(job, path, progress=self.advance)
        if points is None:
            return
        from autopar.measure.link_fit import links_of

        where = f"measured {time.strftime('%Y-%m-%d')} on {len(points.job['nodes'])} ranks of {points.job['device']}, "
        where += f"{points.job['backend']}, torch {points.job['torch']}"
        # the start of the fits, of which only the order of magnitude matters
        start = load_profile("cpu" if points.job["backend"] == "gloo" else "h100-sxm5-80gb")
        fitted = links_of(
            points.sets, points.points, nodes=points.job["nodes"], where=where, points_name=path.name,
            machine=start, nics_per_node=self.nics, library=points.job["backend"],
        )  # fmt: skip
        comment = "Written by 'autopar profile links'; use it as --cluster NAME?links=FILE."
        write_toml(self.output, as_table(fitted), comment=comment)
        self.say(f"wrote {self.output} and {path.name}")
        for name, kind, size, why in points.failed:
            self.say(f"not measured: {name}, {kind} of {size} bytes: {why}")

    def kept_links(self) -> dict[str, Any]:
        """Return a summary of the links that were written."""
        points, fitted = LinkPoints.load(self.output.with_suffix(".points.json")), Links.load(self.output)
        tiers = {"intra_node": fitted.intra_node, "nic": fitted.nic}
        return {
            "links": str(self.output),
            **{
                name: {"latency_s": link.latency_s, "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s}
                for name, link in tiers.items()
            },
            "collectives": len(fitted.measured),
            "largest_residual": max(item.residual for item in fitted.measured),
            "points": len(points.points),
            "points_failed": len(points.failed),
        }

    # --- both

    def cluster(self) -> None:
        """Write a cluster file that refers to the links and to the device's profile, which is written if it is missing."""
        links, device = self.part("links").output, self.part("device").output
        nodes = LinkPoints.load(links.with_suffix(".points.json")).job["nodes"]
        if not device.exists():
            write_toml(device, as_table(self.machine()))
        count, cards = len(set(nodes)), {"nics_per_node": self.nics} if self.nics else {}
        group = {"device": device.name, "num_nodes": count, "devices_per_node": len(nodes) // count, **cards}
        data = {"name": self.output.stem, "links": links.name, "group": [group]}
        write_toml(self.output, data, comment="Written by 'autopar profile all'; use it as --cluster FILE.")


def calls_of(model: str, request: Request, cluster: Cluster, *, sequence: int | None, advance: Progress) -> list[str]:
    """Return every operator at every local shape whose time a search for a MODEL may need.

    Args:
        model: a MODEL as on the command line.
        request: the request; without a global batch it is 8 samples a rank.
        cluster: the cluster of the search.
        sequence: tokens of a sample; None for the model's default.
        advance: called with the progress.
    """
    advance("reading the model", 0, 0)
    source = resolve_model(model, sequence_length=sequence)
    samples = request.global_batch_size or SAMPLES_PER_RANK * cluster.world_size
    full_request = replace(
        request, cluster=cluster, global_batch_size=samples, example_inputs=source.example_inputs, name=source.name
    )
    return list(operator_calls(Planner(task_of(source.model, full_request, advance)), progress=advance))


def _waited(store: Store, key: str) -> Any:
    """Return a value of a store once it is there."""
    store.wait([key], timedelta(seconds=IDLE_S))
    return json.loads(store.get(key))


def device_of(machine: MachineProfile | None) -> torch.device:
    """Return the device on which the machine's operators can be timed, made current; None is this machine.

    Raises:
        UsageError: the machine has GPUs, and this one has none.
    """
    kind = "" if machine is None else machine.device.kind
    if machine is not None and kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"This machine has no CUDA device, and '{machine.device.name}' is one",
            fix="Run it on such a machine, or name a cluster of this one ('local')",
        )
    return local_device(kind)


def render(data: dict[str, Any]) -> str:
    """Return a summary of measurements as text."""
    lines = []
    if "operators" in data:
        lines.append(f"{data['operators']} operators timed, {data['operators_failed']} failed: {data['profile']}")
    if "links" in data:
        lines.append(
            f"{data['points']} points of {data['collectives']} collectives, {data['points_failed']} failed: {data['links']}"
        )
        for name in ("intra_node", "nic"):
            link = data[name]
            lines.append(
                f"  {name:10}  {link['bandwidth_bytes_per_s'] / 1e9:.3g} GB/s, latency {link['latency_s'] * 1e6:.3g} us"
            )
    return "\n".join(lines)
