from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import InfeasibleError, TraceError
from autopar.graph.graph import Graph
from autopar.models.resolve import resolve_model
from autopar.plan.mesh import S
from autopar.plan.plan import Plan, PrecisionName
from autopar.verification.reference import Subject
from tests.support.example_plans import at_rest
from tests.support.lower.against_model import check, check_each
from tests.support.said import refuses
from tests.support.small_models import model_of

pytestmark = pytest.mark.filterwarnings("ignore:.*_functional_collectives.*:FutureWarning")

GPT = "hf:gpt2?n_layer=1&n_embd=32&n_head=4&vocab_size=257&n_positions=18&resid_pdrop=0&embd_pdrop=0&attn_pdrop=0"
LLAMA = "hf:llama?num_hidden_layers=1&hidden_size=32&num_attention_heads=4&intermediate_size=64&vocab_size=96&num_key_value_heads=2"
THREE_HEADS = GPT.replace("n_embd=32&n_head=4", "n_embd=24&n_head=3")


@cache
def traced(
    spec: str, length: int | None, samples: int, masked: bool, precision: PrecisionName
) -> tuple[Subject, dict[str, Tensor], Graph]:
    subject = resolve_model(spec, sequence_length=length)
    batch = subject.make_batch(samples, seed=0, padded=True)
    if not masked:
        del batch["attention_mask"]
    options = {"global_batch_size": samples, "precision": precision}
    return subject, batch, autopar.trace(subject.build(), example_inputs=batch, **options)


def checked(spec: str, length: int | None, pins: list[str], samples: int = 4, masked: bool = True) -> Plan:
    precision: PrecisionName = "fp32" if spec == ROUTED else "fp64"  # experts: products of groups are in float32
    subject, batch, graph = traced(spec, length, samples, masked, precision)
    return check(subject.build(), batch, pins, graph=graph, precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "length", "pins"),
    [
        (GPT, 17, ["tp=2"]),
        (LLAMA, 17, ["tp=2", "dp_shard=2"]),
        (GPT, 18, ["cp=2", "cp_attention=gather"]),
        (LLAMA, 18, ["cp=2", "cp_attention=ulysses"]),
    ],
)
def test_odd_sequences(spec: str, length: int, pins: list[str]) -> None:
    checked(spec, length, pins)


@pytest.mark.parametrize(
    ("spec", "length", "samples", "pins", "said"),
    [
        (GPT, 17, 4, ["cp=2"], "cp divides the sequence of 17; cp=2. .*pad sequences to a multiple of cp.$"),
        (GPT, 17, 4, ["cp=2", "cp_attention=gather"], "sequence of 17; .*pad sequences to a multiple of cp.$"),
        (LLAMA, 17, 4, ["cp=2", "cp_attention=ulysses"], "sequence of 17; .*pad sequences to a multiple of cp.$"),
        (LLAMA, 18, 4, ["cp=2", "cp_attention=ring"], r"sequence of 18 \(ring\); .*pad sequences .* 2 \* cp.$"),
        (GPT, 16, 6, ["dp_shard=4"], "the global batch 6 divides by .*; dp_shard=4. .*take another global batch.$"),
        (GPT, 16, 6, ["dp_shard=2", "num_micro_batches=2"], r"num_micro_batches=2 \(equal parts .* global batch 6\)"),
    ],
)
def test_uneven_parts_have_a_remedy(spec: str, length: int, samples: int, pins: list[str], said: str) -> None:
    refuses(InfeasibleError, said, checked, spec, length, pins, samples)


