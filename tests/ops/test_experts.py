"""Mixtures of experts against each token by itself in float64, in a loop and in grouped products, on one rank and several."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.ops import collectives
from autopar.ops import experts as expert_ops
from autopar.ops.kernels import _ACTIVATIONS as FUNCTIONS
from autopar.plan.mesh import Mesh
from tests.support.close import assert_close
from tests.support.lower.ranks import run_ranks

EXPERTS, WIDTH, INNER, TOKENS = 8, 16, 24, 12


def case(
    k: int = 2, routing: str = "even", *, gated: bool = True, activation: str = "silu", biased: bool = False
) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(k)
    has_gate = gated and "is_interleaved" not in activation
    inner = 2 * INNER if "is_interleaved" in activation else INNER

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def matrices(rows: int, columns: int) -> Tensor:
        return random(EXPERTS, *((columns, rows) if "is_transposed" in activation else (rows, columns)))

    scores = random(TOKENS, EXPERTS)
    if routing == "skewed":  # two experts get no token
        scores[:, [1, EXPERTS - 1]] = -100.0
    indices = scores.topk(k).indices
    if routing == "one":  # all choices of all tokens
        indices = torch.full_like(indices, EXPERTS - 2)
    hidden, weights, gradient = random(TOKENS, WIDTH), random(TOKENS, k), random(TOKENS, WIDTH)
    gate = matrices(INNER, WIDTH) if has_gate else None
    up, down = matrices(inner, WIDTH), matrices(WIDTH, INNER)
    biases = (random(EXPERTS, n) if biased and has else None for n, has in ((INNER, has_gate), (inner, True)))
    tensors = [hidden, weights, gate, up, down, *biases]
    return SimpleNamespace(tensors=tensors, indices=indices, gradient=gradient, activation=activation)


CASES = {
    **{f"{k} of all": case(k) for k in (1, 3, EXPERTS)},
    "experts without tokens": case(2, "skewed"),
    "one expert has all": case(2, "one"),
    "no gate": case(2, gated=False, activation="relu2"),
    "no gate, a bias": case(2, gated=False, activation="relu", biased=True),
    "gates within limits": case(2, activation="silu limit=2.0"),
    "biases": case(2, activation="gelu", biased=True),
    "transposed": case(2, activation="silu alpha=1.5 is_transposed", biased=True),
    "in turn, an expert without tokens": case(3, "skewed", activation="silu shift=1.0 is_interleaved"),
    "as of GPT-OSS": case(
        2, activation="silu alpha=1.702 limit=3.0 shift=1.0 is_transposed is_interleaved", biased=True
    ),
}


def leaves(
    of: SimpleNamespace, tokens: slice = slice(None), cut: Callable[[Tensor], Tensor] = torch.clone
) -> list[Tensor | None]:
    given = [None if x is None else x[tokens] if i < 2 else cut(x) for i, x in enumerate(of.tensors)]
    return [None if x is None else x.detach().clone().requires_grad_() for x in given]


def dense(of: SimpleNamespace) -> list[Tensor]:
    given = leaves(of)
    hidden, weights, gate, up, down, gate_bias, up_bias = given
    assert hidden is not None and weights is not None and up is not None and down is not None
    activation, *options = of.activation.split()
    numbers = dict(option.split("=") for option in options if "=" in option)
    alpha, limit, shift = (float(numbers.get(key, none)) for key, none in (("alpha", 1), ("limit", 1e9), ("shift", 0)))
    if "is_transposed" in options:
        gate, up, down = (None if x is None else x.mT for x in (gate, up, down))
        assert up is not None and down is not None
    rows = []
    for t in range(hidden.shape[0]):
        row = torch.zeros(WIDTH, dtype=hidden.dtype)
        for j, e in enumerate(of.indices[t].tolist()):
            x = up[e] @ hidden[t] + (0 if up_bias is None else up_bias[e])
            g = None if gate is None else gate[e] @ hidden[t] + (0 if gate_bias is None else gate_bias[e])
            if "is_interleaved" in options:
                g, x = x.view(INNER, 2).unbind(1)
            if g is not None:
                g, x = torch.minimum(g, torch.tensor(limit)), x.clamp(-limit, limit) + shift
            own = FUNCTIONS[activation](alpha * (x if g is None else g)) / alpha
            row = row + weights[t, j] * (down[e] @ (own if g is None else own * x))
        rows.append(row)
    return backward(torch.stack(rows), given, of.gradient)


def backward(result: Tensor, given: list[Tensor | None], gradient: Tensor) -> list[Tensor]:
    result.backward(gradient)
    found = [result.detach()]
    for x in given:
        if x is not None:
            assert x.grad is not None
            found.append(x.grad)
    return found


def run(
    of: SimpleNamespace, call: Callable[..., Tensor], *more: Any, tokens: slice = slice(None),
    cut: Callable[[Tensor], Tensor] = torch.clone,
) -> list[Tensor]:  # fmt: skip
    """What a rank makes of some tokens and a part of the experts, and its gradients; ``more``: arguments of split kinds."""
    given = leaves(of, tokens, cut)
    result = call(given[0], given[1], of.indices[tokens], *given[2:], of.activation, *more)
    return backward(result, given, of.gradient[tokens])


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert_close(a, b, 1e-12)


def grouped_mm(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    """What ``torch._grouped_mm`` promises, at its worst: garbage in rows past the end and for groups without rows."""
    assert offs.dtype == torch.int32
    for x in (a, b):
        assert 1 in x.stride()[-2:] and max(x.stride()[-2:]) % expert_ops._GROUPED_ALIGNMENT == 0
    pieces = list(zip([0, *offs.tolist()], offs.tolist(), strict=False))
    if b.dim() == 3:
        out = a.new_full((a.shape[0], b.shape[-1]), torch.nan)
        for e, (begin, end) in enumerate(pieces):
            out[begin:end] = a[begin:end] @ b[e]
        return out
    assert a.shape[1] == b.shape[0]
    out = a.new_full((len(pieces), a.shape[0], b.shape[1]), torch.nan)
    for e, (begin, end) in enumerate(pieces):
        if begin < end:
            out[e] = a[:, begin:end] @ b[begin:end]
    return out


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    found: list[Tensor] = []
    monkeypatch.setattr(expert_ops, "_read", lambda counts: (found.append(counts), counts.tolist())[1])
    return found


@pytest.fixture(params=["loop", "grouped"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How experts multiply; grouped products stand in for those of a GPU."""
    if request.param == "grouped":
        monkeypatch.setattr(expert_ops, "_is_grouped", lambda weight: True)
        monkeypatch.setattr(expert_ops, "_leaves_empty", lambda device: True)
        monkeypatch.setattr(torch, "_grouped_mm", grouped_mm, raising=False)
    return str(request.param)


