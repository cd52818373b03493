import threading
from collections.abc import Iterator

import pytest
import spmd_types
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from spmd_types.checker import typecheck
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.utils import prune
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.errors import InternalError, RuleError, UsageError
from autopar.ops import collectives, kernels, plain, seeded
from autopar.ops import sharded as sharded_ops
from autopar.ops.opaque import deep_copy
from autopar.plan.mesh import I, Mesh, P, R, S, Type, conversion
from tests.support.close import assert_close
from tests.support.lower.ranks import run_ranks, this_mesh
from tests.support.said import refuses

SHAPE = (4, 6)
TYPES = (I, R, P, S(0), S(1))


def part(whole: Tensor, kind: Type, size: int, rank: int) -> Tensor:
    """What one rank holds of ``whole``; the summands of a pending sum differ."""
    if kind.is_split:
        return whole.chunk(size, kind.dim)[rank].clone()
    if kind == P:
        weights = torch.arange(1.0, size + 1, dtype=whole.dtype)
        return whole * weights[rank] / weights.sum()
    return whole.clone()


def together(parts: list[Tensor], kind: Type) -> Tensor:
    if kind.is_split:
        return torch.cat(parts, kind.dim)
    if kind == P:
        return torch.stack(parts).sum(0)
    for other in parts[1:]:
        assert_close(other, parts[0])
    return parts[0]


CHANGES = [
    (a, b)
    for a in TYPES
    for b in TYPES
    if a != b and (found := conversion(a, b, requires_grad=True)) is not None and found.target
]


@pytest.mark.parametrize(("source", "target"), CHANGES, ids=str)
@pytest.mark.parametrize(("size", "dtype"), [(2, torch.float32), (1, torch.float32), (2, torch.bfloat16)], ids=str)
def test_a_change_of_type_keeps_the_tensor_and_its_gradient(
    source: Type, target: Type, size: int, dtype: torch.dtype
) -> None:
    """Gradients of half precision are summed in it."""
    whole, gradient = torch.randn(SHAPE, dtype=dtype), torch.randn(SHAPE, dtype=dtype)
    found = conversion(source, target, requires_grad=True)
    call = kernels.resolve(found.target)

    def work(rank: int) -> tuple[Tensor, Tensor]:
        x = part(whole, source, size, rank).requires_grad_()
        y = call(x, "tp", *found.arguments(source, target))
        # the gradient arrives transposed in memory, as it may from any operator
        y.backward(part(gradient, target.gradient, size, rank).t().contiguous().t())
        return y.detach(), x.grad

    outputs, gradients = zip(*run_ranks(Mesh(tp=size), work), strict=True)
    assert_close(together(list(outputs), target), whole)
    assert_close(together(list(gradients), source.gradient), gradient)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_tensors_of_any_dtype_move(dtype: torch.dtype) -> None:
    whole = (torch.arange(24).reshape(SHAPE) % 3).to(dtype)

    def work(rank: int) -> list[Tensor]:
        mine = collectives.shard(whole, "tp", 0, "R")
        other = collectives.all_to_all(mine, "tp", 1, 0)
        return [collectives.all_gather(mine, "tp", 0, "R"), collectives.all_gather(other, "tp", 1, "I")]

    for moved in run_ranks(Mesh(tp=2), work):
        assert all(torch.equal(tensor, whole) for tensor in moved)


def test_an_uneven_split_is_refused() -> None:
    with pytest.raises(InternalError, match="of 3 does not divide by tp=2"):
        run_ranks(Mesh(tp=2), lambda rank: collectives.shard(torch.ones(3), "tp", 0, "R"))


def test_backward_of_a_change_needs_no_mesh() -> None:
    def work(rank: int) -> Tensor:
        x = torch.ones(2, requires_grad=True)
        y = collectives.invariant_to_replicate(x, "tp")
        with spmd_types.set_current_mesh(frozenset()):
            y.sum().backward()
        return x.grad

    assert all(torch.equal(grad, torch.full((2,), 2.0)) for grad in run_ranks(Mesh(tp=2), work))


def test_a_loss_of_logits_in_half_precision_is_summed_in_float32() -> None:
    loss = plain.cross_entropy_sum(torch.randn(2, 3, 7).bfloat16(), torch.zeros(2, 3, dtype=torch.long))
    assert loss.dtype == torch.float32


