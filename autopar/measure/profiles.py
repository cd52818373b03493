"""``autopar profile``: operators and links of a job timed, fitted and written as profiles that ``--cluster`` takes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from autopar.errors import AutoparError, UsageError
from autopar.hardware.cluster import Cluster
from autopar.hardware.machine import identity, machine_profile, measured_host
from autopar.hardware.read import Links, MachineProfile, load_profile, profile_to_dict
from autopar.measure.collective_times import IDLE_S, LinkJob, LinkPoints, measure_links
from autopar.measure.job_of_ranks import local_device
from autopar.measure.operators import OperatorFile
from autopar.measure.timers import host_link
from autopar.models.resolve import resolve_model
from autopar.planner.planner import Planner, operator_calls
from autopar.planner.search import Progress, task_of
from autopar.request import SAMPLES_PER_RANK, Request
from autopar.util.files import write_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiling:
    """Where profiles are written and how it is told of.

    Attributes:
        output: the profile.
        say: takes a remark for the user.
        advance: takes (what, done, total).
        cache_dir: where measurements of this machine are kept; None for the user's cache directory.
        nics: network cards of a node; None for one each rank of it.
    """

    output: Path
    say: Callable[[str], None]
    advance: Progress
    cache_dir: Path | None = None
    nics: int | None = None

    def part(self, name: str) -> Profiling:
        """The same for a file beside the output."""
        return replace(self, output=self.output.with_name(f"{self.output.stem}.{name}.toml"))

    # --- operators

    def operators(self, calls: list[str], machine: MachineProfile) -> dict[str, Any]:
        """Time what the file beside the output does not have, and write the profile; what to tell of it.

        Raises:
            UsageError: this machine has no device of the kind.
            AutoparError: no operator could be timed.
        """
        device = device_of(machine)
        path = self.output.with_suffix(".operators.json")
        file = OperatorFile(path, identity())
        before = len(file.times)
        file.measure(calls, device, progress=self.advance)
        return {**self._device_written(machine, path, file), "timed_now": len(file.times) - before}

    def shared_operators(
        self, store: Store, rank: int, world: int, calls_of: Callable[[], list[str]]
    ) -> dict[str, Any] | None:
        """Every rank times its share of the operators; rank 0 writes them all. The devices are taken to be equal.

        Args:
            calls_of: what there is to time; called on rank 0 alone.
        """
        machine = self.machine() if rank == 0 else None
        path = self.output.with_suffix(".operators.json")
        calls = _shared_calls(store, rank, calls_of)
        mine = OperatorFile(path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}.json"), identity())
        mine.measure([c for c in calls[rank::world] if c not in mine.times], local_device(), progress=self.advance)
        if rank != 0:
            store.set(f"times{rank}", json.dumps([list(mine.times.values()), mine.failed]))
            mine.path.unlink(missing_ok=True)
            store.wait(["written"], timedelta(seconds=IDLE_S))
            return None
        assert machine is not None
        for other in range(1, world):
            key = f"times{other}"
            try:
                store.wait([key], timedelta(seconds=IDLE_S))
            except RuntimeError:
                self.say(f"rank {other} gave no times within {IDLE_S:g} s")
                continue
            times, failed = json.loads(store.get(key))
            mine.times |= {item["call"]: item for item in times}
            mine.failed |= failed
        mine.save()
        store.set("written", "")
        return self._device_written(machine, path, mine)

    def machine(self) -> MachineProfile:
        """This machine."""
        return machine_profile(cache_dir=self.cache_dir)

    def _device_written(self, machine: MachineProfile, path: Path, file: OperatorFile) -> dict[str, Any]:
        """Write the machine's profile with its operator times; fails where none could be taken."""
        for call, why in file.failed.items():
            self.say(f"not measured: {call[:120]}: {why}")
        if not file.times:
            raise AutoparError(
                f"None of {len(file.failed)} operators can be timed alone",
                where=str(path),
                fix="See the reasons in the lines above",
            )
        data = profile_to_dict(replace(machine, device=replace(machine.device, operators=None)))
        where = f"measured {time.strftime('%Y-%m-%d')} on {identity()}"
        note = f"{where}: medians of warm calls, one operator at a time"
        data["device"]["operators"] = {"file": path.name, "provenance": note}
        if machine.device.kind == "cuda":
            data["device"]["host"] = measured_host(host_link(local_device()), where)
        write_toml(
            self.output, data,
            comment="Written by 'autopar profile'; use it as DEVICE in --cluster DEVICE:NODESxPER_NODE.",
        )  # fmt: skip
        self.say(f"wrote {self.output} and {path.name}")
        return {"profile": str(self.output), "operators": len(file.times), "operators_failed": len(file.failed)}

    # --- links

    def links(self, job: LinkJob) -> dict[str, Any] | None:
        """On rank 0 measure, fit, write and say what came out; the other ranks take part and give None."""
        path = self.output.with_suffix(".points.json")
        found = measure_links(job, path, progress=self.advance)
        return None if found is None else self._links_written(found, path)

    def _links_written(self, found: LinkPoints, path: Path) -> dict[str, Any]:
        from autopar.measure.link_fit import links_of

        where = f"measured {time.strftime('%Y-%m-%d')} on {len(found.job['nodes'])} ranks of {found.job['device']}, "
        where += f"{found.job['backend']}, torch {found.job['torch']}"
        # where the fits begin; only its order of magnitude counts
        start = load_profile("cpu" if found.job["backend"] == "gloo" else "h100-sxm5-80gb")
        fitted = links_of(
            found.sets, found.points, nodes=found.job["nodes"], where=where, points_name=path.name,
            machine=start, nics_per_node=self.nics, library=found.job["backend"],
        )  # fmt: skip
        comment = "Written by 'autopar profile links'; use it as --cluster NAME?links=FILE."
        write_toml(self.output, asdict(fitted), comment=comment)
        self.say(f"wrote {self.output} and {path.name}")
        for name, kind, size, why in found.failed:
            self.say(f"not measured: {name}, {kind} of {size} bytes: {why}")
        return links_summary(self.output, fitted, found)

    def kept_links(self) -> dict[str, Any]:
        """What there is to tell of links that another process has written."""
        points = LinkPoints.load(self.output.with_suffix(".points.json"))
        return links_summary(self.output, Links.load(self.output), points)

    # --- both

    def cluster(self) -> None:
        """Write a cluster file that names the links and, once it is there, the device's profile."""
        links, device = self.part("links").output, self.part("device").output
        nodes = LinkPoints.load(links.with_suffix(".points.json")).job["nodes"]
        if not device.exists():
            write_toml(device, profile_to_dict(self.machine()))
        group = {
            "device": device.name,
            "num_nodes": len(set(nodes)),
            "devices_per_node": len(nodes) // len(set(nodes)),
            **({"nics_per_node": self.nics} if self.nics else {}),
        }
        data = {"name": self.output.stem, "links": links.name, "group": [group]}
        write_toml(self.output, data, comment="Written by 'autopar profile all'; use it as --cluster FILE.")