@pytest.mark.parametrize("name", CASES)
def test_experts_on_one_rank_are_each_token_by_itself(name: str, way: str, reads: list[Tensor]) -> None:
    of = CASES[name]
    assert_same(run(of, expert_ops.experts), dense(of))
    assert len(reads) == (way == "loop")


def test_no_tokens_give_every_expert_a_gradient_of_zeros(way: str) -> None:
    found = run(case(), expert_ops.experts, tokens=slice(0))
    assert found[0].shape == (0, WIDTH) and all(not x.any() for x in found[3:])


@pytest.mark.parametrize("name", CASES)
def test_experts_split_over_ranks_sum_to_the_whole(name: str, way: str, reads: list[Tensor]) -> None:
    of, size = CASES[name], 4

    def work(rank: int) -> list[Tensor]:
        return run(of, expert_ops.experts_split, "tp", EXPERTS, cut=lambda x: x.chunk(size)[rank])

    found = run_ranks(Mesh(tp=size), work)
    assert_same([*summed(found, 3), *joined(found, 3)], dense(of))
    assert len(reads) == size  # one a rank, whatever the products


def summed(ranks: list[list[Tensor]], count: int) -> list[Tensor]:
    return [torch.stack(same).sum(0) for same in list(zip(*ranks, strict=True))[:count]]


def joined(ranks: list[list[Tensor]], start: int) -> list[Tensor]:
    return [torch.cat(same) for same in list(zip(*ranks, strict=True))[start:]]


@pytest.mark.parametrize("shares", [(3, 3, 3, 3), (0, 4, 4, 4)], ids=["even", "a rank without tokens"])
@pytest.mark.parametrize("name", CASES)
def test_tokens_that_travel_come_back(name: str, shares: tuple[int, ...], way: str, reads: list[Tensor]) -> None:
    of = CASES[name]

    def work(rank: int) -> list[Tensor]:
        here, cut = slice(sum(shares[:rank]), sum(shares[: rank + 1])), lambda x: x.chunk(4)[rank]
        return run(of, expert_ops.experts_dispatch, "dp_shard", EXPERTS, tokens=here, cut=cut)

    assert_same(joined(run_ranks(Mesh(dp_shard=4), work), 0), dense(of))
    assert len(reads) == 4


