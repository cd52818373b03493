"""Micro-batches of other sizes are those that sharding gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from autopar.cost.blocks.block_work import block_work
from autopar.errors import RuleError
from autopar.graph.graph import Graph
from autopar.graph.rewrites import compact
from autopar.models.resolve import resolve_model
from autopar.planner.sharding.input_axes import solve_batch
from autopar.rules.apply import shard
from autopar.rules.local_graphs import Resizer, can_resize
from tests.support.distributed.mixtures import mixture_graph
from tests.support.planner.graphs import attention, llama_block


def gpt() -> Graph:
    return resolve_model("gpt:layers=5,hidden=16,heads=2,vocab=30", sequence_length=8, dtype=torch.float16).trace()


MODELS: dict[str, Callable[[], Graph]] = {
    "gpt": gpt,
    "attention": lambda: attention(batch=2),
    "llama": lambda: llama_block(batch=2, layers=5),
    "experts": mixture_graph,
}


@pytest.mark.parametrize("name", MODELS)
def test_a_micro_batch_is_that_of_sharding(name: str) -> None:
    small = compact(MODELS[name]())
    graph, typing = small.graph, solve_batch(small)

    def sizes(samples: int) -> dict[str, int]:
        return {"global_batch_size": 24, "micro_batch_size": samples}

    def own(samples: int) -> Graph:
        return shard(graph, replace(typing, size=Fraction(graph.batch_size, samples)), **sizes(samples))

    first = own(2)
    assert can_resize(graph, first, typing)
    resizer = Resizer(graph, first, typing, 24)
    for samples in (1, 3, 8):
        found = resizer.run(replace(typing, size=Fraction(graph.batch_size, samples)), samples)
        wanted = own(samples)
        assert replace(found, blocks=wanted.blocks) == wanted
        mine, theirs = ([block.hash for block in one.blocks] for one in (found, wanted))
        assert [mine.index(h) for h in mine] == [theirs.index(h) for h in theirs]
        assert found._index.made == wanted._index.made
        assert found._index.producers == wanted._index.producers
        assert [op.operands for op in found.ops] == [op.operands for op in wanted.ops]
        for block, other in zip(found.blocks, wanted.blocks, strict=True):
            mine, theirs = (block_work(one, own, "cuda") for one, own in ((found, block), (wanted, other)))
            assert replace(mine.shape, key="") == replace(theirs.shape, key="")
            assert replace(mine, shape=theirs.shape) == theirs
            assert (block.start, block.stop, block.label) == (other.start, other.stop, other.label)
            assert found.block_inputs(block) == wanted.block_inputs(other)
            assert found.live_across(block.stop) == wanted.live_across(other.stop)


def test_a_size_that_does_not_divide_is_named() -> None:
    small = compact(attention(batch=2))
    typing = solve_batch(small)
    first = shard(small.graph, replace(typing, size=Fraction(2)), global_batch_size=4, micro_batch_size=1)
    with pytest.raises(RuleError, match="the dim does not divide by"):
        Resizer(small.graph, first, typing, 4).run(replace(typing, size=Fraction(3)), 1)
