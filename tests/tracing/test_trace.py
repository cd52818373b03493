import re
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import autopar
from autopar import api
from autopar.errors import TraceError
from autopar.graph.graph import Graph, Op, Ref
from autopar.graph.interpreter import leaves, run
from autopar.models.resolve import resolve_model
from autopar.rules.by_execution import verify_rule
from autopar.tracing import modes
from autopar.tracing.failures import source_of
from autopar.tracing.trace import trace
from autopar.verification.against_one_device import in_dtype
from tests.support.close import assert_close
from tests.support.said import refuses
from tests.support.small_models import evaluate, in_double, model_of, same_as_the_model
from tests.support.zoo import LENGTH, description, subject, traced, traced_on_meta


@pytest.mark.parametrize(("kind", "padded"), [
    ("gpt2", False), ("gpt2", True), ("llama", False), ("mistral", True), ("qwen3", False),
    ("phi3", False), ("bert", True), ("vit", False), ("t5", True), ("mlp", False), ("encoder", False),
    ("handwritten", False),
])  # fmt: skip
def test_loss_and_every_gradient_equal_the_models(kind: str, padded: bool) -> None:
    model, batch = subject(kind, padded=padded)
    graph = traced(kind, padded)
    _assert_promises(graph)
    _assert_specs(graph, batch, dict(model.named_parameters()), dict(model.named_buffers()))
    batch = in_double(model.train(), batch)  # where the gradients of biases that change nothing are next to nothing
    with modes.in_double():
        same_as_the_model(model, batch, in_dtype(graph, torch.float32, torch.float64))


CLEANED = "getitem", "split", "chunk", "native_dropout", "_to_copy", "_unsafe_view", "reshape", "alias"


def _assert_promises(graph: Graph) -> None:
    known = {leaf.name for leaf in (*graph.inputs, *graph.parameters, *graph.buffers)}
    for op in (*graph.prelude, *graph.ops):
        assert all(ref.name in known for ref in op.operands), f"{op.name} reads what stands after it"
        assert op.name not in known
        assert op.name.isidentifier()
        known.add(op.name)
        assert op.target.partition(".")[0] in ("aten", "autopar"), op.target
        overload = op.target.split(".")[1]
        assert not overload.endswith("_"), op.target
        assert overload not in CLEANED
        if op.target in ("aten.view.default", "aten.expand.default"):
            assert op.args[1] == op.spec.shape
        if op.target == "aten.transpose.int":
            assert all(isinstance(dim, int) and dim >= 0 for dim in op.args[1:])
        if op.target == "aten.slice.Tensor":
            assert 0 <= op.args[2] < op.args[3] <= graph.spec(op.operands[0]).shape[op.args[1]]
    used = {ref.name for op in (*graph.prelude, *graph.ops) for ref in op.operands} | {graph.loss.name}
    assert {op.name for op in graph.ops} <= used, "dead code"
    trained = {p.name for p in graph.parameters}
    downstream = set(trained)
    for op in graph.ops:
        assert any(ref.name in downstream for ref in op.operands), f"{op.name} belongs to the prelude"
        downstream.add(op.name)
        assert op.spec.requires_grad == op.spec.dtype.is_floating_point
    assert [b.start for b in graph.blocks] + [len(graph.ops)] == [0, *(b.stop for b in graph.blocks)]


def _assert_specs(graph: Graph, *given: dict[str, Tensor]) -> None:
    env = leaves(graph, *given)
    run((*graph.prelude, *graph.ops), env)
    for ref, value in env.items():
        assert (tuple(value.shape), value.dtype) == (graph.spec(ref).shape, graph.spec(ref).dtype), ref
        if graph.producer(ref) is not None:
            assert value.requires_grad == graph.spec(ref).requires_grad, ref


