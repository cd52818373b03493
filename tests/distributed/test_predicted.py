"""What is predicted of ranks is what they do, to the byte, and the first steps of a run are held against it.

Of collectives are not compared: experts that travel (routing decides how many rows) and attention round a ring, which
the cost model lists as the collectives of equal volume.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.cost.model import CostModel, Step
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import with_free_links
from autopar.lower.program import lower
from autopar.plan.mesh import Mesh
from autopar.plan.plan import BF16, Plan, PrecisionName
from autopar.plan.run_log import CATEGORIES, DATA, OPTIMIZER, PIPELINE, TENSOR, read_log
from autopar.runtime.monitor import MEASURED_STEPS
from autopar.runtime.parallel_model import ParallelModel
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed import jobs
from tests.support.distributed.layouts import on_batch, planned, traced
from tests.support.distributed.mixtures import mixture
from tests.support.distributed.plans import estimated
from tests.support.distributed.subjects import graph_of
from tests.support.step_traffic import Collective, stages_of, traffic

Recorded = tuple[str, tuple[int, ...], int]
"""Kind, ranks of the group (of a send: of the group that it stands in), bytes: of the whole tensor; of one rank's part
for all-to-all and sends."""

_KINDS = {
    "allreduce_": "all_reduce", "_allgather_base_": "all_gather", "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_": "reduce_scatter", "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all", "send": "send", "broadcast_": "broadcast", "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}  # fmt: skip
_SILENT = ("_wrap_tensor_autograd", "recv_", "recv_any_source_", "wait_tensor", "barrier", "monitored_barrier_")


class Recorder(TorchDispatchMode):
    """Records every collective of ``torch.distributed`` that this thread starts over more than one rank.

    The operators below ``dist.*`` and those of functional collectives come by here, whoever calls them. One that is
    not known is an error, so that nothing is missed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Recorded] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith(("c10d::", "_c10d_functional::", "_c10d_functional_autograd::")):
            self._note(name.partition("::")[2].partition(".")[0], func, args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, func: Any, args: tuple[Any, ...]) -> None:
        if name in _SILENT:
            return
        kind = _KINDS[name]
        group = _group(func, args)
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) > 1:
            self.found[kind, tuple(sorted(ranks)), _bytes(kind, args, len(ranks))] += 1


def _group(func: Any, args: tuple[Any, ...]) -> dist.ProcessGroup:
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "group_name":
            return dist.distributed_c10d._resolve_process_group(value)
        if argument.name == "process_group":
            return dist.ProcessGroup.unbox(value)
    raise AssertionError(f"no group among the arguments of {func}")


def _flat(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [tensor for value in values for tensor in _flat(value)] if isinstance(values, list | tuple) else []


def _bytes(kind: str, args: tuple[Any, ...], size: int) -> int:
    sizes = [sum(t.numel() * t.element_size() for t in _flat(value)) for value in args[:2]]
    if kind == "all_gather":  # functional ones are given the input alone
        return max(sizes) if min(sizes) else max(sizes) * size
    if kind == "reduce_scatter":
        return max(sizes)
    return sizes[0] if kind != "all_to_all" else sizes[-1] or sizes[0]


def one_step(parallel: ParallelModel, batch: Mapping[str, Tensor]) -> dict[Recorded, int]:
    """What this rank sends in the second step of a run: a first one has FSDP and the pipeline set up."""
    optimizer, scaler = torch.optim.SGD(parallel.parameters(), lr=0.01), parallel.grad_scaler()
    parallel.train_step(batch)
    optimizer.zero_grad()
    with Recorder() as recorder:
        parallel.train_step(batch)
        scaler.unscale_(optimizer)
        parallel.clip_grad_norm_(1.0)
    return dict(recorder.found)


GLOBAL_BATCH = 16

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "dp4", {}), ("gpt2", "dp2 ZeRO 1", {}), ("llama", "dp2 ZeRO 2", {}),
    ("llama-untied", "HSDP 2x2", {}), ("gpt2", "HSDP 2x2 ZeRO 2", {"precision": BF16}),
    ("llama", "tp2 x dp2 whole parameters", {}),
    ("gpt2", "tp2 x dp2 ZeRO 1", {}), ("llama", "tp2 x dp2 ZeRO 3", {}),
    ("llama", "pp2 x dp2 ZeRO 1", {}), ("gpt2", "pp2 x dp2 ZeRO 3", {}),
    ("llama-untied", "pp2 x dp2 ZeRO 3", {"schedule": "GPipe"}), ("llama", "pp2 x tp2", {}), ("gpt2", "pp4", {}),
    ("gpt2", "pp2 two virtual stages", {}), ("llama", "dp2 ZeRO 3 recomputed", {}),
    ("gpt2", "tp2 recomputed", {}), ("llama", "pp2 x dp2 ZeRO 3 made again", {}),
]  # fmt: skip


