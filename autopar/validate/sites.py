"""What is known of a run beyond its row: the site's network cards and how its software launches work.

``profiles/sites/*.toml`` has facts that published sources state, by a part of the column ``source``; rows of a user's
own may say the same in optional columns.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from autopar.hardware.cluster import Cluster
from autopar.hardware.device import Device
from autopar.hardware.device_rates import MatmulRate
from autopar.hardware.link import CollectiveLibrary, Link
from autopar.hardware.read import MachineProfile, load_library
from autopar.models.transformer import ATTENTIONS, FAMILIES
from autopar.util import data_files as resources
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
        blocking_launches: the host waits for every kernel (``CUDA_LAUNCH_BLOCKING=1``).
        blocking_sends: pipeline messages stand in the stream of computation.
        partitioned_sends: each rank of ``tp`` sends its part of such a message.
        copied_sends: such messages, or whole ones, are those of DeepSpeed's pipeline, which copies and fills besides.
        fused_elementwise: chains of elementwise operators run as one kernel each.
        fused_loss: so does cross entropy.
        half_loss: cross entropy computes in the dtype of the logits, which nothing casts.
        whole_vocabulary: embedding and loss are whole on every rank of ``tp``, and so is the head where the sequence is not split.
        fused_projections: linear layers of one input run as one product.
        fused_ring: attention over a split sequence is a ring of fused kernels.
        autocast: norms compute in single precision, with a cast before and after.
        triton_attention: fused attention is the first one in Triton.
        flash2_attention: fused attention is FlashAttention-2, torch's own, where the profile knows a faster one.
        dropout: attention and feed-forward drop some of what they add; attention that keeps its scores some of these.
        operator_chains: GELU and RMS norms are chains of torch's operators, each a kernel of its own (Hugging Face's
            transformers, minGPT).
        plain_scores: attention that keeps its scores scales, masks and normalizes them by torch's operators, each a kernel of
            its own, and not by one fused softmax.
        megatron_kernels: norms, attention that keeps its scores and the loss are Megatron's of 2021 and 2022.
        copied_logits: this loss copies its logits first (Megatron-DeepSpeed).
        overlapped_tensor_parallel, overlapped_reductions: collectives of tensor and data parallelism run beside
            computation.
        overlapped_gradients: sums of an input's gradient over ``tp`` run beside the product of its weight's gradient.
        sequence_parallel: rows that do not say so split the sequence between products of ``tp``.
        adds_in_products: gradients of weights add to those of the micro-batches before in the products that make them.
        casts_gradients: gradients in half precision are cast by kernels of their own before they add to sums in single
            precision (DeepSpeed's BF16_Optimizer).
        gathers_after_step: ranks gather parameters all at once after the optimizer (ZeRO 1 of DeepSpeed and Megatron).
        regathers: linear layers keep their part of an input gathered over ``tp`` and gather it again in backward.
        recomputes_products: selective recompute makes every second product of a layer again, besides what is cheap.
        recomputes_attention: selective recompute makes attention again, also where it is one fused kernel (Megatron's
            ``core_attn``), and keeps all else.
        shards_over_context: states are sharded over the ranks of ``cp`` as well as those of data parallelism.
        all_reduces_sums: gradients are summed whole on every data rank, of which each then steps its part (DeepSpeed).
        broadcasts_parameters: each data rank steps whole parameters and sends them to all others, one after the other.
        late_reductions: gradients are summed over data ranks after the last backward (Megatron until 2022).
        reduces_last: gradients of several micro-batches are reduced at the last one, also where parameters are sharded (FSDP2's
            ``set_requires_gradient_sync``).
        plain_storage: parameters and optimizer states lie in the dtype of products, with no copy in single precision.
        quantized_gathers: runs in fp8 gather parameters in one byte an element.
        fixed_segments: the caching allocator cannot join its segments (PyTorch before 2.1).
        deterministic: kernels add up in one order, and Transformer Engine fills what it allocates before it writes to it
            (``torch.use_deterministic_algorithms``).
        ring_collectives: collectives run on rings alone (``NCCL_ALGO=Ring``).
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
    blocking_launches: bool = False
    blocking_sends: bool = False
    partitioned_sends: bool = False
    copied_sends: bool = False
    fused_elementwise: bool = False
    fused_loss: bool = False
    half_loss: bool = False
    whole_vocabulary: bool = False
    fused_projections: bool = False
    fused_ring: bool = False
    autocast: bool = False
    triton_attention: bool = False
    flash2_attention: bool = False
    dropout: bool = False
    operator_chains: bool = False
    plain_scores: bool = False
    megatron_kernels: bool = False
    copied_logits: bool = False
    overlapped_tensor_parallel: bool = False
    overlapped_reductions: bool = False
    overlapped_gradients: bool = False
    sequence_parallel: bool = False
    casts_gradients: bool = False
    gathers_after_step: bool = False
    adds_in_products: bool = False
    regathers: bool = False
    recomputes_products: bool = False
    recomputes_attention: bool = False
    shards_over_context: bool = False
    all_reduces_sums: bool = False
    broadcasts_parameters: bool = False
    fixed_segments: bool = False
    late_reductions: bool = False
    reduces_last: bool = False
    plain_storage: bool = False
    quantized_gathers: bool = False
    deterministic: bool = False
    ring_collectives: bool = False
    provenance: str = ""


PLAIN = Site(source="")
LAYOUTS = ("", "megatron")
FLAGS = tuple(f.name for f in fields(Site) if f.type == "bool")


def load_sites() -> tuple[Site, ...]:
    """The shipped sites.

    Raises:
        UsageError: a file is malformed; names file, line and key.
    """
    return tuple(
        site_from(item)
        for path in resources.files("profiles/sites").values()
        for item in Table.load(path).tables("site")
    )


def site_from(table: Table) -> Site:
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
        provenance=table.text("provenance"),
        **{flag: table.flag(flag, False) for flag in FLAGS},
    )
    for key, value, known in (
        ("family", site.family, FAMILIES), ("attention", site.attention, ATTENTIONS),
        ("precision", site.precision, PRECISIONS), ("layout", site.layout, LAYOUTS),
    ):  # fmt: skip
        if value and value not in known:
            raise table.wrong(key, f"nothing or one of {', '.join(filter(None, known))}", repr(value))
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
    if site.ring_collectives:
        rings = tuple(a for a in library.algorithms if a.name == "ring")
        library = replace(library, name=f"{library.name}, rings", algorithms=rings)
    return Cluster(name=name, groups=(group,), tiers=(), library=library)


def _reached(link: Link, bandwidth_bytes_per_s: float, site: Site) -> Link:
    """The link with the bandwidth that a site's collectives reached; itself where that is 0."""
    if not bandwidth_bytes_per_s:
        return link
    return replace(link, bandwidth_bytes_per_s=bandwidth_bytes_per_s, step_fraction=1.0, provenance=site.provenance)


