"""Plans of all kinds, on ranks that are processes, compute what one device does."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar import api
from autopar.graph.graph import Graph, Ref
from autopar.hardware.cluster import Cluster
from autopar.lower.emit import str_name
from autopar.lower.program import Program, lower
from autopar.models.resolve import resolve_model
from autopar.plan.file import load_plan, save_plan
from autopar.plan.mesh import Mesh
from autopar.plan.plan import FP64, Plan
from autopar.util.files import write_toml
from autopar.verification.compared_models import VerifiedModel
from autopar.verification.rank_pool import WorkerPool
from autopar.verification.reference import Subject, loss_of
from tests.support.clusters import two_kinds
from tests.support.distributed import jobs, layouts
from tests.support.distributed.layouts import clips_as_one_device, equals_one_device, goes_on
from tests.support.distributed.mixtures import mixture
from tests.support.distributed.oddities import REMEMBERING, UNUSUAL, WITHOUT_STATISTICS
from tests.support.distributed.plans import estimated, make_plan, micro_batch_size
from tests.support.distributed.subjects import HfSubject, OwnSubject, graph_of

BATCH = 8
Planned = tuple[Any, Plan, Graph]


@cache
def traced(subject: OwnSubject) -> Graph:
    return subject.trace(global_batch_size=BATCH)


def planned(subject: Any, pins: str, graph: Graph | None = None, *, ranks: int = 4) -> Planned:
    graph = graph or traced(subject)
    return subject, estimated(graph, cluster=f"cpu:1x{ranks}", global_batch_size=BATCH, pins=pins.split()), graph


def batches(subject: Any, count: int = 3) -> list[dict[str, torch.Tensor]]:
    return [subject.make_batch(BATCH, seed=seed) for seed in range(count)]


# --- layouts

CLIPPED = {
    "dp4", "dp2 ZeRO 2", "HSDP 2x2", "tp2 x dp2 whole parameters", "tp2 x dp2 ZeRO 3", "pp2 x dp2 ZeRO 1", "pp2 x tp2",
    "pp2 two virtual stages",
}  # fmt: skip
"""Whose losses, norms and parameters ``clips_as_one_device`` compares, in the tests of clipping and of steps on the host."""
KINDS = ["gpt2", "llama", "llama-untied"]
PARTS = {"tp2", "tp2 whole parameters", "dp4 ZeRO 3", "pp2 x dp2"}
"""Of others: of tp4, of those parameters beside dp2, of HSDP and of pipelines with ZeRO."""
REST = {name: mesh for name, (mesh, _) in layouts.LAYOUTS.items() if name not in CLIPPED}
CASES = [
    (name, KINDS[n % (2 if mesh.pp > 1 else 3)]) for n, (name, mesh) in enumerate(REST.items()) if name not in PARTS
]
"""Kinds in turn: of pipelines those that are tied, as tied tables concern stages."""


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_every_layout_equals_one_device(pool: WorkerPool, layout: str, kind: str) -> None:
    steps = 3 if kind == "llama" else 2  # the second one has what the first one left behind
    equals_one_device(pool, *layouts.planned(layout, kind), steps=steps)


@pytest.mark.parametrize(("layout", "kind", "code"), [
    ("cp4 gather", "gpt2 unmasked", "attention_gathered("), ("pp2 x cp2 gather", "llama", "all_gather("),
    ("cp2 x dp2 ZeRO 3 ulysses", "gpt2", "all_to_all("), ("cp2 x tp2 ulysses", "llama unmasked", "all_to_all("),
    ("cp4 ring", "llama", "attention_ring("), ("cp2 x tp2 ring made again", "gpt2 unmasked", "attention_ring("),
    ("cp2 x dp2 ZeRO 1 ring", "llama unmasked", "attention_ring("),
])  # fmt: skip
def test_a_split_sequence_equals_one_device(pool: WorkerPool, layout: str, kind: str, code: str) -> None:
    subject, plan, graph = layouts.planned(layout, kind)
    assert code in lower(plan, graph).code
    equals_one_device(pool, subject, plan, graph)


# --- experts


def with_experts(pins: str, **options: Any) -> Planned:
    subject = mixture(**options)
    return planned(subject, pins, graph_of(subject))


EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ep4 of dp4 ZeRO 3": ("ep=4 dp_shard=4 zero=3", {}),
    "ep2 of HSDP": ("ep=2 dp_replicate=2 dp_shard=2 zero=3 recompute=selective", {}),
    "ep2 of dp2, width on tp2": ("ep=2 ep_data=2 tp=2", {}),
    "ep4 of tp4": ("ep=4 ep_data=1 tp=4", {}),
    "all experts of every token": ("ep=4 dp_shard=4", {"top_k": 4}),
    "an expert without tokens, twice split": ("ep=4 ep_data=2 tp=2", {"top_k": 1, "skewed": True}),
    "auxiliary loss on dp4": ("ep=1 dp_replicate=4", {"balanced": True}),
    "auxiliary loss with ep2 x pp2": ("ep=2 pp=2 tp=1", {"balanced": True}),
    "auxiliary loss of a skewed router": ("ep=4 ep_data=2 tp=2", {"balanced": True, "skewed": True}),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_experts_on_ranks_equal_one_device(pool: WorkerPool, case: str) -> None:
    pins, options = EXPERTS[case]
    subject, plan, graph = with_experts(pins, **options)
    wanted = dict(pin.split("=") for pin in pins.split() if pin.startswith("ep"))
    assert all(getattr(plan.mesh, key) == int(value) for key, value in wanted.items())
    assert plan.num_micro_batches == 1 or "auxiliary" not in case
    equals_one_device(pool, subject, plan, graph)


@pytest.mark.parametrize("pins", ["ep=2 dp_shard=4", "ep=4 ep_data=2 tp=2"])
def test_the_norm_counts_every_expert_once_and_clips_them_all(pool: WorkerPool, pins: str) -> None:
    clips_as_one_device(pool, *with_experts(pins), alone=True)


def test_a_checkpoint_of_spread_experts_loads_under_another_plan(pool: WorkerPool, tmp_path: Path) -> None:
    (subject, here, graph), (_, there, _) = map(with_experts, ("ep=4 ep_data=2 tp=2", "ep=2 dp_shard=4 zero=3"))
    goes_on(pool, subject, graph, batches(subject), tmp_path, here, there, here)


def test_mixed_precision_keeps_spread_experts_in_float32_at_rest(pool: WorkerPool) -> None:
    """Computed in bfloat16, summed in float32: the gradients of experts are those of one device but for rounding."""
    subject = mixture()
    graph = api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0), precision="bf16")
    plan = estimated(graph, cluster="cpu:1x4", global_batch_size=8, pins=["ep=2", "dp_replicate=4"], precision="bf16")
    model, name = subject.build(), "layers.1.experts.down"
    model(**batches(subject)[0]).backward()
    wanted = model.get_parameter(name).grad
    for rank in layouts.on_batch(pool, jobs.gradients_both_ways, subject, plan, graph):
        for way in ("step", "call"):
            assert rank[way][name].dtype == torch.float32
            assert (rank[way][name] - wanted).norm() <= 0.05 * wanted.norm()


# --- vocabularies that are padded

SPLIT = "transformer.wte.weight=tp:S(0)"
MODELS = {
    "tied": "hf:gpt2?n_embd=32&n_layer=2&n_head=4&vocab_size=257&n_positions=17",
    "untied": "hf:llama?num_hidden_layers=2&hidden_size=32&intermediate_size=64&num_attention_heads=4"
    "&num_key_value_heads=2&vocab_size=257&max_position_embeddings=16&tie_word_embeddings=false",
}


@cache
def odd_vocabulary(kind: str) -> tuple[Subject, Graph]:
    subject = VerifiedModel(resolve_model(MODELS[kind]), masked=True)
    return subject, api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0))


def padded(kind: str, pins: str) -> Planned:
    subject, graph = odd_vocabulary(kind)
    return planned(subject, pins, graph)


@pytest.mark.parametrize(("pins", "length", "positions"), [
    (f"tp=4 {SPLIT}", 260, 20), (f"tp=2 dp_shard=2 zero=3 {SPLIT}", 258, 18),
    # what is padded follows from the degree, not from the typing: one graph is solved for, priced and run
    ("tp=4 transformer.wte.weight=tp:S(1)", 260, 20),
])  # fmt: skip
def test_257_tokens_and_17_positions_split(pool: WorkerPool, pins: str, length: int, positions: int) -> None:
    subject, plan, graph = padded("tied", pins)
    lengths = {entry.parameter: entry.length for entry in plan.padding}
    assert lengths == {"transformer.wte.weight": length, "transformer.wpe.weight": positions}
    assert any(f"257 padded to {length}" in note for note in plan.notes)
    equals_one_device(pool, subject, plan, graph)


@pytest.mark.parametrize(("kind", "pins"), [
    ("tied", "dp_replicate=4 zero=0"), ("tied", "pp=2 dp_shard=2 zero=1"), ("tied", "tp=2 dp_shard=2 zero=3"),
    ("untied", "cp=2 dp_replicate=2 zero=0"),  # by which the 17 tokens of the tied model do not divide
])  # fmt: skip
def test_aligned_vocabularies_train_as_one_device(pool: WorkerPool, kind: str, pins: str) -> None:
    """Untied under other plans, beside one that is not aligned: ``test_checkpoints_hold_no_padding``."""
    subject, plan, graph = padded(kind, f"{pins} vocab_multiple=16")
    lengths = {entry.parameter: entry.length for entry in plan.padding}
    head = "transformer.wte.weight" if kind == "tied" else "lm_head.weight"
    assert lengths[head] == (288 if plan.mesh.tp == 2 else 272)
    assert plan.mesh.tp > 1 or list(lengths) == [head], "a table that is only looked up in gains nothing"
    assert plan.vocab_multiple == 16
    equals_one_device(pool, subject, plan, graph)


PLAIN = "dp_replicate=4 zero=0"
ALIGNED = ("dp_shard=4 zero=3 vocab_multiple=16", PLAIN, "pp=2 dp_shard=2 zero=1 vocab_multiple=16")


@pytest.mark.parametrize(("kind", "route"), [
    ("tied", [f"{pins} {SPLIT}" for pins in ("pp=2 tp=2", "tp=4", "tp=2 dp_shard=2 zero=3", "tp=4")]),
    ("untied", ALIGNED),
])  # fmt: skip
def test_checkpoints_hold_no_padding(pool: WorkerPool, tmp_path: Path, kind: str, route: list[str]) -> None:
    """So that plans without read those of aligned vocabularies, and go on with the same losses."""
    subject, graph = odd_vocabulary(kind)
    plans = [padded(kind, pins)[1] for pins in route]
    assert [bool(plan.padding) for plan in plans] == [pins != PLAIN for pins in route]
    goes_on(pool, subject, graph, batches(subject), tmp_path, *plans)


# --- two kinds of devices: ranks that take 3 samples and 1 of each micro-batch, unequal stages

SHARED = HfSubject("gpt2")


def shares(zero: int) -> Planned:
    graph, pins = graph_of(SHARED), ["data_shares=3-1", f"zero={zero}"]
    plan = estimated(graph, cluster=two_kinds(1, 1, factor=3.0), global_batch_size=8, pins=pins)
    assert plan.num_micro_batches == 2
    assert [plan.samples_of(rank) for rank in range(2)] == [range(6), range(6, 8)]
    return SHARED, plan, graph


@pytest.mark.parametrize("zero", [1, 2])
def test_unequal_shares_equal_one_device(pool: WorkerPool, zero: int) -> None:
    """Under the others: ``test_steps_and_norms_of_unequal_shares_are_those_of_one_device``."""
    equals_one_device(pool, *shares(zero))


@pytest.mark.parametrize("zero", [1, 3])
def test_unequal_shares_of_a_padded_vocabulary_equal_one_device(pool: WorkerPool, zero: int) -> None:
    """As a search plans them: node groups of two ranks each, one kind three times as fast, and rows that are aligned."""
    graph, pins = graph_of(SHARED), ["data_shares=3-1", f"zero={zero}", "vocab_multiple=64"]
    plan = estimated(graph, cluster=two_kinds(2, 2, factor=3.0), global_batch_size=16, pins=pins)
    assert plan.padding
    assert [len(plan.samples_of(rank)) for rank in range(4)] == [6, 6, 2, 2]
    equals_one_device(pool, SHARED, plan, graph)


@pytest.mark.parametrize("zero", [0, 3])
def test_steps_and_norms_of_unequal_shares_are_those_of_one_device(pool: WorkerPool, zero: int) -> None:
    clips_as_one_device(pool, *shares(zero))


def test_a_launched_job_trains_with_its_shares_or_with_a_ranks_own_samples(pool: WorkerPool) -> None:
    subject, plan, graph = shares(3)
    batch = subject.make_batch(BATCH, seed=0)
    expected = loss_of(subject.build()(**batch)).item()
    for found in pool.run(jobs.launched_losses, subject, plan, graph, batch, size=2, timeout_s=300.0):
        assert found == pytest.approx((expected, expected), rel=1e-6)


@pytest.mark.parametrize("pins", [
    "pp=2 dp_replicate=2 zero=0 schedule=1F1B", "pp=2 dp_shard=2 zero=1 schedule=Interleaved1F1B virtual_stages=2",
])  # fmt: skip
def test_a_plan_with_unequal_stages_equals_one_device(pool: WorkerPool, pins: str, tmp_path: Path) -> None:
    subject = HfSubject("gpt2", depth=6)
    graph = graph_of(subject)
    write_toml(tmp_path / "cluster.toml", two_kinds(factor=4.0).to_dict())
    cluster = Cluster.parse(str(tmp_path / "cluster.toml"))
    plan = api.search(graph, cluster=cluster, global_batch_size=16, pins=["tp=1", "micro_batch=2", *pins.split()])
    layers = {"cpu": 0, "cpu-slow": 0}
    for stage in plan.stages:
        (device,) = plan.devices_of(stage.pp_rank)
        layers[device] += stage.stop - stage.start
    assert layers["cpu"] > 2 * layers["cpu-slow"]
    save_plan(plan, tmp_path / "plan.json")
    equals_one_device(pool, subject, load_plan(tmp_path / "plan.json"), graph)


# --- models that a trace or a pipeline has trouble with. Up to torch 2.11 pipelines ask of all that stages pass on for what
# activations have (``autopar/runtime/step/stage.py``); 2.13 does not.


@pytest.mark.parametrize(("kind", "pins"), [
    ("pairs", "tp=2 dp_shard=2"), ("pairs", "dp_replicate=2 dp_shard=2 zero=3"), ("routers", "pp=2 dp_replicate=2"),
    ("resting", "tp=2 dp_replicate=2"), ("resting", "dp_shard=4 zero=3 recompute=full"),
    ("indexed", "tp=2 dp_shard=2 zero=3"), ("checkpointed", "pp=2 tp=2"),
    # as of GPT-OSS: refused once for a sequence that is one longer than the model's
    ("sinks", "cp=2 tp=2 cp_attention=gather"), ("sinks", "cp=2 dp_shard=2 cp_attention=ulysses"),
    ("pictures", "pp=2 dp_replicate=2 micro_batch=1"), ("pictures", "tp=2 dp_shard=2 zero=3"),
    ("summed", "dp_replicate=4 zero=0 micro_batch=2 bucket_bytes=1"),
    ("spectral", "pp=2 dp_shard=2 zero=3"),  # complex numbers go from stage to stage
])  # fmt: skip
def test_unusual_models_equal_one_device(pool: WorkerPool, kind: str, pins: str) -> None:
    subject, plan, graph = planned(UNUSUAL[kind], pins)
    assert bool(graph.mixing) == (kind == "pairs")
    equals_one_device(pool, subject, plan, graph)


@pytest.mark.parametrize(("kind", "pins"), [
    ("rolling", "dp_shard=2"), ("choosy", "dp_replicate=2 micro_batch=1"), ("choosy", "dp_shard=2 zero=3"), ("choosy", "tp=2"),
    ("sparing", "dp_shard=2 zero=2 micro_batch=1"), ("sparing", "dp_replicate=2 micro_batch=2"),
])  # fmt: skip
def test_what_is_not_traced_runs_in_float64_too(pool: WorkerPool, kind: str, pins: str) -> None:
    """A parameter to which no rank has a gradient decays by no optimizer, and all ranks sum the same gradients."""
    subject, plan, graph = planned(UNUSUAL[kind], pins, ranks=2)
    apart = any("the outputs of a batch are not those of its halves" in note for note in graph.notes)
    assert apart == (kind == "rolling")
    report = equals_one_device(pool, subject, plan, graph, precision=FP64)
    assert report.verdict == "every rank agrees"
    assert all(row.error < 1e-10 for row in report.rows)


def test_weights_of_two_stages_of_one_rank_learn_from_both(pool: WorkerPool) -> None:
    pins = "pp=2 micro_batch=2 schedule=Interleaved1F1B virtual_stages=2"
    subject, plan, graph = planned(UNUSUAL["shared"], pins, ranks=2)
    assert {stages for _, stages in lower(plan, graph).tied} == {(1, 3)}
    equals_one_device(pool, subject, plan, graph)


PIPELINES: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "pp4": (Mesh(pp=4), {}),
    "pp2 x dp2 ZeRO 3 GPipe": (Mesh(pp=2, dp_shard=2), {"zero_stage": 3, "schedule": "GPipe"}),
    "pp2 two virtual stages": (Mesh(pp=2), {"schedule": "Interleaved1F1B", "virtual_stages": 2}),
    "pp2 x tp2 recomputed": (Mesh(pp=2, tp=2), {"recompute": "full"}),
}


def program(kind: str, layout: str) -> Program:
    mesh, options = PIPELINES[layout]
    graph, each = traced(UNUSUAL[kind]), micro_batch_size(mesh, BATCH)
    return lower(make_plan(graph, mesh, global_batch_size=BATCH, micro_batch_size=each, **options), graph)


@pytest.mark.parametrize("layout", PIPELINES)
def test_whatever_stages_pass_on_training_equals_one_device(pool: WorkerPool, layout: str) -> None:
    lowered = program("passing", layout)
    specs = {str_name(Ref(op.name, i)): spec for op in lowered.graph.ops for i, spec in enumerate(op.outputs)}
    passed = [specs[name] for stage in lowered.stages for name in stage.sends]
    assert {torch.int64, torch.bool, torch.float32} <= {spec.dtype for spec in passed}
    assert any(spec.dtype == torch.float32 and not spec.requires_grad for spec in passed)
    equals_one_device(pool, UNUSUAL["passing"], lowered.plan, traced(UNUSUAL["passing"]))


@pytest.mark.parametrize(("layout", "kind"), [(name, ["unread", "frozen"][n % 2]) for n, name in enumerate(PIPELINES)])
def test_stages_train_beside_some_without_a_gradient(pool: WorkerPool, layout: str, kind: str) -> None:
    equals_one_device(pool, UNUSUAL[kind], program(kind, layout).plan, traced(UNUSUAL[kind]))


@pytest.mark.parametrize(("pins", "micro_batches"), [
    ("tp=2 dp_replicate=2", 1), ("dp_shard=4 zero=3 recompute=full", 1), ("pp=2 dp_replicate=2 recompute=full", 1),
    ("pp=2 dp_replicate=2 recompute=full num_micro_batches=4", 4),
])  # fmt: skip
def test_buffers_that_steps_change_equal_those_of_one_device(pool: WorkerPool, pins: str, micro_batches: int) -> None:
    """Of one micro-batch statistics too; a step of several changes the other buffers once."""
    subject, plan, graph = planned(REMEMBERING if micro_batches == 1 else WITHOUT_STATISTICS, pins)
    assert plan.num_micro_batches == micro_batches
    equals_one_device(pool, subject, plan, graph)


def test_every_rank_gives_the_buffers_and_a_checkpoint_keeps_them(pool: WorkerPool, tmp_path: Path) -> None:
    data = batches(REMEMBERING)
    (_, plan, graph), (_, other, _) = (planned(REMEMBERING, pins) for pins in ("pp=2 tp=2", "tp=2 dp_replicate=2"))
    for rank in layouts.on_ranks(pool, jobs.train, REMEMBERING, plan, graph, data):
        assert rank["parameters"]["steps"].item() == 3
        assert rank["parameters"]["norm.num_batches_tracked"].item() == 6, "one batch norm, twice a step"
    goes_on(pool, REMEMBERING, graph, data, tmp_path, plan, other)
