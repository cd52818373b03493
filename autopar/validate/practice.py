"""What published programs do otherwise than autopar's runtime: their sites, their software's choices, how they carry out a step.

``profiles/sites/*.toml`` has facts that published sources state, by a part of the column ``source``; rows of a user's
own may say the same in optional columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.operators.work import LINEAR
from autopar.cost.step.data_parallel import DataParallel, Parts, Unit, itemsize
from autopar.cost.step.simulation import StageTimes
from autopar.cost.step.step import Runtime, StageMessages, StageSums, Step
from autopar.errors import UsageError
from autopar.graph.graph import Graph, Op, Ref
from autopar.hardware.cluster import Cluster
from autopar.hardware.device import Device
from autopar.hardware.device_rates import MatmulRate
from autopar.hardware.link import Link
from autopar.hardware.read import MachineProfile, load_library
from autopar.models.transformer import ATTENTIONS, FAMILIES
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Precision
from autopar.rules.strategy import Strategy
from autopar.util.files import data_files
from autopar.util.toml import Table
from autopar.validate.foreign_kernels import DROPOUT, LOSSES, NORMS
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
    found = data_files("profiles/sites")
    known = frozenset(Table.load(found.pop(PRACTICES)).table(PRACTICES).names())
    return tuple(site_from(item, known) for path in found.values() for item in Table.load(path).tables("site"))


def site_from(table: Table, known_practices: frozenset[str]) -> Site:
    """Read one ``[[site]]``.

    Raises:
        UsageError: a key is unknown or has a wrong value; names file, line and key.
    """
    site = table.record(
        Site,
        names=tuple(table.text("names", "").split()),
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


def cluster_of(run: Run, profile: MachineProfile, site: Site) -> Cluster:
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
    library = load_library(profile.library)
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


TABLE = Ref("p_embedding_weight")
"""The vocabulary of the models of ``families.py``."""

HEAD = Ref("p_head_weight")


def as_megatron(
    sequence: int,
    split_rows: bool | None,
    op: Op,
    offered: tuple[Strategy, ...],
    *,
    whole_vocabulary: bool = False,
) -> tuple[Strategy, ...]:
    """Keeps the strategies on ``tp`` that Megatron and torchtitan have; the planner's own are more.

    Weights of linear layers and the vocabulary are split; the planner may hold one whole and split rows of samples or of
    the sequence.

    Args:
        sequence: tokens of a sample.
        split_rows: sequence parallelism: norms run on parts of the sequence [batch, sequence, ...]; False: no activation
            is split along batch or sequence, and dropout has all of [batch, sequence, hidden]; None: as is fastest.
        op: the operator.
        offered: its strategies.
        whole_vocabulary: embedding and loss are not split, nor is the head with ``split_rows`` False.
    """
    if whole_vocabulary and (
        op.target in LOSSES or TABLE in op.operands or (HEAD in op.operands and split_rows is False)
    ):
        return tuple(s for s in offered if not any(t.is_split for t in (*s.inputs, *s.outputs)))
    if op.target in LINEAR or TABLE in op.operands:
        weight = 1 if op.target in LINEAR else op.operands.index(TABLE)
        offered = tuple(s for s in offered if s.inputs[weight].is_split)
    if op.target == DROPOUT:  # of whole sums, not of each rank's part of one
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
    """Whether an operator is of a norm, of whose weight and rows no rank has a part, as where it is one operator."""
    if op.target in ("aten.mean.dim", "aten.to.dtype"):
        return len(op.spec.shape) == 3
    return op.target == "aten.mul.Tensor" and any("norm" in r.name and r.name.endswith("_weight") for r in op.operands)


def cheap(op: Op) -> bool:
    """What op-level selective checkpointing computes again: all but products, fused attention and collectives."""
    return op.target not in LINEAR and "attention" not in op.target and not op.target.startswith("autopar.")


def second_products(graph: Graph) -> frozenset[str]:
    """Names of every second linear layer of each block (torchtitan: "every second mm"), in order of the forward.

    The head, alone in its block, is none of them.
    """
    layers = ([op for op in graph.block_ops(block) if op.target in LINEAR] for block in graph.blocks)
    return frozenset(op.name for linear in layers for op in linear[1::2])


def attention_core(op: Op) -> bool:
    """What Megatron's selective recompute computes again: scores, softmax and their product with the values, or the fused kernel."""
    scores = len(op.spec.shape) == 4 and op.target in ("aten.div.Tensor", "aten.masked_fill.Scalar", "aten.to.dtype")
    core = ("aten.softmax.int", "aten.matmul.default", "aten.dropout.default", DROPOUT)
    return scores or "attention" in op.target or op.target in core


