"""Differences of published programs from autopar's runtime: their clusters, the choices of their software, and how they run a step.

``profiles/sites/*.toml`` has facts that published sources state, by a part of the column ``source``. Users' rows may state the same in
optional columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.operators.work import LINEAR
from autopar.cost.step.data_parallel import DataParallel, Parts, Unit, itemsize
from autopar.cost.step.simulation import StageTimes
from autopar.cost.step.step import Runtime, StageMessages, StageSums, Step
from autopar.errors import UsageError
from autopar.graph.graph import Graph, Op, Ref
from autopar.hardware.cluster import Cluster
from autopar.hardware.device import Device, MatmulRate
from autopar.hardware.link import Link
from autopar.hardware.read import MachineProfile, load_library
from autopar.models.transformer import Attention, Family
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Precision
from autopar.rules.strategy import Strategy
from autopar.util.files import data_files
from autopar.util.toml import Table
from autopar.validate.foreign_kernels import DROPOUT, LOSSES, NORMS
from autopar.validate.runs import PrecisionColumn, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A cluster and its software.

    Attributes:
        source: a part of the column ``source`` of its runs.
        names: names of its runs; empty: all of the source.
        family, attention, precision: the only ones of its runs; None: any.
        layout: ``megatron``: only runs that split layers or stages and shard at most optimizer states, as Megatron does; None: any.
        release: marks its runs among those of the source, where the source says that they are not comparable with the others.
        link_bandwidth_bytes_per_s: what links inside a node reached, without a further loss in a step; 0: as in the profile.
        nics_per_node, nic_bandwidth_bytes_per_s: network cards and what collectives reached on them; 0: as in the profile.
        slowdown: the part by which steps took longer than later on the same machines, as the source says.
        practices: differences of its software from torch's eager mode and autopar's runtime; ``profiles/sites/practices.toml`` explains
            each.
        provenance: where the facts are from.
    """

    source: str
    names: tuple[str, ...] = ()
    family: Family | None = None
    attention: Attention | None = None
    precision: PrecisionColumn | None = None
    layout: Literal["megatron"] | None = None
    release: str = ""
    link_bandwidth_bytes_per_s: float = 0.0
    nics_per_node: int = 0
    nic_bandwidth_bytes_per_s: float = 0.0
    slowdown: float = 0.0
    practices: frozenset[str] = frozenset()
    provenance: str = ""


PLAIN = Site(source="")
"""Eager PyTorch with autopar's runtime."""
PRACTICES = "practices"
"""The file that explains each practice."""


def load_sites() -> tuple[Site, ...]:
    """Return the shipped sites.

    Raises:
        UsageError: a file is malformed; the error names file, line and key.
    """
    files = data_files("profiles/sites")
    practices = frozenset(Table.load(files.pop(PRACTICES)).table(PRACTICES).names())
    return tuple(site_from(item, practices) for path in files.values() for item in Table.load(path).tables("site"))


def site_from(table: Table, known_practices: frozenset[str]) -> Site:
    """Return the site of one ``[[site]]``.

    Raises:
        UsageError: a key is unknown or has a wrong value; the error names file, line and key.
    """
    site = table.record(
        Site,
        names=tuple(table.text("names", "").split()),
        practices=frozenset(table.text("practices", "").split()),
        provenance=table.text("provenance"),
    )
    if site.slowdown >= 1:
        raise table.wrong("slowdown", "the part by which a step takes longer, below 1", site.slowdown)
    for name in sorted(site.practices - known_practices):
        raise UsageError.unknown("practice", name, sorted(known_practices), where=table.place("practices"))
    return site


def released(run: Run, site: Site) -> Run:
    """Return the run with the release of its site, in parentheses after the name of its source."""
    mark = f" ({site.release})"
    if not site.release or run.release.endswith(mark):
        return run
    return replace(run, source=run.release + mark + run.source[len(run.source.split(";")[0]) :])


def site_of(run: Run, sites: tuple[Site, ...]) -> Site:
    """Return the first site that a run belongs to, or :data:`PLAIN`."""
    return next((s for s in sites if _is_for(s, run)), PLAIN)


def _is_for(site: Site, run: Run) -> bool:
    """Return whether a run belongs to a site."""
    named = site.source.lower() in run.source.lower() and (not site.names or run.name in site.names)
    is_megatron = run.tp * run.pp > 1 and run.zero in (None, 0, 1)
    return (
        named
        and site.family in (None, run.family)
        and site.attention in (None, run.attention)
        and site.precision in (None, run.precision)
        and (is_megatron or not site.layout)
    )


