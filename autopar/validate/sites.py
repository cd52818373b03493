"""What is known of a run beyond its row: the site's network cards and how its software launches work.

``profiles/sites/*.toml`` has facts that published sources state, by a part of the column ``source``; rows of a user's
own may say the same in optional columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.errors import UsageError
from autopar.hardware.cluster import Cluster
from autopar.hardware.device import Device
from autopar.hardware.device_rates import MatmulRate
from autopar.hardware.link import CollectiveLibrary, Link
from autopar.hardware.read import MachineProfile, load_library
from autopar.models.transformer import ATTENTIONS, FAMILIES
from autopar.util import files as resources
from autopar.util.toml import Table
from autopar.validate.runs import PRECISIONS, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A cluster and its software.

    Attributes:
        source: part of the column ``source`` of the runs that it is for.
        names: of these runs, where it is not for all of them.
        family, attention, precision: the only ones that it is for; empty: any.
        layout: ``megatron``: only for rows that split layers or stages and shard at most optimizer states, as Megatron does;
            empty: any.
        release: what tells these runs of a source from its others, where the source says that they do not compare.
        link_bandwidth_bytes_per_s: 0: as the profile says; else what links inside a node reached, all of which arrives in a step.
        nics_per_node, nic_bandwidth_bytes_per_s: 0: as the profile says; else as collectives reached on that cluster.
        slowdown: by what part every step took longer, by the source's own words, than on the same machines later.
        practices: what its software does otherwise than torch's eager mode and autopar's runtime; ``profiles/sites/practices.toml`` says
            what each is.
    """

    source: str
    names: tuple[str, ...] = ()
    family: str = ""
    attention: str = ""
    precision: str = ""
    layout: str = ""
    release: str = ""
    link_bandwidth_bytes_per_s: float = 0.0
    nics_per_node: int = 0
    nic_bandwidth_bytes_per_s: float = 0.0
    slowdown: float = 0.0
    practices: frozenset[str] = frozenset()
    provenance: str = ""


PLAIN = Site(source="")
LAYOUTS = ("", "megatron")
PRACTICES = "practices"
"""The file that says what each practice is."""


def load_sites() -> tuple[Site, ...]:
    """The shipped sites.

    Raises:
        UsageError: a file is malformed; names file, line and key.
    """
    found = resources.files("profiles/sites")
    known = frozenset(Table.load(found.pop(PRACTICES)).table(PRACTICES).names())
    return tuple(site_from(item, known) for path in found.values() for item in Table.load(path).tables("site"))


def site_from(table: Table, known_practices: frozenset[str]) -> Site:
    """Read one ``[[site]]``.

    Raises:
        UsageError: a key is unknown or has a wrong value; names file, line and key.
    """
    site = Site(
        source=table.text("source"),
        names=tuple(table.text("names", "").split()),
        family=table.text("family", ""),
        attention=table.text("attention", ""),
        precision=table.text("precision", ""),
        layout=table.text("layout", ""),
        release=table.text("release", ""),
        link_bandwidth_bytes_per_s=table.number("link_bandwidth_bytes_per_s", 0.0, positive=False),
        nics_per_node=table.integer("nics_per_node", 0, positive=False),
        nic_bandwidth_bytes_per_s=table.number("nic_bandwidth_bytes_per_s", 0.0, positive=False),
        slowdown=table.number("slowdown", 0.0, positive=False),
        practices=frozenset(table.text("practices", "").split()),
        provenance=table.text("provenance"),
    )
    for key, value, known in (
        ("family", site.family, FAMILIES), ("attention", site.attention, ATTENTIONS),
        ("precision", site.precision, PRECISIONS), ("layout", site.layout, LAYOUTS),
    ):  # fmt: skip
        if value and value not in known:
            raise table.wrong(key, f"nothing or one of {', '.join(filter(None, known))}", repr(value))
    for name in sorted(site.practices - known_practices):
        raise UsageError.unknown("practice", name, sorted(known_practices), where=table.place("practices"))
    if site.slowdown >= 1:
        raise table.wrong("slowdown", "the part by which a step takes longer, below 1", site.slowdown)
    table.finish()
    return site


