from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost.operators.operator_times import op_time
from autopar.cost.operators.work import operand_specs, work
from autopar.graph.graph import Argument, Op, Ref, TensorSpec
from autopar.hardware.cluster import Cluster
from autopar.hardware.device import CurvePoint, KernelKind
from autopar.tracing.trace import trace
from tests.support.kept import kept_bytes
from tests.support.planner import graphs
from tests.support.small_models import model_of

H100 = Cluster.parse("h100-sxm5-80gb:1x8").devices[0]
BF16, F32 = torch.bfloat16, torch.float32


spec = partial(graphs.spec, dtype=BF16)


def op(target: str, args: tuple[Argument, ...], out: TensorSpec) -> Op:
    return Op(name="y", target=target, args=args, outputs=(out,))


X, W, B, K, V = (Ref(name) for name in "xwbkv")
LINEAR = op("aten.linear.default", (X, W, B), spec(4, 8, 32))
LINEAR_OPERANDS = (spec(4, 8, 16), spec(32, 16), spec(32))


def test_a_product_of_complex_numbers_is_four_of_real_ones() -> None:
    real = op("aten.mm.default", (X, W), spec(512, 512, dtype=F32))
    twice = replace(real, outputs=(spec(512, 512, dtype=torch.complex64),))
    one, two = (work(each, (each.spec, each.spec)) for each in (real, twice))
    assert (two.flops, two.backward_flops) == (4 * one.flops, 4 * one.backward_flops)
    assert two.num_bytes == 2 * one.num_bytes
    curve = replace(H100, matmul=tuple(replace(rate, num_units=0) for rate in H100.matmul))
    times = [op_time(each, (each.spec, each.spec), curve) for each in (real, twice)]
    assert times[1].forward_s - H100.launch_s == pytest.approx(4 * (times[0].forward_s - H100.launch_s))


Q, SCORES = spec(2, 4, 128, 64), 2 * 4 * 128 * 128
PAIR = (spec(4, 8), spec(4, 8))


@pytest.mark.parametrize(
    ("target", "args", "out", "operands", "kind", "wanted"),
    [
        # two FLOPs for each multiply-add
        ("aten.linear.default", (X, W, B), LINEAR.spec, LINEAR_OPERANDS, "cpu",
         {"flops": 2 * 32 * 16 * 32, "backward_flops": 4 * 32 * 16 * 32, "smallest_dim": 16, "saved": (0, 1),
          "saves_output": False, "num_bytes": 2 * (4 * 8 * 16 + 32 * 16 + 32 + 4 * 8 * 32)}),
        # the weight and its bias are frozen: one product backward, and no input is kept
        ("aten.linear.default", (X, W, B), LINEAR.spec,
         (LINEAR_OPERANDS[0], spec(32, 16, grad=False), spec(32, grad=False)), "cpu",
         {"backward_flops": 2 * 32 * 16 * 32, "saved": (1,)}),
        # nothing goes backward
        ("aten.linear.default", (X, W, B), spec(4, 8, 32, grad=False),
         tuple(replace(s, requires_grad=False) for s in LINEAR_OPERANDS), "cpu",
         {"backward_flops": 0, "backward_bytes": 0, "backward_launches": 0, "saved": ()}),
        ("autopar.dropout", (X, 0.5), spec(4, 8), (spec(4, 8),), "cpu", {"saved_bytes": 4 * 8}),
        ("autopar.dropout", (X, 0.5), spec(4, 8), (spec(4, 8),), "cuda", {"saved_bytes": 4 * 8}),
        # probabilities, in single precision
        ("autopar.cross_entropy_sum", (X, K), spec(dtype=F32),
         (spec(16, 1000), TensorSpec(shape=(16,), dtype=torch.int64)), "cuda", {"saved_bytes": 16 * 1000 * 4}),
        # views are free, and parts fill their gradient
        ("aten.view.default", (X, (8, 4)), spec(8, 4), (spec(4, 8),), "cuda",
         {"launches": 0, "num_bytes": 0, "backward_bytes": 0}),
        ("aten.slice.Tensor", (X, 0, 0, 2), spec(2, 8), (spec(4, 8),), "cuda",
         {"launches": 0, "num_bytes": 0, "backward_bytes": 2 * (32 + 2 * 16)}),
        # it was counted as kept, with what it was made of
        ("aten.repeat_interleave.self_int", (X, 2, 1), spec(4, 16), (spec(4, 8),), "cuda",
         {"saved": (), "saves_output": False, "saved_bytes": 0}),
        # a product keeps the other factor
        ("aten.mul.Tensor", (X, K), spec(4, 8), PAIR, "cuda", {"saved": (0, 1)}),
        ("aten.mul.Tensor", (X, K), spec(4, 8), (spec(4, 8), spec(8, grad=False)), "cuda", {"saved": (1,)}),
        ("aten.mul.Tensor", (X, 2.0), spec(4, 8), (spec(4, 8),), "cuda", {"saved": ()}),
        ("mylib.mystery", (X, K), spec(4, 8), PAIR, "cuda", {"saved": (0, 1), "saves_output": True}),
    ],
)  # fmt: skip
def test_what_backward_does_and_keeps(
    target: str, args: tuple[Argument, ...], out: TensorSpec, operands: tuple[TensorSpec, ...], kind: KernelKind,
    wanted: dict[str, object],
) -> None:  # fmt: skip
    done = work(op(target, args, out), operands, kind)
    assert {name: getattr(done, name) for name in wanted} == wanted


