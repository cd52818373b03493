"""Test help: traced small models, whole tensors for them, and plans made from typings."""

from dataclasses import replace
from functools import cache

import torch

from autopar.graph.graph import Graph
from autopar.lower.program import Program, lower
from autopar.plan.mesh import Mesh
from autopar.plan.plan import BlockLayout, Plan
from autopar.rules.apply import shard
from autopar.rules.strategy import Typing
from autopar.tracing.trace import trace
from tests.support.distributed.plans import names_of, unpriced
from tests.support.distributed.subjects import hf_model
from tests.support.lower import chooser

BATCH, SEQ = 4, 8


@cache
def traced(name: str, dropout: float = 0.0, *, hidden: int = 32, seq: int = SEQ, padded: bool = True) -> Graph:
    """``gpt2`` (tied weights, fused projections) or ``llama-untied`` (grouped queries), two layers, on meta."""
    with torch.device("meta"):
        model = hf_model(name, dropout=dropout, hidden=hidden, heads=8, length=2 * seq)
    ids = torch.zeros(BATCH, seq, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids} | ({"attention_mask": torch.ones_like(ids)} if padded else {})
    graph = trace(model.train(), kwargs=batch)
    generator = torch.Generator().manual_seed(1)
    known = (
        b if b.value is not None else replace(b, value=torch.rand(b.spec.shape, generator=generator))
        for b in graph.buffers
    )
    return replace(graph, buffers=tuple(known))


def whole_tensors(graph: Graph) -> dict[str, torch.Tensor]:
    """Parameters and a batch with ignored labels and padding, unevenly."""
    generator = torch.Generator().manual_seed(0)
    whole = {p.name: 0.2 * torch.randn(p.spec.shape, generator=generator) for p in graph.parameters}
    ids = torch.randint(0, 64, (BATCH, SEQ), generator=generator)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :6] = labels[2, 3] = -100
    mask[1, :3] = 0
    return {**whole, "input_ids": ids, "labels": labels, "attention_mask": mask}


def random_program(graph: Graph, mesh: Mesh, micro_batch_size: int, seed: int, cuts: tuple[int, ...] = ()) -> Program:
    typings = random_typings(graph, micro_batch_size, mesh.tp, seed)
    return lower(plan_of(graph, mesh, micro_batch_size, typings, cuts), graph)


def random_typings(graph: Graph, micro_batch_size: int, tp: int, seed: int) -> tuple[Typing, Typing]:
    """Samples split, and strategies at random on ``tp``."""
    batch = chooser.batch_typing(graph, micro_batch_size)
    local = shard(graph, batch, global_batch_size=graph.batch_size, micro_batch_size=micro_batch_size)
    return batch, chooser.axis_typing(local, "tp", tp, seed)


def plan_of(
    graph: Graph,
    mesh: Mesh,
    micro_batch_size: int,
    typings: tuple[Typing, ...] = (),
    cuts: tuple[int, ...] = (),
    graphs: tuple[Graph, ...] = (),
) -> Plan:
    """A plan with one layout for each block; ``graphs``: what each typing is for, where an earlier one adds operators."""
    graphs = graphs or (graph,) * len(typings)
    prelude: tuple[str, ...] = ()
    if typings:
        prelude = tuple(typings[0].strategies[op.name].name for op in graph.prelude)
    layouts = [
        BlockLayout(
            block_hash=block.hash,
            typings=tuple(names_of(g, t, block.index) for t, g in zip(typings, graphs, strict=True)),
        )
        for block in graph.blocks
    ]
    sizes = {"global_batch_size": graph.batch_size, "micro_batch_size": micro_batch_size}
    return unpriced(graph, mesh, layouts, cuts=cuts, pp=len(cuts) + 1, prelude=prelude, **sizes)