def _as_run(device: Device, site: Site) -> Device:
    if site.blocking_launches and device.blocking_launch_s:
        around = replace(device.overheads, collective_s=device.overheads.collective_s or device.blocking_launch_s)
        device = replace(device, launch_s=device.blocking_launch_s, interference=1.0, overheads=around)
    if site.fixed_segments and device.fixed_segments:
        device = replace(device, fragmentation=device.fixed_segments)
    if site.triton_attention or site.flash2_attention or site.deterministic:
        device = replace(device, matmul=tuple(_as_computed(rate, site) for rate in device.matmul))
    return device


def _as_computed(rate: MatmulRate, site: Site) -> MatmulRate:
    """The rate with the site's kernel of fused attention, where the profile knows it."""
    forward, backward = rate.attention_fraction, rate.attention_backward_fraction
    if site.triton_attention and rate.triton_fraction:
        forward, backward = rate.triton_fraction, rate.triton_backward_fraction
    elif site.flash2_attention and rate.flash2_fraction and not site.triton_attention:
        forward, backward = rate.flash2_fraction, rate.flash2_backward_fraction
    if site.deterministic and rate.ordered_fraction:
        backward = (backward or forward) * rate.ordered_fraction
    return replace(rate, attention_fraction=forward, attention_backward_fraction=backward)
