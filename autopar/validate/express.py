"""A measured run as the planner sees it: a traced model, the pinned layout of the run, and the blocks of one rank.

Equal layers are solved once: a model of :data:`TRACED_LAYERS` is traced, and its inner layer stands for all others. The typing on ``tp``
and ``cp`` is the fastest of those that the run allows. The work of blocks is kept apart from its price, so that one solution serves every
profile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from autopar.cost.blocks.block_cost import BlockCost, Message
from autopar.cost.blocks.block_work import BlockWork, block_work, price_block
from autopar.cost.model import CostModel, StageCost, Step, flops_of_block
from autopar.graph.graph import Graph, Op
from autopar.hardware.cluster import Cluster
from autopar.hardware.device import times
from autopar.hardware.read import MachineProfile
from autopar.models.transformer import Sizes, build
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Precision, Recompute
from autopar.plan.prediction import Prediction
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.layout import LayoutKey, PricedLayout
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space
from autopar.tracing.trace import trace
from autopar.validate import practice
from autopar.validate.foreign_kernels import PRACTICES, ForeignKernels, filled
from autopar.validate.practice import PLAIN, ForeignRuntime, Site
from autopar.validate.runs import Run

TRACED_LAYERS = 4
"""The fewest layers of which one has equal layers before and after it, and another one is equal to it."""
PADDED_VOCABULARY = 128
"""Megatron pads the vocabulary to a multiple of 128 * tp (``--make-vocab-size-divisible-by``)."""

PRECISIONS = {
    "fp32": Precision(),
    "fp16": Precision(name="fp16", compute="float16", storage="float32", reduce="float16"),
    "bf16": Precision(name="bf16", compute="bfloat16", storage="float32", reduce="bfloat16"),
    "bf16_fp32_grad_accum": Precision(name="bf16", compute="bfloat16", storage="float32", reduce="float32"),
    "bf16_true": Precision(name="bf16", compute="bfloat16", storage="bfloat16", reduce="bfloat16"),
    "fp8": Precision(name="fp8", compute="bfloat16", storage="float32", reduce="bfloat16"),
}
"""Precisions by the column ``precision``: dtypes of products and activations, of parameters between steps, and of gradient sums."""

QUANTIZED = {"fp8": "float8_e4m3fn"}
"""Dtypes of quantized products by the column ``precision``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The blocks of one rank in one layout, without prices.

    Attributes:
        works: work of each block of the compact graph.
        members: how many blocks of the model each stands for.
        flops_per_sample: FLOPs of products of the whole model for a sample, forward and backward.
    """

    works: tuple[BlockWork, ...]
    members: tuple[int, ...]
    flops_per_sample: float


Solved = dict[object, Layouts]
"""Layouts that runs with equal graphs share; they use the first profile that is given for a device."""


def structures_of(run: Run, site: Site, profile: MachineProfile, solved: Solved) -> tuple[Structure, ...]:
    """Return the layouts that the run may have had: several if the sequence can be split in several ways.

    Args:
        run: the run.
        site: its site.
        profile: the profile of its device.
        solved: the layouts of other runs, to which those of this run are added.
    """
    layouts = _layouts_of(run, site, profile, solved)
    split = LayoutKey(micro_batch_size=run.micro_batch, cp=run.cp, tp=run.tp)
    typings = layouts.typed(split, num_micro_batches=8, in_flight=1)
    by_kind = {typed.kind: layouts.price(typed) for typed in typings}
    return tuple(_structure(layouts, option, run, site) for option in by_kind.values())


def _layouts_of(run: Run, site: Site, profile: MachineProfile, solved: Solved) -> Layouts:
    """Return the layouts of the run's model on a single pipeline stage inside one node."""
    sizes, whole_vocabulary = sizes_of(run, site), "whole_vocabulary" in site.practices
    split_rows = run.sequence_parallel
    if split_rows is None and "sequence_parallel" in site.practices:
        split_rows = True
    key = (sizes, run.device, None if run.tp == 1 else (split_rows, whole_vocabulary))
    if key not in solved:
        inside = run.devices_per_node if run.devices_per_node % (run.tp * run.cp) == 0 else run.tp * run.cp
        one_stage = replace(run, devices=inside, pp=1, dp=max(inside // (run.tp * run.cp), 1))
        space = replace(load_space("default"), price_ratios=(0.0,))
        solved[key] = Layouts(
            _graph_of(sizes),
            CostModel(practice.cluster_of(one_stage, profile, site), PRECISIONS[run.precision], "adamw"),
            global_batch_size=run.global_batch,
            pins=Pins.parse(()),
            space=space,
            narrow=partial(practice.as_megatron, run.seq, split_rows, whole_vocabulary=whole_vocabulary),
        )
    return solved[key]


@cache
def _graph_of(sizes: Sizes) -> Graph:
    """Return the traced model of :data:`TRACED_LAYERS` layers. It depends on sizes alone, and tracing takes most of the time."""
    model, batch = build(sizes, TRACED_LAYERS)
    return trace(model, (), batch, name=sizes.family, repeats=True, evaluates=False)


def sizes_of(run: Run, site: Site = PLAIN) -> Sizes:
    """Return the sizes and choices of a run that determine its graph."""
    padded = PADDED_VOCABULARY * run.tp if run.tp * run.pp > 1 else 1
    names = ("family", "hidden", "ffn", "heads", "kv_heads", "attention")
    as_stated: dict[str, Any] = {name: getattr(run, name) for name in names}
    practices = ("autocast", "dropout", "plain_scores", "operator_chains")
    return Sizes(
        **as_stated | {name: name in site.practices for name in practices},
        vocabulary=-(-run.vocab // padded) * padded,
        sequence=run.seq,
        dtype=PRECISIONS[run.precision].compute,
    )


def precision_of(run: Run, site: Site = PLAIN) -> Precision:
    """Return the dtypes of a run."""
    precision = PRECISIONS[run.precision]
    return replace(precision, storage=precision.compute) if "plain_storage" in site.practices else precision


def _structure(layouts: Layouts, option: PricedLayout, run: Run, site: Site) -> Structure:
    """Return the work of a layout's blocks, with the site's kernels and recompute."""
    graph, kind = layouts.local_graph(option), layouts.model.device.kernel_kind
    again: list[Callable[[Op], bool]] = [practice.regathered] if "regathers" in site.practices else []
    if run.recompute == "selective":
        by_operator = run.attention == "flash" and "recomputes_attention" not in site.practices
        again.append(practice.cheap if by_operator else practice.attention_core)
        if "recomputes_products" in site.practices:
            seconds = practice.second_products(graph)
            again.append(lambda op: op.name in seconds)
    kernels = kernels_of(site, run)
    works = tuple(
        block_work(graph, b, kind, again=lambda op: any(f(op) for f in again), kernels=kernels) for b in graph.blocks
    )
    if "deterministic" in site.practices:
        works = tuple(filled(work, graph) for work in works)
    compact = layouts.compact
    members = scaled([len(m) for m in compact.members], run.layers)
    blocks = zip(compact.graph.blocks, members, strict=True)
    flops = sum(flops_of_block(compact.graph, block, kind) * count for block, count in blocks)
    return Structure(works=works, members=members, flops_per_sample=flops)


def kernels_of(site: Site, run: Run) -> ForeignKernels | None:
    """Return the kernels of a site's software, or None for torch's eager mode. Attention scores of BLOOM are added to positions."""
    practices = site.practices & PRACTICES
    if run.attention != "scores":
        practices -= {"megatron_kernels"}
    elif "megatron_kernels" in practices and run.family == "bloom":
        practices |= {"biased_scores"}
    return ForeignKernels(practices=practices) if practices else None


def scaled(members: Sequence[int], layers: int) -> tuple[int, ...]:
    """Return how many blocks each block of the compact graph stands for in a model of ``layers``; only the inner layer's number changes.

    >>> scaled((1, 1, 3, 1, 1), 32), scaled((1, 1, 3, 1, 1), 1)
    ((1, 1, 30, 1, 1), (1, 0, 1, 0, 1))
    """
    inner = members.index(max(members))
    if layers >= 2:
        return (*members[:inner], layers - 2, *members[inner + 1 :])
    return tuple(n if i in (0, len(members) - 1) else int(i == inner) for i, n in enumerate(members))


# --- pricing


def predict(run: Run, structures: Sequence[Structure], cluster: Cluster, site: Site = PLAIN) -> Prediction:
    """Return the prediction of a run on a cluster: the fastest of its structures, slowed down as its site says."""
    model = CostModel(cluster, precision_of(run, site), "adamw", runtime=runtime_of(run, site))
    fastest = min((model.predict(*_laid_out(run, s, model, site)) for s in structures), key=lambda p: p.step_time_s)
    return slower(fastest, 1.0 + site.slowdown)


def slower(prediction: Prediction, factor: float) -> Prediction:
    """Return a prediction in which the step and each of its parts take ``factor`` times as long."""
    if factor == 1.0:
        return prediction
    parts, (low, high) = prediction.breakdown, prediction.step_time_interval_s
    return replace(
        times(prediction, factor, "step_time_s"),
        step_time_interval_s=(low * factor, high * factor),
        mfu=prediction.mfu / factor,
        tokens_per_s=prediction.tokens_per_s / factor,
        breakdown=times(parts, factor, *parts.__slots__),
        stage_times=tuple((forward * factor, backward * factor) for forward, backward in prediction.stage_times),
    )


def mesh_of(run: Run) -> Mesh:
    """Return the mesh of a run. ZeRO shards over all data ranks, as published programs do."""
    shards = run.dp if (run.zero if run.zero is not None else 1) else 1
    return Mesh(pp=run.pp, dp_replicate=run.dp // shards, dp_shard=shards, cp=run.cp, tp=run.tp)


def _laid_out(run: Run, structure: Structure, model: CostModel, site: Site) -> tuple[list[StageCost], Step]:
    """Return the priced stages of a run and its step."""
    mesh = mesh_of(run)
    quantized = QUANTIZED.get(run.precision)
    costs: list[BlockCost] = []
    for work, count in zip(structure.works, structure.members, strict=True):
        priced = price_block(
            work, mesh, model.device, model.collectives, quantized=quantized,
            exposed=partial(exposed, site=site, mesh=mesh, interference=model.device.interference),
        )  # fmt: skip
        # recompute in these programs runs all of forward; torch's stops after the last value that backward needs
        recomputed = replace(
            priced, communication_again_s=priced.communication_forward_s, context_again_s=priced.context_forward_s
        )
        costs += [recomputed] * count
    stops = stage_stops(run.layers, run.pp * run.virtual_stages, len(costs))
    full = run.recompute == "full"
    stages = []
    for start, stop in zip((0, *stops), stops, strict=False):
        layers: list[Recompute] = ["full" if full and 0 < i < len(costs) - 1 else "none" for i in range(start, stop)]
        stages.append(StageCost(blocks=tuple(costs[start:stop]), recompute=tuple(layers)))
    micro_batches = run.global_batch // (run.dp * run.micro_batch)
    if "shards_over_context" in site.practices:  # blocks are priced by here: only the data axes still matter
        mesh = replace(mesh, dp_shard=mesh.dp_shard * mesh.cp, cp=1)
    step = Step(
        mesh=mesh,
        schedule=schedule_of(run, micro_batches),
        num_micro_batches=micro_batches,
        zero_stage=(run.zero if run.zero is not None else 1) if mesh.dp_shard > 1 else 0,
        global_batch_size=run.global_batch,
        flops_per_sample=structure.flops_per_sample,
        tokens_per_sample=run.seq,
        adds_gradients="adds_in_products" not in site.practices,
    )
    return stages, step


def runtime_of(run: Run, site: Site) -> ForeignRuntime:
    """Return the runtime of the site's program, with those of its practices that concern the run."""
    concerned = {
        "partitioned_sends": run.sequence_parallel is False,
        "copied_sends": run.pp > 1,
        "casts_gradients": run.precision == "bf16_fp32_grad_accum",
        "quantized_gathers": run.precision == "fp8",
    }
    return ForeignRuntime(practices=frozenset(name for name in site.practices if concerned.get(name, True)))


def exposed(message: Message, *, site: Site, mesh: Mesh, interference: float) -> float:
    """Return the exposed share of a collective inside a block with the site's software.

    User buffers of Transformer Engine split a collective into as many parts as there are ranks and run them at the same time as products
    that make or read their values. Copy engines move them: one part overlaps no product, and the others take nothing from the
    multiprocessors. Megatron sums a gradient over ``tp`` at the same time as the product that gives the weight's gradient.
    """
    if "overlapped_tensor_parallel" in site.practices:
        return 1.0 / mesh.size((message.axis,))
    sums_gradient = message.backward and message.kind in ("all_reduce", "reduce_scatter")
    is_beside = "overlapped_gradients" in site.practices and sums_gradient and message.axis == "tp"
    return interference if is_beside else 1.0


def schedule_of(run: Run, micro_batches: int) -> str:
    """Return the schedule that Megatron runs with these numbers."""
    if run.pp == 1:
        return "none"
    if run.virtual_stages > 1:
        return "Interleaved1F1B"
    return "1F1B" if micro_batches >= run.pp else "GPipe"


def stage_stops(layers: int, stages: int, blocks: int) -> tuple[int, ...]:
    """Return where stages stop among ``blocks`` blocks, of which the first is the embedding and the last the head.

    - Stages have equal numbers of layers if these divide.
    - If only layers with embedding and head divide, these count as layers (``account_for_embedding`` of Megatron,
      ``type:transformer|embedding`` of DeepSpeed). The first and the last stage may then have no other layer (30 layers on 32 stages).
    - Otherwise all stages but the last have the number of layers rounded up, and the last has the remainder, perhaps only the head
      (``partition_balanced`` of DeepSpeed; BigScience, chronicles-prequel.md: "78/12=6.5 - so the last stage has 1 block, while the rest
      have 7"). No other stage is without a layer.

    >>> stage_stops(4, 2, 6), stage_stops(6, 4, 8), stage_stops(7, 3, 9)
    ((3, 6), (2, 4, 6, 8), (3, 6, 9))
    >>> stage_stops(2, 4, 4), stage_stops(3, 4, 5), stage_stops(9, 6, 11)
    ((1, 2, 3, 4), (2, 3, 4, 5), (3, 5, 7, 9, 10, 11))
    """
    if layers % stages and (layers + 2) % stages == 0:
        return tuple((s + 1) * (layers + 2) // stages for s in range(stages))
    per = -(-layers // stages)
    ends = [1 + min((s + 1) * per, layers - max(stages - 2 - s, 0)) for s in range(stages)]
    return (*ends[:-1], blocks)
