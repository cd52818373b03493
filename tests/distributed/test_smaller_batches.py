from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import UsageError
from autopar.graph.graph import Graph
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.runtime.parallel_model import ParallelModel
from autopar.verification.rank_pool import WorkerPool
from autopar.verification.reference import loss_of
from tests.support.close import assert_close
from tests.support.clusters import two_kinds
from tests.support.distributed.layouts import LAYOUTS, on_ranks
from tests.support.distributed.oddities import COUNTING, MEETING, Residual, Routed
from tests.support.distributed.plans import estimated, make_plan
from tests.support.distributed.subjects import HfSubject, graph_of
from tests.support.parallel import gradients, state, train_step

Batch = Mapping[str, Tensor]


def stepped(
    model: nn.Module, steps: Sequence[Batch], rests: Sequence[Batch], rate: float = 0.1, called: bool = False
) -> dict[str, Any]:
    """Steps of gradient descent, and then what ``eval()`` makes of ``rests``, by ranks or by one device; what is refused is its error.

    ``called``: the caller calls backward.
    """
    found = dict[str, Any](steps=[], rests=[])
    parallel = model if isinstance(model, ParallelModel) else None
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for batch in steps:
        optimizer.zero_grad()
        try:
            loss = loss_of(model(**batch)) if called else train_step(model, batch)
        except UsageError as error:
            found["steps"].append(str(error))
            continue
        if called:
            loss.backward()
        found["steps"].append((loss.detach().clone(), gradients(model)))
        optimizer.step()
    found["state"] = state(model)
    model.train(isinstance(model, Routed))  # its norm has no statistics
    for batch in rests:
        try:
            with torch.no_grad():
                output = model(**batch)
                loss = loss_of(output) if parallel is None else parallel.evaluate(batch)
            found["rests"].append((loss, output))
        except UsageError as error:
            found["rests"].append(str(error))
    assert all(torch.equal(value, found["state"][name]) for name, value in state(model).items())
    return found


SUBJECTS = {"gpt2": HfSubject("gpt2"), "counting": COUNTING}
SIZES = (16, 15, 7, 8, 1)
"""Of a plan's 16: complete, odd, less than a sample for each rank, and as many as a rank may take of a complete one."""

MICRO_BATCHES = {
    "dp4": 4, "dp4 ZeRO 3": 2, "tp2 x dp2 ZeRO 1": 8, "pp2 two virtual stages": 4,
    "pp2 x dp2 ZeRO 3 made again": 4,
}  # fmt: skip


@cache
def of_one_device(kind: str) -> tuple[list[Any], list[Any]]:
    batches = [SUBJECTS[kind].make_batch(size, seed=size) for size in SIZES]
    return batches, stepped(SUBJECTS[kind].build(), batches, [], rate=0.0)["steps"]


def check(pool: WorkerPool, kind: str, plan: Plan, called: bool = False) -> None:
    subject, (batches, wanted) = SUBJECTS[kind], of_one_device(kind)
    job = partial(stepped, rate=0.0, called=called)
    for found in on_ranks(pool, job, subject, plan, graph_of(subject), batches, batches):
        for size, mine, rest, theirs in zip(SIZES, found["steps"], found["rests"], wanted, strict=True):
            assert (mine[0].item(), rest[0].item()) == pytest.approx((theirs[0].item(),) * 2, rel=1e-5), size
            assert_close(mine[1], theirs[1], 1e-4, place=f"{size} samples")


CASES = [*((name, "gpt2") for name in MICRO_BATCHES), ("dp4", "counting"), ("tp2 x dp2 ZeRO 1", "counting")]


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_smaller_batches_equal_one_device(pool: WorkerPool, layout: str, kind: str) -> None:
    mesh, options = LAYOUTS[layout]
    micro_batch_size, graph = MICRO_BATCHES[layout], graph_of(SUBJECTS[kind])
    check(pool, kind, make_plan(graph, mesh, global_batch_size=16, micro_batch_size=micro_batch_size, **options))


def test_a_called_backward_of_smaller_batches_equals_one_device(pool: WorkerPool) -> None:
    graph = graph_of(SUBJECTS["counting"])
    plan = make_plan(graph, Mesh(dp_replicate=2), global_batch_size=16, micro_batch_size=4)
    check(pool, "counting", plan, called=True)


@pytest.mark.parametrize("zero", [0, 3])
def test_smaller_batches_of_unequal_shares_equal_one_device(pool: WorkerPool, zero: int) -> None:
    graph, pins = graph_of(SUBJECTS["gpt2"]), ["data_shares=3-1", f"zero={zero}"]
    check(pool, "gpt2", estimated(graph, cluster=two_kinds(1, 1, factor=3.0), global_batch_size=16, pins=pins))


STEPS = (8, 6, 8, 5, 7, 1)
RESTS = (8, 3, 7)

MEETING_LAYOUTS = {
    "dp4 ZeRO 3 recomputed": ["dp_shard=4", "zero=3", "recompute=full"],
    "pp2 x dp2": ["pp=2", "dp_replicate=2"],
    "tp2 x dp2": ["tp=2", "dp_replicate=2"],
    "tp2 x dp2 by channels": ["tp=2", "dp_replicate=2", "layers.*.conv.weight=tp:S(0)", "layers.*.norm.*=tp:S(0)"],
}


@cache
def traced(kind: type[nn.Module]) -> Graph:
    return MEETING[kind].trace(samples=8, precision="fp64", global_batch_size=8)


@pytest.mark.parametrize(("kind", "layout"), [
    *((Residual, layout) for layout in MEETING_LAYOUTS if layout != "tp2 x dp2"), (Routed, "dp4 ZeRO 3 recomputed"), (Routed, "tp2 x dp2"),
])  # fmt: skip
def test_smaller_batches_of_samples_that_meet_equal_one_device(pool: WorkerPool, kind: Any, layout: str) -> None:
    """Batch norms, and losses of means, in steps and evaluations; but for the steps of so many samples as are refused."""
    too_many = (1,) if "dp4" in layout else (1, 7)
    subject, graph = MEETING[kind], traced(kind)
    plan = estimated(graph, cluster="cpu:1x4", global_batch_size=8, precision="fp64", pins=MEETING_LAYOUTS[layout])
    steps = [subject.make_batch(size, seed=seed + 1) for seed, size in enumerate(STEPS)]
    rests = [subject.make_batch(size, seed=seed + 9) for seed, size in enumerate(RESTS)]
    wanted = stepped(subject.build(), [s for s in steps if len(s["labels"]) not in too_many], rests)
    for found in on_ranks(pool, stepped, subject, plan, graph, steps, rests):
        done = [step for step, size in zip(found["steps"], STEPS, strict=True) if size not in too_many]
        refused = [step for step, size in zip(found["steps"], STEPS, strict=True) if size in too_many]
        assert all("drop_last=True" in error for error in refused), refused
        assert_close(done, wanted["steps"], 1e-9, place="steps")
        assert_close(found["state"], wanted["state"], 1e-9, place="state")
        for size, rest, one in zip(RESTS, found["rests"], wanted["rests"], strict=True):
            if isinstance(rest, str):
                assert size in too_many and kind is Routed, rest
            else:
                assert_close(rest, one, 1e-9, place=f"{size} samples")
