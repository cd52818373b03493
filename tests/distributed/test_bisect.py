from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

import autopar.lower.program
import autopar.ops.collectives
import autopar.ops.kernels
from autopar.errors import VerificationError
from autopar.graph.graph import Graph, Op
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import with_free_links
from autopar.lower.read_plan import local_graph
from autopar.models.resolve import resolve_model
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.verification.against_one_device import verify
from autopar.verification.compared_models import VerifiedModel
from autopar.verification.rank_pool import WorkerPool
from autopar.verification.reference import Subject
from autopar.verification.results import GRAPH_TOLERANCE, VerifyReport, render_verification, verification
from tests.support.distributed.oddities import CHOOSING, REMEMBERING
from tests.support.distributed.plans import estimated, make_plan
from tests.support.distributed.subjects import HfSubject, Unpadded
from tests.support.said import refuses


@dataclass(frozen=True)
class Faulty:
    """A subject in whose workers a fault is planted: only they unpickle it.

    ``fault``: an operator's name in one rank's graph, and what is wrong of it, one of :data:`KINDS`, or ``sum``: the pending sum
    of the gradients of the parameters that it reads is forgotten.
    """

    subject: Subject
    fault: tuple[str, str] | None

    def __reduce__(self) -> Any:
        return _arrive, (self.subject, self.fault)

    def build(self, *, drops: bool = False) -> nn.Module:
        return self.subject.build(drops=drops)

    def make_batch(self, batch_size: int, *, seed: int) -> dict[str, Tensor]:
        return self.subject.make_batch(batch_size, seed=seed)


def _arrive(subject: Subject, fault: tuple[str, str] | None) -> Faulty:
    """In a worker: programs are lowered with the fault from now on, or without one again."""

    def lowered(plan: Plan, graph: Graph, data_rank: int = 0) -> Graph:
        local = local_graph(plan, graph, data_rank)
        return local if fault is None else planted(local, *fault)

    autopar.lower.program.local_graph = lowered
    return Faulty(subject, fault)


def planted(local: Graph, name: str, kind: str) -> Graph:
    """The graph with one operator made wrong."""
    (op,) = [op for op in local.ops if op.name == name]
    if kind == "sum":
        read = {ref.name for ref in op.operands}
        assert any(p.name in read and p.gradient_sum_axes for p in local.parameters)
        forgotten = (replace(p, gradient_sum_axes=()) if p.name in read else p for p in local.parameters)
        return replace(local, parameters=tuple(forgotten))
    setattr(autopar.ops.collectives, f"fault_{kind}", KINDS[kind](op))
    autopar.ops.kernels.resolve.cache_clear()
    wrong = replace(op, target=f"autopar.fault_{kind}")
    return replace(local, ops=tuple(wrong if one is op else one for one in local.ops))


def _scaled(made: Any, forward: float, backward: float) -> Any:
    """What an operator makes, times one number forward and another backward, in its first tensor."""
    first, *rest = (made,) if isinstance(made, Tensor) else made
    wrong = backward * first + (forward - backward) * first.detach()
    return wrong if isinstance(made, Tensor) else (wrong, *rest)


def _no_sum(op: Op) -> Callable[..., Tensor]:
    """A reduce-scatter that hands on the rank's own summand."""
    assert op.target == "autopar.reduce_scatter"
    return lambda x, axis, dim: autopar.ops.collectives.shard(x, axis, dim, "R")


def _no_gradient_sum(op: Op) -> Callable[..., Tensor]:
    """An all-gather for readers that do the same work, where each does its own."""
    assert op.target == "autopar.all_gather"
    return lambda x, axis, dim, _: autopar.ops.collectives.all_gather(x, axis, dim, "I")


def _wrong(forward: float, backward: float, *, last: bool = False) -> Callable[[Op], Callable[..., Tensor]]:
    """A wrong value, or a wrong gradient that is passed back; ``last``: on the last rank alone."""

    def make(op: Op) -> Callable[..., Tensor]:
        right = autopar.ops.kernels.resolve(op.target)

        def call(*args: Any, **kwargs: Any) -> Tensor:
            made = right(*args, **kwargs)
            is_wrong = not last or dist.get_rank() == dist.get_world_size() - 1
            return _scaled(made, forward, backward) if is_wrong else made

        return call

    return make


