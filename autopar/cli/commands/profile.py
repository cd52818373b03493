"""``autopar profile``: measures operators and links, and writes profiles that ``--cluster`` takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.console import cache_dir, print_json, print_text, progress, warn
from autopar.cli.options import (
    ClusterOption,
    Json,
    Model,
    Opaque,
    Pin,
    PrecisionOption,
    Sequence_,
    parse_cluster,
    split_pins,
)
from autopar.errors import AutoparError, UsageError
from autopar.measure.job_of_ranks import check_output, local_device, start_ranks, torchrun_job, under_torchrun

if TYPE_CHECKING:
    import torch

    from autopar.hardware.links_file import Links
    from autopar.hardware.read import MachineProfile
    from autopar.measure.collective_times import LinkJob, LinkPoints

app = typer.Typer(help="Measure operators and links of a cluster.", no_args_is_help=True, rich_markup_mode=None)

Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE.toml", help="Write the profile here.")]
Space = Annotated[
    str, typer.Option("--space", metavar="NAME|FILE", help="What may be chosen: default, quick or a file.")
]
Batch = Annotated[
    int | None, typer.Option("--global-batch", min=1, metavar="N", help="Samples of a step; 8 a rank if not given.")
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks", min=2, metavar="N", help="Without torchrun: local ranks; a GPU or a core each (at least 2)."
    ),
]
Budget = Annotated[float, typer.Option("--budget", min=1, metavar="S", help="Seconds for all collectives.")]
Largest = Annotated[int, typer.Option("--max-bytes", min=1024, metavar="N", help="Of the largest collective.")]
Timeout = Annotated[float, typer.Option("--timeout", min=1, metavar="S", help="Seconds until a collective has failed.")]
Nics = Annotated[int | None, typer.Option("--nics", min=1, metavar="N", help="Network cards of a node.")]


@app.command("ops")
def ops(
    model: Model,
    cluster: ClusterOption,
    output: Output,
    space: Space = "default",
    global_batch: Batch = None,
    seq: Sequence_ = None,
    precision: PrecisionOption = "fp32",
    pin: Pin = None,
    opaque: Opaque = None,
    as_json: Json = False,
) -> None:
    """Time every operator at every local shape that a search for MODEL can ask for; continues what was begun."""
    check_output(output)
    from autopar.hardware.describe import machine_of

    machine = machine_of(cluster, cache_dir=cache_dir())
    device = _device(machine)
    calls = _calls(
        model, cluster, space=space, global_batch=global_batch, seq=seq, precision=precision,
        pins=split_pins(pin or ()), opaque=opaque or [],
    )  # fmt: skip
    _give(_measure_operators(calls, machine, device, output), as_json)


@app.command("links")
def links(
    output: Output,
    ranks: Ranks = None,
    max_bytes: Largest = 2**30,
    budget: Budget = 120.0,
    timeout: Timeout = 30.0,
    nics: Nics = None,
    as_json: Json = False,
) -> None:
    """Time collectives between the ranks of a torchrun job, or of this machine; continues what was begun."""
    check_output(output)
    if not under_torchrun():
        start_ranks(output, ranks, max_bytes=max_bytes, budget=budget, timeout=timeout, nics=nics)
        _give(_summary_of_links(output), as_json)
        return
    with torchrun_job(max_bytes, budget, timeout) as job:
        found = _measure_links(job, output, nics)
    if found is not None:
        _give(found, as_json)


@app.command("all")
def everything(
    model: Model,
    output: Output,
    ranks: Ranks = None,
    space: Space = "default",
    global_batch: Batch = None,
    seq: Sequence_ = None,
    precision: PrecisionOption = "fp32",
    pin: Pin = None,
    opaque: Opaque = None,
    max_bytes: Largest = 2**30,
    budget: Budget = 120.0,
    timeout: Timeout = 30.0,
    nics: Nics = None,
    as_json: Json = False,
) -> None:
    """Links, then operators of MODEL, and a cluster file that names both; under torchrun every rank takes part."""
    check_output(output)
    names = {part: output.with_name(f"{output.stem}.{part}.toml") for part in ("links", "device")}
    wish: dict[str, Any] = {
        "space": space, "global_batch": global_batch, "seq": seq, "precision": precision,
        "pins": split_pins(pin or ()), "opaque": opaque or [],
    }  # fmt: skip
    if not under_torchrun():
        start_ranks(names["links"], ranks, max_bytes=max_bytes, budget=budget, timeout=timeout, nics=nics)
        _write_cluster(output, names, nics)
        machine = _machine()
        calls = _calls(model, str(output), **wish)
        found = _measure_operators(calls, machine, _device(machine), names["device"])
    else:
        with torchrun_job(max_bytes, budget, timeout) as job:
            linked = _measure_links(job, names["links"], nics)
            store, rank, world = job.store, job.rank, job.world
        if linked is not None:
            _write_cluster(output, names, nics)

        def plan() -> list[str]:
            return _calls(model, str(output), **wish)

        shared = _shared_operators(store, rank, world, plan, names["device"])
        if shared is None:
            return
        found = shared
    _give({**_summary_of_links(names["links"]), **found, "cluster": str(output)}, as_json)


# --- operators


def _calls(
    model: str, cluster: str, *, space: str, global_batch: int | None, seq: int | None, precision: str,
    pins: list[str], opaque: list[str],
) -> list[str]:  # fmt: skip
    """What the search can ask for."""
    found = parse_cluster(cluster)
    with progress("reading the model") as advance:
        from autopar import api
        from autopar.models.resolve import resolve_model

        resolved = resolve_model(model, sequence_length=seq)
        call: Callable[..., tuple[str, ...]] = api.operator_calls
        return list(
            call(
                resolved.model,
                example_inputs=resolved.example_inputs,
                name=resolved.name,
                cluster=found,
                global_batch_size=global_batch,
                precision=precision,
                pins=pins,
                space=space,
                opaque=opaque,
                progress=advance,
            )
        )


def _measure_operators(calls: list[str], machine: MachineProfile, device: torch.device, output: Path) -> dict[str, Any]:
    """Time what the file beside ``output`` does not have, and write the profile; what to tell of it."""
    from autopar.hardware.detect.machine import identity
    from autopar.measure.operators import OperatorFile

    path = output.with_suffix(".operators.json")
    file = OperatorFile(path, identity())
    with progress("timing operators") as advance:
        before = len(file.times)
        file.measure(calls, device, progress=advance)
    return {**_write_device(machine, path, output, file), "timed_now": len(file.times) - before}


def _write_device(machine: MachineProfile, path: Path, output: Path, file: Any) -> dict[str, Any]:
    """The machine's profile with its operator times; fails where none could be taken."""
    from autopar.hardware.detect.machine import identity, measured_host
    from autopar.hardware.read import profile_to_dict
    from autopar.measure.timers import host_link
    from autopar.util.files import write_toml

    for call, reason in file.failed.items():
        warn(f"not measured: {call[:120]}: {reason}")
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
        output, data, comment="Written by 'autopar profile'; use it as DEVICE in --cluster DEVICE:NODESxPER_NODE."
    )
    warn(f"wrote {output} and {path.name}")
    return {"profile": str(output), "operators": len(file.times), "operators_failed": len(file.failed)}


