import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autopar import api
from autopar.errors import AutoparError
from autopar.graph.graph import Graph
from autopar.hardware.places import place_here
from autopar.hardware.read import load_profile
from autopar.plan.mesh import Mesh
from autopar.plan.plan import BF16, RECOMPUTES, Plan, Recompute
from autopar.request import Request
from autopar.runtime.launch import launch
from autopar.verification.rank_pool import WorkerPool
from autopar.verification.reference import adamw, loss_of
from tests.support.close import assert_close
from tests.support.distributed import jobs, layouts
from tests.support.distributed.layouts import batches, on_batch, on_ranks, planned, planned_on, traced
from tests.support.distributed.plans import make_plan
from tests.support.distributed.subjects import HfSubject, graph_of


@pytest.mark.parametrize("layout", [
    *("HSDP 2x2", "tp2 x dp2 whole parameters", "pp2 x tp2"),
    *("cp2 x tp2 ring", "cp2 x dp2 ZeRO 3 ulysses"),  # what cp repeats counts once
])  # fmt: skip
def test_clipping_takes_the_norm_of_the_whole_model(pool: WorkerPool, layout: str) -> None:
    """Losses and parameters too; under more layouts: ``test_steps_on_the_host_are_those_of_one_device``."""
    layouts.clips_as_one_device(pool, *planned(layout, "llama"))


def ends_all(dead: str, job: Callable[..., None], *given: Any) -> None:
    """A job of two ranks of its own, of which one ends the other; ``dead``: a pattern of its number."""
    with WorkerPool(2) as own, pytest.raises(AutoparError, match=f"rank {dead}: the process died"):
        own.run(job, *given, timeout_s=300.0)


OUT_OF_BOUNDS = "IndexError: Target 1000000 is out of bounds."


@pytest.mark.parametrize(("call", "mesh", "words"), [
    ("train_step", Mesh(pp=2), f", pipeline stage 1: {OUT_OF_BOUNDS}"),
    ("evaluate", Mesh(pp=2), f", pipeline stage 1: {OUT_OF_BOUNDS}"),
    ("backward", Mesh(dp_replicate=2), ": a backward came to no end."),
    ("clip_grad_norm_", Mesh(dp_replicate=2), f": {OUT_OF_BOUNDS}"),
])  # fmt: skip
def test_a_failure_of_one_rank_ends_all(tmp_path: Path, call: str, mesh: Mesh, words: str) -> None:
    """Caught there or not: the others would wait for it until the time-out of their process group."""
    subject, plan, graph = planned_on(mesh)
    (batch,) = batches(subject, 1)
    bad = {**batch, "labels": batch["labels"].clone()}
    bad["labels"][9] = 10**6
    ends_all("0", jobs.failing, subject, plan, graph, batch, bad, call, str(tmp_path))
    first, again = (tmp_path / "rank1").read_text().splitlines()
    assert first.startswith(OUT_OF_BOUNDS)
    assert mesh.pp == 1 or first == f"{OUT_OF_BOUNDS} ['pipeline stage 1']"
    said = f"RankFailedError: A rank of the job has failed, or made another call: rank 1{words} Correct"
    assert again.startswith(said), again
    assert (tmp_path / "rank0").read_text().startswith(said)


@pytest.mark.parametrize(("call", "mesh", "zero_stage"), [
    ("evaluate", Mesh(dp_replicate=2), 0), ("clip_grad_norm_", Mesh(dp_replicate=2), 0),
    ("clip_grad_norm_", Mesh(dp_shard=2), 3),
])  # fmt: skip
def test_a_call_that_one_rank_makes_alone_ends_all(tmp_path: Path, call: str, mesh: Mesh, zero_stage: int) -> None:
    """Its sums would be taken for those of the step in which the others are, or wait for them until a time-out."""
    subject, plan, graph = planned_on(mesh, zero_stage=zero_stage)
    ends_all(r"\d", jobs.calls_alone, subject, plan, graph, *batches(subject, 1), call, str(tmp_path))
    for rank, what in enumerate((call, "full_state_dict") if call == "evaluate" else ()):
        words = f"Rank {rank} called {what} while another rank made a different call"
        assert (tmp_path / f"met{rank}").read_text().startswith(words)
    said = "".join((tmp_path / f"rank{rank}").read_text() for rank in range(2))
    for part in (f"{call} on rank 0", "train_step on rank 1", "different calls at the same time. Correct"):
        assert part in said