KINDS: Mapping[str, Callable[[Op], Callable[..., Tensor]]] = {
    "no_sum": _no_sum, "no_gradient_sum": _no_gradient_sum, "one_rank": _wrong(1.25, 1.0, last=True),
    "value": _wrong(1.25, 1.0), "gradient": _wrong(1.0, 1.25),
}  # fmt: skip


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    """Workers of their own: faults stay where they are planted."""
    with WorkerPool(4) as pool:
        yield pool


@cache
def traced(kind: str) -> tuple[HfSubject, Graph]:
    subject = HfSubject(kind) if kind == "gpt2" else Unpadded(kind)
    return subject, subject.trace()


def made(mesh: Mesh, **options: Any) -> tuple[HfSubject, Graph, Plan]:
    subject, graph = traced("gpt2")
    micro_batch = 8 // (2 * mesh.data)
    return subject, graph, make_plan(graph, mesh, global_batch_size=8, micro_batch_size=micro_batch, **options)


def with_ring() -> tuple[HfSubject, Graph, Plan]:
    subject, graph = traced("llama")
    pins = ["cp=2", "zero=0", "cp_attention=ring", "micro_batch=2"]
    return subject, graph, estimated(graph, cluster="cpu:1x2", global_batch_size=4, pins=pins)


_TEXT = "num_hidden_layers=1&hidden_size=16&num_attention_heads=2&intermediate_size=32&vocab_size=32"
_SIDES = ("layers=1", "attention_heads=2", "ffn_dim=32")
_SPEECH = "&".join(f"{side}_{option}" for side in ("encoder", "decoder") for option in _SIDES)


def of_family(model: str, pins: str, tokens: int | None = 8) -> tuple[VerifiedModel, Graph, Plan]:
    subject = VerifiedModel(resolve_model(model, sequence_length=tokens), masked=True)
    graph, cluster = subject.trace(), with_free_links(Cluster.parse("cpu:1x2"))
    return subject, graph, estimated(graph, cluster=cluster, global_batch_size=4, pins=pins.split())


def the(local: Graph, place: int | str, target: str, number: int = 0) -> Op:
    """The ``number``-th operator of a block, or inside of a module, whose target contains ``target``."""
    ops = local.ops if isinstance(place, str) else local.block_ops(local.blocks[place])
    return [op for op in ops if target in op.target and (isinstance(place, int) or place in op.module)][number]


VALUE, GRADIENT = "the value that it makes", "the gradient that it passes back to "


def verified(workers: WorkerPool, subject: Subject, plan: Plan, graph: Graph, **how: Any) -> VerifyReport:
    return verify(subject, plan, graph, pool=workers, run_timeout_s=300.0, **{"steps": 1, **how})