@pytest.mark.parametrize("name", CASES)
def test_tokens_travel_for_each_share_of_the_experts(name: str, way: str, reads: list[Tensor]) -> None:
    of, mesh = CASES[name], Mesh(dp_shard=2, tp=2)

    def work(rank: int) -> list[Tensor]:
        outer, inner = (mesh.coordinate(rank)[axis] for axis in ("dp_shard", "tp"))
        here = slice(outer * TOKENS // 2, (outer + 1) * TOKENS // 2)
        cut = lambda x: x.chunk(2)[outer].chunk(2)[inner]
        return run(of, expert_ops.experts_dispatch_split, "dp_shard", EXPERTS, "tp", 2, tokens=here, cut=cut)

    found = run_ranks(mesh, work)  # the ranks of tp are neighbours
    assert_same([*joined([summed(found[:2], 3), summed(found[2:], 3)], 0), *joined(found, 3)], dense(of))
    assert len(reads) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_of_torch_is_that_of_a_loop(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert without rows in the middle and one at the end; the gradient is expanded."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(*s, generator=generator).to(dtype) for s in ((10, WIDTH), (4, INNER, WIDTH)))
    ends, counts = torch.tensor([3, 3, 10, 10], dtype=torch.int32), [3, 0, 7, 0]
    monkeypatch.setattr(expert_ops, "_leaves_empty", lambda device: True)
    given = [[x.clone().requires_grad_() for x in (rows, weight)] for _ in range(2)]
    try:
        found = expert_ops._product(*given[0], None, ends)
    except RuntimeError as error:  # torch 2.11 on a CPU
        pytest.skip(f"no grouped product of {dtype} here: {error}")
    wanted = torch.cat([x @ w.T for x, w in zip(given[1][0].split(counts), given[1][1], strict=True)])
    assert_close(found, wanted)
    for result in (found, wanted):
        result.sum().backward()
    for a, b in zip(*given, strict=True):
        assert a.grad is not None and b.grad is not None
        error = (a.grad - b.grad).abs().max() / b.grad.abs().max()
        assert error <= 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("is_grouped", [True, False])
def test_grouped_products_need_no_value_on_the_host(is_grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without values, where whatever is read raises: the loop is."""
    monkeypatch.setattr(expert_ops, "_is_grouped", lambda weight: is_grouped)
    with FakeTensorMode():
        hidden, weights = torch.empty(TOKENS, WIDTH).bfloat16(), torch.empty(TOKENS, 2).bfloat16()
        gate, down = torch.empty(EXPERTS, INNER, WIDTH).bfloat16(), torch.empty(EXPERTS, WIDTH, INNER).bfloat16()
        bias = torch.empty(EXPERTS, INNER).bfloat16()
        given = [x.requires_grad_() for x in (hidden, weights, gate, gate.clone(), down, bias, bias.clone())]
        indices = torch.empty(TOKENS, 2, dtype=torch.int64)
        if not is_grouped:
            with pytest.raises(DataDependentOutputException):
                expert_ops.experts(hidden, weights, indices, *given[2:], "silu")
            return
        expert_ops.experts(hidden, weights, indices, *given[2:], "silu").sum().backward()
        assert all(x.grad is not None and x.grad.shape == x.shape for x in given)


@pytest.mark.parametrize(
    ("capability", "dtype", "shape", "wanted"),
    [
        ((9, 0), torch.bfloat16, (8, 24, 16), True), ((10, 3), torch.bfloat16, (8, 24, 16), True),
        ((8, 0), torch.bfloat16, (8, 24, 16), False), ((12, 0), torch.bfloat16, (8, 24, 16), False),
        ((9, 0), torch.float32, (8, 24, 16), False), ((9, 0), torch.float16, (8, 24, 16), False),
        ((9, 0), torch.bfloat16, (8, 24, 12), False), ((9, 0), torch.bfloat16, (8, 20, 16), False),
        ((9, 0), torch.bfloat16, (1024, 8, 8), False),
    ],
    ids=str,
)  # fmt: skip
def test_products_are_grouped_where_the_gpu_has_a_kernel(
    capability: Any, dtype: torch.dtype, shape: Any, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    with FakeTensorMode() as mode:
        weight = FakeTensor(mode, torch.empty(shape, dtype=dtype, device="meta"), torch.device("cuda:0"))
        assert expert_ops._is_grouped(weight) == wanted
        assert expert_ops._is_grouped(weight.transpose(1, 2)) == wanted
        assert not expert_ops._is_grouped(torch.empty(shape, dtype=dtype))


@pytest.fixture
def among_fakes() -> Iterator[None]:
    dist.init_process_group(backend="fake", rank=1, world_size=4, store=FakeStore())
    with collectives.on_meshes((init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",)),)):
        yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("among_fakes")
@pytest.mark.parametrize("name", CASES)
def test_a_rank_among_fakes_gets_as_many_rows_as_it_sends(name: str) -> None:
    of = CASES[name]
    given = leaves(of, cut=lambda x: x.chunk(4)[1])
    result = expert_ops.experts_dispatch(given[0], given[1], of.indices, *given[2:], of.activation, "dp_shard", EXPERTS)
    own = {"indices": of.indices % 2, "tensors": [*of.tensors[:2], *given[2:]]}
    assert_same(backward(result, given, of.gradient), dense(SimpleNamespace(**vars(of) | own)))