@pytest.mark.parametrize(("causal", "share"), [(False, 1.0), (True, (128 + 1) / 256)])
def test_attention_keeps_no_scores_and_half_of_them_is_masked(causal: bool, share: float) -> None:
    call = op("aten.scaled_dot_product_attention.default", (X, K, V, None, 0.0, causal), Q)
    done = work(call, (Q, Q, Q))
    assert done.flops == pytest.approx(share * 2 * 2 * 4 * 128 * 128 * (64 + 64))
    assert done.backward_flops == pytest.approx(2.5 * done.flops) and done.saved_bytes == 2 * 4 * 128 * 4
    dropping = replace(call, args=(X, K, V, None, 0.1, causal))  # on a CPU it keeps the scores
    assert work(dropping, (Q, Q, Q), "cpu").saved_bytes >= 3 * 4 * SCORES
    assert work(dropping, (Q, Q, Q), "cuda").saved_bytes < SCORES


def test_large_products_reach_the_ceiling_and_small_ones_pay_for_bytes() -> None:
    size = 8192
    call = op("aten.linear.default", (X, W), spec(size, size))
    time = op_time(call, (spec(size, size), spec(size, size)), H100)
    rate = H100.rate("bfloat16")
    best = rate.ceiling_flops_per_s * rate.efficiency(size)
    assert 0.8 * best < 2 * size**3 / time.forward_s < best
    assert time.backward_s == pytest.approx(2 * time.forward_s, rel=0.01)
    row = op("aten.linear.default", (X, W), spec(1, size))
    moved = 2 * (size * size + 2 * size)
    # the idle part of a wave takes less than the bytes: where fits make it longer, it is what counts
    device = replace(H100, matmul=tuple(replace(r, wave_loss=0.3) for r in H100.matmul))
    found = op_time(row, (spec(1, size), spec(size, size)), device).forward_s
    bandwidth = device.memory_bandwidth_bytes_per_s * device.kernel_fraction
    assert found == pytest.approx(moved / bandwidth + device.launch_s, rel=0.01)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.integers(2, 8))
