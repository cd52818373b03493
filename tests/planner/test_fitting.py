"""What a rank's memory has left over goes to blocks that then need no recompute."""

import random

import pytest

from autopar.plan import Memory
from autopar.planner.stages.activation_modes import BlockOption
from autopar.planner.stages.fitting import Fitting, busy_s, relaxable, relaxed
from autopar.planner.stages.stage_cut import Cut, CutBlock, StageCutter

PP, LIMIT = 2, 40
IN_FLIGHT = (5, 4, 2, 1)


def blocks(count: int) -> StageCutter:
    plain = BlockOption(mode="none", time_s=3.0, held_bytes=4.0, transient_bytes=0.0)
    again = BlockOption(mode="full", time_s=4.0, held_bytes=1.0, transient_bytes=0.0)
    return StageCutter([CutBlock(key=0, options=(plain, again), static_bytes=0.0)] * count)


def fitted(cut: Cut) -> Fitting:
    """A rank of stages ``r`` and ``r + 2`` holds what its blocks keep for the micro-batches in flight."""
    used = [0] * PP
    for s, (start, stop) in enumerate(zip((0, *cut.stops), cut.stops, strict=False)):
        used[s % PP] += IN_FLIGHT[s] * sum(1 if mode == "full" else 4 for mode in cut.modes[start:stop])
    parts = {"parameters": 0, "gradients": 0, "optimizer": 0, "transient": 0, "reserved": 0}
    return Fitting(
        cut=cut, made=(), memory=tuple(Memory(pp_rank=r, activations=n, **parts) for r, n in enumerate(used))
    )


def test_as_many_blocks_as_fit_are_not_recomputed_and_first_those_that_keep_least() -> None:
    cutter = blocks(8)
    first = Cut(stops=(2, 4, 6, 8), modes=("full",) * 8, time_s=0.0)
    orders = relaxable(first, cutter, IN_FLIGHT, PP)
    assert orders == [[4, 5, 0, 1], [6, 7, 2, 3]]
    best = relaxed(fitted(first), orders, cutter, fitted, [LIMIT] * PP)
    assert [m.total for m in best.memory] == [26, 40]
    assert best.cut.modes == ("full", "full", "none", "none", "none", "none", "none", "none")
    left = relaxable(best.cut, cutter, IN_FLIGHT, PP)
    for rank, own in enumerate(left):
        for i in own[:1]:
            modes = tuple("none" if k == i else mode for k, mode in enumerate(best.cut.modes))
            more = fitted(Cut(stops=first.stops, modes=modes, time_s=0.0))
            assert more.memory[rank].total > LIMIT


@pytest.mark.parametrize("seed", range(20))
def test_a_relaxed_cut_fits_and_is_no_slower(seed: int) -> None:
    chance = random.Random(seed)
    cutter = blocks(8)
    stops = (*sorted(chance.sample(range(1, 8), 3)), 8)
    first = Cut(stops=stops, modes=tuple(chance.choice(("none", "full")) for _ in range(8)), time_s=0.0)
    limit = max(m.total for m in fitted(first).memory) + chance.randrange(20)
    best = relaxed(fitted(first), relaxable(first, cutter, IN_FLIGHT, PP), cutter, fitted, [limit] * PP)
    assert all(m.total <= limit for m in best.memory)
    assert busy_s(best.cut, cutter, PP, 4) <= busy_s(first, cutter, PP, 4)


def test_a_rank_waits_for_the_stages_before_it() -> None:
    """Each stage takes 6 seconds: the second rank has 4 micro-batches on two stages, and one on the first stage before."""
    cut = Cut(stops=(2, 4, 6, 8), modes=("none",) * 8, time_s=0.0)
    assert busy_s(cut, blocks(8), PP, 4) == 6 + 4 * 12