@pytest.mark.parametrize(("planned", "place", "target", "fault", "wrong", "ranks", "strategy"), [
    pytest.param(lambda: made(Mesh(tp=2)), 2, "reduce_scatter", "no_sum", VALUE, (0, 1),
                 "tp: change of type P to S(0)", id="a sum forgotten forward"),
    pytest.param(lambda: made(Mesh(dp_shard=2, tp=2), zero_stage=3, recompute="full"), 1, "gelu", "one_rank", VALUE, (3,),
                 "tp: ", id="one rank"),
    pytest.param(lambda: made(Mesh(tp=2)), 1, "all_gather", "no_gradient_sum", f"{GRADIENT}layer_norm_1", (0, 1),
                 "tp: change of type S(0) to R", id="a sum forgotten backward"),
    pytest.param(lambda: made(Mesh(pp=2, dp_replicate=2)), 3, "layer_norm", "gradient", f"{GRADIENT}add_11", (2, 3),
                 "batch: ", id="the second stage, backward"),
    pytest.param(with_ring, 1, "attention_ring", "gradient", GRADIENT, (0, 1), "cp: ring", id="a split sequence"),
    pytest.param(lambda: of_family(f"hf:mixtral?{_TEXT}&num_key_value_heads=2&num_local_experts=4&num_experts_per_tok=2", "tp=2"),
                 "layers.0.mlp", "autopar.experts", "gradient", GRADIENT, (0, 1), "tp: ", id="Mixtral"),
    pytest.param(lambda: of_family(f"hf:whisper?{_SPEECH}&d_model=16&max_source_positions=8&vocab_size=32&max_target_positions=8"
                                   "&num_mel_bins=8", "dp_replicate=2"),
                 "encoder", "aten.conv1d.default", "value", VALUE, (0, 1), "batch: ", id="Whisper"),
    pytest.param(lambda: of_family("hf:resnet?embedding_size=4&hidden_sizes=[4,8]&depths=[1,1]&layer_type=basic&num_labels=5",
                                   "dp_replicate=2 micro_batch=2", None),
                 "stages.1", "batch_norm", "gradient", GRADIENT, (0, 1), "batch: ", id="ResNet"),
])  # fmt: skip
def test_a_planted_fault_is_found(
    workers: WorkerPool, planned: Callable[[], Any], place: Any, target: str, fault: str, wrong: str, ranks: Any,
    strategy: str,
) -> None:  # fmt: skip
    """In a module it is in the last such operator; so it is where an all-gather is of activations."""
    subject, graph, plan = planned()
    local = local_graph(plan, graph)
    op = the(local, place, target, -1 if fault == "no_gradient_sum" or isinstance(place, str) else 0)
    block = local.block_of(op.name)
    report = verified(workers, Faulty(subject, (op.name, fault)), plan, graph)
    assert not report.passed
    difference = report.bisection.difference
    assert (difference.block, difference.op, difference.target) == (block, op.name, op.target)
    assert difference.module == op.module
    assert difference.what.startswith(wrong)
    assert difference.mismatch.ranks == ranks
    assert difference.mismatch.micro_batches == tuple(range(plan.num_micro_batches))
    text = render_verification(report, plan)
    stage = next(s.index for s in plan.stages if s.start <= block < s.stop)
    assert f"first difference  step 1, block {block} ({graph.blocks[block].label}), stage {stage}" in text
    assert f"operator          {op.name}: {op.target}" in text
    assert op.source in text
    assert strategy in text
    refuses(VerificationError, f"first in block {block} .*operator {op.name} ", report.check)


def test_a_forgotten_gradient_sum_is_no_operators_fault(workers: WorkerPool) -> None:
    subject, graph, plan = made(Mesh(tp=2), memory_price=0.01)
    op = the(local_graph(plan, graph), 2, "layer_norm")
    difference = verified(workers, Faulty(subject, (op.name, "sum")), plan, graph).bisection.difference
    assert "the sum of the gradient of parameter transformer.h.1.ln_1." in difference.what
    assert "(over tp)" in difference.what
    assert (difference.block, difference.op) == (2, op.name)


def test_a_right_program_is_not_bisected(workers: WorkerPool) -> None:
    subject, graph, plan = made(Mesh(pp=2, tp=2))
    report = verified(workers, Faulty(subject, None), plan, graph)
    assert report.passed
    assert report.bisection is None
    assert "first difference" not in render_verification(report, plan)


def test_nothing_is_found_where_nothing_differs(workers: WorkerPool) -> None:
    subject, graph, plan = made(Mesh(dp_shard=2), zero_stage=2)
    report = verified(workers, Faulty(subject, None), plan, graph, steps=2, find="always")
    assert report.bisection.difference is None
    assert report.bisection.steps == 2
    assert report.bisection.graph_loss < GRAPH_TOLERANCE
    assert verification(report)["bisection"]["difference"] is None
    text = render_verification(report, plan)
    assert "in float64 no loss, gradient or parameter differs in 2 steps" in text


@pytest.mark.parametrize(
    ("kind", "pin"), [("remembering", "tp=2"), ("choosing", "dp_replicate=2"), ("choosing", "tp=2")]
)
def test_no_difference_is_found_where_buffers_change_or_only_choose(workers: WorkerPool, kind: str, pin: str) -> None:
    """Buffers that a step changes are those of the step before; a parameter that only chooses is decayed as on one device."""
    subject = {"remembering": REMEMBERING, "choosing": CHOOSING}[kind]
    graph = subject.trace(8, global_batch_size=8)
    plan = estimated(graph, cluster="cpu:1x2", global_batch_size=8, pins=[pin])
    report = verified(workers, subject, plan, graph, steps=2, find="always")
    assert report.bisection.difference is None