IN_VAIN = ", and rank 0 waits for it in its call 2, train_step. Correct"


@pytest.mark.parametrize(("how", "wanted"), [
    ("stopped", f"rank 1 was killed or stopped{IN_VAIN}"),
    ("slow", f"rank 1 hangs, or is slower than collective_timeout_s{IN_VAIN}"),
    ("gone", "rank 1 ended after 2 calls, and this one waits for it in its call 1, evaluate: different calls. Correct"),
])  # fmt: skip
def test_a_rank_that_does_not_come_is_named(pool: WorkerPool, how: str, wanted: str) -> None:
    """All that the others had was gloo's text on a time-out, or on a closed connection where steps were complete without it."""
    said, _ = pool.run(jobs.without_the_other, how, size=2, timeout_s=300.0)
    assert wanted in said


SHARED = "Ranks 1 and 0 were given different samples, but must share them (par.data_rank 0)"


@pytest.mark.parametrize(("mesh", "how", "said"), [
    *((mesh, "shuffled", f"{SHARED}. Sample by par.data_rank") for mesh in (Mesh(tp=2), Mesh(pp=2))),
    (Mesh(tp=2), "shuffled later", SHARED),
    (Mesh(dp_replicate=2), "shuffled", "data ranks were given different global batches"),
    *((mesh, "short", "but the plan takes (samples, 16)") for mesh in (Mesh(dp_shard=4), Mesh(pp=2, dp_replicate=2))),
], ids=["tp", "stages", "later", "data ranks", "short on shards", "short in stages"])  # fmt: skip
def test_a_batch_that_every_rank_refuses_leaves_the_job_as_it_is(
    pool: WorkerPool, mesh: Mesh, how: str, said: str
) -> None:
    """Sums of different samples, or labels of others, would look like a loss; data ranks may have different ones."""
    warned = how == "shuffled" and mesh.data > 1
    found = on_batch(pool, jobs.after_refusals, *planned_on(mesh, zero_stage=3 * (mesh.dp_shard > 1)), how)
    for texts, loss in found[:1] if warned else found:
        assert len(texts) == (1 if warned else 2)
        assert all(said in text for text in texts), texts
        assert loss == pytest.approx(layouts.loss_alone("gpt2"), rel=1e-5)


@pytest.mark.parametrize("mesh", [Mesh(tp=2), Mesh(dp_shard=2), Mesh(pp=2, dp_replicate=2)], ids=str)
def test_a_parameter_that_one_rank_alone_has_frozen_is_refused(pool: WorkerPool, mesh: Mesh) -> None:
    """The others would go on to train it."""
    remedy = r"Call requires_grad_ for the same parameters on every rank\."
    for first, after in on_batch(pool, jobs.frozen_alone, *planned_on(mesh)):
        assert re.fullmatch(rf"Ranks \d and \d have frozen different parameters\. {remedy}", first), first
        assert not after


def test_a_rank_that_cannot_build_its_part_ends_all(tmp_path: Path) -> None:
    ends_all("0", jobs.failing_build, *planned_on(Mesh(pp=2)), str(tmp_path))
    assert "rank 1: LookupError: no such part. Correct" in (tmp_path / "rank0").read_text()


@pytest.mark.parametrize(("layout", "kind", "said"), [
    ("pp2 x dp2", "LBFGS", "LBFGS needs all parameters at once, but each rank of a pipeline has those of its stages. Pin pp=1"),
    ("dp4 ZeRO 3", "Adafactor", "Adafactor needs each matrix complete"),
    ("pp2 x dp2", "clipping", "would be that of this rank's pipeline stages or experts alone. Call par.clip_grad_norm_"),
    ("dp4 ZeRO 3", "clipping", ""),
    ("pp2 GPipe", "call", r"2 pipeline stages cannot be called(?s:.*)train_step\(batch\).*step_loss\(par, batch\)\. par\.predict"),
])  # fmt: skip
def test_what_needs_what_other_ranks_hold_is_refused(pool: WorkerPool, layout: str, kind: str, said: str) -> None:
    found = on_batch(pool, jobs.refused, *planned(layout, "gpt2"), kind)
    assert all(re.search(said, message) and bool(said) == bool(message) for message in found), found