def step_of(plan: Plan, graph: Graph) -> Step:
    local = lower(plan, graph).graph
    return Step(
        mesh=plan.mesh, schedule=plan.schedule, num_micro_batches=plan.num_micro_batches, zero_stage=plan.zero_stage,
        global_batch_size=plan.global_batch_size, flops_per_sample=plan.model.flops_per_sample,
        tokens_per_sample=plan.model.tokens_per_sample, totals=tuple(local.spec(ref).num_bytes for ref in local.sums),
        bucket_bytes=plan.bucket_bytes,
    )  # fmt: skip


def as_recorded(found: Counter[Collective], mesh: Mesh, rank: int) -> dict[Recorded, int]:
    """By the ranks of each group."""
    counts: Counter[Recorded] = Counter()
    for collective, count in found.items():
        ranks = mesh.group(rank, collective.axes)
        if collective.pp_ranks:
            ranks = tuple(r for r in ranks if mesh.coordinate(r)["pp"] in collective.pp_ranks)
        counts[collective.kind, ranks, collective.num_bytes] += count
    return dict(counts)


def compare(pool: WorkerPool, kind: str, plan: Plan, graph: Graph) -> None:
    subject, _ = traced(kind)
    model = CostModel(Cluster.parse(f"cpu:1x{plan.mesh.world_size}"), plan.precision, plan.optimizer)
    predicted = traffic(model, stages_of(model, plan, graph), step_of(plan, graph), clips=True)
    for rank, row in enumerate(on_batch(pool, one_step, subject, plan, graph)):
        assert row
        expected = as_recorded(predicted[plan.mesh.coordinate(rank)["pp"]], plan.mesh, rank)
        if torch.__version__ < "2.13":  # as ops.all_to_all asks: there gloo gathers and cuts instead
            expected, row = as_gathered(expected, row)
        assert expected == row


def as_gathered(expected: dict[Recorded, int], row: dict[Recorded, int]) -> tuple[dict[Recorded, int], ...]:
    """Without all-to-alls, and what runs in their place: a gather forward, the sum of its gradients backward."""
    exchanges = Counter[tuple[tuple[int, ...], int]]()
    for (kind, ranks, num_bytes), count in expected.items():
        if kind == "all_to_all":
            exchanges[ranks, num_bytes * len(ranks)] += count
    kept = {key: count for key, count in expected.items() if key[0] != "all_to_all"}
    assert not any(kind == "all_to_all" for kind, _, _ in row)
    rest = dict(row)
    for (ranks, num_bytes), count in exchanges.items():
        keys = [(kind, ranks, num_bytes) for kind in ("all_gather", "reduce_scatter")]
        extra = [row.get(key, 0) - kept.get(key, 0) for key in keys]
        assert min(extra) > 0 and sum(extra) == count, "each is one of the two"
        for key in keys:
            rest[key] = kept.get(key, 0)
    return {key: count for key, count in kept.items() if count}, {key: count for key, count in rest.items() if count}


@pytest.mark.parametrize(("kind", "layout", "options"), CASES, ids=[f"{k} {n}" for k, n, _ in CASES])
def test_a_step_runs_what_is_priced(pool: WorkerPool, kind: str, layout: str, options: dict[str, Any]) -> None:
    _, plan, graph = planned(layout, kind, **options)
    compare(pool, kind, plan, graph)