SEGFORMER = (
    "hf:segformer?num_encoder_blocks=4&depths=[1,1,1,1]&sr_ratios=[8,4,2,1]&hidden_sizes=[8,16,40,64]&patch_sizes=[7,3,3,3]"
    "&strides=[4,2,2,2]&num_attention_heads=[1,2,5,8]&mlp_ratios=[2,2,2,2]&decoder_hidden_size=32&num_labels=5"
)
"""Of 1, 2, 5 and 8 heads."""
BART = (
    "hf:bart?encoder_layers=1&decoder_layers=1&encoder_attention_heads=3&decoder_attention_heads=4&d_model=24"
    "&encoder_ffn_dim=48&decoder_ffn_dim=48&vocab_size=96&max_position_embeddings=32"
)
HYBRID = (
    "hf:granitemoehybrid?num_hidden_layers=2&hidden_size=24&num_attention_heads=3&num_key_value_heads=3&intermediate_size=48"
    "&shared_intermediate_size=48&vocab_size=96&mamba_n_heads=6&mamba_d_head=8&mamba_d_state=8&mamba_chunk_size=8"
    '&layer_types=["mamba","attention"]&num_local_experts=0'
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "length", "degree", "split"),
    [
        (SEGFORMER, None, "tp=2", ("stages.1.blocks.0.attention.q_proj.weight", "stages.3.blocks.0.attention.q_proj.weight")),
        (BART, 16, "tp=2", ("decoder.layers.0.self_attn.q_proj.weight", "encoder.layers.0.fc1.weight")),
        (HYBRID, 16, "tp=2", ("layers.0.mamba.in_proj.weight", "layers.1.shared_mlp.input_linear.weight")),
        (THREE_HEADS.replace("n_layer=1", "n_layer=2"), 16, "tp=4", ("h.0.mlp.c_fc.weight", "h.1.mlp.c_fc.weight")),
    ],
)  # fmt: skip
def test_undivided_heads_leave_others_split(spec: str, length: int | None, degree: str, split: tuple[str, ...]) -> None:
    """What is pinned is split by output rows, and those heads stay whole: one sample at a time leaves nothing else to split."""
    dim = 1 if "c_fc" in split[0] else 0
    plan = checked(spec, length, [degree, "micro_batch=1", *(f"*.{name}=tp:S({dim})" for name in split)])
    assert plan.mesh.tp > 1
    assert S(dim) in at_rest(plan).values()


@pytest.mark.parametrize("heads", [1, 2])
def test_fewer_heads_of_keys_than_ranks(heads: int) -> None:
    """Each rank has the key and value heads that its query heads read, which several ranks may share."""
    spec = LLAMA.replace("key_value_heads=2", f"key_value_heads={heads}")
    plan = checked(spec, 16, ["tp=4", "*.q_proj.weight=tp:S(0)"])
    assert [kind for name, kind in at_rest(plan).items() if name.endswith("q_proj.weight")] == [S(0)]


def _convolved(self: Any, x: Tensor, y: Tensor) -> Tensor:
    x = F.gelu(self.second(F.relu(self.norm(self.first(x)))))
    return F.cross_entropy(self.head(self.last(x).mean((2, 3))), y)


def convolved(norm: partial[nn.Module], groups: int = 1) -> nn.Module:
    """Two convolutions (the second grouped, if so) with a norm between them."""
    first, wide = nn.Conv2d(3, 8, 3, padding=1, bias=False), partial(nn.Conv2d, 8, 8, 3, padding=1, bias=False)
    parts = {"second": wide(groups=groups), "last": nn.Conv2d(8, 4, 1), "head": nn.Linear(4, 5)}
    return model_of(_convolved, first=first, norm=norm(), **parts)


def images(samples: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(samples, 3, 7, 5, generator=generator),
        "y": torch.randint(0, 5, (samples,), generator=generator),
    }


GROUPS, BATCH = partial(nn.GroupNorm, 4, 8), partial(nn.BatchNorm2d, 8)
CHANNELS = {"first.weight": S(0), "norm.weight": S(0), "norm.bias": S(0), "second.weight": S(1)}


OF_GROUPS = {"first.weight": S(0), "second.weight": S(0), "last.weight": S(1)}


@pytest.mark.parametrize(("degrees", "norm", "groups", "pinned"), [
    ("tp=2 dp_shard=2", GROUPS, 1, CHANNELS),
    ("tp=2 dp_shard=2", GROUPS, 2, OF_GROUPS), ("tp=2 dp_shard=2", partial(nn.GroupNorm, 1, 8), 1, OF_GROUPS),
    ("tp=4", partial(nn.GroupNorm, 2, 8), 1, {"first.weight": S(0)}),  # of fewer groups than ranks
    ("tp=2 dp_shard=2", BATCH, 1, {}), ("tp=2 dp_shard=2", BATCH, 1, CHANNELS),
    ("tp=2 dp_shard=2", partial(nn.InstanceNorm2d, 8, affine=True), 1, CHANNELS),
])  # fmt: skip
def test_convolutions_and_norms(degrees: str, norm: partial[nn.Module], groups: int, pinned: dict[str, object]) -> None:
    pins = degrees.split() + [f"{name}=tp:{kind}" for name, kind in pinned.items()]
    plan = check(convolved(norm, groups), images(), pins)
    assert at_rest(plan).items() >= pinned.items()
    assert norm is not BATCH or any("statistics over the global batch" in note for note in plan.notes)


