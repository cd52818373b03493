"""Models that mix dtypes, as buffers in float32 and torch.zeros do, and the scaler of float16: torch's own numbers, and what is refused."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from autopar import api
from autopar.errors import UsageError
from autopar.ops.sharded import partial_mean
from autopar.plan.plan import BF16, FP16, PRECISIONS, Precision, PrecisionName
from autopar.runtime.parallel_model import ParallelModel
from autopar.tracing.trace import trace
from autopar.verification.reference import loss_of
from tests.support.distributed import scaled
from tests.support.distributed.subjects import HfSubject
from tests.support.parallel import alone, halve
from tests.support.said import refuses
from tests.support.small_models import evaluate, model_of

pytestmark = pytest.mark.usefixtures("one_rank")

SUBJECT = HfSubject("llama", depth=1)


@cache
def traced(precision: PrecisionName) -> Any:
    return api.trace(SUBJECT.build(), example_inputs=SUBJECT.make_batch(2, seed=0), precision=precision)


def build(precision: Precision = FP16) -> ParallelModel:
    return alone(SUBJECT.build(), traced(precision.name), batch=8, precision=precision)


def test_the_scale_falls_and_grows_as_torchs() -> None:
    """From a scale that overflows in float16 by itself, down to one that does not, and up again."""
    data = [SUBJECT.make_batch(8, seed=seed) for seed in range(10)]
    scaling = {"init_scale": 2.0**25, "growth_interval": 2, "growth_factor": 8.0, "backoff_factor": 0.125}
    found = scaled.steps(build(), data, scaling=scaling)
    wanted = scaled.alone(SUBJECT.build(), data, scaling=scaling)
    assert found["states"] == wanted["states"]
    scales = [state["scale"] for state in found["states"]]
    changes = [b / a for a, b in pairwise(scales)]
    assert 0.125 in changes and 8.0 in changes, scales
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-4)


def test_gradients_that_are_still_scaled_are_not_stepped_by_or_clipped() -> None:
    parallel, batch = build(), SUBJECT.make_batch(8, seed=0)
    with pytest.raises(UsageError, match=r"most gradients would be zero.* scaler = par\.grad_scaler\(\) before"):
        parallel.train_step(batch)
    scaler, optimizer = parallel.grad_scaler(), scaled.sgd(parallel.parameters())
    refuses(UsageError, "second scaler", parallel.grad_scaler)
    said = r"the scaler of this model has not scaled.*scaler\.scale\(loss\)\.backward\(\), where loss is that of par"
    refuses(UsageError, said, torch.amp.GradScaler("cpu").scale(parallel(**batch).loss).backward)
    before = parallel.full_state_dict()
    loss = parallel.train_step(batch)
    refuses(UsageError, r"has been scaled already.*Leave scaler\.scale\(loss\)\.backward\(\) out", scaler.scale, loss)
    said = r"would step by the gradients of the scaled loss.*Call scaler\.step\(optimizer\)"
    refuses(UsageError, said, optimizer.step)
    message = r"still times the scale of the loss.*Call scaler\.unscale_\(optimizer\) before"
    refuses(UsageError, message, parallel.clip_grad_norm_, 1.0)
    assert all(torch.equal(p, before[name]) for name, p in parallel.full_state_dict().items())
    scaler.unscale_(optimizer)
    parallel.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not any(torch.equal(p, before[name]) for name, p in parallel.full_state_dict().items())


@pytest.mark.parametrize(("precision", "options"), [(BF16, {}), (FP16, {"enabled": False})], ids=["bf16", "fp16 off"])
def test_a_scaler_that_is_off_does_nothing(precision: Precision, options: dict[str, bool]) -> None:
    """So that one loop is for all precisions, and a model may be trained in float16 at scale one."""
    parallel, batch = build(precision), SUBJECT.make_batch(8, seed=0)
    scaler, optimizer = parallel.grad_scaler(**options), scaled.sgd(parallel.parameters())
    before = parallel.full_state_dict()
    parallel.train_step(batch)
    norm = parallel.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert 0.01 < norm < 100
    assert not any(torch.equal(p, before[name]) for name, p in parallel.full_state_dict().items())


def test_a_mean_over_a_split_dim_stays_in_float16s_range() -> None:
    half = torch.full((256, 256), 2.0, dtype=torch.float16)
    assert partial_mean(half, (0, 1), False, 2 * half.numel()).item() == 1.0


def test_a_load_that_is_refused_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    """Between a step and its ``scaler.step``: states are made by a step, which scaled gradients do not allow."""
    parallel, batch = build(), SUBJECT.make_batch(8, seed=0)
    parallel.grad_scaler()
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.25)
    parallel.save(tmp_path / "saved")
    parallel.train_step(batch)
    before = [p.grad for p in parallel.parameters()]
    refuses(UsageError, "would step by the gradients of the scaled loss", parallel.load, tmp_path / "saved", optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25]
    assert all(p.grad is grad for p, grad in zip(parallel.parameters(), before, strict=True))


def test_a_checkpoint_without_a_scale_is_loaded(tmp_path: Path) -> None:
    build(BF16).save(tmp_path)
    parallel, batch = build(), SUBJECT.make_batch(8, seed=0)
    halve(parallel)
    scaler = parallel.grad_scaler()
    parallel.load(tmp_path)
    assert scaler.state_dict()["scale"] == 65536.0
    assert parallel.train_step(batch).item() == pytest.approx(loss_of(SUBJECT.build()(**batch)).item(), rel=2.0**-10)


F = nn.functional
Op = Callable[[Tensor, Tensor, Tensor], Tensor]


def placed(whole: Tensor, part: Tensor) -> Tensor:
    whole[:, torch.arange(8).flip(0)] = part
    return whole


OPS: dict[str, Op] = {
    "positions": lambda x, row, _: x + row,
    "matmul": lambda x, _, square: x @ square,
    "mv": lambda x, row, _: x * torch.mv(x, row)[:, None],
    "einsum": lambda x, _, square: torch.einsum("bi,ij->bj", x, square),
    "conv": lambda x, row, _: F.conv1d(x[:, None], row[None, None, :3], padding=1)[:, 0],
    "prelu": lambda x, row, _: F.prelu(x, row[:1]),
    "index_add": lambda x, _, square: x.index_add(0, torch.arange(2), square[:2]),
    "index_add by name": lambda x, _, square: torch.index_add(input=x, dim=0, index=torch.arange(2), source=square[:2]),
    "scatter_reduce": lambda x, row, _: x + row.clone().scatter_reduce(0, torch.arange(8), x[0], "amax"),
    "index_reduce": lambda x, _, square: x @ square.index_reduce(0, torch.arange(2), x, "amax"),
    "masked_scatter": lambda x, _, square: x @ square.masked_scatter(square > 9.0, x),
    "index_put": lambda x, _, square: square.index_put((torch.arange(2),), x) @ square,
    "set at places": lambda x, _, square: placed(torch.zeros(len(x), 8), x) @ square,
    "cross": lambda x, row, square: torch.cross(x[:, :3], row[:3].expand(len(x), 3), dim=-1) @ square[:3],
    "huber": lambda x, row, _: x * F.huber_loss(x, row.expand_as(x), reduction="none"),
    "attention with a mask": lambda x, row, square: F.multi_head_attention_forward(
        *(x[None],) * 3, 8, 2, square.repeat(3, 1), None, None, None, False, 0.0, square, None, attn_mask=row[:1, None]
    )[0][0],
    "cdist": lambda x, _, square: torch.cdist(x, square),
    "cdist by name": lambda x, _, square: torch.cdist(x1=x, x2=square),
    "solve": lambda x, _, square: torch.linalg.solve(square @ square.T + 4 * torch.eye(8), x.T).T,
    "singular values": lambda x, _, square: x * torch.linalg.svdvals(x @ square).sum(),
    "a method": lambda x, _, square: x * (x.T @ x + torch.eye(8)).logdet(),
    "fourier": lambda x, row, _: torch.fft.fft(x).abs() * row,
    "from zeros": lambda x, _, square: torch.zeros(len(x), 8).index_add(0, torch.arange(len(x)), x) @ square,
}


def mixed(op: Op) -> nn.Module:
    """A product of parameters behind one operator on buffers in float32."""
    parts = {"inner": nn.Linear(8, 8), "out": nn.Linear(8, 1)}
    kept = {"row": nn.Buffer(torch.randn(8)), "square": nn.Buffer(torch.randn(8, 8))}
    forward = lambda self, x: self.out(op(self.inner(x), self.row, self.square)).square().mean()
    return model_of(forward, **parts, **kept)


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Weights divided by their largest singular value, which buffers in float32 approach step by step."""
    net = nn.Sequential(norm(nn.Linear(8, 16)), nn.ReLU(), nn.Linear(16, 1))
    return model_of(lambda self, x: self.net(x).square().mean(), net=net)


