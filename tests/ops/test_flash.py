import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.cost.operators.matmul import _attention  # the works of attention alone
from autopar.cost.operators.operator_times import time_of_work
from autopar.graph.graph import Op, Ref, TensorSpec
from autopar.hardware.cluster import Cluster
from autopar.ops import collectives, flash
from autopar.ops import sequence as sequence_ops
from autopar.ops.kernels import takes_shapes
from autopar.ops.plain import wide
from tests.support.said import refuses

DTYPES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def drawn(
    dtype: torch.dtype, rows: int, columns: int, heads: int = 4, key_heads: int = 4
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows * 100 + columns)
    shapes = ((2, heads, rows, 16), (2, key_heads, columns, 16), (2, key_heads, columns, 16))
    q, k, v = (torch.randn(shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes)
    return q, k, v


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    wide = [x.double() for x in (q, k, v)]
    return F.scaled_dot_product_attention(*wide, mask, scale=0.3, enable_gqa=q.shape[1] != k.shape[1])


def assert_near(found: Tensor, wanted: Tensor, within: float) -> None:
    assert (found.double() - wanted.double()).abs().max() <= within * wanted.double().abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("cuts", [(0, 24), (0, 5, 24), (0, 8, 9, 24)])
def test_blocks_merge_to_the_whole(dtype: torch.dtype, key_heads: int, cuts: tuple[int, ...]) -> None:
    q, k, v = drawn(dtype, 7, 24, key_heads=key_heads)
    wanted = dense(q, k, v)
    weights = torch.linspace(-1, 1, q.numel()).view(q.shape).to(dtype)
    wanted.backward(weights.double())
    blocks = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    there = [(k[..., part, :].detach(), v[..., part, :].detach()) for part in blocks]
    found = [flash.forward(q.detach(), *block, 0.3, is_causal=False) for block in there]
    out, total = wide(found[0][0]).clone(), found[0][1].clone()
    for one, statistic, _ in found[1:]:
        flash.merge(out, total, one, statistic)
    assert_near(out, wanted, DTYPES[dtype])
    result = out.to(dtype)
    made = [flash.backward(weights, q.detach(), *block, result, total, (), 0.3, is_causal=False) for block in there]
    assert_near(sum((wide(gq) for gq, _, _ in made), torch.zeros(())), q.grad, 2 * DTYPES[dtype])
    for (_, gk, gv), part in zip(made, blocks, strict=True):
        assert_near(gk, k.grad[..., part, :], 2 * DTYPES[dtype])
        assert_near(gv, v.grad[..., part, :], 2 * DTYPES[dtype])


@pytest.mark.parametrize(
    ("changed", "shape"),
    [
        (0, (1, 4, 6, 16)), (0, (2, 3, 6, 16)), (1, (2, 2, 3, 16)), (2, (2, 2, 3, 16)), (2, (2, 1, 6, 16)),
        (1, (1, 2, 6, 16)), (0, (2, 4, 7, 16)),
    ],
)  # fmt: skip
def test_shapes_that_do_not_agree_are_refused(changed: int, shape: tuple[int, ...]) -> None:
    """Under a causal mask there are as many rows as columns."""
    for is_causal in (False, True):
        given = [x.detach() for x in drawn(torch.float32, 6, 6, key_heads=2)]
        flash.forward(*given, 0.3, is_causal=is_causal)
        given[changed] = torch.zeros(shape)
        if shape[2] == 7 and not is_causal:
            flash.forward(*given, 0.3, is_causal=False)
            continue
        said = "shapes of queries, keys and values of one attention disagree"
        refuses(ValueError, said, flash.forward, *given, 0.3, is_causal=is_causal)


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("value_width", [16, 24])
def test_gathered_attention_shares_heads(monkeypatch: pytest.MonkeyPatch, rank: int, value_width: int) -> None:
    monkeypatch.setattr(collectives, "group", lambda _: SimpleNamespace(rank=lambda: rank))
    q, k, _ = drawn(torch.float64, 6, 18, key_heads=2)
    v = (
        torch.linspace(-1, 1, 2 * 2 * 18 * value_width, dtype=torch.float64)
        .view(2, 2, 18, value_width)
        .requires_grad_()
    )
    seen = torch.ones(6, 18, dtype=torch.bool).tril(6 * rank)
    wanted = dense(q, k, v, seen)
    found = sequence_ops.attention_gathered(q, k, v, axis="cp", scale=0.3, enable_gqa=True)
    assert_near(found, wanted, 1e-12)
    weights = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view(wanted.shape)
    gradients = (torch.autograd.grad(out, (q, k, v), weights) for out in (found, wanted))
    for got, right in zip(*gradients, strict=True):
        assert_near(got, right, 1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("columns", [64, 65, 192])
def test_the_last_rows_on_a_gpu_equal_a_mask(columns: int, key_heads: int) -> None:
    """With dropout the output is linear in the values: their gradient is by the same numbers drawn as the output."""
    q, k, v = (x.detach().cuda().requires_grad_() for x in drawn(torch.bfloat16, 64, columns, key_heads=key_heads))
    mask = torch.ones(64, columns, dtype=torch.bool, device="cuda").tril(columns - 64)
    weights = torch.linspace(-1, 1, q.numel(), device="cuda").view(q.shape).to(q.dtype)
    wanted = dense(q, k, v, mask)
    gradients = torch.autograd.grad(wanted, (q, k, v), weights.double())
    found = flash.rows_after(q, k, v, 0.3, 0.0)
    assert_near(found, wanted, 2e-2)
    for got, right in zip(torch.autograd.grad(found, (q, k, v), weights), gradients, strict=True):
        assert_near(got, right, 4e-2)
    dropped = flash.rows_after(q, k, v, 0.3, 0.5)
    assert (dropped - found).abs().max() > 0.1 * found.abs().max()
    (grad,) = torch.autograd.grad(dropped, v, weights)
    here, there = ((grad * v).double().sum(), (dropped * weights).double().sum())
    assert (here - there).abs() <= 2e-2 * (dropped * weights).double().abs().sum()


def test_what_no_kernel_takes_is_known() -> None:
    assert takes_shapes("cuda", torch.bfloat16, 128, 128)
    for refused in (
        ("cuda", torch.float32, 128, 128),
        ("cuda", torch.float64, 128, 128),
        ("cuda", torch.float16, 264, 264),
        ("cuda", torch.float16, 60, 60),
        ("cuda", torch.bfloat16, 128, 64),
        ("cpu", torch.float32, 32, 16),
        ("meta", torch.float32, 32, 32),
        ("cuda without flash", torch.float16, 128, 128),
    ):
        assert not takes_shapes(*refused), refused


def attention(target: str, columns: int, dtype: torch.dtype, **options: Any) -> tuple[Op, list[TensorSpec]]:
    """Of a rank's 1024 rows, under a causal mask, with keys and values of so many."""
    query, key = (TensorSpec(shape=(1, 4, rows, 128), dtype=dtype, requires_grad=True) for rows in (1024, columns))
    kwargs = {"is_causal": True, "axis": "cp", **options}
    names = (Ref("q"), Ref("k"), Ref("v"))
    op = Op(name="mixed", target=target, args=names, kwargs=tuple(kwargs.items()), outputs=(query,))
    return op, [query, key, key]


ring = partial(attention, "autopar.attention_ring", 1024, ranks=4)
gathered = partial(attention, "autopar.attention_gathered", 4096)


def test_a_ring_is_priced_as_it_runs() -> None:
    """By flash kernels where they take it; else by products in float32, ten times as slow on an H100, whose scores move."""
    device = Cluster.parse("h100-sxm5-80gb:1x4").groups[0].device
    fused, unfused = ring(torch.bfloat16), ring(torch.bfloat16, dropout_p=0.1)
    fast, slow = (_attention(op, operands, "cuda") for op, operands in (fused, unfused))
    assert fast.is_attention
    assert (slow.is_attention, slow.dtype) == (False, "float32")
    out = 1024 * 128 * 4
    assert (fast.workspace_bytes, fast.backward_workspace_bytes) == (2 * out * 4, 2 * 3 * out * 4)
    assert fast.num_bytes == 4 * 2 * out + 4 * 4 * out * 3
    assert slow.num_bytes > 5 * fast.num_bytes
    bfloat = time_of_work(replace(slow, dtype="", num_bytes=0), unfused[0], device)
    single = time_of_work(replace(slow, num_bytes=0), unfused[0], device)
    assert single.forward_s > 5 * bfloat.forward_s
    exact = ring(torch.float64)
    assert _attention(*exact, "cuda").dtype == "float64" and _attention(*exact, "cpu").is_attention


def test_gathered_attention_is_priced_as_it_runs() -> None:
    """One flash kernel on a GPU, with dropout or without; under a mask where there is none."""
    mask = 1024 * 4096 * 3
    for options in ({}, {"dropout_p": 0.1}):
        fused = _attention(*gathered(torch.float16, **options), "cuda")
        masked = _attention(*gathered(torch.float16, **options), "cuda without flash")
        assert (fused.launches, fused.workspace_bytes, fused.is_attention) == (1, 0, True)
        assert masked.workspace_bytes == masked.backward_workspace_bytes == mask
    op, (query, key, _) = gathered(torch.float32, enable_gqa=True)
    shared = replace(key, shape=(1, 2, 4096, 128))
    kept = (
        _attention(op, [query, shared, shared], "cuda").saved_bytes
        - _attention(*gathered(torch.float32), "cuda").saved_bytes
    )
    assert kept == 2 * 4 * 4096 * 128 * 4  # keys and values of all heads
    on_host = _attention(*gathered(torch.float32), "cpu"), _attention(*gathered(torch.float32, dropout_p=0.1), "cpu")
    assert [work.is_attention for work in on_host] == [True, False]


def test_rings_of_float16_on_gpus_before_flash_are_products_of_float32() -> None:
    kinds = {
        name: Cluster.parse(f"{name}:1x4").groups[0].device.kernel_kind for name in ("v100-sxm2-16gb", "l4-24gb", "cpu")
    }
    assert kinds == {"v100-sxm2-16gb": "cuda without flash", "l4-24gb": "cuda", "cpu": "cpu"}
    old, new = (_attention(*ring(torch.float16), kinds[name]) for name in ("v100-sxm2-16gb", "l4-24gb"))
    assert (old.is_attention, old.dtype, new.is_attention) == (False, "float32", True)


@pytest.mark.parametrize(
    ("capability", "width", "drops", "is_taken"),
    [
        ((7, 5), 64, False, False), ((8, 0), 256, True, True), ((8, 6), 192, True, True), ((8, 9), 200, False, False),
        ((8, 9), 256, False, True), ((8, 9), 256, True, False), ((9, 0), 224, True, True),
    ],
)  # fmt: skip
def test_kernels_that_a_gpu_has_no_room_for_are_not_called(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], width: int, drops: bool, is_taken: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    with torch._subclasses.fake_tensor.FakeTensorMode():
        q = torch.empty(1, 2, 8, width, dtype=torch.float16, device="cuda")
    assert flash.takes(q, q, drops=drops) == is_taken