def test_muon_on_split_matrices_steps_as_on_whole_ones(pool: WorkerPool) -> None:
    """Its own iteration is in bfloat16, where the order of a sum shows (3e-3 of weights): in float32 it does not."""
    subject = HfSubject("llama", depth=1)
    graph, mesh = graph_of(subject), Mesh(tp=2, dp_shard=2)
    plan = make_plan(graph, mesh, global_batch_size=16, micro_batch_size=4, zero_stage=3)
    data, model = batches(subject, 2), subject.build()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    jobs.step_muon(matrices, lambda batch: loss_of(model(**batch)).backward(), data)
    (found, *_) = on_ranks(pool, jobs.muon_steps, subject, plan, graph, data)
    assert_close(found, dict(model.named_parameters()), 1e-5)


@pytest.mark.parametrize(("layout", "kind"), [
    ("tp2 x dp2", "llama"), *((layout, "llama unmasked") for layout in ("cp4 gather", "cp2 x tp2 ulysses", "cp2 x dp2 ZeRO 1 ring")),
])  # fmt: skip
def test_bf16_stays_near_fp32(pool: WorkerPool, layout: str, kind: str) -> None:
    """Without splits of sequences in float16: ``test_equals_one_device_with_the_same_casts_and_scale``."""
    subject, plan, graph = planned(layout, kind, precision=BF16)
    data = batches(subject, 2)
    exact = loss_of(subject.build()(**data[0])).item()
    found = on_ranks(pool, jobs.train, subject, plan, graph, data)
    for rank in found:
        assert rank["losses"] == found[0]["losses"]
        assert rank["losses"][0] == pytest.approx(exact, rel=1e-2)
        assert all(tensor.dtype == torch.float32 for tensor in rank["parameters"].values())


@pytest.mark.parametrize(("layout", "modes"), [
    ("dp4 ZeRO 3", RECOMPUTES), ("tp2", ("none", "full")), ("pp2 x dp2", ("none", "full")),
    ("cp2 x tp2 ring", ("none", "full")),  # whose attention draws by itself
])  # fmt: skip
def test_dropout_repeats_itself_under_recompute(pool: WorkerPool, layout: str, modes: Sequence[Recompute]) -> None:
    """Where sequences are split: ``test_streams_differ_on_shards_and_are_equal_on_replicas_and_in_recompute``."""
    data = batches(traced("gpt2", 0.2)[0], 2)
    run = lambda mode: on_ranks(pool, jobs.train, *planned(layout, "gpt2", dropout=0.2, recompute=mode), data)
    found = {mode: run(mode) for mode in modes}
    plain = found["none"][0]
    assert plain["losses"][0] != pytest.approx(layouts.loss_alone("gpt2"), rel=1e-5)
    for mode, ranks in found.items():
        for rank in ranks:
            assert rank["losses"] == pytest.approx(plain["losses"], rel=1e-6)
            if mode == "full":
                assert_close(rank["parameters"], plain["parameters"], 1e-5)


@pytest.mark.parametrize("layout", ["dp4 ZeRO 3", "pp2 two virtual stages", "pp2 x dp2 ZeRO 3 made again"])
def test_an_evaluation_drops_nothing_and_changes_nothing(pool: WorkerPool, layout: str) -> None:
    wanted = layouts.loss_alone("gpt2")
    for found in on_batch(pool, jobs.evaluated, *planned(layout, "gpt2", dropout=0.2)):
        assert found["losses"] == pytest.approx([wanted] * 3, rel=1e-5)
        assert abs(found["trained"][0] - wanted) > 1e-4 * wanted
        assert (len(set(found["trained"])), found["same"], found["steps"]) == (2, True, 2)