def attention(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.target == "aten.scaled_dot_product_attention.default"]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral"])
def test_a_causal_mask_is_recognised_and_a_padding_mask_is_kept(kind: str) -> None:
    plain, padded = traced_on_meta(kind), traced(kind, True)
    assert len(attention(plain)) == 2
    assert all(op.args[3] is None and op.args[5] is True for op in attention(plain))
    assert not any(buffer.spec.dtype == torch.bool for buffer in plain.buffers), "the mask is dropped"

    assert all(isinstance(op.args[3], Ref) and op.args[5] is False for op in attention(padded))
    assert all(padded.is_prelude(op.args[3]) for op in attention(padded))


@pytest.mark.parametrize(("mask", "causal", "kept"), [
    (torch.ones(8, 8).tril().bool(), True, False),
    (torch.full((8, 8), float("-inf")).triu(1), True, False),
    (torch.full((8, 8), torch.finfo(torch.float32).min).triu(1), True, False),
    (torch.ones(8, 8).bool(), False, False),
    (torch.ones(8, 8).tril(-1).bool(), False, True),
    (torch.ones(8, 8).tril(1).bool(), False, True),
    (torch.ones(8, 8).tril().triu(-2).bool(), False, True),
    (torch.full((8, 8), -1.0).triu(1), False, True),
])  # fmt: skip
def test_only_the_exact_lower_triangle_is_causal(mask: Tensor, causal: bool, kept: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x * self.weight, x, x, attn_mask=self.mask[:6, :6]).sum()

    model = model_of(forward, weight=nn.Parameter(torch.ones(4)), mask=nn.Buffer(mask))
    (op,) = attention(trace(model, (torch.ones(2, 3, 6, 4),)))
    assert (op.args[5], op.args[3] is not None) == (causal, kept)


def _positions(self: Any, x: Tensor) -> Tensor:
    """A mask of comparisons of positions, far too large to hold."""
    places = torch.arange(x.shape[2], device=x.device)
    rows, columns = places[None, None, :, None], places[None, None, None, :]
    mask = columns <= rows + self.offset
    if self.window is not None:
        mask = mask & (columns > rows - self.window)
    mask = mask.expand(x.shape[0], 1, -1, -1)
    return F.scaled_dot_product_attention(x * self.weight, x, x, attn_mask=mask).sum()


@pytest.mark.parametrize("length", [3000, 40_000])
@pytest.mark.parametrize(
    ("offset", "window", "causal"),
    [(0, None, True), (1, None, False), (-1, None, False), (0, 99, False), (0, 10**6, True)],
)
def test_large_masks_are_told_without_holding_them(length: int, offset: int, window: int | None, causal: bool) -> None:
    x = torch.ones(2, 1, length, 4, device="meta")
    graph = trace(model_of(_positions, weight=nn.Parameter(torch.ones(4)), offset=offset, window=window), (x,))
    (op,) = attention(graph)
    assert op.args[5] is causal
    assert (op.args[3] is None) is causal
    assert all(buffer.spec.numel <= 2**26 for buffer in graph.buffers)
    if not causal:
        assert graph.spec(op.args[3]).shape == (2, 1, length, length)


def test_gpt2_has_one_gelu_linears_over_parts_and_one_tied_parameter() -> None:
    graph = traced_on_meta("gpt2")
    gelus = [op for op in graph.ops if op.target == "aten.gelu.default"]
    assert len(gelus) == 2
    assert all(op.kwargs == (("approximate", "tanh"),) for op in gelus)
    parts = [p for p in graph.parameters if p.fqn == "transformer.h.1.attn.c_attn.weight"]
    assert [(p.part.dim, p.part.start, p.part.stop) for p in parts if p.part] == [(1, 0, 32), (1, 32, 64), (1, 64, 96)]
    assert [p.key.rsplit(".", 1)[-1] for p in parts] == ["weight[0:32]", "weight[32:64]", "weight[64:96]"]
    assert not any(op.target in ("aten.tanh.default", "aten.slice.Tensor") for op in graph.ops)
    (tied,) = [p for p in graph.parameters if p.fqn == "transformer.wte.weight"]
    assert tied.aliases == ("lm_head.weight",)
    assert len(graph.users(Ref(tied.name))) == 2
    assert not any(p.aliases for p in traced_on_meta("llama").parameters)
    encoder = traced("encoder")
    assert sum(p.fqn.endswith("in_proj_weight") and p.part is not None for p in encoder.parameters) == 6
    assert not any(op.target == "aten.select.int" for op in encoder.ops)


