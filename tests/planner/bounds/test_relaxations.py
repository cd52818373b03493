import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autopar.cost.step.simulation import chains_of, compiled
from autopar.plan.schedule import peak_table
from autopar.planner.bounds import chain_proof
from autopar.planner.bounds.chain_program import WHOLE, chain_bound
from autopar.planner.bounds.columns import Columns
from autopar.planner.bounds.feasibility import _largest_impossible, feasible_bounds
from autopar.planner.bounds.instance import BlockFloor, FloorTable, ModeFloor, PipelineInstance, runs_of
from autopar.planner.bounds.whole_recompute import WholeRecompute


def block(*modes: tuple[float, float], forward_s: float = 1.0, **fields: float) -> BlockFloor:
    """A block by the seconds of the backward and the kept bytes of each of its modes."""
    own = tuple(ModeFloor(backward_s=time_s, kept_bytes=kept, passing_bytes=0.0) for time_s, kept in modes)
    return BlockFloor(forward_s=forward_s, modes=own, **fields)


def pipeline(
    schedule: str, pp: int, num_micro_batches: int, kinds: Sequence[int], blocks: Sequence[BlockFloor], **fields: Any
) -> PipelineInstance:
    """Blocks of these kinds on ranks with equal devices, which have room for all of them."""
    nothing = (0.0,) * pp if pp > 1 else ()
    instance = PipelineInstance(
        schedule=schedule, virtual_stages=1, num_micro_batches=num_micro_batches, runs=runs_of(kinds), groups=((1,),),
        floors=(FloorTable(blocks=tuple(blocks)),), device_of_rank=(0,) * pp, limit_bytes=(100.0,), forward_s=(0.0,),
        backward_s=(0.0,), sends_s=nothing, sends_back_s=nothing,
    )  # fmt: skip
    return replace(instance, **fields)


TINY = 1e-6
NUMBERS = st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0])
SOME = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def floors(draw: st.DrawFn) -> BlockFloor:
    """A block of up to three modes: what keeps less takes no less."""
    kept, backward_s, modes = draw(st.sampled_from([4.0, 6.0])), draw(st.sampled_from([1.0, 2.0])), []
    for _ in range(draw(st.integers(1, 3))):
        passing = draw(NUMBERS)
        modes.append(ModeFloor(backward_s=backward_s, kept_bytes=kept, passing_bytes=passing))
        kept = max(kept - draw(st.sampled_from([1.0, 2.0])), 0.0)
        backward_s += draw(st.sampled_from([0.25, 1.0]))
    return BlockFloor(
        forward_s=draw(st.sampled_from([0.5, 1.0, 1.5])), modes=tuple(modes), gather_s=draw(NUMBERS) / 4,
        once_s=draw(NUMBERS), static_bytes=draw(NUMBERS), more_s=draw(st.sampled_from([0.0, 0.0, 0.25])),
        stepped_bytes=draw(st.sampled_from([0.0, 0.0, 8.0, 16.0])),
    )  # fmt: skip


