"""One small model of each kind of architecture against one device; ``tools.campaigns.models`` runs all families."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import InfeasibleError, PlanError, VerificationError
from autopar.graph.graph import Graph
from autopar.lower.program import lower
from autopar.models.resolve import resolve_model
from autopar.plan.plan import Plan
from autopar.verification import results
from autopar.verification.against_one_device import verify
from autopar.verification.compared_models import VerifiedModel
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed.layouts import equals_one_device
from tests.support.distributed.plans import estimated
from tests.support.said import refuses
from tests.support.small_models import model_of


def _normalised(self: Any, target: Tensor, losses: Tensor) -> Tensor:
    x = functional.relu(self.norms[0](self.first(target)))
    x = functional.adaptive_avg_pool2d(self.second(x), 1).flatten(1)
    return (self.head(self.norms[1](x)).squeeze(1) - losses).square().mean()


def normalised(bias: bool = False) -> tuple[nn.Module, dict[str, Tensor]]:
    """Convolutions and batch norms, called by keywords of torch's pipelines; a bias before a norm has no gradient but rounding."""
    parts = {"first": nn.Conv2d(3, 8, 3, bias=bias), "second": nn.Conv2d(8, 8, 3, bias=False), "head": nn.Linear(8, 1)}
    model = model_of(_normalised, **parts, norms=nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm1d(8)]))
    return model, {"target": torch.randn(2, 3, 8, 8), "losses": torch.randn(2)}


def biased() -> tuple[nn.Module, dict[str, Tensor]]:
    return normalised(bias=True)


def transcribed() -> tuple[nn.Module, dict[str, Tensor]]:
    """Frames to letters by a CTC loss; the letters of a batch stand one after the other."""

    def forward(self: Any, sound: Tensor, labels: Tensor) -> Tensor:
        x = self.inside(sound).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        lengths = torch.full((len(x),), x.shape[1])
        logs, known = self.letters(x).log_softmax(-1).transpose(0, 1), labels >= 0
        return functional.ctc_loss(logs, labels[known], lengths, known.sum(1))

    inside = nn.Conv1d(4, 16, 3, padding=1)
    layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
    model = model_of(forward, inside=inside, layers=nn.ModuleList(layers), letters=nn.Linear(16, 8))
    labels = torch.randint(1, 8, (4, 5))
    labels[torch.arange(5) >= torch.tensor([5, 3, 1, 4])[:, None]] = -100
    return model, {"sound": torch.randn(4, 4, 12), "labels": labels}


def latents() -> tuple[nn.Module, dict[str, Tensor]]:
    """Learned queries, expanded to the batch before the layers that read them: views of a parameter."""

    def forward(self: Any, x: Tensor) -> Tensor:
        known, z = self.inside(x), self.queries.expand(len(x), -1, -1)
        for reads in self.reads:
            z = z + reads(z, known, known, need_weights=False)[0]
        return self.head(z).square().mean()

    queries, inside = nn.Parameter(torch.randn(3, 16)), nn.Linear(6, 16)
    reads = nn.ModuleList(nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))
    model = model_of(forward, queries=queries, inside=inside, reads=reads, head=nn.Linear(16, 4))
    return model, {"x": torch.randn(4, 5, 6)}


def taught() -> tuple[nn.Module, dict[str, Tensor]]:
    """A teacher without gradients whose weights could have some: an average of the model that another part of a program makes."""

    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            known = self.teacher(x)
        return (self.student(x) - known).square().mean()

    teacher, student = (nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))) for _ in range(2))
    return model_of(forward, teacher=teacher, student=student), {"x": torch.randn(4, 16)}


HERE = "tests.distributed.test_families"
GPT, LLAMA = "gpt:layers=2,hidden=32,heads=4,vocab=65", "llama:layers=2,hidden=32,heads=4,ffn=64,vocab=65"


@cache
def traced(spec: str, length: int | None) -> tuple[VerifiedModel, Graph]:
    subject = VerifiedModel(resolve_model(spec, sequence_length=length), masked=True)
    return subject, subject.trace()


def planned(
    spec: str, pins: str, *, length: int | None = None, ranks: int = 4, batch: int = 16
) -> tuple[VerifiedModel, Plan, Graph]:
    subject, graph = traced(spec, length)
    plan = estimated(graph, cluster=f"cpu:1x{ranks}", global_batch_size=batch, pins=pins.split())
    return subject, plan, graph