def test_meta_and_real_models_give_the_same_graph() -> None:
    source = resolve_model(description("llama"), sequence_length=LENGTH)
    meta, real = traced_on_meta("llama"), trace(source.build(), (), source.make_batch(3))
    assert meta.fingerprint == real.fingerprint
    assert [op.target for op in meta.ops] == [op.target for op in real.ops]
    values = {b.fqn: b.value is not None for b in meta.buffers if b.fqn}
    assert values == {"model.rotary_emb.inv_freq": False}
    assert all(b.value is not None for b in real.buffers)


@pytest.mark.parametrize("kind", ["llama", "encoder"])
def test_decomposing_first_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = subject(kind)
    short = traced(kind)
    monkeypatch.setattr(sys.modules["autopar.tracing.trace"], "needs_decomposition", lambda *_: True)
    long = trace(model, (), batch)
    assert [op.target for op in short.ops] == [op.target for op in long.ops]
    assert [b.hash for b in short.blocks] == [b.hash for b in long.blocks]


def test_a_square_is_that_of_a_decomposed_program_without_decomposing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    make = partial(trace, nn.Linear(4, 4), (torch.ones(2, 4),), loss_fn=lambda output, _: output.square().mean())
    with mock.patch.object(torch.export.ExportedProgram, "run_decompositions", side_effect=AssertionError):
        short = make()
    monkeypatch.setattr(sys.modules["autopar.tracing.trace"], "needs_decomposition", lambda *_: True)
    assert short.ops == make().ops


def test_the_mean_of_the_loss_is_a_sum_over_a_count_of_the_prelude() -> None:
    graph = traced_on_meta("llama")
    last = graph.ops[-1]
    assert (Ref(last.name), last.target) == (graph.loss, "aten.div.Tensor")
    total, count = last.operands
    loss = graph.producer(total)
    assert loss.target == "autopar.cross_entropy_sum"
    assert graph.spec(loss.operands[0]).shape == (2, LENGTH, 96), "tokens are not flattened"
    assert graph.is_prelude(count)


def test_dtype_and_frozen_parameters_stay_as_the_model_has_them() -> None:
    source = resolve_model(description("llama"), sequence_length=LENGTH, dtype=torch.bfloat16)
    source.model.get_parameter("model.embed_tokens.weight").requires_grad_(False)
    graph = source.trace()
    assert {p.spec.dtype for p in graph.parameters} == {torch.bfloat16}
    frozen = [p.fqn for p in graph.parameters if not p.spec.requires_grad]
    assert frozen == ["model.embed_tokens.weight"]
    assert not graph.ops[0].spec.requires_grad
    assert graph.spec(graph.loss).dtype == torch.float32


def test_a_batch_of_one_is_doubled_and_inputs_keep_their_names() -> None:
    model, batch = subject("handwritten")
    graph = trace(model, (batch["x"][:1],), {"y": batch["y"][:1]})
    assert graph.batch_size == 2
    assert [(i.name, i.spec.shape, i.batch_dim) for i in graph.inputs] == [("x", (2, LENGTH), 0), ("y", (2, LENGTH), 0)]


# --- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("writes", "said"),
    [(True, r"`return F\.cross_entropy"), (False, r"aten\.item\.default depends on the values of tensors")],
)
def test_a_failure_of_the_exported_program_names_the_line_too(writes: bool, said: str) -> None:
    """torch.export takes the cuts of sequences by their ends, and decomposing fails at the loss; up to 2.11 the cuts fail."""

    def forward(self: Any, x: Tensor, ends: Tensor, y: Tensor) -> Tensor:
        if writes:
            x = x.clone()
            x.view(-1).add_(1)
        parts = torch.cat([x[ends[i] : ends[i + 1]].softmax(0) for i in range(2)])
        return F.cross_entropy(self.head(parts), y)

    inputs = {"x": torch.randn(6, 8), "ends": torch.tensor([0, 2, 6]), "y": torch.zeros(6, dtype=torch.int64)}
    (note,) = trace(model_of(forward, head=nn.Linear(8, 4)), kwargs=inputs).notes
    assert re.search(rf"test_trace\.py:\d+: ({said}|`parts = torch\.cat)", note), note


