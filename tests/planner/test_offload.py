from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autopar import api
from autopar.errors import InfeasibleError, UsageError
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.hardware.device import HostLink
from autopar.plan.file import plan_from_dict, plan_to_dict
from autopar.plan.plan import Plan
from autopar.planner.planner import Planner
from autopar.planner.space.space import Hosted, load_space
from autopar.planner.stages.recompute import OFFLOADED, BlockOption, CutBlock
from autopar.planner.stages.stage_cut import Cut, CutBlocks, cut, stage_masks
from autopar.planner.studies.study import params
from autopar.util.files import data_files
from tests.support.clusters import HOST, with_device
from tests.support.planner.graphs import mlp
from tests.support.planner.tasks import check_search, planner_of
from tests.support.said import refuses

ROOM_FOR_SOME, NEEDS_HOST = "440MB", "430MB"


@cache
def graph() -> Graph:
    return mlp(layers=6, batch=2, width=256, hidden=1024)


def cluster(memory: str, host: HostLink | None = HOST) -> Cluster:
    return with_device(Cluster.parse(f"cpu:1x4?memory={memory}"), host=host)


def made(memory: str, *pins: str, tried: tuple[Hosted, ...] = ("optimizer",), batch: int = 64) -> Planner:
    space = replace(load_space("quick"), offload=tried)
    return planner_of(graph(), *pins, cluster=cluster(memory), space=space, global_batch_size=batch)


@pytest.mark.parametrize(("memory", "is_offloaded"), [("16GB", False), (ROOM_FOR_SOME, None), (NEEDS_HOST, True)])
def test_the_best_of_all_is_found_and_no_bound_is_above(memory: str, is_offloaded: bool | None) -> None:
    found, plans = check_search(lambda: made(memory))
    assert any(c.offload for c in plans)
    assert len({tuple(params(c).values()) for c in plans}) == len(plans), "each is a trial of its own in a study"
    if is_offloaded is not None:
        assert bool(found.best.candidate.offload) == is_offloaded
        assert all(bool(c.offload) for c in plans) == is_offloaded
    if memory == "16GB":  # at equal choices the device is never slower
        for candidate, plan in plans.items():
            assert not candidate.offload or plan.time_s > plans[replace(candidate, offload=())].time_s


@pytest.mark.parametrize("memory", ["16GB", "434MB"])
def test_no_bound_is_above_a_plan_whose_blocks_keep_on_the_host(memory: str) -> None:
    _, plans = check_search(lambda: made(memory, "offload=activations@layers.1-4", "micro_batch>=2"))
    predictions = [plan.prediction for plan in plans.values()]
    assert all(any(rank.host for rank in one.memory) for one in predictions)
    assert any(one.breakdown.offload_s > 0 for one in predictions)


@pytest.mark.parametrize(("memory", "offloaded"), [("16GB", 0), ("560MB", 5), ("500MB", 6)])
def test_the_search_moves_what_blocks_keep_where_that_pays(memory: str, offloaded: int) -> None:
    """Of all candidates the best is found, and no bound is above a plan."""
    pins = ("micro_batch=2048", "pp<=2", "tp=1")
    found, plans = check_search(lambda: made(memory, *pins, tried=("activations",), batch=8192))
    assert all(candidate.offloads_activations or OFFLOADED not in plan.modes for candidate, plan in plans.items())
    assert any(c.offloads_activations for c in plans)
    assert found.best.modes.count(OFFLOADED) == offloaded


def test_a_plan_says_which_blocks_the_search_moved(tmp_path: Path) -> None:
    file = tmp_path / "moving.toml"
    file.write_text(data_files("search")["quick"].read_text() + 'offload = ["activations"]\n')
    pins = ["micro_batch=2048", "pp=1", "tp=1", "zero=0"]
    plan = api.search(graph(), cluster=cluster("560MB"), global_batch_size=8192, space=str(file), pins=pins)
    assert sum(block.offload for block in plan.blocks) == 5
    assert {block.recompute for block in plan.blocks} == {"none"}
    assert plan.predicted.memory[0].host > 0
    assert plan.search.lower_bound_s <= plan.predicted.step_time_s
    assert plan_from_dict(plan_to_dict(plan)) == plan


def test_blocks_that_move_stand_evenly_among_those_that_do_not() -> None:
    """So that each has others' forwards to copy beside; copies that are longer than all of them are waited for."""
    plain = BlockOption(mode="none", time_s=3.0, held_bytes=10.0, transient_bytes=0.0, forward_s=1.0)
    offloaded = replace(plain, mode=OFFLOADED, held_bytes=0.0, down_s=2.0, up_s=2.0)
    block = CutBlock(key=0, options=(plain, offloaded), static_bytes=0.0)

    def within(limit_bytes: float) -> Cut | None:
        masks, limits = stage_masks(8, 1, None, {}), [limit_bytes]
        return cut([CutBlocks([block] * 8)], in_flight=[1], limit_bytes=limits, num_micro_batches=1, allowed=masks)

    half = within(40.0)
    assert half.modes == ("none", OFFLOADED) * 4
    assert half.time_s == 8 * 3.0 + 2.0  # the last one up
    most = within(20.0)
    assert most.modes.count(OFFLOADED) == 6 and most.time_s == 8 * 3.0 + (6 * 2.0 - 8 * 1.0) + 2.0