def _shared_operators(
    store: Any, rank: int, world: int, plan: Callable[[], list[str]], output: Path
) -> dict[str, Any] | None:
    """Every rank times its share of the operators; rank 0 writes them all. The devices are taken to be equal."""
    import json
    from datetime import timedelta

    from autopar.hardware.detect.machine import identity
    from autopar.measure.collective_times import IDLE_S
    from autopar.measure.operators import OperatorFile

    machine = _machine() if rank == 0 else None
    path = output.with_suffix(".operators.json")
    if rank == 0:
        try:
            text = json.dumps(plan())
        except AutoparError:
            store.set("calls", "null")
            raise
        store.set("calls", text)
    store.wait(["calls"], timedelta(seconds=IDLE_S))
    calls = json.loads(store.get("calls"))
    if calls is None:
        raise AutoparError(
            "Rank 0 failed before it knew what to measure", where=f"rank {rank}", fix="See what rank 0 says"
        )
    mine = OperatorFile(path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}.json"), identity())
    with progress("timing operators") as advance:
        mine.measure([c for c in calls[rank::world] if c not in mine.times], local_device(), progress=advance)
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
            warn(f"rank {other} gave no times within {IDLE_S:g} s")
            continue
        times, failed = json.loads(store.get(key))
        mine.times |= {item["call"]: item for item in times}
        mine.failed |= failed
    mine.save()
    store.set("written", "")
    return _write_device(machine, path, output, mine)