ROUTED = LLAMA.replace("llama", "mixtral") + "&num_local_experts=4&output_router_logits=true&router_aux_loss_coef=1.0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pins", "masked"),
    [
        (["dp_shard=2", "tp=2"], True),
        (["dp_shard=2", "tp=2"], False),
    ],
)
def test_an_auxiliary_loss_with_and_without_a_mask(pins: list[str], masked: bool) -> None:
    assert checked(ROUTED, 7, pins, masked=masked).num_micro_batches == 1


def test_an_auxiliary_loss_of_several_micro_batches_is_refused() -> None:
    said = "auxiliary losses of routers.* one micro-batch.*num_micro_batches=2.*before the first backward"
    refuses(InfeasibleError, said, checked, ROUTED, 7, ["dp_shard=2", "num_micro_batches=2"])


def standardized(self: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """Targets less their mean, over their deviation: sums over the batch that depend on others, in three rounds."""
    spread = target - target.mean(0)
    scaled = spread / (spread.square().mean(0).sqrt() + 0.1)
    return F.huber_loss(self.linear(x), scaled) + (self.linear(x) * scaled).mean() * scaled.pow(4).mean()


def test_sums_over_the_batch_that_depend_on_others() -> None:
    batch = {"x": torch.randn(8, 6), "target": torch.randn(8, 4) * 3.0 + 1.0}
    model = model_of(standardized, linear=nn.Linear(6, 4))
    graph = autopar.trace(model, example_inputs=batch, global_batch_size=8, precision="fp64")
    assert not graph.exact
    for pins in (["dp_shard=2", "micro_batch=2"], ["tp=2", "micro_batch=4"]):
        check(model, batch, pins, graph=graph)


def penalised(self: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """A loss with a term that no sample has a part in: a penalty on weights, a learned variance, numbers."""
    loss = F.huber_loss(self.layers(x), target)
    if self.kind == "penalty":
        penalty = sum(p.square().sum() for p in self.parameters())
        return F.cross_entropy(self.layers(x), target.argmax(1)) + 0.1 * penalty
    if self.kind == "variance":
        return 0.5 * (torch.exp(-self.log_variance) * loss + self.log_variance)
    return 1.0 - (3.0 - loss / target.square().sum()) * 0.5


@pytest.mark.parametrize("kind", ["penalty", "variance", "numbers"])
def test_terms_of_no_sample_are_counted_once(kind: str) -> None:
    batch = {"x": torch.randn(8, 6), "target": torch.randn(8, 4)}
    layers, variance = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), nn.Parameter(torch.zeros(()))
    model = model_of(penalised, kind=kind, layers=layers, log_variance=variance)
    check_each(model, batch, ["dp_shard=2", "micro_batch=2"], ["tp=2", "micro_batch=4"], ["pp=2", "micro_batch=4"])


NUMBER, ROW, ROWS = (lambda self, y: 0.5), (lambda self, y: self.row), (lambda self, y: self.row[None])


@pytest.mark.parametrize(("places", "value"), [
    *((lambda y, place, mask: mask, value) for value in (NUMBER, ROWS)),
    *((lambda y, place, mask: (torch.arange(y.shape[0]), place), value) for value in (ROW, ROWS)),
    (lambda y, place, mask: (torch.arange(y.shape[0])[:, None], torch.stack([place, place - 2], dim=1)), ROW),
    (
        lambda y, place, mask: (
            torch.arange(y.shape[0])[:, None, None],
            torch.arange(5)[:, None],
            (place[:, None, None] + torch.arange(4)) % 4 + torch.zeros(5, 1, dtype=torch.int64),
        ),
        ROWS,
    ),
    (lambda y, place, mask: (slice(None), [0, 2]), ROW),
    (lambda y, place, mask: (mask[:, 0], slice(None), ...), ROWS),
])  # fmt: skip
def test_what_is_put_at_places_leaves_samples_apart(places: Callable[..., Any], value: Callable[..., Any]) -> None:
    """Of what a layer returns, as SpecAugment, padding of labels and caches are written."""

    def forward(self: Any, x: Tensor, place: Tensor, mask: Tensor) -> Tensor:
        y = 1.0 * self.linear(x)
        y[places(y, place, mask)] = value(self, y)
        return y.square().sum()

    batch = {"x": torch.randn(4, 5, 4), "place": torch.tensor([0, -1, 3, 0]), "mask": torch.rand(4, 5) < 0.5}
    model = model_of(forward, linear=nn.Linear(4, 4), row=nn.Parameter(torch.randn(4)))
    check_each(model, batch, ["dp_shard=2", "num_micro_batches=2"], ["tp=2"])


@pytest.mark.parametrize("turned", [False, True])
def test_strides_are_those_of_the_trace(turned: bool) -> None:
    """A program may hold a transposed tensor as one that is contiguous."""

    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x).transpose(1, 2) if turned else self.linear(x)
        return (y.as_strided((len(y), 4, 8), (20, 4, 1)) * torch.arange(8)).square().sum()

    pins = ["dp_shard=2", "num_micro_batches=2"]
    check(model_of(forward, linear=nn.Linear(4, 4)), {"x": torch.randn(4, 5, 4)}, pins)
    strided = lambda self, x: self.linear(x)[:, 1:].as_strided((2, 4), (20, 1), 0).sum()
    outside = model_of(strided, linear=nn.Linear(4, 4))
    said = "as_strided reads memory that is not the tensor's"
    refuses(TraceError, said, autopar.trace, outside, example_inputs={"x": torch.randn(2, 5, 4)})


