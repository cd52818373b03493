from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from autopar.graph.graph import Graph, Ref
from autopar.plan.mesh import Mesh, P, R, S
from autopar.plan.plan import FP64
from autopar.rules.apply import BATCH
from autopar.runtime.job import start, stop
from autopar.verification.against_one_device import in_dtype
from autopar.verification.record import PRELUDE, OneDevice, Tape, Watch, attach
from autopar.verification.slices import Split
from autopar.verification.walk import Trail
from tests.support.distributed.plans import make_plan
from tests.support.distributed.subjects import HfSubject, graph_of
from tests.support.parallel import on_rank

SUBJECT = HfSubject("gpt2", depth=1)


@cache
def traced() -> Graph:
    return in_dtype(graph_of(SUBJECT), torch.float32, torch.float64)


@pytest.fixture(scope="module")
def recorded() -> Iterator[tuple[Trail, Tape, Tape, dict[Ref, torch.Tensor]]]:
    """One rank's tape and one device's, of everything."""
    start("cpu")
    batch, graph = SUBJECT.make_batch(4, seed=0), traced()
    plan = replace(make_plan(graph, Mesh(), global_batch_size=4, micro_batch_size=2, recompute="full"), precision=FP64)
    trail = Trail(plan, traced())
    both = [trail.boundaries(), *(trail.inside(block.index) for block in trail.local.blocks)]
    here, there = (
        Watch(
            values=frozenset().union(*(pair[side].values for pair in both)),
            edges=frozenset().union(*(pair[side].edges for pair in both)),
            places=frozenset().union(*(pair[side].places for pair in both)),
        )
        for side in (0, 1)
    )
    parallel = on_rank(SUBJECT.build(), plan, traced())
    tape = attach(parallel, here)
    parallel.train_step(batch)
    one = OneDevice(trail.whole, SUBJECT.build())
    yield trail, tape, one.record(batch, there), one.values
    stop()


def walk(recorded: Any, table: str, key: Any) -> Any:
    """Where the walk ends when one recorded tensor is off."""
    trail, tape, own, values = recorded
    changed = {**getattr(tape, table)}
    changed[key] = changed[key] + 1
    return trail.first([replace(tape, **{table: changed})], own, values)


def test_a_right_step_has_no_difference(recorded: Any) -> None:
    trail, tape, own, values = recorded
    assert trail.first([tape], own, values) is None
    made = sum(len(op.outputs) for op in (*trail.local.prelude, *trail.local.ops))
    assert len({ref for ref, _ in tape.values}) > 0.9 * made
    assert {number for _, number in tape.values} == {0, 1}


@pytest.mark.parametrize("index", [0, 1, 2])
def test_every_value_is_compared(recorded: Any, index: int) -> None:
    trail = recorded[0]
    for op in trail.local.block_ops(trail.local.blocks[index])[:: 3 - index]:
        spot = walk(recorded, "values", (Ref(op.name), 1))
        assert (spot.kind, spot.place, spot.op) == ("value", index, op)
        assert spot.mismatch.micro_batches in ((1,), (0, 1))  # both where summands are added


def test_the_prelude_is_compared(recorded: Any) -> None:
    op = recorded[0].local.prelude[-1]
    spot = walk(recorded, "values", (Ref(op.name), 0))
    assert (spot.kind, spot.place, spot.op.name) == ("value", PRELUDE, op.name)


def test_a_gradient_passed_back_is_the_operators_fault(recorded: Any) -> None:
    trail, tape = recorded[0], recorded[1]
    for name, position, number in list(tape.edges)[::3]:
        spot = walk(recorded, "edges", (name, position, number))
        assert (spot.kind, spot.op.name) == ("passed", name)
        assert spot.ref == spot.op.operands[position]
        assert trail.local.block_of(name) == spot.place


def test_a_gradient_that_is_not_the_sum_of_what_was_passed(recorded: Any) -> None:
    ref = recorded[0].local.block_outputs(recorded[0].local.blocks[0])[0]
    spot = walk(recorded, "gradients", (ref, 0))
    assert (spot.kind, spot.place, spot.ref) == ("arrived", 0, ref)