@st.composite
def instances(draw: st.DrawFn) -> PipelineInstance:
    """Up to six blocks of up to three kinds on up to three ranks of up to two kinds of devices."""
    pp, v = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2)]))
    schedule = "none" if pp == 1 else "Interleaved1F1B" if v > 1 else draw(st.sampled_from(["1F1B", "GPipe"]))
    m = draw(st.integers(pp if schedule == "1F1B" else 1, 4)) if v == 1 else pp * draw(st.integers(1, 2))
    kinds = [0, *draw(st.lists(st.sampled_from([1, 2]), min_size=max(pp * v - 2, 0), max_size=4)), 3]
    devices = draw(st.integers(1, 2)) if pp > 1 else 1
    blocks = [draw(floors()) for _ in range(4)]
    later = [tuple(replace(x, backward_s=2 * x.backward_s) for x in own.modes) for own in blocks]
    slower = [replace(own, forward_s=1.5 * own.forward_s, modes=m) for own, m in zip(blocks, later, strict=True)]
    device_of_rank = tuple(draw(st.integers(0, devices - 1)) for _ in range(pp))
    ends: tuple[tuple[int, int], ...] = ()
    if pp > 1 and draw(st.booleans()):
        stops = draw(st.sampled_from([*combinations(range(1, len(kinds)), pp * v - 1)]))
        wide = [(draw(st.sampled_from([0, 0, 1, 9])), draw(st.sampled_from([0, 0, 1, 9]))) for _ in stops]
        ends = tuple((max(i - a, 1), min(i + b, len(kinds) - 1)) for i, (a, b) in zip(stops, wide, strict=True))
        ends += ((len(kinds), len(kinds)),)
    more_s: tuple[tuple[tuple[float, float], ...], ...] = ()
    if pp > 1 and draw(st.booleans()):
        of_kind = tuple((draw(NUMBERS), draw(NUMBERS)) for _ in blocks)
        more_s = tuple(tuple((there * (1 + r), back) for there, back in of_kind) for r in range(pp))
    return PipelineInstance(
        schedule=schedule, virtual_stages=v, num_micro_batches=m, runs=runs_of(kinds), groups=((1,), (2,)),
        floors=(FloorTable(blocks=tuple(blocks)), FloorTable(blocks=tuple(slower)))[:devices],
        device_of_rank=device_of_rank, limit_bytes=tuple(draw(st.sampled_from([20.0, 40.0, 200.0])) for _ in range(devices)),
        forward_s=(0.125,) * devices, backward_s=(0.0625,) * devices, first_s=draw(st.sampled_from([0.0, 0.25])),
        sends_s=(0.25,) * pp if pp > 1 else (), sends_back_s=(0.125,) * pp if pp > 1 else (), sends_more_s=more_s,
        sent_bytes=draw(st.sampled_from([0.0, 0.5])), read_bytes=draw(st.sampled_from([0.0, 0.5])),
        ranks_s=draw(st.sampled_from([(), (0.5,) * pp, (0.75, *(0.25,) * (pp - 2), 0.5)[:pp]])),
        ends=ends,
    )  # fmt: skip


def plans(instance: PipelineInstance) -> Iterator[float]:
    """The step times of all cuts of an instance with all choices of modes that fit, each simulated."""
    pp, v, m = instance.pp, instance.virtual_stages, instance.num_micro_batches
    kinds, num = instance.kind_of_block.tolist(), pp * v
    tables = [instance.floors[d].blocks for d in instance.device_of_rank]
    moments = [peak_table(instance.schedule, pp, v, m, rank) for rank in range(pp)]
    actions = compiled(instance.schedule, pp, v, m)
    for stops in combinations(range(1, len(kinds)), num - 1):
        held = [sum(k in instance.groups[0] for k in kinds[i:j]) for i, j in pairwise((0, *stops, len(kinds)))]
        if max(held) > instance.most_blocks:
            continue
        if instance.ends and not all(a <= i <= b for i, (a, b) in zip(stops, instance.ends, strict=False)):
            continue
        cut = list(zip((0, *stops), (*stops, len(kinds)), strict=True))
        messages = messages_s(instance, [kinds[stop - 1] for stop in stops])
        for modes in product(*(range(len(tables[0][k].modes)) for k in kinds)):
            durations, once_s, used = [], [*(instance.ranks_s or (0.0,) * pp)], np.zeros(pp)
            peak, of_stage, stepped = np.zeros(pp), np.zeros(num), np.zeros(pp)
            for s, (start, stop) in enumerate(cut):
                rank = s % pp
                device, blocks = instance.device_of_rank[rank], [tables[rank][kinds[i]] for i in range(start, stop)]
                own = [block.modes[modes[i]] for block, i in zip(blocks, range(start, stop), strict=True)]
                forward_s = instance.forward_s[device] + sum(block.forward_s for block in blocks)
                backward_s = instance.backward_s[device] + sum(mode.backward_s for mode in own)
                backward_s += sum(block.more_s for block in blocks)  # it may fall on either
                first_s = instance.first_s + sum(block.gather_s for block in blocks)
                durations += [forward_s, backward_s, forward_s + first_s]
                once_s[rank] += sum(block.once_s for block in blocks)
                kept = [mode.kept_bytes for mode in own]
                used[rank] += sum(block.static_bytes for block in blocks)
                stepped[rank] += sum(block.stepped_bytes for block in blocks)
                of_stage[s] = sum(kept) + instance.sent_bytes * (s < num - 1)
                of_stage[s] += instance.read_bytes * (0 < s < num - 1 or num == 1)
                passing = [mode.passing_bytes - sum(kept[i + 1 :]) for i, mode in enumerate(own)]
                peak[rank] = max(peak[rank], *passing)
            limits = [instance.limit_bytes[d] for d in instance.device_of_rank]
            used += [(table @ of_stage[rank::pp]).max() for rank, table in enumerate(moments)]
            if (used + peak <= limits).all() and (stepped <= limits).all():
                yield chains_of(actions, durations, [*messages, 0.0], once_s, 1)[0].time_s