@pytest.mark.parametrize(("pins", "precision"), [
    ("tp=2 dp_shard=2 zero=3", "fp16"), ("pp=2 dp_replicate=2 zero=0 num_micro_batches=2", "fp16"),
    *((f"dp_shard=2 cp=2 zero=2 num_micro_batches=2 cp_attention={kind}", "fp32") for kind in ("gather", "ulysses")),
])  # fmt: skip
def test_a_scaled_or_split_step_runs_what_is_priced(pool: WorkerPool, pins: str, precision: PrecisionName) -> None:
    """In float16 one collective asks all ranks for infinities."""
    _, graph = traced("gpt2", precision=precision)
    plan = estimated(graph, cluster="cpu:1x4", global_batch_size=GLOBAL_BATCH, pins=pins.split(), precision=precision)
    compare(pool, "gpt2", plan, graph)


def test_the_prices_are_those_of_the_plan() -> None:
    """What is compared here is what the search priced: the same stages give the plan's own prediction."""
    _, graph = traced("gpt2")
    plan = estimated(graph, cluster="cpu:1x4", global_batch_size=GLOBAL_BATCH, pins=["tp=2", "dp_shard=2", "zero=3"])
    model = CostModel(Cluster.parse("cpu:1x4"), plan.precision, plan.optimizer)
    again = model.predict(stages_of(model, plan, graph), step_of(plan, graph))
    assert again.breakdown.data_parallel_s == pytest.approx(plan.predicted.breakdown.data_parallel_s, rel=1e-9)
    assert again.breakdown.tensor_parallel_s == pytest.approx(plan.predicted.breakdown.tensor_parallel_s, rel=1e-9)
    assert again.memory == plan.predicted.memory


@pytest.mark.parametrize(("pins", "size"), [
    ("dp_replicate=4 zero=0 num_micro_batches=2", 1),
    ("dp_replicate=2 tp=2 zero=0", 20_000),
    ("pp=2 dp_replicate=2 zero=0 num_micro_batches=2", 50_000),
])  # fmt: skip
def test_buckets_have_the_size_of_the_plan(pool: WorkerPool, pins: str, size: int) -> None:
    _, graph = traced("gpt2")
    usual, other = (
        estimated(graph, cluster="cpu:1x4", global_batch_size=GLOBAL_BATCH, pins=[*pins.split(), *more])
        for more in ([f"bucket_bytes={2**40}"], [f"bucket_bytes={size}"])
    )
    assert other.bucket_bytes == size
    sums = [sum(count_sums(plan, graph).values()) for plan in (usual, other)]
    assert sums[1] > sums[0]
    compare(pool, "gpt2", other, graph)


def count_sums(plan: Plan, graph: Graph) -> Counter[Collective]:
    model = CostModel(Cluster.parse(f"cpu:1x{plan.mesh.world_size}"), plan.precision, plan.optimizer)
    found = traffic(model, stages_of(model, plan, graph), step_of(plan, graph))[0]
    return Counter({c: n for c, n in found.items() if c.kind == "all_reduce"})


@pytest.mark.parametrize(("kind", "pins", "shards"), [
    ("gpt2", "dp_replicate=2 tp=2 zero=0 num_micro_batches=2", 1),
    ("gpt2", "pp=2 tp=2 num_micro_batches=2", 1),
    ("llama-untied", "dp_shard=4 zero=1 num_micro_batches=1", 1),
    ("gpt2", "dp_shard=4 zero=2 num_micro_batches=2", 1),
    ("gpt2", "dp_shard=2 tp=2 zero=3 num_micro_batches=2", 1),
    ("llama-untied", "dp_shard=2 dp_replicate=2 zero=3 num_micro_batches=2", 1),
    ("gpt2", "dp_shard=2 cp=2 zero=2 num_micro_batches=2", 1),
    ("gpt2 in float16", "dp_shard=2 tp=2 zero=3 num_micro_batches=2", 1),
    # whole gradients accumulate
    ("gpt2", "pp=2 dp_shard=2 zero=3 num_micro_batches=4", 2),
    ("llama-untied", "pp=2 dp_shard=2 zero=1 num_micro_batches=2", 2),
    ("llama-untied", "dp_shard=2 tp=2 zero=1 num_micro_batches=2", 2),
    *((f"gpt2 by {kind}", "dp_replicate=2 tp=2 zero=0 num_micro_batches=2", 1) for kind in ("momentum", "adafactor")),
    *(("experts", pins, 1) for pins in (
        "ep=2 dp_replicate=4", "ep=4 dp_shard=4 zero=3", "ep=4 dp_replicate=2 dp_shard=2 zero=2",
        "ep=4 ep_data=2 tp=2 num_micro_batches=1",
    )),
])  # fmt: skip
def test_states_are_those_predicted(pool: WorkerPool, kind: str, pins: str, shards: int) -> None:
    """``shards``: of whole gradients that every data rank holds until the last micro-batch, and a shard of them after the step."""
    name, _, how = kind.partition(" ")
    precision: PrecisionName = "fp16" if how == "in float16" else "fp32"
    optimizer = how.removeprefix("by ") if how.startswith("by ") else "adamw"
    subject, graph = (mixture(), graph_of(mixture())) if kind == "experts" else traced(name, precision=precision)
    options: Any = {"cluster": "cpu:1x4", "global_batch_size": 8 if kind == "experts" else GLOBAL_BATCH}
    plan = estimated(graph, pins=pins.split(), precision=precision, optimizer=optimizer, **options)
    rows = on_batch(pool, jobs.held_bytes, subject, plan, graph, optimizer)
    for predicted in plan.predicted.memory:
        ranks = [row for row in rows if row["pp_rank"] == predicted.pp_rank]
        for key, times in (("parameters", 1), ("gradients", shards), ("optimizer", 1)):
            assert times * max(row[key] for row in ranks) == getattr(predicted, key), key


