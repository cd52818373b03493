from math import prod
from pathlib import Path

import pytest
from safetensors import safe_open

from autopar import api
from autopar.errors import AutoparError
from autopar.models.resolve import resolve_model
from autopar.plan.mesh import Mesh
from autopar.runtime.checkpoint.load import Folder
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.distributed import checkpoints, jobs
from tests.support.distributed.layouts import batches, goes_on, on_ranks, planned, planned_on
from tests.support.distributed.plans import estimated
from tools.campaigns import checkpoints as campaign


@pytest.mark.parametrize("route", [
    ("tp4, padded", "pp2 interleaved", "tp2 x dp2 ZeRO 3"),
    ("dp3 ZeRO 3, optimizer on the host", "pp2 x dp2 ZeRO 1", "one rank", "HSDP 2 x 2"),
], ids=" to ".join)  # fmt: skip
def test_every_bit_is_the_same_under_another_plan(pool: WorkerPool, tmp_path: Path, route: tuple[str, ...]) -> None:
    """All pairs of eight plans: ``tools.campaigns.checkpoints``."""
    campaign.save(pool, route[0], tmp_path / "0")
    for i, name in enumerate(route[1:]):
        campaign.move(pool, tmp_path / f"{i}", name, tmp_path / f"{i + 1}")
        assert campaign.difference(tmp_path / "0", tmp_path / f"{i + 1}") == "", name


def test_damage_is_refused_by_all_ranks_alike(pool: WorkerPool, tmp_path: Path) -> None:
    """A thousand: ``tools.campaigns.checkpoints``."""
    outcomes = campaign.damages(pool, tmp_path, "tp2 x dp2 ZeRO 3", range(16))
    assert {outcome.kind for outcome in outcomes} == set(campaign.KINDS)
    for outcome in outcomes:
        assert outcome.is_right, outcome
        assert campaign.is_refused_alike(outcome) or not any(outcome.said), outcome
    assert sum(map(campaign.is_refused_alike, outcomes)) >= 12


@pytest.mark.parametrize(
    ("rank", "where"), [(1, "write.write_parts"), (0, "write.commit"), (1, "beside write.write_parts")]
)
def test_a_rank_that_is_killed_in_a_save_leaves_the_checkpoint_before(tmp_path: Path, rank: int, where: str) -> None:
    subject, plan, graph = planned_on(Mesh(dp_shard=2), zero_stage=3)
    root = str(tmp_path / "run")
    with WorkerPool(2) as own:
        with pytest.raises(AutoparError, match="died"):
            on_ranks(own, checkpoints.killed, subject, plan, graph, batches(subject, 2), root, rank, where)
        for found in on_ranks(own, checkpoints.resumed, subject, plan, graph, root):
            assert found == (1, ["step-00000001"])


def test_what_is_written_beside_steps_is_what_a_save_writes(pool: WorkerPool, tmp_path: Path) -> None:
    subject, plan, graph = planned("tp2 x dp2 ZeRO 3", "gpt2")
    on_ranks(pool, checkpoints.beside_and_at_once, subject, plan, graph, batches(subject, 3), str(tmp_path))
    found = {path.relative_to(tmp_path / "beside") for path in (tmp_path / "beside").glob("*/*")}
    assert len({path.parent for path in found}) == 3
    assert found == {path.relative_to(tmp_path / "at_once") for path in (tmp_path / "at_once").glob("*/*")}
    for path in found:
        assert (tmp_path / "beside" / path).read_bytes() == (tmp_path / "at_once" / path).read_bytes(), path


def test_each_data_rank_has_its_position_again(pool: WorkerPool, tmp_path: Path) -> None:
    subject, plan, graph = planned("tp2 x dp2", "gpt2")
    on_ranks(pool, checkpoints.saved_positions, subject, plan, graph, str(tmp_path))
    for layout in ("tp2 x dp2", "pp2 x dp2"):
        _, other, _ = planned(layout, "gpt2")
        found = on_ranks(pool, checkpoints.loaded_positions, subject, other, graph, str(tmp_path))
        assert sorted(found) == [(n, 10 * n, [n, n + 1, n + 2], {"epoch": 4}) for n in (0, 0, 1, 1)]
    _, four, _ = planned("dp4", "gpt2")
    for said in on_ranks(pool, checkpoints.loaded_positions, subject, four, graph, str(tmp_path)):
        assert "The state of the dataloader was saved for 2 ranks, each of which had another one" in said
        assert "Load without dataloader=" in said