def test_blocks_that_keep_on_the_host_hold_less_on_the_device() -> None:
    moved = [f"offload=activations{blocks} offload!=optimizer" for blocks in ("", "@layers.2-3")]
    here, there, some = (planned(f"dp_shard=4 zero=2 recompute=none {more}") for more in ("offload=none", *moved))
    assert [block.offload for block in some.blocks] == [False, False, False, True, True, False, False, False]
    assert plan_from_dict(plan_to_dict(some)) == some
    (one,), (all_,), (part,) = (plan.predicted.memory for plan in (here, there, some))
    assert (all_.activations, one.host) == (4 * 256 * 4, 0)  # the batch stays
    assert all_.host + all_.activations == part.host + part.activations == one.activations
    assert 0 < part.host < all_.host
    assert all_.transient > one.transient
    assert here.predicted.step_time_s < some.predicted.step_time_s <= there.predicted.step_time_s
    assert "what 2 of 8 blocks keep for backward lives there" in str(some)


def planned(pins: str, **changes: Any) -> Plan:
    wish, host = [*pins.split(), "tp=1", "pp=1", "micro_batch=4"], replace(HOST, **changes)
    return api.estimate(graph(), cluster=cluster("16GB", host), global_batch_size=64, pins=wish)


def test_pins_choose_and_plans_say_so_with_the_time_of_gradients_down_and_parameters_up() -> None:
    here, there = (planned(f"zero=2 dp_shard=4 offload={where}") for where in ("none", "optimizer"))
    assert (here.offload, there.offload) == ((), ("optimizer",))
    assert plan_from_dict(plan_to_dict(there)) == there
    assert "offload" not in plan_to_dict(here)
    one, other = here.predicted.memory[0], there.predicted.memory[0]
    assert (other.optimizer, one.host) == (0, 0)
    assert other.host == one.optimizer + 2 * one.optimizer // 2  # a copy and a gradient beside the two states
    assert any("host memory for each device: the profile does not know" in note for note in there.notes)
    text = str(there)
    assert "offload     the optimizer steps on the host" in text and "copies to and from the host" in text
    here, there = here.predicted, there.predicted
    size, count = here.memory[0].optimizer // 2, len(graph().parameters)  # adamw has two states
    checked_s = 2 * size / cluster("16GB").groups[0].device.memory_bandwidth_bytes_per_s
    assert there.breakdown.offload_s == pytest.approx(2 * size / 4e10 + 2 * count * 1e-6 + checked_s)
    assert there.breakdown.optimizer_s == pytest.approx(21 * size / 4e10 + 9 * count * 1e-6)
    parts = [name for name in here.breakdown.__slots__ if name not in ("optimizer_s", "offload_s")]
    assert [getattr(there.breakdown, n) for n in parts] == [getattr(here.breakdown, n) for n in parts]
    assert there.step_time_s == pytest.approx(there.breakdown.total_s)


def test_the_host_has_its_own_limit() -> None:
    plan = planned("zero=2 dp_shard=4 offload=optimizer", memory_bytes=10**9)
    assert plan.predicted.host_memory_limit_bytes == 10**9 and plan.predicted.fits
    said = r"memory of the host: needs .* of 9\.54 MiB a device"
    refuses(InfeasibleError, said, planned, "zero=2 dp_shard=4 offload=optimizer", memory_bytes=10_000_000)


def test_without_a_link_there_is_no_offload_and_a_pin_says_so() -> None:
    def search(pins: list[str]) -> Plan:
        return api.search(graph(), cluster=cluster("16GB", None), global_batch_size=64, pins=pins)

    assert search(["offload!=optimizer", "tp=1"]).offload == ()
    for pin in ("offload=optimizer", "offload=activations@layers.0"):
        refuses(UsageError, rf"pin '{pin}': .*profile of cpu has no link to it\. Add \[device.host\]", search, [pin])
    for pins, said in (
        (["offload=activations", "offload=none"], "The pins offload=activations, offload=none contradict each other"),
        (["offload=activations@head"], "No block of the model matches 'head'"),
        (["offload=optimizer", "offload=none"], "leave nothing to choose"),
    ):
        refuses(UsageError, said, search, pins)
    options = {"global_batch_size": 64, "optimizer": "adafactor", "pins": ["offload=optimizer"]}
    said = r"The optimizer adafactor cannot live on the host.* Take one of adamw, adam"
    refuses(UsageError, said, api.estimate, graph(), cluster=cluster("16GB"), **options)


def test_where_nothing_fits_the_error_names_the_space_with_the_host() -> None:
    def search(space: str) -> Plan:
        return api.search(graph(), cluster=cluster(NEEDS_HOST), global_batch_size=64, space=space)

    refuses(InfeasibleError, "or search --space wide, where optimizers may live on the host", search, "default")
    assert search("wide").offload == ("optimizer",)