X = torch.ones(2, 4)


def test_calls_of_a_forward_by_another_name_have_no_line_rather_than_one_of_the_tracer() -> None:
    graph = trace(model_of(lambda self, x: self.linear(x).square().mean(), linear=nn.Linear(4, 4)), (X,))
    assert {op.source for op in graph.ops} == {""}


def _masked(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    if mask is None:
        raise ValueError("a mask, please")
    return (x * mask).sum()


def _packed(self: Any, x: Tensor) -> Tensor:
    return self.rnn(nn.utils.rnn.pack_padded_sequence(x[None], x[:, 0].long()))[0].data.sum()


def _mismatched(self: Any, x: Tensor) -> Tensor:
    return (self.linear(x) @ x).sum()


def _layerdrop(self: Any, x: Tensor) -> Tensor:
    layerdrop = 0.1
    is_skipped = torch.rand(()) < layerdrop
    return x.sum() if is_skipped else self.layer(x).sum()


@pytest.mark.parametrize(("model", "inputs", "loss_fn", "problem"), [
    (nn.Linear(4, 4), (X,), lambda y, _: y.argmax(1).sum(), r"no scalar loss: outputs of shape \(\) in int64"),
    (
        nn.Linear(4, 4), (X,), lambda y, _: {"a": y.sum(), "b": y.mean(), "n": y.detach().sum()},
        r"several losses \(a, b\), and none is called loss\..* output\['a'\] \+ output\['b'\]",
    ),
    (nn.Linear(4, 4), (), None, "No example input is a tensor"),
    (nn.Linear(4, 4), (X, torch.ones(2)), None, "Too many positional example inputs"),
    (nn.Linear(4, 4), {"input": X, "why": X}, None, "Forward does not take the example input why"),
    (nn.Bilinear(4, 4, 1), (X,), None, "do not fit the model's forward.*input2.*give a factory"),
    (
        nn.Bilinear(4, 4, 1), ({"input1": X, "input2": X},), None,
        r"a list of one dict.*\(input1, input2\).*Give the dict itself",
    ),
    (nn.Linear(4, 4), (X,), lambda y, _: torch.ones(()) * 3, "The loss is a constant"),
    (model_of(lambda self, x: x.sum(), held=threading.Lock()), (X,), None, "copied"),
    (model_of(_masked), (X,), None, r"fails on its example inputs.*a mask, please.*package\.module:factory"),
    (model_of(_mismatched, linear=nn.Linear(4, 4)), (X,), None, r"test_trace\.py:\d+: .*self\.linear"),
    (model_of(lambda self, x: x.sum()), (X,), None, "depends on no parameter"),
    (
        model_of(lambda self, x: flex_attention(*[self.qkv(x).view(1, 1, -1, 4)] * 3).sum(), qkv=nn.Linear(4, 64)),
        (X,), None, "flex_attention cannot be traced.*scaled_dot_product_attention",
    ),
    (
        nn.Linear(4, 4).requires_grad_(False), (X,), lambda y, _: y.mean(),
        "depends on no parameter that is trained.*leave requires_grad on",
    ),
    (
        nn.Linear(4, 4), (X,), lambda y, _: y.detach().mean(),
        "depends on no parameter that is trained.*leave requires_grad on",
    ),
    (nn.Linear(4, 4), (X.numpy(),), lambda y, _: y.mean(), r"The example input input is a numpy\.ndarray"),
    (nn.Linear(4, 4), (X,), lambda y: y.mean(), r"The loss_fn does not take \(output, batch\)"),
])  # fmt: skip
def test_bad_models_and_inputs_have_one_message(model: nn.Module, inputs: Any, loss_fn: Any, problem: str) -> None:
    given = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    assert refuses(TraceError, problem, trace, model, *given, loss_fn=loss_fn).fix


@pytest.mark.parametrize(("model", "said"), [
    (model_of(_layerdrop, layer=nn.Linear(4, 4)), r"`return .*` depends on .*\(Set layerdrop to 0"),
    (model_of(_packed, rnn=nn.LSTM(4, 4)), "`return .*` depends on the values of tensors"),
])  # fmt: skip
def test_a_note_says_why_a_model_runs_as_a_whole(model: nn.Module, said: str) -> None:
    (note,) = trace(model, (X,)).notes
    assert re.search(rf"the whole model; .*{said}", note), note


def test_a_cast_to_the_dtype_that_a_module_has_is_nothing() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.inner = self.inner.to(torch.float32)
        return self.inner(x).sum()

    usual = nn.Module.to
    graph = trace(model_of(forward, inner=nn.Linear(4, 4)), (X,))
    assert not graph.notes
    assert [op.target for op in graph.ops].count("aten.linear.default") == 1
    assert nn.Module.to is usual


@pytest.mark.parametrize("turn", [
    lambda w: w.T, lambda w: w.t(), lambda w: w.mT, lambda w: w.permute(1, 0), lambda w: w.permute(-1, -2),
    lambda w: w.transpose(-1, -2), lambda w: w.swapaxes(0, 1), lambda w: w.mH, lambda w: w.movedim(0, 1),
])  # fmt: skip
def test_a_product_with_a_turned_weight_is_linear_however_it_is_written(turn: Callable[[Tensor], Tensor]) -> None:
    model = model_of(lambda self, x: (x @ turn(self.weight)).square().sum(), weight=nn.Parameter(torch.randn(6, 4)))
    graph = same_as_the_model(model, {"x": torch.randn(3, 4)})
    assert graph.ops[0].target == "aten.linear.default"
    assert not any("permute" in op.target or "transpose" in op.target for op in graph.ops)


@pytest.mark.filterwarnings("ignore:.*is deprecated:UserWarning")
@pytest.mark.parametrize("shape", [(3,), (3, 5), (3, 5, 2)])
def test_tensors_are_turned_as_torch_turns_them(shape: tuple[int, ...]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        w = self.weight
        turned = w.T.exp() if len(shape) < 3 else w.mT.exp() + w.permute(0, -1, 1)
        waves = torch.arange(turned.numel(), dtype=x.dtype).reshape(turned.shape).sin()
        return (turned * waves).sum() * x.sum()

    same_as_the_model(model_of(forward, weight=nn.Parameter(torch.randn(*shape))), {"x": torch.randn(2)})


@pytest.mark.parametrize("chosen", [
    lambda mask: torch.where(mask, 0.0, -9.0), lambda mask: torch.where(mask, torch.zeros(8), -9.0),
    lambda mask: torch.where(mask, 0.0, torch.full((8,), -9.0)),
    lambda mask: torch.zeros(8).masked_fill(~mask, torch.tensor(-9.0)),
])  # fmt: skip
def test_masks_are_known_by_one_copy_of_what_they_repeat(chosen: Callable[[Tensor], Tensor]) -> None:

    def forward(self: Any, x: Tensor) -> Tensor:
        mask = torch.ones(8, 8, dtype=torch.bool).tril()[None, None].expand(len(x), 2**20, 8, 8)
        return (self.linear(x)[:, None, None] + chosen(mask)[:, :1]).sum()

    model, x = model_of(forward, linear=nn.Linear(8, 8, dtype=torch.float64)), torch.randn(4, 8, dtype=torch.float64)
    graph = trace(model, (x,))
    assert not any("where" in op.target or "fill" in op.target for op in (*graph.prelude, *graph.ops))
    wanted = (model.linear(x)[:, None, None] + chosen(torch.ones(8, 8, dtype=torch.bool).tril())[None]).sum()
    assert_close(evaluate(graph, {"x": x}, dict(model.named_parameters())), wanted)


def test_a_constant_of_one_number_without_a_stride_is_kept() -> None:
    ids = nn.Buffer(torch.ones((), dtype=torch.int64).expand(1, 1))
    model = model_of(lambda self, x: (x * self.table(self.ids)).sum(), table=nn.Embedding(3, 4), ids=ids)
    same_as_the_model(model, {"x": torch.randn(2, 4)})


def test_transformers_of_torch_are_traced_with_a_mask() -> None:
    """They ask its values whether it is causal."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    causal = nn.Transformer.generate_square_subsequent_mask
    forward = lambda self, x: self.inner(x, causal(x.shape[1], dtype=x.dtype)).square().mean()
    model = model_of(forward, inner=nn.TransformerEncoder(layer, 1))
    assert not same_as_the_model(model, {"x": torch.randn(2, 3, 8)}).notes


def test_repeated_slices_are_as_many_as_a_rank_has() -> None:
    repeated = lambda self, x: self.groups(x).repeat_interleave(4, dim=1, output_size=32).square().sum()
    graph = trace(model_of(repeated, groups=nn.Linear(8, 8)), (torch.zeros(2, 8),))
    (op,) = (o for o in graph.ops if "repeat_interleave" in o.target)
    x = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    assert verify_rule(op, [x], size=2) == []


def test_an_error_in_a_class_of_no_file_is_told() -> None:
    """As a notebook has them, and modules that are run without being imported."""

    branch = model_of(lambda self, x: self.inner(x).mean() if x.sum() > 0 else x.mean(), inner=nn.Linear(4, 4))
    type(branch).__module__ = "nowhere"
    (note,) = trace(branch, (X,)).notes
    assert "depends on the values of tensors" in note


@pytest.mark.parametrize("package", [torch, autopar])
def test_a_package_beside_torch_whose_name_begins_alike_is_user_code(package: Any) -> None:
    """As torchvision is, or a checkout autopar-models beside autopar."""
    file = f"{Path(package.__file__).parent}vision/layers.py"
    made: dict[str, Any] = {}
    exec(compile("def forward(self, x):\n    raise ValueError('no such size')\n", file, "exec"), made)
    caught = refuses(TraceError, "The model fails on its example inputs", trace, model_of(made["forward"]), (X,))
    assert caught.where == f"{file}:2"


def test_a_line_in_a_folder_called_torch_is_a_line_of_the_model() -> None:
    node = torch.fx.Graph().placeholder("x")
    node.stack_trace = '  File "/home/someone/torch/net.py", line 7, in forward'
    assert source_of(node) == "net.py:7"


def test_a_name_that_ends_like_a_number_of_an_export_is_no_value() -> None:
    model = model_of(lambda self, x: {"gru": nn.Linear(4, 4)}["gru0"](x).sum())
    refuses(TraceError, r"The model fails on its example inputs: KeyError: 'gru0'", trace, model, (X,))


OUTSIDE = nn.Linear(4, 3)


def _reads_outside(self: Any, x: Tensor) -> Tensor:
    """A layer in a plain list, which PyTorch does not see either."""
    made = self.first(x)
    if self.learns:
        return self.hidden[0](made).square().mean()
    with torch.no_grad():
        target = self.hidden[0](x[:, :4])
    return (made[:, :3] - target).square().mean() + (made[:, :3] @ OUTSIDE.weight.detach()).mean()


def test_parameters_outside_of_the_model_that_would_learn_are_refused() -> None:
    x, parts = torch.randn(2, 6), {"first": nn.Linear(6, 4), "hidden": [OUTSIDE]}
    with pytest.raises(TraceError, match=r"test_trace.py:\d+: .* a parameter outside of the model.*shape \(3, 4\)"):
        trace(model_of(_reads_outside, **parts, learns=True), (x,))
    assert trace(model_of(_reads_outside, **parts, learns=False), (x,)).loss
    apart = lambda self, output, batch: (output - self.centre).square().mean()
    criterion = model_of(apart, centre=nn.Parameter(torch.zeros(4)))
    with pytest.raises(TraceError, match=r"The loss_fn has parameters \(centre\), which no plan trains"):
        trace(nn.Linear(6, 4), (x,), loss_fn=criterion)
    with pytest.raises(TraceError, match="Forward reads a parameter outside of the model"):
        trace(nn.Linear(6, 4), (x,), loss_fn=lambda output, batch: 2.0 * criterion(output, batch))
    criterion.requires_grad_(False)
    assert trace(nn.Linear(6, 4), (x,), loss_fn=criterion).loss


class Remembers(nn.Module):
    """Functions that remember the model: a hook that keeps what a layer made, an activation, a layer's own forward in another one."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.scale, self.first, self.last = nn.Parameter(torch.tensor(2.0)), nn.Linear(4, 4), nn.Linear(4, 4)
        self.first.register_forward_hook(lambda module, given, made: self.kept.update(first=made))
        self.activations = [lambda x: torch.tanh(self.scale * x)]
        usual = self.last.forward
        self.last.forward = lambda x: usual(x) + self.scale  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.activations[0](self.first(x))) ** 2).mean() + sum(self.kept.values()).abs().mean()