@pytest.mark.parametrize(
    ("layout", "kind", "size"),
    [("tp2 x dp2 ZeRO 3", "gpt2", "20KB"), ("pp2 x tp2", "llama", "5GB"), ("pp2 x dp2 ZeRO 1", "llama-untied", "30KB")],
)
def test_weights_to_transformers_and_back(pool: WorkerPool, tmp_path: Path, layout: str, kind: str, size: str) -> None:
    from transformers import AutoModelForCausalLM

    subject, plan, graph = planned(layout, kind)
    folder = tmp_path / "out"
    for _ in range(2 if size == "20KB" else 1):  # the second time in place of the first
        found = on_ranks(pool, checkpoints.exported, subject, plan, graph, batches(subject, 1), str(folder), size)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(model) is type(subject.build())
    assert_close(dict(model.state_dict()), found[0], 0.0)
    files = sorted(path.name for path in folder.iterdir())
    wanted = tmp_path / "wanted"
    model.save_pretrained(wanted, max_shard_size=size)
    assert ("model.safetensors" in files) == (size == "5GB")
    assert {"config.json", "generation_config.json"} <= set(files)
    assert _tensors(folder) == _tensors(wanted)
    source = str(wanted if kind == "gpt2" else folder)
    for values in pool.run(jobs.launched_from, subject, plan, graph, "meta", source, timeout_s=300.0):
        assert_close(values, {name: found[0][name] for name in values}, 0.0)


def _tensors(folder: Path) -> set[str]:
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= set(file.keys())
    return found


TORCHS_ROUTE = (
    "tp=4 transformer.wte.weight=tp:S(0)", "pp=2 tp=2", "tp=2 dp_shard=2 zero=3", "pp=2 dp_shard=2 zero=3",
    "pp=2 dp_replicate=2 schedule=Interleaved1F1B virtual_stages=2", "dp_replicate=4",
)  # fmt: skip


def test_torchs_checkpoints_go_on_under_other_plans_whose_vocabularies_are_lengthened(
    pool: WorkerPool, tmp_path: Path
) -> None:
    """What ``torch.distributed.checkpoint`` saves under one plan it loads under the next, which saves it again."""
    subject = resolve_model("hf:gpt2?n_embd=32&n_layer=2&n_head=4&vocab_size=257&n_positions=17")
    graph = api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0, padded=True))
    given = {"cluster": "cpu:1x4", "global_batch_size": 8}
    plans = [estimated(graph, pins=pins.split(), **given) for pins in TORCHS_ROUTE]
    assert plans[0].padding
    goes_on(pool, subject, graph, [subject.make_batch(8, seed=0, padded=True)], tmp_path, *plans, by="torch")


def test_torchs_state_dicts_have_the_optimizer_and_go_on_under_other_plans(pool: WorkerPool, tmp_path: Path) -> None:
    (subject, plan, graph), *others = (planned(name, "gpt2") for name in ("tp2 x dp2 ZeRO 3", "pp2 x dp2", "dp4"))
    plans = plan, *(other for _, other, _ in others)
    goes_on(pool, subject, graph, batches(subject, 3), tmp_path, *plans, by="torch with optimizer")


@pytest.mark.parametrize("layout", ["dp4", "tp2 x dp2", "pp2 x dp2"])
def test_ranks_write_each_element_once_and_about_equally_many(pool: WorkerPool, tmp_path: Path, layout: str) -> None:
    subject, plan, graph = planned(layout, "gpt2")
    on_ranks(pool, jobs.go_on, subject, plan, graph, batches(subject, 1), "", str(tmp_path / "run"), "autopar")
    source = Folder(tmp_path / "run")
    # each rank writes its own state
    entries = [entry for name, entry in source.tensors.items() if not name.startswith("state.")]
    stored = sum(prod(entry.shape) * entry.dtype.itemsize for entry in entries)
    written = [_written_bytes(source.path / name) for name in source._files]
    assert stored <= sum(written) < 1.05 * stored, "steps of an optimizer come more than once"
    assert len(written) == 4
    assert max(written) < 0.6 * stored


def _written_bytes(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        return sum(file.get_tensor(name).nbytes for name in file.keys() if not name.startswith("state."))  # noqa: SIM118