@pytest.mark.parametrize(("wanted", "words"), [
    (lambda local, place, ref: local.is_parameter(ref) and place == 1, "the value of parameter transformer.h.0."),
    (lambda local, place, ref: any(leaf.name == ref.name for leaf in local.inputs), "part of the input "),
    (lambda local, place, ref: ref in local.sums, "a sum over the global batch"),
    (lambda local, place, ref: place == 1 and local.producer(ref) in local.ops, "as it arrives"),
])  # fmt: skip
def test_what_a_block_reads_is_compared(recorded: Any, wanted: Callable[[Graph, int, Ref], bool], words: str) -> None:
    trail, tape = recorded[0], recorded[1]
    key = next(key for key in tape.reads if wanted(trail.local, key[0], key[1]))
    spot = walk(recorded, "reads", key)
    assert (spot.kind, spot.place, spot.ref) == ("read", *key[:2])
    assert words in trail.words(spot)[0]


# --- parts and the whole

MESH = Mesh(pp=2, dp_replicate=2, cp=2, tp=2)
LAYOUT = ((BATCH, S(0)), ("cp", S(1)), ("tp", S(1)))


def pieces(split: Split, whole: torch.Tensor, layout: Any) -> dict[tuple[int, int], torch.Tensor]:
    places = [(rank, number) for rank in range(8) for number in range(2)]  # one pipeline stage
    return {place: split.part(whole, layout, split.coordinate(*place)).clone() for place in places}


def test_the_rank_that_is_wrong_is_named() -> None:
    split = Split(MESH, 2, frozenset(("cp",)))
    whole = torch.rand(8, 8, dtype=torch.float64)
    found = pieces(split, whole, LAYOUT)
    assert split.compare(found, whole, LAYOUT) is None
    found[3, 1][0, 0] += 0.5
    wrong = split.compare(found, whole, LAYOUT)
    assert (wrong.ranks, wrong.micro_batches, wrong.local_shape, wrong.shape) == ((3,), (1,), (2, 2), (8, 8))
    assert [sample.index for sample in wrong.samples] == [(0, 0)]
    assert wrong.samples[0].found - wrong.samples[0].expected == pytest.approx(0.5)


def test_summands_are_added_and_none_is_zero() -> None:
    split = Split(MESH, 2, frozenset())
    whole = torch.rand(8, 8, dtype=torch.float64)
    layout = ((BATCH, P), ("cp", R), ("tp", S(1)))
    found: dict[tuple[int, int], torch.Tensor | None] = dict.fromkeys(pieces(split, whole, layout))
    for rank in range(4):  # data rank 0, first micro-batch: the one summand
        found[rank, 0] = split.part(whole, layout, split.coordinate(rank, 0))
    assert split.compare(found, whole, layout) is None
    found[5, 1] = torch.full((8, 4), 1e-3, dtype=torch.float64)
    wrong = split.compare(found, whole, layout)
    assert (wrong.ranks, wrong.micro_batches) == ((1, 5), (0, 1))  # all summands of that part


@pytest.mark.parametrize(("values", "whole", "how", "at_least"), [
    # what counts nothing may hold anything
    ([1.0, float("nan")], [1.0, 1.0], {"counts": torch.tensor([1.0, 0.0])}, None),
    ([1.0, float("nan")], [1.0, 1.0], {}, float("inf")),
    # what should cancel may leave rounding
    ([1e-13, 1e-13], [0.0, 0.0], {"scale": 1.0}, None),
    ([1e-13, 1e-13], [0.0, 0.0], {"scale": 1e-3}, 0.0),
    # what is all zero has no measure
    ([1.0, 1.0], [0.0, 0.0], {}, float("inf")),
])  # fmt: skip
def test_what_differs_by_what_it_is_measured_by(values: Any, whole: Any, how: dict[str, Any], at_least: Any) -> None:
    found, wanted = (torch.tensor(some, dtype=torch.float64) for some in (values, whole))
    wrong = Split(Mesh(), 1, frozenset()).compare({(0, 0): found}, wanted, (), **how)
    assert at_least is None if wrong is None else wrong.error >= at_least