def losses(model: nn.Module, precision: str) -> list[float]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    recipe = PRECISIONS[precision]
    graph = api.trace(model, example_inputs={"x": x}, precision=recipe.name)
    par = alone(model, graph, precision=recipe)
    return [par.train_step({"x": x}).item() for _ in range(2)]


IN_DOUBLE = (
    *("matmul", "huber", "attention with a mask", "index_add by name", "index_put", "set at places"),
    *("cdist by name", "solve", "a method", "fourier"),
)
"""One of each way in which operands are cast: products, writes, what a half has no kernel for; to float64 as to bfloat16."""


@pytest.mark.parametrize(
    ("kind", "precision"), [*((kind, "bf16") for kind in OPS), *((kind, "fp64") for kind in IN_DOUBLE)]
)
def test_products_have_operands_in_one_dtype(kind: str, precision: str) -> None:
    model, x, recipe = mixed(OPS[kind]), torch.randn(2, 8), PRECISIONS[precision]
    dtype = getattr(torch, recipe.compute)
    graph = api.trace(model, example_inputs={"x": x}, precision=recipe.name)
    parameters = {name: p.detach().to(dtype) for name, p in model.named_parameters()}
    found = evaluate(graph, {"x": x.to(dtype)}, parameters, dict(model.named_buffers()))
    assert found.item() == pytest.approx(model(x).item(), rel=5e-2 if precision == "bf16" else 1e-5)