def _contrast(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    return torch.logsumexp((y @ y.T).fill_diagonal_(float("-inf")), 1).mean()


def _written(self: Any, x: Tensor) -> Tensor:
    y = 1.0 * self.linear(x)
    y.as_strided((2, len(y)), (2, 4)).copy_(self.linear(x.sin())[:, 1:3].T)
    return (y * x).square().sum()


def _zeroed(self: Any, x: Tensor) -> Tensor:
    y = 1.0 * self.linear(x)
    y.view(len(y), 2, -1)[:, 1].zero_()
    return (y * x).square().sum()


def _covariances(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x).T
    return torch.cov(y).triu(1).square().sum() + y.cov(correction=0).square().mean() + torch.corrcoef(y).sin().sum()


def _used(self: Any, x: Tensor) -> Tensor:
    """A moving count of what is positive, which the loss reads at once."""
    y = self.linear(x)
    with torch.no_grad():
        self.seen.mul_(0.9).add_((y > 0).to(x.dtype).sum(0), alpha=0.1)
    return (y.square() * self.seen / self.seen.sum()).sum()


@pytest.mark.parametrize(("forward", "plans"), [
    *((forward, [["dp_shard=2"], ["tp=2"]]) for forward in (_contrast, _written)),
    (_zeroed, [["dp_shard=2", "num_micro_batches=2"]]),
    *((forward, [["dp_shard=2"], ["tp=2", "dp_replicate=2"]]) for forward in (_covariances, _used)),
])  # fmt: skip
def test_writes_by_strides_leave_the_gradients_of_the_rest_and_totals_are_of_all_samples(
    forward: Callable[..., Any], plans: list[list[str]]
) -> None:
    """Torch's own gradient of ``as_strided_scatter`` reaches what was replaced, and nothing else."""
    model = model_of(forward, linear=nn.Linear(4, 4), seen=nn.Buffer(torch.ones(4)))
    check_each(model, {"x": torch.randn(8, 4)}, *plans)


def test_indices_of_a_put_may_end_in_none() -> None:
    """As calls of the operator itself have them; slices of Python leave none."""

    def forward(self: Any, x: Tensor, mask: Tensor, place: Tensor) -> Tensor:
        y = torch.ops.aten.index_put(self.linear(x), [mask, None], torch.tensor(0.5))
        y = torch.ops.aten.index_put(y[:, None], [torch.arange(len(y)), place, None], self.row)
        return y.square().sum()

    model = model_of(forward, linear=nn.Linear(4, 4), row=nn.Parameter(torch.randn(4)))
    mask, place = torch.tensor([True, False, False, True]), torch.zeros(4, dtype=torch.int64)
    batch = {"x": torch.randn(4, 4), "mask": mask, "place": place}
    check_each(model, batch, ["tp=2"], ["dp_shard=2", "num_micro_batches=2"])