def test_every_target_resolves_or_is_named() -> None:
    assert kernels.resolve("aten.linear.default") is torch.ops.aten.linear.default
    assert kernels.resolve("autopar.dropout") is seeded.dropout
    assert kernels.resolve("autopar.embedding_vocabulary").__module__ == "autopar.ops.sharded"
    for missing in ("autopar.nothing", "aten.nothing.default", "nothing"):
        refuses(RuleError, "in torch or autopar", kernels.resolve, missing)


# --- random streams ------------------------------------------------------------------------------


WORDS = st.tuples(st.integers(0, 2**62), st.integers(0, 1000), st.integers(0, 1000))


@given(st.lists(WORDS, min_size=2, unique=True, max_size=50))
def test_streams_of_different_seeds_and_operators_differ(words: list[tuple[int, int, int]]) -> None:
    seeds = {seeded.stream_seed((a, b), seed, ()) for seed, a, b in words}
    assert len(seeds) == len(words) and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("call", ["dropout", "attention"])
def test_ranks_share_a_stream_unless_the_tensor_is_split(call: str) -> None:
    turn = threading.Lock()  # torch has one generator for all threads

    def draw(axes: tuple[str, ...]) -> Tensor:
        if call == "dropout":
            return seeded.dropout(torch.ones(64), 0.5, 3, 7, axes)
        ones = torch.ones(1, 1, 8, 8)
        with turn:
            return seeded.attention(ones, ones, torch.eye(8).expand(1, 1, 8, 8), None, 0.5, salt=3, seed=7, axes=axes)

    before = torch.random.get_rng_state()
    drawn = run_ranks(
        Mesh(dp_shard=2, tp=2), lambda rank: [draw(()), draw(("tp",)), draw(("dp_shard", "tp")), draw(("tp",))]
    )
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's stream is left alone"
    assert all(torch.equal(rank[0], drawn[0][0]) for rank in drawn)
    assert torch.equal(drawn[0][1], drawn[2][1]) and not torch.equal(drawn[0][1], drawn[1][1])
    assert len({tuple(rank[2].flatten().tolist()) for rank in drawn}) == 4
    assert all(torch.equal(rank[1], rank[3]) for rank in drawn), "a recomputation repeats itself"


# --- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_the_gradient_of_a_parameter_stays_a_pending_sum(placement: Replicate | Shard) -> None:
    def work(rank: int) -> tuple[Tensor, Tensor]:
        leaf = DTensor.from_local(torch.ones(2), this_mesh()["tp"], [placement], run_check=False).requires_grad_()
        mine = plain.local(leaf)
        (mine * (rank + 1)).sum().backward()
        assert isinstance(leaf.grad, DTensor) and leaf.grad.placements == (placement,)
        return mine, leaf.grad.to_local()

    for rank, (mine, gradient) in enumerate(run_ranks(Mesh(tp=2), work)):
        assert mine.shape == (2,)
        assert_close(gradient, torch.full((2,), rank + 1.0))
    parameter = torch.nn.Parameter(torch.ones(2))
    assert plain.local(parameter) is parameter


# --- random operators ----------------------------------------------------------------------------