def test_functions_that_remember_the_model_read_its_copy() -> None:
    model = Remembers()
    trace(model, (torch.randn(6, 4),))
    assert not model.kept
    same_as_the_model(model, {"x": torch.randn(6, 4)})


def _tied_by_memory(kept: Callable[[Tensor], object]) -> nn.Module:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if isinstance(made := kept(layers[0].weight.data), nn.Parameter):
        layers[1].weight = made
    else:
        layers.register_buffer("kept", made)  # type: ignore[arg-type]
    return layers


@pytest.mark.parametrize("kept", [nn.Parameter, lambda weight: weight])
def test_parameters_that_one_device_trains_by_another_name_are_refused(kept: Callable[[Tensor], object]) -> None:
    options: Any = {"example_inputs": [X], "loss_fn": lambda y, _: y.mean()}
    said = r"0\.weight and (1\.weight|kept) lie in the same memory.*b\.weight = a\.weight"
    refuses(TraceError, said, api.trace, _tied_by_memory(kept), **options)
    assert api.trace(_tied_by_memory(lambda weight: kept(weight.clone())), **options).ops


def test_what_vmap_computes_is_traced() -> None:
    model = model_of(
        lambda self, x: torch.vmap(lambda row: self.inner(row).masked_fill(row > 1, 0.0).square().mean())(x).mean(),
        inner=nn.Linear(8, 8),
    )
    same_as_the_model(model, {"x": torch.randn(4, 6, 8)})


