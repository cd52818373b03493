"""The search finds the best of all plans: some small problems; the command prices more (``docs/evidence/brute.md``)."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.planner import Planner
from autopar.planner.space.space import load_space
from tools.campaigns.brute import LEFT_OUT, ROUNDING, Result, compare, limited, problems, task_of
from tools.campaigns.product import Choice, Point, Small, best_of, every_plan, front_of
from tools.campaigns.small import draw, tiny

SEEDS = (5, 7, 10, 13, 17)
"""Of problems without ``tp``, whose blocks are larger: cuts, recompute, ZeRO and schedules."""

OF_CPUS = [(2, 2, 1), (35, 4, 2), (44, 4, 1), (13, 4, 3)]
"""Seeds, ranks and the cores that these divide."""

OVERHEADS = """
[device.overheads]
sharded_launch_s = 1.0e-5
unit_s = 4.0e-3
gather_s = 4.0e-3
reduce_s = 5.0e-3
gather_parameter_s = 1.0e-4
reduce_parameter_s = 1.0e-4
collective_s = 3.0e-3
action_s = 2.0e-2
message_s = 1.0e-2
interleaved_action_s = 4.0e-2
interleaved_message_s = 3.0e-2
provenance = "for tests: large, so that a bound that counts one of them too often is seen"
"""


def of_cpus(checkout: Path, folder: Path, seed: int, ranks: int, cores: int) -> Small:
    """A drawn problem on ranks of a CPU, with large overheads."""
    profile = folder / "machine.toml"
    profile.write_text((checkout / "profiles" / "cpu.toml").read_text() + OVERHEADS)
    return replace(draw(seed), cluster=f"{profile}:1x{ranks}?cores={cores}", precision="fp32", is_whole=False)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_plan_is_quicker_than_that_of_the_search(seed: int) -> None:
    check(problems([seed], limits=2, usual=False))


def test_no_layout_is_quicker_than_that_of_the_search() -> None:
    found = check(limited(1, tiny(), limits=2, usual=False))
    assert found[0].layouts > 50
    assert "tp=2" in {result.best.split(",")[0] for result in found}


def test_what_later_blocks_kept_is_gone_when_a_block_is_at_its_peak() -> None:
    small = replace(draw(30), is_whole=False)  # where optimizers on the host are not gone through
    found = compare(30, small, every_plan(small), 2_385_342_628, usual=False)
    assert found.gap == 0.0
    assert "pp=2 x dp_shard=2, zero=1" in found.found  # its limit is what this plan needs, to the byte


def check(results: Iterable[Result]) -> list[Result]:
    found = list(results)
    for result in found:
        assert abs(result.gap) <= ROUNDING, (result.best, result.found)
        assert result.is_certified
    return found


def test_a_front_has_what_nothing_beats() -> None:
    plain = {"stops": (1,), "ways": ("none",), "layout": 0}
    lean, fast = Point(time_s=2.0, peak_bytes=1, **plain), Point(time_s=1.0, peak_bytes=3, **plain)
    beaten = Point(time_s=math.nextafter(2.0, 3.0), peak_bytes=2, **plain)
    assert front_of([beaten, fast, lean]) == [lean, fast]


@pytest.mark.parametrize("seed", [10, 13, 17])
def test_no_plan_of_a_candidate_is_quicker_than_its_bounds(seed: int) -> None:
    """Of each candidate, not of the best alone; and every outer choice that has a plan is a candidate or equal to one."""
    check_candidates(draw(seed))


@pytest.mark.parametrize(("seed", "ranks", "cores"), OF_CPUS)
def test_no_plan_of_cpu_ranks_breaks_bounds(seed: int, ranks: int, cores: int, checkout: Path, tmp_path: Path) -> None:
    check_candidates(of_cpus(checkout, tmp_path, seed, ranks, cores))


@pytest.mark.parametrize(("seed", "ranks", "cores"), OF_CPUS[:2])
def test_no_plan_of_ranks_beats_the_search(seed: int, ranks: int, cores: int, checkout: Path, tmp_path: Path) -> None:
    check(limited(seed, of_cpus(checkout, tmp_path, seed, ranks, cores), limits=2, usual=False))


def check_candidates(small: Small) -> None:
    whole = every_plan(small)
    memory_bytes = (whole.least_bytes + max(p.peak_bytes for front in whole.fronts.values() for p in front)) // 2
    pins = ["tp=1", *(() if small.is_whole else LEFT_OUT)]
    planner = Planner(task_of(small, memory_bytes, pins, load_space("exhaustive")))
    evaluator = planner.evaluator
    found = zip(
        planner.pool, *(evaluator.bounds_s(level, planner.pool) for level in range(LEVELS)),
        [evaluator.closest_s(candidate, math.inf)[0] for candidate in planner.pool], strict=True,
    )  # fmt: skip
    seen = set()
    for candidate, *bounds_s in found:
        mesh = replace(candidate.mesh, ep=1, ep_data=1)
        choice = Choice(
            mesh=mesh, micro_batch_size=candidate.micro_batch_size, zero_stage=candidate.zero_stage,
            schedule=candidate.schedule, virtual_stages=candidate.virtual_stages, offload=candidate.offload,
            moves=candidate.offloads_activations,
        )  # fmt: skip
        best = best_of(whole.fronts[choice], planner.evaluator.model.fitting_bytes)
        assert best is None or max(bounds_s) <= best.time_s * (1 + ROUNDING), candidate
        seen.add(choice)
    assert {c for c in whole.fronts if c.zero_stage != 2} <= seen