CASES = {
    "learned queries": (f"{HERE}:latents", "tp=2 dp_shard=2 zero=3"),
    "a teacher without gradients": (f"{HERE}:taught", "dp_shard=4 zero=3"),
    "speech": (f"{HERE}:transcribed", "pp=2 tp=2"),
    "batch norm in a pipeline": (f"{HERE}:normalised", "pp=2 dp_replicate=2"),
    "encoder and decoder": ("hf:t5?num_layers=1&d_model=16&d_kv=8&num_heads=2&d_ff=32&vocab_size=32", "pp=2 tp=2"),
    "skip connections over stages": ("tools.campaigns.handmade:unet", "pp=2 tp=2"),
    "vision": ("hf:convnext?hidden_sizes=[8,8]&depths=[1,1]&num_stages=2&image_size=16&num_labels=5", "tp=2 dp_replicate=2"),
    "tables of embeddings": ("tools.campaigns.handmade:recommender", "tp=4"),
    "a stage without parameters": ("tools.campaigns.handmade:recommender",
                                   "pp=4 stage@bottom.*=0 stage@tables.*=1 stage@all=2 stage@top.*=3"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_architecture_equals_one_device(pool: WorkerPool, case: str) -> None:
    equals_one_device(pool, *planned(*CASES[case], length=8 if case == "encoder and decoder" else None))


@pytest.mark.parametrize(("spec", "pins", "layers"), [
    (GPT, "pp=2 virtual_stages=2", [0, 1, 1, 0]),
    (GPT, "pp=2 virtual_stages=2 recompute=full", [0, 1, 1, 0]),
    (LLAMA, "pp=2 stage@embed_tokens=0 stage@layers.0=1", [0, 2]),
    (LLAMA, "pp=2 stage@layers.1=0 stage@lm_head=1", [2, 0]),
])  # fmt: skip
def test_stages_without_a_layer_equal_one_device(pool: WorkerPool, spec: str, pins: str, layers: list[int]) -> None:
    """The first family's table of words is its head too, in other stages of other ranks."""
    subject, plan, graph = planned(spec, pins, length=16, ranks=2, batch=8)
    labels = [[block.label for block in graph.blocks[s.start : s.stop]] for s in plan.stages]
    assert [sum(".h." in label or ".layers." in label for label in own) for own in labels] == layers
    equals_one_device(pool, subject, plan, graph)


def test_statistics_over_the_batch_take_one_micro_batch() -> None:
    refuses(InfeasibleError, "one micro-batch", planned, f"{HERE}:normalised", "dp_replicate=2 micro_batch=2", ranks=2)
    _, plan, graph = planned(f"{HERE}:normalised", "dp_replicate=2", ranks=2)
    assert plan.num_micro_batches == 1
    with pytest.raises(PlanError, match=r"cannot .* micro-batches.* Pin num_micro_batches=1"):
        lower(replace(plan, micro_batch_size=4), graph)


def test_rounding_is_told_from_a_wrong_program(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every error counts as past the limits, as rounding is on some machines: float64 is asked."""
    monkeypatch.setitem(results._TOLERANCES, "fp32", (-1.0, -1.0, -1.0))
    report = verify(*planned(f"{HERE}:biased", "tp=2 dp_shard=2"), steps=2, pool=pool, run_timeout_s=300.0)
    assert not report.is_within
    report.check()
    assert report.verdict.startswith("rounding: the same plan agrees in float64 to ")
    assert len(report.confirmation.rows) == 4
    assert report.confirmation.error < 1e-9
    assert {row.precision for row in report.confirmation.rows} == {"fp64"}


def test_a_program_that_is_wrong_in_float32_alone_is_wrong(pool: WorkerPool) -> None:
    """The graph has another epsilon than the model, which its trace in float64 does not have."""
    subject, _, graph = planned(f"{HERE}:normalised", "tp=2 dp_shard=2")
    other = lambda op: replace(op, args=tuple(0.1 if arg == 1e-5 else arg for arg in op.args))
    ops = tuple(other(op) if "batch_norm" in op.target else op for op in graph.ops)
    assert ops != graph.ops
    wrong = replace(graph, ops=ops)
    plan = estimated(wrong, cluster="cpu:1x4", global_batch_size=16, pins=["tp=2", "dp_shard=2"])
    report = verify(subject, plan, wrong, steps=2, pool=pool, run_timeout_s=300.0)
    assert not report.passed
    assert report.verdict.startswith("wrong")
    refuses(VerificationError, "", report.check)