def messages_s(instance: PipelineInstance, last: Sequence[int]) -> list[float]:
    """Seconds of the messages of each stage, to the next one and to the one before; ``last``: kinds of the last blocks of all but the last stage."""
    pp, num = instance.pp, instance.pp * instance.virtual_stages
    found = np.zeros((num, 2))
    if instance.sends_s:
        found[:, 0] = np.array(instance.sends_s)[np.arange(num) % pp]
        found[:, 1] = np.array(instance.sends_back_s)[(np.arange(num) - 1) % pp]
    for s, kind in enumerate(last if instance.sends_more_s else ()):
        there_s, back_s = instance.sends_more_s[s % pp][kind]
        found[s, 0] += there_s
        found[s + 1, 1] += back_s
    return [*found.ravel().tolist()]


def least_s(instance: PipelineInstance) -> float:
    return min(plans(instance), default=math.inf)


@pytest.mark.slow
@SOME
@given(instances())
def test_no_relaxation_is_above_a_simulated_plan(instance: PipelineInstance) -> None:
    best_s = least_s(instance)
    columns = Columns([instance])
    assert columns.work_s()[0] <= best_s * (1 + TINY)
    assert math.isinf(best_s) or columns.holds()[0]
    for goal_s, whole in product((math.inf, 1.2 * best_s, best_s, 0.9 * best_s), (False, True)):
        assert feasible_bounds([instance], goal_s, whole=whole)[0] <= best_s * (1 + TINY)
    for goal_s in (math.inf, 1.2 * best_s, best_s):
        bound = chain_bound(instance, goal_s, whole_s=goal_s)
        if bound is not None:
            assert bound.time_s <= best_s * (1 + 2 * WHOLE)
            assert bound.proof is None or bound.proof.bound_s <= min(bound.time_s, best_s * (1 + TINY))


@st.composite
def given_stages(draw: st.DrawFn) -> PipelineInstance:
    """One block on each stage, or two of a group of equal ones, between a first and a last block of other kinds."""
    pp, v = draw(st.sampled_from([(2, 1), (3, 1), (2, 2)]))
    each = draw(st.sampled_from([1, 2])) if pp * v == 2 else 1
    one = replace(draw(instances()), virtual_stages=v, ranks_s=())
    m = pp * draw(st.integers(1, 2)) if v > 1 else draw(st.integers(pp, 4))
    return replace(
        one, schedule="1F1B" if v == 1 else "Interleaved1F1B", num_micro_batches=m, groups=((1,),),
        runs=((0, 1), (1, each * pp * v), (3, 1)), most_blocks=each, device_of_rank=(0,) * pp,
        limit_bytes=(draw(st.sampled_from([12.0, 16.0, 20.0, 28.0])),) * len(one.floors), sends_s=(0.25,) * pp,
        sends_back_s=(0.125,) * pp, ends=(),
    )  # fmt: skip