def test_attention_draws_as_if_all_generators_were_seeded_and_without_dropout_seeds_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q = torch.randn(2, 2, 8, 4, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    found = seeded.attention(q, q, q, None, 0.5, salt=3, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded.stream_seed(3, 5, ()))
        assert torch.equal(found, torch.nn.functional.scaled_dot_product_attention(q, q, q, None, 0.5))
    monkeypatch.setattr(seeded, "stream_seed", None)  # a call would raise
    q = torch.randn(2, 2, 8, 4)
    assert torch.equal(seeded.attention(q, q, q, is_causal=True), seeded.attention(q, q, q, None, 0.0, True, seed=1))


def test_only_the_generator_of_the_tensors_device_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [torch.Generator().manual_seed(n) for n in (1, 2)]
    monkeypatch.setattr(torch.cuda, "default_generators", devices)
    states = [g.get_state() for g in (torch.default_generator, *devices)]
    with seeded.seeded((torch.device("cuda", 1),), 3, 5, ()):
        assert devices[1].initial_seed() == seeded.stream_seed(3, 5, ()) and devices[0].initial_seed() == 1
        assert torch.equal(torch.get_rng_state(), states[0])
    now = [g.get_state() for g in (torch.default_generator, *devices)]
    assert all(torch.equal(a, b) for a, b in zip(now, states, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("p", [0.25, 0.3, 1.0])
def test_dropout_keeps_what_its_stream_says_forward_and_backward(dtype: torch.dtype, p: float) -> None:
    x = torch.randn(6, 10, dtype=dtype).t().requires_grad_()
    found = seeded.dropout(x, p, 3, 5)
    kept = torch.empty(10, 6, dtype=torch.bool)
    kept.bernoulli_(1 - p, generator=torch.Generator().manual_seed(seeded.stream_seed(3, 5, ())))
    scale = 1 / (1 - p) if p < 1 else 0.0
    close = torch.finfo(dtype).eps * 2
    assert_close(found, x * kept * scale, close)
    weight = torch.randn(10, 6, dtype=dtype)
    (grad,) = torch.autograd.grad(found, x, weight)
    assert_close(grad, weight * kept * scale, close)
    assert seeded.dropout(x, 0.0) is x


def test_ctc_losses_of_targets_that_are_no_classes_are_nan() -> None:
    """Behind a sample's length targets count nothing, whatever they are."""
    logs = torch.randn(6, 4, 5).log_softmax(-1)
    targets = torch.tensor([[1, 2, 3], [4, 2, -100], [1, 5, 2], [-1, 2, 3]])
    lengths = torch.full((4,), 6), torch.tensor([3, 2, 2, 1])
    found = plain.ctc_losses(logs, targets, *lengths, 0, False)
    wanted = torch.nn.functional.ctc_loss(logs[:, :2], targets[:2], *(n[:2] for n in lengths), reduction="none")
    assert_close(found[:2], wanted)
    assert found[2:].isnan().all()


def test_places_are_filled_by_sample_and_by_no_other_one() -> None:
    x, source = torch.randn(3, 4, 2, requires_grad=True), torch.randn(3, 2, 2, requires_grad=True)
    places = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 1]]).bool()[..., None].expand_as(x)
    found, wanted = plain.masked_scatter_by_sample(x, places, source), x.masked_scatter(places, source)
    weight = torch.randn_like(x)
    assert torch.equal(found, wanted)
    gradients = (torch.autograd.grad(y, (x, source), weight) for y in (found, wanted))
    assert all(map(torch.equal, *gradients))
    places = torch.tensor([2, 1, 3])[:, None, None].gt(torch.arange(4)[:, None]).expand_as(x)
    said = r"of another sample.*4 values for each sample, and \[4, 2, 6\] places\. Give each sample"
    refuses(UsageError, said, plain.masked_scatter_by_sample, x, places, source)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group(backend="fake", rank=1, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_types_of_the_vocabulary_parallel_operators(mesh: DeviceMesh, smoothing: float) -> None:
    with spmd_types.set_current_mesh(mesh), FakeTensorMode(), typecheck(strict_mode="strict", local=True):
        logits = torch.randn(3, 7, 6, requires_grad=True)
        target = torch.randint(0, 12, (3, 7))
        weight = torch.randn(6, 5, requires_grad=True)
        varying, replicated = spmd_types.V, spmd_types.R
        spmd_types.assert_type(logits, {"tp": varying, "dp": varying})
        spmd_types.assert_type(target, {"tp": replicated, "dp": varying})
        spmd_types.assert_type(weight, {"tp": varying, "dp": replicated})
        rows = sharded_ops.embedding_vocabulary(weight, target, "tp", 3)
        loss = sharded_ops.cross_entropy_vocabulary(logits, target, "tp", -100, smoothing)
        assert spmd_types.get_axis_local_type(rows, "tp") is spmd_types.P
        assert spmd_types.get_axis_local_type(loss, "tp") is spmd_types.I
        assert spmd_types.get_axis_local_type(loss, "dp") is varying


def test_a_pruned_model_is_copied_though_its_weight_has_a_history() -> None:
    model = prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)
    copied, x = deep_copy(model), torch.randn(2, 4)
    assert copied.weight_orig is not model.weight_orig
    assert torch.equal(copied(x), model(x)) and copied.weight.grad_fn is not None