def released(run: Run, site: Site) -> Run:
    """The run with the release that its site states, in parentheses behind the name of its source."""
    mark = f" ({site.release})"
    if not site.release or run.release.endswith(mark):
        return run
    return replace(run, source=run.release + mark + run.source[len(run.source.split(";")[0]) :])


def site_of(run: Run, sites: tuple[Site, ...]) -> Site:
    """The first site that is for the run, by source, name and columns; a plain one, eager PyTorch, where there is none."""
    return next((s for s in sites if _is_for(s, run)), PLAIN)


def _is_for(site: Site, run: Run) -> bool:
    named = site.source.lower() in run.source.lower() and (not site.names or run.name in site.names)
    is_megatron = run.tp * run.pp > 1 and run.zero in (None, 0, 1)
    return (
        named
        and site.family in ("", run.family)
        and site.attention in ("", run.attention)
        and site.precision in ("", run.precision)
        and (is_megatron or not site.layout)
    )


def cluster_of(run: Run, profile: MachineProfile, site: Site, library: CollectiveLibrary | None = None) -> Cluster:
    """The cluster of a run: its nodes, with the site's cards and software; ``library``: read where None."""
    num_nodes = max(run.devices // run.devices_per_node, 1)
    group = profile.group(num_nodes, min(run.devices, run.devices_per_node))
    group = replace(
        group,
        device=_as_run(group.device, site),
        intra_node=_reached(group.intra_node, site.link_bandwidth_bytes_per_s, site),
        nic=_reached(group.nic, site.nic_bandwidth_bytes_per_s, site),
        nics_per_node=site.nics_per_node or group.nics_per_node,
    )
    name = f"{run.device}:{num_nodes}x{group.devices_per_node}"
    library = library or load_library(profile.library)
    if "ring_collectives" in site.practices:
        rings = tuple(a for a in library.algorithms if a.name == "ring")
        library = replace(library, name=f"{library.name}, rings", algorithms=rings)
    return Cluster(name=name, groups=(group,), tiers=(), library=library)


def _reached(link: Link, bandwidth_bytes_per_s: float, site: Site) -> Link:
    """The link with the bandwidth that a site's collectives reached; itself where that is 0."""
    if not bandwidth_bytes_per_s:
        return link
    return replace(link, bandwidth_bytes_per_s=bandwidth_bytes_per_s, step_fraction=1.0, provenance=site.provenance)


def _as_run(device: Device, site: Site) -> Device:
    if "blocking_launches" in site.practices and device.blocking_launch_s:
        around = replace(device.overheads, collective_s=device.overheads.collective_s or device.blocking_launch_s)
        device = replace(device, launch_s=device.blocking_launch_s, interference=1.0, overheads=around)
    if "fixed_segments" in site.practices and device.fixed_segments:
        device = replace(device, fragmentation=device.fixed_segments)
    if site.practices & {"triton_attention", "flash2_attention", "deterministic"}:
        device = replace(device, matmul=tuple(_as_computed(rate, site) for rate in device.matmul))
    return device


def _as_computed(rate: MatmulRate, site: Site) -> MatmulRate:
    """The rate with the site's kernel of fused attention, where the profile knows it."""
    forward, backward = rate.attention_fraction, rate.attention_backward_fraction
    if "triton_attention" in site.practices and rate.triton_fraction:
        forward, backward = rate.triton_fraction, rate.triton_backward_fraction
    elif "flash2_attention" in site.practices and rate.flash2_fraction and "triton_attention" not in site.practices:
        forward, backward = rate.flash2_fraction, rate.flash2_backward_fraction
    if "deterministic" in site.practices and rate.ordered_fraction:
        backward = (backward or forward) * rate.ordered_fraction
    return replace(rate, attention_fraction=forward, attention_backward_fraction=backward)