@pytest.mark.slow
@SOME
@given(given_stages())
def test_whole_modes_of_given_stages_are_below_every_plan_and_above_parts(instance: PipelineInstance) -> None:
    best_s, whole = least_s(instance), chain_bound(instance, math.inf)
    parts = chain_bound(replace(instance, groups=((1,), (2,))), math.inf)  # of several groups no stage is given
    assert instance.given_stops()
    assert whole.time_s <= best_s * (1 + TINY)
    assert math.isinf(whole.time_s) or (whole.proof is not None and whole.proof.verify(instance))
    # at the moments of the schedule a rank may hold more than when its first backward begins, which parts are weighed by
    assert parts is None or whole.time_s >= parts.time_s * (1 - 1e-3)


def test_whole_modes_are_exact_where_a_rank_recomputes_one_block_of_two() -> None:
    """Each rank has room for what one of its two blocks keeps; parts of blocks would recompute three quarters of one."""
    nothing = block((0.0, 0.0), forward_s=0.0)
    blocks = [nothing, block((1.0, 4.0), (2.0, 0.0)), nothing]
    instance = pipeline("GPipe", 2, 1, [0, 1, 1, 1, 1, 2], blocks, limit_bytes=(5.0,), most_blocks=2)
    bound = chain_bound(instance, math.inf)
    assert (least_s(instance), bound.time_s) == pytest.approx((10.0, 10.0))
    assert chain_bound(replace(instance, most_blocks=math.inf), math.inf).time_s < 9.6
    many = replace(instance, num_micro_batches=4, limit_bytes=(20.0,))
    own_s, whole_s = feasible_bounds([many])[0], feasible_bounds([many], whole=True)[0]
    assert whole_s - own_s == pytest.approx(4 * 0.25, abs=0.03)  # a quarter of a block more for each micro-batch
    assert whole_s <= least_s(many)
    kinds, kept = [0, 1, 1, 2, 2, 2, 2, 3], [nothing, nothing, blocks[1], nothing]  # blocks before spare nothing
    light = pipeline("GPipe", 2, 4, kinds, kept, limit_bytes=(20.0,))
    assert feasible_bounds([light], whole=True)[0] == pytest.approx(whole_s)
    for known in ((), (bound.proof,)):  # a proof of an instance of the same schedule that fits
        full = chain_bound(replace(instance, limit_bytes=(-1.0,)), math.inf, known)
        assert math.isinf(full.time_s)
        assert bound.proof.verify(replace(instance, limit_bytes=(-1.0,)))