def calls_of(model: str, request: Request, cluster: Cluster, *, sequence: int | None, advance: Progress) -> list[str]:
    """Every operator at every local shape that a search for a MODEL can ask the time of.

    Args:
        request: its global batch may be open: 8 samples a rank.
    """
    advance("reading the model", 0, 0)
    found = resolve_model(model, sequence_length=sequence)
    samples = request.global_batch_size or SAMPLES_PER_RANK * cluster.world_size
    asked = replace(
        request, cluster=cluster, global_batch_size=samples, example_inputs=found.example_inputs, name=found.name
    )
    return list(operator_calls(Planner(task_of(found.model, asked, advance)), progress=advance))


def _shared_calls(store: Store, rank: int, calls_of: Callable[[], list[str]]) -> list[str]:
    """What rank 0 says is to be timed, on every rank."""
    if rank == 0:
        try:
            text = json.dumps(calls_of())
        except AutoparError:
            store.set("calls", "null")
            raise
        store.set("calls", text)
    store.wait(["calls"], timedelta(seconds=IDLE_S))
    calls: list[str] | None = json.loads(store.get("calls"))
    if calls is None:
        raise AutoparError(
            "Rank 0 failed before it knew what to measure", where=f"rank {rank}", fix="See what rank 0 says"
        )
    return calls


def device_of(machine: MachineProfile) -> torch.device:
    """Where the machine's operators can be timed.

    Raises:
        UsageError: the machine has GPUs and this one none.
    """
    if machine.device.kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"This machine has no CUDA device, and '{machine.device.name}' is one",
            fix="Run it on such a machine, or name a cluster of this one ('local')",
        )
    return torch.device("cpu") if machine.device.kind == "cpu" else local_device()


def links_summary(output: Path, fitted: Links, found: LinkPoints) -> dict[str, Any]:
    """What to tell of measured links."""
    return {
        "links": str(output),
        "intra_node": {"latency_s": fitted.intra_node.latency_s, "bandwidth_bytes_per_s": fitted.intra_node.bandwidth_bytes_per_s},
        "nic": {"latency_s": fitted.nic.latency_s, "bandwidth_bytes_per_s": fitted.nic.bandwidth_bytes_per_s},
        "collectives": len(fitted.measured),
        "largest_residual": max(item.residual for item in fitted.measured),
        "points": len(found.points),
        "points_failed": len(found.failed),
    }  # fmt: skip


def render(found: dict[str, Any]) -> str:
    """What was measured, for people."""
    lines = []
    if "operators" in found:
        lines.append(f"{found['operators']} operators timed, {found['operators_failed']} failed: {found['profile']}")
    if "links" in found:
        lines.append(
            f"{found['points']} points of {found['collectives']} collectives, {found['points_failed']} failed: {found['links']}"
        )
        for name in ("intra_node", "nic"):
            link = found[name]
            lines.append(
                f"  {name:10}  {link['bandwidth_bytes_per_s'] / 1e9:.3g} GB/s, latency {link['latency_s'] * 1e6:.3g} us"
            )
    return "\n".join(lines)