def test_checkpoint_goes_on_under_other_plans(pool: WorkerPool, tmp_path: Path) -> None:
    names = "tp2 x dp2 ZeRO 3", "cp2 x tp2 ring", "pp2 x dp2 ZeRO 1", "dp4 ZeRO 3"
    subject, graph = traced("gpt2")
    plans = (planned(name, "gpt2")[1] for name in names)
    layouts.goes_on(pool, subject, graph, batches(subject, 3), tmp_path, *plans)


@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(dp_shard=2)], ids=str)
def test_a_save_that_fails_leaves_the_checkpoint_before(pool: WorkerPool, tmp_path: Path, mesh: Mesh) -> None:
    planned = planned_on(mesh, zero_stage=3 if mesh.pp == 1 else 0)
    other_folders = "what rank 1 wrote is not in the folder that rank 0 sees"
    wanted = {"last": "file too large", "first": "file too large", "folders": other_folders}
    for found in on_batch(pool, jobs.saves_that_fail, *planned, str(tmp_path)):
        for name, value in wanted.items():
            said, left = found[name]
            assert "Cannot write the checkpoint" in said
            assert value in said
            assert left == []


def test_a_load_of_different_checkpoints_changes_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    """Damaged ones: ``test_damage_is_refused_by_all_ranks_alike``."""
    planned = planned_on(Mesh(dp_shard=2), zero_stage=3)
    for text, same in on_ranks(pool, jobs.load_of_different_checkpoints, *planned, str(tmp_path)):
        assert "Rank 1 loads another checkpoint than rank 0" in text and same


def test_a_group_without_parameters_on_a_rank_is_loaded_like_others(pool: WorkerPool, tmp_path: Path) -> None:
    """A scheduler that is made after the load asks each group for its first rate."""
    first, second = on_ranks(pool, jobs.empty_groups_after_load, *planned_on(Mesh(pp=2)), str(tmp_path))
    assert first == second == [(0.25, 1.0), (0.0625, 0.25)]


@pytest.mark.parametrize("layout", ["tp2 x dp2 ZeRO 3", "pp2 x dp2"])
def test_all_ranks_take_the_weights_of_the_first(pool: WorkerPool, layout: str) -> None:
    subject, plan, graph = planned(layout, "gpt2")
    wanted = dict(subject.build().named_parameters())
    for found in pool.run(jobs.launched_from, subject, plan, graph, "real", timeout_s=300.0):
        assert_close(found, wanted, 0.0)


@pytest.mark.parametrize("kind", ["gpt2", "llama-untied"])
def test_meta_weights_do_not_depend_on_the_plan(pool: WorkerPool, kind: str) -> None:
    plans = planned("tp2 x dp2", kind), planned("pp2 x dp2 ZeRO 3", kind)
    launched = (pool.run(jobs.launched_from, *plan, "meta", timeout_s=300.0) for plan in plans)
    found = [rank for ranks in launched for rank in ranks]
    for rank in found[1:]:
        assert_close(rank, found[0], 0.0)
    spread = {name: tensor.std().item() for name, tensor in found[0].items() if tensor.ndim == 2}
    assert all(0.005 < value < 0.03 for value in spread.values()), spread


def test_errors_of_the_planning_rank_reach_all(pool: WorkerPool) -> None:
    subject, graph = traced("gpt2")

    def said(mesh: Mesh) -> tuple[str, ...]:
        plan = make_plan(graph, mesh, global_batch_size=4, micro_batch_size=4)
        return pool.run(jobs.launch_failure, subject, plan, graph, timeout_s=300.0)

    assert set(said(Mesh())) == {"AutoparError: plan.json: No plan. Expected one, got 0. Try again."}
    for message in said(Mesh(tp=2)):
        assert message.startswith("RuntimeMismatchError")
        assert "This job has 4 ranks, but the plan is for 2 (tp=2)." in message
    first, *others = said(Mesh(tp=4))
    assert first == "LookupError: no such thing", "of any kind: the others waited for an answer"
    for message in others:
        assert "Rank 0 failed to make the plan: LookupError: no such thing. See the traceback of rank 0" in message