def cluster_of(run: Run, profile: MachineProfile, site: Site) -> Cluster:
    """Return the cluster of a run: its nodes, with the cards and the software of its site."""
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
    library = load_library(profile.library)
    if "ring_collectives" in site.practices:
        rings = tuple(a for a in library.algorithms if a.name == "ring")
        library = replace(library, name=f"{library.name}, rings", algorithms=rings)
    return Cluster(name=name, groups=(group,), tiers=(), library=library)


def _reached(link: Link, bandwidth_bytes_per_s: float, site: Site) -> Link:
    """Return a link with the bandwidth that a site's collectives reached; unchanged if that is 0."""
    if not bandwidth_bytes_per_s:
        return link
    return replace(link, bandwidth_bytes_per_s=bandwidth_bytes_per_s, step_fraction=1.0, provenance=site.provenance)


def _as_run(device: Device, site: Site) -> Device:
    """Return a device with the launches, memory allocator and kernels of a site's software."""
    if "blocking_launches" in site.practices and device.blocking_launch_s:
        overheads = replace(device.overheads, collective_s=device.overheads.collective_s or device.blocking_launch_s)
        device = replace(device, launch_s=device.blocking_launch_s, interference=1.0, overheads=overheads)
    if "fixed_segments" in site.practices and device.fixed_segments:
        device = replace(device, fragmentation=device.fixed_segments)
    if site.practices & {"triton_attention", "flash2_attention", "deterministic"}:
        device = replace(device, matmul=tuple(_as_computed(rate, site) for rate in device.matmul))
    return device


def _as_computed(rate: MatmulRate, site: Site) -> MatmulRate:
    """Return a rate with that of the site's fused attention, if the profile has it."""
    forward, backward = rate.attention_fraction, rate.attention_backward_fraction
    if "triton_attention" in site.practices and rate.triton_fraction:
        forward, backward = rate.triton_fraction, rate.triton_backward_fraction
    elif "flash2_attention" in site.practices and rate.flash2_fraction and "triton_attention" not in site.practices:
        forward, backward = rate.flash2_fraction, rate.flash2_backward_fraction
    if "deterministic" in site.practices and rate.ordered_fraction:
        backward = (backward or forward) * rate.ordered_fraction
    return replace(rate, attention_fraction=forward, attention_backward_fraction=backward)


TABLE = Ref("p_embedding_weight")
"""The embedding of the models of ``families.py``."""

HEAD = Ref("p_head_weight")


def as_megatron(
    sequence: int,
    split_rows: bool | None,
    op: Op,
    offered: tuple[Strategy, ...],
    *,
    whole_vocabulary: bool = False,
) -> tuple[Strategy, ...]:
    """Return the strategies on ``tp`` that Megatron and torchtitan have, of those that the planner offers.

    They split the weights of linear layers and the vocabulary, where the planner may also replicate these and split rows of samples or of
    the sequence.

    Args:
        sequence: tokens of a sample.
        split_rows: True: sequence parallelism, in which norms run on parts of the sequence [batch, sequence, ...]. False: no activation is
            split along batch or sequence, and dropout runs on all of [batch, sequence, hidden]. None: either.
        op: the operator.
        offered: its strategies.
        whole_vocabulary: embedding and loss are not split, nor is the head if ``split_rows`` is False.
    """
    if whole_vocabulary and (
        op.target in LOSSES or TABLE in op.operands or (HEAD in op.operands and split_rows is False)
    ):
        return tuple(s for s in offered if not any(t.is_split for t in (*s.inputs, *s.outputs)))
    if op.target in LINEAR or TABLE in op.operands:
        weight = 1 if op.target in LINEAR else op.operands.index(TABLE)
        offered = tuple(s for s in offered if s.inputs[weight].is_split)
    if op.target == DROPOUT:  # dropout is not linear, and never runs on pending sums
        offered = tuple(s for s in offered if s.outputs[0].kind != "P")
    shape = op.spec.shape
    if _of_chained_norm(op):
        offered = tuple(
            s for s in offered if s.outputs[0].kind != "P" and (not s.outputs[0].is_split or s.outputs[0].dim < 2)
        )
    if split_rows and op.target in NORMS and len(shape) == 3:
        return tuple(s for s in offered if s.outputs[0].is_split and s.outputs[0].dim == 1)
    if split_rows is False and len(shape) >= 3 and shape[1] == sequence:
        whole = 3 if op.target == DROPOUT and len(shape) == 3 else 2
        return tuple(s for s in offered if not any(t.is_split and t.dim < whole for t in s.outputs))
    return offered