PLACED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "scattered": (lambda x, mask, seen: x.masked_scatter(mask[..., None], seen.flatten(0, 1)), "autopar.masked_scatter_by_sample"),
    "unbound": (lambda x, mask, seen: x.masked_scatter(mask[..., None].expand_as(x), torch.cat(seen.unbind())), "autopar.masked_scatter_by_sample"),
    "put": (lambda x, mask, seen: x.index_put((mask,), seen.reshape(-1, 8)), "autopar.masked_scatter_by_sample"),
    "as many": (lambda x, mask, seen: x.masked_scatter(mask[..., None], x.flip(1)), "aten.masked_scatter.default"),
    "of columns": (lambda x, mask, seen: x.masked_scatter(mask[0, :, None], seen.flatten(0, 1)), "aten.masked_scatter.default"),
}  # fmt: skip
"""What stands at the places of a mask, and the operator: by sample only where each may have values of its own alone."""


@pytest.mark.parametrize("kind", PLACED)
def test_values_at_the_places_of_a_mask_are_those_of_their_sample(kind: str) -> None:
    code, target = PLACED[kind]

    def forward(self: Any, x: Tensor, seen: Tensor) -> Tensor:
        x = self.inner(x)
        return code(x, (x.detach() * 0 + torch.tensor([0.0, 1, 1, 0])[:, None])[..., 0] > 0, seen).square().sum()

    model, batch = model_of(forward, inner=nn.Linear(8, 8)), {"x": torch.randn(2, 4, 8), "seen": torch.randn(2, 2, 8)}
    graph = same_as_the_model(model, batch)
    assert [op.target for op in graph.ops if "scatter" in op.target] == [target]