FREE = with_free_links(Cluster.parse("cpu:1x4"))
"""So that ``tp`` splits something of so small a model."""


@pytest.mark.parametrize(("pins", "called", "present"), [
    ("dp_replicate=2 tp=2 num_micro_batches=2", False, {TENSOR, DATA, OPTIMIZER}),
    ("pp=2 dp_shard=2 zero=1 num_micro_batches=2", False, {PIPELINE, DATA, OPTIMIZER}),
    ("tp=4 num_micro_batches=1", True, {TENSOR, OPTIMIZER}),
])  # fmt: skip
def test_categories_and_warnings(pool: WorkerPool, tmp_path: Path, pins: str, called: bool, present: set[str]) -> None:
    subject, graph = traced("gpt2")
    plan = estimated(graph, cluster=FREE, global_batch_size=8, pins=pins.split())
    wide = replace(plan.predicted, step_time_interval_s=(1e-9, 1e9))
    quiet = replace(plan, predicted=wide)
    batch = subject.make_batch(8, seed=0)
    rows = pool.run(jobs.watched, subject, quiet, graph, batch, str(tmp_path), called, timeout_s=300.0)
    assert len({row["measured_s"] for row in rows}) == 1  # ranks agree
    assert not any(row["active"] for row in rows)
    assert all(row["restored"] for row in rows)
    assert all(row["warnings"] == [] for row in rows)  # inside of the interval
    parts = rows[0]["parts"]
    assert set(parts) == set(CATEGORIES)
    assert {name for name in CATEGORIES if parts[name] > 0} == {"compute"} | present
    record = read_log(tmp_path)
    assert record.measured_s == rows[0]["measured_s"]
    assert record.num_steps == MEASURED_STEPS and record.num_ranks == 4
    assert record.predicted_s == plan.predicted.step_time_s


def test_an_altered_prediction_is_warned_of_once(pool: WorkerPool, tmp_path: Path) -> None:
    subject, graph = traced("gpt2")
    plan = estimated(graph, cluster="cpu:1x2", global_batch_size=8, pins=["dp_replicate=2", "micro_batch=4"])

    def rows(plan: Plan) -> Any:
        batch = subject.make_batch(8, seed=0)
        given = (subject, plan, graph, batch, str(tmp_path), False)
        return pool.run(jobs.watched, *given, size=2, timeout_s=300.0)

    measured = rows(plan)[0]["measured_s"]
    for factor in (0.1, 10.0):
        off = measured * factor
        breakdown = replace(plan.predicted.breakdown, compute_s=off)
        wrong = replace(plan.predicted, step_time_s=off, step_time_interval_s=(off / 2, off * 2), breakdown=breakdown)
        said = [row["warnings"] for row in rows(replace(plan, predicted=wrong))]
        assert [len(texts) for texts in said] == [1, 0], factor
        text = said[0][0]
        assert "predicted" in text and f"autopar validate --from-run {tmp_path}" in text and "autopar profile" in text
    assert "most of it is compute" in text