def _of_chained_norm(op: Op) -> bool:
    """Return whether an operator is part of a norm that is several operators. As in a fused norm, its weight and its rows are not split."""
    if op.target in ("aten.mean.dim", "aten.to.dtype"):
        return len(op.spec.shape) == 3
    return op.target == "aten.mul.Tensor" and any("norm" in r.name and r.name.endswith("_weight") for r in op.operands)


def cheap(op: Op) -> bool:
    """Return whether selective checkpointing by operator recomputes an operator: all but products, fused attention and collectives."""
    return op.target not in LINEAR and "attention" not in op.target and not op.target.startswith("autopar.")


def second_products(graph: Graph) -> frozenset[str]:
    """Return the names of every second linear layer of each block in forward order (torchtitan: "every second mm").

    The head is alone in its block, and is none of them.
    """
    layers = ([op for op in graph.block_ops(block) if op.target in LINEAR] for block in graph.blocks)
    return frozenset(op.name for linear in layers for op in linear[1::2])


def attention_core(op: Op) -> bool:
    """Return whether Megatron's selective recompute recomputes an operator.

    It recomputes scores, softmax and their product with the values, or fused attention.
    """
    scores = len(op.spec.shape) == 4 and op.target in ("aten.div.Tensor", "aten.masked_fill.Scalar", "aten.to.dtype")
    core = ("aten.softmax.int", "aten.matmul.default", "aten.dropout.default", DROPOUT)
    return scores or "attention" in op.target or op.target in core


def regathered(op: Op) -> bool:
    """Return whether an operator gathers activations over ``tp`` that linear layers keep as parts and gather again in backward.

    Megatron does so with sequence parallelism. The second gather runs at the same time as the product that gives the input's gradient
    (Korthikanti et al. 2022, section 4.2.2), so that its time does not count again.
    """
    return op.target == "autopar.all_gather" and op.args[1] == "tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRuntime(Runtime):
    """A program with the practices of a site (``profiles/sites/practices.toml``); without any it is autopar's runtime."""

    practices: frozenset[str] = frozenset()

    def data_parallel(self, step: Step, precision: Precision) -> DataParallel:
        """Return the data parallelism of a step; late reductions wait for the last backward, as those of a pipeline do."""
        is_late = step.mesh.pp > 1 or "late_reductions" in self.practices
        return DataParallel(step.mesh, step.zero_stage, precision, is_late, "reduces_last" in self.practices)

    def gather_s(self, parts: Parts, data: DataParallel, collectives: CollectiveModel, device: Device) -> float:
        """Return the seconds for gathering parameters: a broadcast for each, or one gather for all."""
        size = itemsize(data.precision.compute)
        if "broadcasts_parameters" in self.practices:
            sizes = [p.numel * size for p, _ in parts if p.shape]
            return sum(collectives.time_s("broadcast", num_bytes, data.mesh, ("dp_shard",)) for num_bytes in sizes)
        whole = data.padded(parts) * (1 if "quantized_gathers" in self.practices else size)
        moved_s = collectives.time_s("all_gather", whole, data.mesh, ("dp_shard",))
        return moved_s + 2 * whole / device.memory_bandwidth_bytes_per_s

    @property
    def reduction(self) -> str:
        """The collective that reduces gradients."""
        return "all_reduce" if "all_reduces_sums" in self.practices else "reduce_scatter"

    def adding_s(self, units: Sequence[Unit], data: DataParallel, num_micro_batches: int, device: Device) -> float:
        """Return the seconds for adding gradients.

        If a kernel casts each gradient, the sums exist from the first micro-batch on, filled with zeros.
        """
        whole, sum_bytes = data.accumulates(num_micro_batches), itemsize(data.precision.storage)
        if data.uses_fsdp and whole:
            sum_bytes = itemsize(data.precision.reduce)
        if not ("casts_gradients" in self.practices and whole and sum_bytes > itemsize(data.precision.compute)):
            return Runtime.adding_s(self, units, data, num_micro_batches, device)
        moved, launches = data.added(units, num_micro_batches)
        moved += 2 * sum(u.trained_numel + u.spread_numel for u in units) * sum_bytes
        return moved / device.memory_bandwidth_bytes_per_s + device.launch_s * (2 * launches)

    def message_bytes(self, num_bytes: int, mesh: Mesh) -> float:
        """Return the bytes of a message; partitioned messages have a rank's part over ``tp``."""
        return num_bytes / mesh.tp if "partitioned_sends" in self.practices else num_bytes

    def stage_times(
        self, sums: StageSums, messages: StageMessages, mesh: Mesh, collectives: CollectiveModel, device: Device
    ) -> StageTimes:
        """Return the times of a stage, with waits for blocking messages, gathers of partitioned messages, and copies."""

        def gather_s(size: int) -> float:
            is_gathered = "partitioned_sends" in self.practices
            return collectives.time_s("all_gather", size, mesh, ("tp",)) if is_gathered else 0.0

        forward_waits = backward_waits = 0.0
        if "blocking_sends" in self.practices:
            waits = messages.sent_s + messages.received_s
            forward_waits = waits + gather_s(messages.received_bytes)
            # DeepSpeed keeps a part of a stage's outputs and gathers them again with their gradients
            backward_waits = waits + (2 if "copied_sends" in self.practices else 1) * gather_s(messages.sent_bytes)
        forward_host, backward_host = messages.forward_host_s, messages.backward_host_s
        if "copied_sends" in self.practices:
            copies = copies_s(messages.received_bytes, messages.sent_bytes, mesh.tp, device)
            forward_host, backward_host = forward_host + copies[0], backward_host + copies[1]
        is_free = "blocking_sends" not in self.practices
        return StageTimes(
            forward_s=sums.forward_s + forward_waits + forward_host,
            backward_s=sums.backward_s + backward_waits + backward_host,
            send_forward_s=messages.sent_s + gather_s(messages.sent_bytes) if is_free else 0.0,
            send_backward_s=messages.sent_back_s + gather_s(messages.received_bytes) if is_free else 0.0,
            first_forward_s=0.0 if "gathers_after_step" in self.practices else sums.data_first_s,
            schedule_s=forward_waits + backward_waits + forward_host + backward_host,
        )

    def first_gathers_s(
        self, sums: Sequence[StageSums], units: Sequence[Unit], data: DataParallel, device: Device
    ) -> float:
        """Return the exposed seconds of gathers before the first forward. After the optimizer nothing else runs at the same time."""
        if "gathers_after_step" not in self.practices:
            return Runtime.first_gathers_s(self, sums, units, data, device)
        if not data.uses_fsdp or data.gathers_always:
            return 0.0
        return sum(unit.gather_s for unit in units) * self.late_share(device)

    def late_share(self, device: Device) -> float:
        """Return the exposed share of late reductions: overlapped ones slow down computation, others are exposed entirely."""
        return device.interference if "overlapped_reductions" in self.practices else 1.0