@pytest.mark.parametrize("most_choices", [20_000, 0])
@pytest.mark.parametrize("ends", [(), (1, 1), (2, 2), (3, 3), (2, 3)])
def test_messages_are_of_last_blocks(ends: tuple[int, ...], most_choices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block sends little, later ones more: the bound is the step of the pinned cut, or of the best of two, and never above."""
    instance = pipeline(
        "GPipe", 2, 2, [0, 1, 2, 3], [block((backward_s, 0.0)) for backward_s in (3.0, 2.0, 3.0, 2.0)], groups=((1,), (2,)),
        sends_s=(0.5, 0.5), sends_back_s=(0.25, 0.25), sends_more_s=(((0.0, 0.0), (1.0, 1.5), (2.0, 1.0), (2.0, 1.0)),) * 2,
        ends=(ends, (4, 4)) if ends else (),
    )  # fmt: skip
    monkeypatch.setattr(chain_proof, "MOST_CHOICES", most_choices)  # of none, given stages are weighed by parts
    bound, least = chain_bound(instance, math.inf), chain_bound(replace(instance, sends_more_s=()), math.inf)
    assert least.time_s <= bound.time_s <= least_s(instance) * (1 + TINY)
    assert not ends or bound.time_s == pytest.approx(least_s(instance), rel=1e-3)


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_an_optimizer_step_has_to_fit_too(virtual_stages: int) -> None:
    """Six blocks on two ranks: three on one of them at least, which keep little, and need more room while they are stepped."""
    blocks = [block((1.0, 0.5), forward_s=0.5, static_bytes=2.0, stepped_bytes=6.0)] * 3
    instance = pipeline(
        "Interleaved1F1B" if virtual_stages > 1 else "1F1B", 2, 2, [0, 1, 1, 1, 1, 2], blocks,
        virtual_stages=virtual_stages, limit_bytes=(18.0,), sent_bytes=1.0,
    )  # fmt: skip
    assert feasible_bounds([instance])[0] <= least_s(instance) < math.inf
    assert math.isinf(least_s(replace(instance, limit_bytes=(17.0,))))
    assert math.isinf(feasible_bounds([replace(instance, limit_bytes=(17.0,))])[0])


def test_a_rank_may_leave_the_next_block_to_an_earlier_one() -> None:
    """The second rank is slow and cannot take the second block, which the first one can: the last rank may not take the third then."""

    def table(forward_s: float, backward_s: tuple[float, ...]) -> FloorTable:
        return FloorTable(blocks=tuple(block((time_s, 4.0), forward_s=forward_s) for time_s in backward_s))

    instance = pipeline(
        "GPipe", 3, 1, [0, 1, 2, 3], (), groups=((1,), (2,)), device_of_rank=(0, 1, 0),
        floors=(table(0.5, (1.0, 2.0, 1.0, 1.0)), table(0.75, (2.0, 4.0, 2.0, 2.0))), limit_bytes=(20.0, 20.0),
        forward_s=(0.125, 0.125), backward_s=(0.0625, 0.0625), sends_s=(0.25,) * 3, sends_back_s=(0.125,) * 3,
    )  # fmt: skip
    assert least_s(instance) == pytest.approx(9.5625)  # two blocks on the first rank, one on each of the others
    assert feasible_bounds([instance])[0] <= least_s(instance)


@pytest.mark.parametrize(("schedule", "wanted_s"), [("GPipe", 19.0), ("1F1B", 18.0)])
def test_a_rank_ends_behind_a_micro_batch_that_went_to_the_last_stage_and_back(schedule: str, wanted_s: float) -> None:
    """The second of three ranks steps long. Before that: all forwards, what else it does, and the last rank's backward between; of GPipe
    its three forwards stand before, of 1F1B one of them behind. The second that 1F1B takes more is not seen by this relaxation."""
    instance = pipeline(schedule, 3, 3, [0, 1, 2], [block((1.0, 0.0), once_s=once_s) for once_s in (0.0, 10.0, 0.0)])
    assert feasible_bounds([instance])[0] == pytest.approx(wanted_s, rel=1e-3)
    assert least_s(instance) == pytest.approx(19.0)


@pytest.mark.parametrize("sizes", [(6, 6, 1, 1, 1), (1, 1, 1, 6, 6)])
def test_blocks_are_on_no_stage_that_their_order_excludes(sizes: Sequence[int]) -> None:
    """Each of four stages has one of five blocks at least, so that every block has two stages to choose from."""
    kinds, blocks = range(len(sizes)), [block((2.0 * size, 0.0), forward_s=1.0 * size) for size in sizes]
    instance = pipeline("Interleaved1F1B", 2, 4, kinds, blocks, virtual_stages=2, groups=((1, 2, 3),))
    bound = chain_bound(instance, math.inf)
    assert bound is not None
    assert 0.99 * least_s(instance) <= bound.time_s <= least_s(instance)


@pytest.mark.parametrize("goal_s", [10.0, 1e9])
def test_the_grid_has_all_times_up_to_the_goal(goal_s: float) -> None:
    bound_s = _largest_impossible(np.ones(1), lambda _, times: times >= 1e6, goal_s, step=1e-4, at_once=64)[0]
    assert min(goal_s, 1e6) * math.exp(-1e-4) <= bound_s <= min(goal_s, 1e6)


@SOME
@given(instances(), st.lists(st.floats(0.5, 2.0), min_size=2, max_size=4), st.booleans())
def test_no_bound_is_lower_when_the_goal_rises(instance: PipelineInstance, parts: Sequence[float], whole: bool) -> None:
    own_s = float(feasible_bounds([instance], whole=whole)[0])
    assert own_s >= feasible_bounds([instance])[0]
    goals = sorted(part * (own_s if math.isfinite(own_s) else 10.0) for part in parts)
    found = [float(feasible_bounds([instance], goal_s, whole=whole)[0]) for goal_s in goals]
    assert found == sorted(found)
    assert found == pytest.approx([min(own_s, goal_s) for goal_s in goals], rel=1e-12)


@pytest.mark.slow
@SOME
@given(st.lists(instances(), min_size=2, max_size=5), st.sampled_from([math.inf, 12.0]))
def test_a_bound_is_the_same_alone_and_in_company(every: Sequence[PipelineInstance], goal_s: float) -> None:
    most = len(every[0].kind_of_block)
    together = [replace(one, runs=every[0].runs) for one in every if one.pp * one.virtual_stages <= most]
    alone = [float(feasible_bounds([one], goal_s)[0]) for one in together]
    assert feasible_bounds(together, goal_s).tolist() == alone
    assert feasible_bounds(together[::-1], goal_s).tolist() == alone[::-1]
    alone = [float(feasible_bounds([one], goal_s, whole=True)[0]) for one in together]
    assert feasible_bounds(together, goal_s, whole=True).tolist() == alone


@SOME
@given(instances())
def test_proofs_verify_and_spoilt_ones_do_not(instance: PipelineInstance) -> None:
    bound = chain_bound(instance, math.inf)
    if bound is None or bound.proof is None:
        return
    proof = bound.proof
    assert proof.verify(instance)
    more = replace(proof, bound_s=proof.bound_s + max(abs(proof.bound_s), 1.0) * 1e-3)
    assert not more.verify(instance)
    assert not replace(proof, weights=tuple(2 * weight for weight in proof.weights)).verify(instance)
    longest = max(proof.chains, key=len)
    if len(longest) > 2:
        broken = tuple((*chain[:1], *chain[2:]) if chain == longest else chain for chain in proof.chains)
        a = compiled(instance.schedule, instance.pp, instance.virtual_stages, instance.num_micro_batches)
        still = all(j in (a.before[i], a.need[i]) for chain in broken for i, j in pairwise(chain))  # by the schedule
        assert not replace(proof, chains=broken).verify(instance) or still


def test_a_proof_of_one_instance_is_no_proof_of_a_quicker_one() -> None:
    slow, quick = (
        pipeline("1F1B", 2, 4, [0, 1, 1, 1, 1, 2], [block((2.0, 1.0), forward_s=forward_s)] * 3)
        for forward_s in (1.0, 0.5)
    )
    proof = chain_bound(slow, math.inf).proof
    assert proof.bound_s == pytest.approx(least_s(slow), rel=1e-3)  # three blocks each: the cut of the program is whole
    assert proof.verify(slow) and not proof.verify(quick)


NUM_BLOCKS = 10


def seconds(limit_bytes: float) -> float:
    """Ten equal blocks of 1.1 bytes on one rank, of which recompute frees 0.3 of each in 0.25 s, between two that hold nothing."""
    end, each = block((2.0, 0.0)), np.full((1, 1), float(NUM_BLOCKS))
    blocks = [end, block((2.0, 1.1), (2.25, 0.8)), end]
    instance = pipeline("none", 1, 1, [0, *[1] * NUM_BLOCKS, 2], blocks, limit_bytes=(limit_bytes,))
    return float(WholeRecompute(Columns([instance]), each, [1]).least_s(np.array([0]), each)[0, 0])


@pytest.mark.parametrize("count", range(NUM_BLOCKS + 1))
def test_as_many_whole_blocks_recompute_as_free_enough_up_to_rounding(count: int) -> None:
    """Of those blocks alone nothing is left that the other mode, which frees nothing, could add; that is no number of seconds."""
    limit_bytes = NUM_BLOCKS * 1.1 - count * 0.3
    for limit in (limit_bytes, math.nextafter(limit_bytes, 0.0)):
        assert seconds(limit) == pytest.approx(0.25 * count)
    for limit in (limit_bytes * (1 - 3e-9), limit_bytes - 0.03) if count < NUM_BLOCKS else ():
        assert seconds(limit) == pytest.approx(0.25 * (count + 1))