def test_more_rows_never_take_less_time(rows: int, width: int, depth: int, factor: int) -> None:
    def seconds(count: int) -> float:
        call = op("aten.linear.default", (X, W), spec(count, width))
        time = op_time(call, (spec(count, depth), spec(width, depth)), Cluster.parse("cpu:1x1").devices[0])
        return time.forward_s + time.backward_s

    # a curve may rise so fast that a larger product is hardly slower, never faster
    assert seconds(rows * factor) >= 0.99 * seconds(rows)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {}), ("LSTM", {"num_layers": 2, "bidirectional": True}), ("LSTM", {"num_layers": 2, "proj_size": 32}),
        ("GRU", {"num_layers": 2}), ("GRU", {"bidirectional": True}), ("RNN", {"num_layers": 2, "bidirectional": True}),
    ],
)  # fmt: skip
def test_recurrent_networks_keep_what_is_predicted(kind: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Every storage that backward is given, the weights aside; oneDNN, in fp32, pads rows of its own."""
    net = getattr(torch.nn, kind)(48, 64, batch_first=True, dtype=dtype, **options)
    x = torch.randn(8, 32, 48, dtype=dtype, requires_grad=True)

    made, ends = net(x)
    ends = ends if isinstance(ends, tuple) else (ends,)
    tensors = (x, *ends, *net.parameters())
    operands = [TensorSpec(shape=tuple(t.shape), dtype=dtype, requires_grad=True) for t in tensors]
    refs = tuple(Ref(str(i)) for i in range(len(tensors)))
    states, held = refs[1 : 1 + len(ends)], refs[1 + len(ends) :]
    literals = (True, net.num_layers, 0.0, True, net.bidirectional, True)
    name = "rnn_tanh" if kind == "RNN" else kind.lower()
    out = TensorSpec(shape=tuple(made.shape), dtype=dtype, requires_grad=True)
    args = (refs[0], states if len(states) > 1 else states[0], held, *literals)
    outputs = (out, *operands[1 : 1 + len(ends)])
    call = Op(name="y", target=f"aten.{name}.input", args=args, outputs=outputs)
    done = work(call, operands, "cpu")
    predicted = operands[0].num_bytes + done.saved_bytes + done.saves_output * call.spec.num_bytes
    found = kept_bytes(lambda: net(x), net.parameters())
    is_exact = dtype == torch.float64 or kind != "LSTM" or "proj_size" in options
    assert predicted == (found if is_exact else pytest.approx(found, rel=0.05))


def test_ctc_losses_keep_what_torch_keeps() -> None:
    time, samples, classes, length = 20, 4, 12, 5
    log_probs = torch.randn(time, samples, classes, requires_grad=True)
    rest = torch.randint(1, classes, (samples, length)), torch.full((samples,), time), torch.full((samples,), length)
    tensors = (log_probs, *rest)
    specs = tuple(TensorSpec(shape=tuple(t.shape), dtype=t.dtype, requires_grad=t is log_probs) for t in tensors)
    refs = tuple(Ref(name) for name in "abcd")
    out = TensorSpec(shape=(samples,), dtype=torch.float32, requires_grad=True)
    done = work(Op(name="y", target="autopar.ctc_losses", args=(*refs, 0, False), outputs=(out,)), specs, "cpu")
    found = kept_bytes(lambda: torch.nn.functional.ctc_loss(log_probs, *rest, reduction="none"))
    predicted = sum(specs[i].num_bytes for i in done.saved) + out.num_bytes + done.saved_bytes
    assert predicted == pytest.approx(found, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [("LSTM", {}), ("LSTM", {"proj_size": 8}), ("GRU", {"bidirectional": True}), ("RNN", {"num_layers": 3})],
)
def test_recurrent_networks_multiply_each_row_with_each_matrix(kind: str, options: dict[str, Any]) -> None:
    """Torch's counter knows none of it; by hand, and one step of time after the other."""

    net, samples, steps = getattr(torch.nn, kind)(16, 24, batch_first=True, **options), 4, 10
    graph = trace(model_of(lambda self, x: self.net(x)[0].square().mean(), net=net), (torch.zeros(samples, steps, 16),))
    (call,) = [one for one in graph.ops if kind.lower() in one.target]
    done = work(call, operand_specs(call, graph.spec))
    assert done.flops == 2 * samples * steps * sum(p.numel() for p in net.parameters() if p.dim() == 2)
    assert done.backward_flops == 2 * done.flops
    networks = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    assert (done.matmuls, done.smallest_dim) == (steps * networks, samples)
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    assert done.saved_bytes == 4 * samples * steps * networks * (gates * 24 + 2 * options.get("proj_size", 24))


A100 = Cluster.parse("a100-sxm4-80gb:1x8").devices[0]
SIZES = st.integers(1, 3000)


@given(
    count=st.integers(1, 16), rows=SIZES, columns=SIZES, depth=SIZES, parts=st.integers(1, 8),
    padding=st.integers(0, 64),
)  # fmt: skip
@pytest.mark.parametrize("cut", ["count", "rows", "columns", "depth"])
def test_no_part_of_a_product_is_below_its_share(
    cut: str, count: int, rows: int, columns: int, depth: int, parts: int, padding: int
) -> None:
    """Whatever one dim is cut into and the others are padded to, the parts take no less than the whole at best."""
    rate = A100.rate("bfloat16")
    whole = {"count": count, "rows": rows, "columns": columns, "depth": depth}
    least_s = 2.0 * count * rows * columns * depth / rate.at_best().product_flops_per_s(**whole)
    part = {name: -(-size // parts) if name == cut else size + padding for name, size in whole.items()}
    flops = 2.0 * part["count"] * part["rows"] * part["columns"] * part["depth"]
    assert flops / rate.product_flops_per_s(**part) >= least_s / parts * (1 - 1e-12)


def test_curves_at_best_do_not_fall() -> None:
    numbers = ((1, 0.2, 0.5), (64, 0.9, 0.3), (512, 0.6, 0.0))
    points = tuple(CurvePoint(smallest_dim=n, efficiency=e, backward_efficiency=b) for n, e, b in numbers)
    rate = replace(A100.rate("float32"), curve=points)
    for backward in (False, True):
        for n in (1, 7, 64, 200, 512, 4096):
            least = max(rate.efficiency(m, backward=backward) for m in (1, 7, 64, 200, 512, 4096) if m <= n)
            assert rate.at_best().efficiency(n, backward=backward) >= least


def test_unaligned_rows_of_one_product_and_of_several() -> None:
    rate = A100.rate("bfloat16")
    alone, several = ([rate.product_flops_per_s(n, 4096, rows, 4096) for rows in (768, 769)] for n in (1, 8))
    assert alone[1] / alone[0] == pytest.approx(rate.unaligned_fraction, rel=1e-3)
    assert several[1] / several[0] == pytest.approx(rate.unaligned_batched_fraction, rel=1e-3)