def regathered(op: Op) -> bool:
    """Activations gathered over ``tp``, where linear layers keep their own part and gather it again in backward.

    Megatron does so with sequence parallelism, beside the product that gives the input's gradient (Korthikanti et al.
    2022, section 4.2.2), so that its time is not counted twice.
    """
    return op.target == "autopar.all_gather" and op.args[1] == "tp"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRuntime(Runtime):
    """A program by its practices (``profiles/sites/practices.toml``); without any of them autopar's own."""

    practices: frozenset[str] = frozenset()

    def data_parallel(self, step: Step, precision: Precision) -> DataParallel:
        """Sums that are late wait for the last backward as those of a pipeline do."""
        is_late = step.mesh.pp > 1 or "late_reductions" in self.practices
        return DataParallel(step.mesh, step.zero_stage, precision, is_late, "reduces_last" in self.practices)

    def gather_s(self, parts: Parts, data: DataParallel, collectives: CollectiveModel, device: Device) -> float:
        """Each parameter by a broadcast, or all of them by one gather."""
        size = itemsize(data.precision.compute)
        if "broadcasts_parameters" in self.practices:
            sizes = [p.numel * size for p, _ in parts if p.shape]
            return sum(collectives.time_s("broadcast", own, data.mesh, ("dp_shard",)) for own in sizes)
        whole = data.padded(parts) * (1 if "quantized_gathers" in self.practices else size)
        moved_s = collectives.time_s("all_gather", whole, data.mesh, ("dp_shard",))
        return moved_s + 2 * whole / device.memory_bandwidth_bytes_per_s

    @property
    def reduction(self) -> str:
        """An all-reduce or a reduce-scatter."""
        return "all_reduce" if "all_reduces_sums" in self.practices else "reduce_scatter"

    def adding_s(self, units: Sequence[Unit], data: DataParallel, num_micro_batches: int, device: Device) -> float:
        """Where a kernel casts each gradient, the sums are there from the first micro-batch on, filled with zeros."""
        whole, kept = data.accumulates(num_micro_batches), itemsize(data.precision.storage)
        if data.uses_fsdp and whole:
            kept = itemsize(data.precision.reduce)
        if not ("casts_gradients" in self.practices and whole and kept > itemsize(data.precision.compute)):
            return Runtime.adding_s(self, units, data, num_micro_batches, device)
        moved, launches = data.added(units, num_micro_batches)
        moved += 2 * sum(u.trained_numel + u.spread_numel for u in units) * kept
        return moved / device.memory_bandwidth_bytes_per_s + device.launch_s * (2 * launches)

    def message_bytes(self, num_bytes: int, mesh: Mesh) -> float:
        """A rank's part of ``tp``, where messages are partitioned."""
        return num_bytes / mesh.tp if "partitioned_sends" in self.practices else num_bytes

    def stage_times(
        self, sums: StageSums, messages: StageMessages, mesh: Mesh, collectives: CollectiveModel, device: Device
    ) -> StageTimes:
        """With what a stage waits for messages that block it, gathers what arrived in parts, and copies."""

        def gather_s(size: int) -> float:
            is_gathered = "partitioned_sends" in self.practices
            return collectives.time_s("all_gather", size, mesh, ("tp",)) if is_gathered else 0.0

        forward_waits = backward_waits = 0.0
        if "blocking_sends" in self.practices:
            waits = messages.sent_s + messages.received_s
            forward_waits = waits + gather_s(messages.received_bytes)
            # DeepSpeed gathers a stage's outputs, of which it kept its part, once more beside their gradients
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
        """Where they follow the optimizer nothing runs beside them."""
        if "gathers_after_step" not in self.practices:
            return Runtime.first_gathers_s(self, sums, units, data, device)
        if not data.uses_fsdp or data.gathers_always:
            return 0.0
        return sum(unit.gather_s for unit in units) * self.late_share(device)

    def late_share(self, device: Device) -> float:
        """What they slow the computation beside them by, where there is any."""
        return device.interference if "overlapped_reductions" in self.practices else 1.0


def copies_s(received: int, sent: int, ranks: int, device: Device) -> tuple[float, float]:
    """What DeepSpeed's pipeline copies for one forward and one backward of a stage besides its messages, with their kernels.

    By deepspeed/runtime/pipe/engine.py and ``PartitionedTensor`` of deepspeed/runtime/utils.py (0.5 to 0.9): what arrives, a tensor
    and a small one that describes it, is copied when it is received and once more before forward; the part that is sent is a
    copy. A gather fills its output with zeros, copies the rank's part into it, gathers into a list, which c10d copies out of a
    flat buffer one by one, and copies the whole; forward gathers the input, backward the output and its gradient. Nothing
    is cut where ``ranks``, those of ``tp``, are one.

    Args:
        received, sent: bytes of the whole input and the whole output; 0 where the stage has none.
        ranks: of ``tp``.
        device: whose memory copies.
    """

    def gathered(size: int) -> tuple[float, int]:
        return (5 * size + 2 * size / ranks, ranks + 3) if ranks > 1 and size else (0.0, 0)

    def cut(size: int) -> tuple[float, int]:
        return (2 * size / ranks, 1) if ranks > 1 and size else (0.0, 0)

    def seconds(moved: float, launches: int) -> float:
        return moved / device.memory_bandwidth_bytes_per_s + launches * device.launch_s

    # what describes a part travels beside it
    tensors = 2 if ranks > 1 else 1
    arrivals, leavings = tensors * (received > 0), tensors * (sent > 0)
    (bytes_in, launches_in), (bytes_out, launches_out) = gathered(received), gathered(sent)
    cut_out, cut_back = cut(sent), cut(received)
    forward_s = seconds(
        bytes_in + 4 * received / ranks + cut_out[0], launches_in + cut_out[1] + 3 * arrivals + leavings
    )
    backward_s = seconds(2 * bytes_out + cut_back[0], 2 * launches_out + cut_back[1] + arrivals + leavings)
    return forward_s, backward_s