def test_a_job_takes_nothing_from_the_job_before_it(pool: WorkerPool) -> None:
    """DTensor remembers meshes by their ranks alone; of groups of this process's last job nobody knows any more."""
    subject, plan, graph = planned("tp2 x dp2 ZeRO 3", "gpt2")
    given = (jobs.train_beside_others, subject, plan, graph, *batches(subject, 1))
    found = [pool.run(*given, num_groups, timeout_s=300.0) for num_groups in (30, 0)]
    (loss, gradients), (again, same) = found[0][0], found[1][0]
    assert again == loss
    assert_close(same, gradients, 0.0)


def test_a_model_outlives_no_process_group(pool: WorkerPool, tmp_path: Path) -> None:
    for said in on_batch(pool, jobs.in_another_job, *planned("pp2 x dp2", "gpt2"), str(tmp_path)):
        assert len(said) == 6
        assert all("The process group that the parallel model was made in has ended" in text for text in said)
        assert ["another one has begun" in text for text in said] == 3 * [False] + 3 * [True]


def in_inference_mode(subject: Any, plan: Plan, graph: Graph, batch: Any, folder: str) -> tuple[list[float], bool]:
    """Losses of steps between what was made, evaluated, clipped, saved and loaded in inference mode; whether states are of it."""
    model: nn.Module = subject.build()
    with torch.inference_mode():
        parallel = launch(model, lambda: (plan, graph), device_type="cpu")
        losses = [parallel.evaluate(batch).item()]
    optimizer = adamw(parallel.parameters())
    losses.append(parallel.train_step(batch).item())
    with torch.inference_mode():
        whole = parallel.full_gradients()
        parallel.clip_grad_norm_(1e6)
        losses.append(parallel.evaluate(batch).item())  # what it gathers is no longer there after the step
    optimizer.step()
    with torch.inference_mode():
        whole |= parallel.full_state_dict()
        parallel.save(folder, optimizer)
        parallel.load(folder, optimizer)
        losses.append(parallel.evaluate(batch).item())
    losses.append(parallel.train_step(batch).item())
    return losses, any(tensor.is_inference() for tensor in whole.values())


@pytest.mark.parametrize("layout", ["dp2 ZeRO 2", "dp4 ZeRO 3", "tp2 x dp2 whole parameters", "pp2 x dp2"])
def test_nothing_that_is_kept_is_made_in_inference_mode(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    subject, plan, graph = planned(layout, "gpt2")
    first, second = jobs.train(subject.build(), batches(subject, 1) * 2)["losses"]
    given = (*batches(subject, 1), str(tmp_path))
    size = plan.mesh.world_size
    for losses, is_inference in pool.run(in_inference_mode, subject, plan, graph, *given, size=size, timeout_s=300.0):
        assert losses == pytest.approx([first, first, first, second, second], rel=1e-5)
        assert not is_inference


def without_a_cluster(subject: HfSubject, batch: jobs.Batch) -> tuple[str, str, list[tuple[int, int]]]:
    """What is planned where nobody names the cluster and every two ranks say that they are on another host."""
    rank, planned = dist.get_rank(), []
    found = place_here()
    node = replace(found, host=(f"node{rank // 2}", ""))
    search = api._searched

    def noted(model: nn.Module, request: Request, *rest: Any) -> tuple[Plan, Graph]:
        planned.extend((group.num_nodes, group.devices_per_node) for group in request.cluster.groups)
        return search(model, request, *rest)

    with (
        mock.patch("autopar.hardware.places.place_here", return_value=node),
        mock.patch("autopar.hardware.places.machine_profile", return_value=load_profile("cpu")),
        mock.patch("autopar.api._searched", noted),
    ):
        parallel = api.parallelize(subject.build(), example_inputs=batch, global_batch_size=16, pins=["dp=4"])
    parallel.train_step(batch)
    return parallel.plan.cluster, str(parallel.plan.mesh), planned


@pytest.mark.usefixtures("known_machine")
def test_ranks_on_two_hosts_are_planned_as_two_nodes(pool: WorkerPool) -> None:
    subject, _ = traced("gpt2")
    found = pool.run(without_a_cluster, subject, *batches(subject, 1), timeout_s=300.0)
    assert {(cluster, mesh) for cluster, mesh, _ in found} == {("local (2x2)", found[0][1])}
    assert [nodes for _, _, nodes in found] == [[(2, 2)], [], [], []]  # rank 0 plans, and knows of all