def _machine() -> MachineProfile:
    """This machine."""
    from autopar.hardware.detect.machine import machine_profile

    return machine_profile(cache_dir=cache_dir())


def _device(machine: MachineProfile) -> torch.device:
    """Where the machine's operators can be timed.

    Raises:
        UsageError: the machine has GPUs and this one none.
    """
    import torch

    if machine.device.kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"This machine has no CUDA device, and '{machine.device.name}' is one",
            fix="Run it on such a machine, or name a cluster of this one ('local')",
        )
    return torch.device("cpu") if machine.device.kind == "cpu" else local_device()


# --- links


def _measure_links(job: LinkJob, output: Path, nics: int | None) -> dict[str, Any] | None:
    """On rank 0 measure, fit, write and say what came out; the other ranks take part and give None."""
    from autopar.measure.collective_times import measure_links

    path = output.with_suffix(".points.json")
    with progress("timing collectives") as advance:
        found = measure_links(job, path, progress=advance)
    return None if found is None else _write_links(found, path, output, nics)


def _write_links(found: LinkPoints, path: Path, output: Path, nics: int | None) -> dict[str, Any]:
    from autopar.measure.link_fit import links_of
    from autopar.util.files import write_toml

    where = f"measured {time.strftime('%Y-%m-%d')} on {len(found.job['nodes'])} ranks of {found.job['device']}, "
    where += f"{found.job['backend']}, torch {found.job['torch']}"
    fitted = links_of(
        found.sets, found.points, nodes=found.job["nodes"], where=where, points_name=path.name,
        machine=_link_start(found.job["backend"]), nics_per_node=nics, library=found.job["backend"],
    )  # fmt: skip
    write_toml(
        output, fitted.to_dict(), comment="Written by 'autopar profile links'; use it as --cluster NAME?links=FILE."
    )
    warn(f"wrote {output} and {path.name}")
    for name, kind, size, reason in found.failed:
        warn(f"not measured: {name}, {kind} of {size} bytes: {reason}")
    return _told(output, fitted, found)


def _link_start(backend: str) -> MachineProfile:
    """Where the fits of the links begin; only their order of magnitude counts."""
    from autopar.hardware.read import load_profile

    return load_profile("cpu" if backend == "gloo" else "h100-sxm5-80gb")


def _told(output: Path, fitted: Links, found: LinkPoints) -> dict[str, Any]:
    return {
        "links": str(output),
        "intra_node": {"latency_s": fitted.intra_node.latency_s, "bandwidth_bytes_per_s": fitted.intra_node.bandwidth_bytes_per_s},
        "nic": {"latency_s": fitted.nic.latency_s, "bandwidth_bytes_per_s": fitted.nic.bandwidth_bytes_per_s},
        "collectives": len(fitted.measured),
        "largest_residual": max(item.residual for item in fitted.measured),
        "points": len(found.points),
        "points_failed": len(found.failed),
    }  # fmt: skip


def _summary_of_links(output: Path) -> dict[str, Any]:
    from autopar.hardware.links_file import Links
    from autopar.measure.collective_times import LinkPoints

    return _told(output, Links.load(output), LinkPoints.load(output.with_suffix(".points.json")))


def _write_cluster(output: Path, names: dict[str, Path], nics: int | None) -> None:
    """A cluster file that names the links and, once it is there, the device's profile."""
    from autopar.hardware.read import profile_to_dict
    from autopar.measure.collective_times import LinkPoints
    from autopar.util.files import write_toml

    nodes = LinkPoints.load(names["links"].with_suffix(".points.json")).job["nodes"]
    if not names["device"].exists():
        write_toml(names["device"], profile_to_dict(_machine()))
    group = {
        "device": names["device"].name,
        "num_nodes": len(set(nodes)),
        "devices_per_node": len(nodes) // len(set(nodes)),
        **({"nics_per_node": nics} if nics else {}),
    }
    data = {"name": output.stem, "links": names["links"].name, "group": [group]}
    write_toml(output, data, comment="Written by 'autopar profile all'; use it as --cluster FILE.")


# --- output


def _give(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
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
    print_text("\n".join(lines))