def test_a_loss_of_two_dtypes_has_a_gradient() -> None:
    """Its backward has one dtype alone."""
    model = mixed(OPS["huber"])
    assert losses(model, "bf16") == pytest.approx(losses(model, "fp32"), rel=5e-2)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, spectral_norm, parametrizations.orthogonal])
def test_norms_of_whole_weights_train(norm: Callable[[nn.Module], nn.Module]) -> None:
    """Of weights in what the plan computes in, by vectors in float32; or by products of reflections, which no half has."""
    found = {}
    for precision in ("fp32", "bf16", "fp64"):
        torch.manual_seed(0)
        found[precision] = losses(normed(norm), precision)
    assert found["bf16"] == pytest.approx(found["fp32"], rel=5e-2)
    assert found["fp64"] == pytest.approx(found["fp32"], rel=1e-4)


def test_an_operator_without_a_kernel_is_told_with_a_remedy() -> None:
    lacking = NotImplementedError("\"cdist\" not implemented for 'BFloat16'")
    with (
        mock.patch("autopar.runtime.step.runner.Accumulation.run", side_effect=lacking),
        pytest.raises(UsageError, match=r"No kernel cdist for BFloat16 on this device\. Cast .* x\.float\(\)"),
    ):
        losses(mixed(OPS["positions"]), "bf16")


def test_what_takes_two_dtypes_keeps_them() -> None:
    """A mask in float32 beside halves, and a model of one dtype, are traced as before."""
    x = torch.randn(4, 8)

    def masked(x: Tensor, row: Tensor, _: Tensor) -> Tensor:
        heads = x[:, None, None]
        return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=row[:1, None])[:, 0, 0]

    graph = api.trace(mixed(masked), example_inputs={"x": x}, precision="bf16")
    attention = next(op for op in graph.ops if "attention" in op.target)
    assert {graph.spec(name).dtype for name in attention.operands} == {torch.bfloat16, torch.float32}
    model = mixed(OPS["positions"])
    assert not any("to.dtype" in op.target for op in trace(model, kwargs={"x": x}).ops)
