"""Test help: traced small models, and plans made from typings."""

from dataclasses import replace
from functools import cache

import torch

from autopar.graph.graph import Graph
from autopar.plan.mesh import Mesh
from autopar.plan.plan import BlockLayout, Plan
from autopar.rules.strategy import Typing
from autopar.tracing.trace import trace
from tests.support.distributed.plans import names_of, unpriced
from tests.support.distributed.subjects import hf_model

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