def copies_s(received: int, sent: int, ranks: int, device: Device) -> tuple[float, float]:
    """Return the seconds of DeepSpeed's pipeline copies for one forward and one backward of a stage, without its messages.

    Sources: deepspeed/runtime/pipe/engine.py and ``PartitionedTensor`` of deepspeed/runtime/utils.py (0.5 to 0.9). A received tensor comes
    with a small one that describes it; both are copied on arrival and again before forward. The part that is sent is a copy. A gather fills
    its output with zeros, copies the rank's part into it, gathers into a list, which c10d copies out of a flat buffer one by one, and
    copies the result. Forward gathers the input, backward the output and its gradient. With one rank on ``tp`` nothing is partitioned.

    Args:
        received, sent: bytes of the complete input and output; 0 where the stage has none.
        ranks: ranks of ``tp``.
        device: the device whose memory copies.
    """

    def gathered(size: int) -> tuple[float, int]:
        return (5 * size + 2 * size / ranks, ranks + 3) if ranks > 1 and size else (0.0, 0)

    def cut(size: int) -> tuple[float, int]:
        return (2 * size / ranks, 1) if ranks > 1 and size else (0.0, 0)

    def seconds(moved: float, launches: int) -> float:
        return moved / device.memory_bandwidth_bytes_per_s + launches * device.launch_s

    # a part comes with a tensor that describes it
    tensors = 2 if ranks > 1 else 1
    arrivals, leavings = tensors * (received > 0), tensors * (sent > 0)
    (bytes_in, launches_in), (bytes_out, launches_out) = gathered(received), gathered(sent)
    cut_out, cut_back = cut(sent), cut(received)
    forward_s = seconds(
        bytes_in + 4 * received / ranks + cut_out[0], launches_in + cut_out[1] + 3 * arrivals + leavings
    )
    backward_s = seconds(2 * bytes_out + cut_back[0], 2 * launches_out + cut_back[1] + arrivals + leavings)
    return forward_s, backward_s
