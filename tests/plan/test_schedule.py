from itertools import accumulate

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import UsageError
from autopar.plan.schedule import check_schedule, peak_table
from tests.support.example_plans import schedule_actions


def _torch_interleaved(pp: int, virtual_stages: int, num_micro_batches: int) -> list[list[str]]:
    schedule = object.__new__(torch_schedules.ScheduleInterleaved1F1B)
    schedule.pp_group_size, schedule.n_local_stages = pp, virtual_stages
    schedule._n_microbatches = num_micro_batches
    schedule.number_of_rounds = max(1, num_micro_batches // pp)
    schedule.microbatches_per_round = num_micro_batches // schedule.number_of_rounds
    return [
        [str(action) for action in schedule._calculate_single_rank_operations(rank) if action is not None]
        for rank in range(pp)
    ]


def _torch_single(cls: type, pp: int, num_micro_batches: int) -> list[list[str]]:
    schedule = object.__new__(cls)
    schedule._num_stages, schedule._n_microbatches = pp, num_micro_batches
    order = schedule._get_pipeline_order()
    return [
        [str(a) for a in order[rank] if a is not None and a.computation_type.value in ("F", "B")] for rank in range(pp)
    ]


def _texts(name: str, pp: int, virtual_stages: int, num_micro_batches: int) -> list[list[str]]:
    return [[str(a) for a in rank] for rank in schedule_actions(name, pp, virtual_stages, num_micro_batches)]


@pytest.mark.parametrize(("pp", "m"), [(2, 2), (2, 5), (4, 4), (4, 9), (8, 16)])
def test_one_stage_orders_are_torchs(pp: int, m: int) -> None:
    assert _texts("GPipe", pp, 1, m) == _torch_single(torch_schedules.ScheduleGPipe, pp, m)
    # torch's picture of the last rank counts its forwards from 1 (it runs from 0): the other ranks are compared
    assert _texts("1F1B", pp, 1, m)[:-1] == _torch_single(torch_schedules.Schedule1F1B, pp, m)[:-1]
    assert _texts("1F1B", pp, 1, m)[-1] == [f"{pp - 1}{kind}{i}" for i in range(m) for kind in "FB"]


@pytest.mark.parametrize(
    ("pp", "v", "m"), [(2, 2, 2), (2, 2, 4), (2, 3, 6), (4, 2, 8), (4, 2, 10), (4, 3, 3), (3, 2, 6), (8, 4, 32)]
)
def test_interleaved_order_is_torchs(pp: int, v: int, m: int) -> None:
    assert _texts("Interleaved1F1B", pp, v, m) == _torch_interleaved(pp, v, m)


cases = st.one_of(
    st.tuples(st.just("none"), st.just(1), st.just(1), st.integers(1, 9)),
    st.tuples(st.sampled_from(["GPipe", "1F1B"]), st.integers(1, 6), st.just(1), st.integers(6, 14)),
    st.tuples(st.integers(2, 5), st.integers(2, 4), st.integers(1, 4)).map(
        lambda drawn: ("Interleaved1F1B", *drawn[:2], drawn[0] * drawn[2])
    ),
)


@settings(max_examples=40, deadline=None)
@given(cases)
def test_peaks_bound_every_stage(case: tuple[str, int, int, int]) -> None:
    _, pp, v, _ = case
    for rank, queue in enumerate(schedule_actions(*case)):
        peaks = peak_table(*case, rank)
        for turn in range(v):
            own = (1 if action.kind == "F" else -1 for action in queue if action.stage == turn * pp + rank)
            assert peaks[:, turn].max() == max(accumulate(own))  # the most micro-batches that it holds activations of


@pytest.mark.parametrize(
    ("case", "word"),
    [
        (("ZigZag", 2, 1, 4), "ZigZag"), (("1F1B", 4, 1, 3), "needs at least 4 micro-batches"),
        (("1F1B", 4, 2, 8), "virtual stages"), (("none", 2, 1, 4), "pp=2"), (("Interleaved1F1B", 4, 2, 9), "rounds"),
        (("Interleaved1F1B", 4, 1, 8), "Use schedule=1F1B"), (("GPipe", 2, 1, 0), "at least 1"),
    ],
)  # fmt: skip
def test_impossible_schedules_say_why(case: tuple[str, int, int, int], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        check_schedule(*case)
