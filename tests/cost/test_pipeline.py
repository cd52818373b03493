import itertools

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.step import simulation
from autopar.cost.step.simulation import StageTimes, compiled, durations_of, rank_chains, simulate, with_chains
from tests.support.example_plans import dependencies, schedule_actions

F, B = 1.0, 2.0


def equal(count: int, **sends: float) -> list[StageTimes]:
    return [StageTimes(forward_s=F, backward_s=B, **sends) for _ in range(count)]


SCHEDULES = pytest.mark.parametrize(
    ("name", "pp", "v", "m"), [("GPipe", 3, 1, 4), ("1F1B", 4, 1, 6), ("Interleaved1F1B", 4, 3, 8)]
)


@SCHEDULES
def test_chains_through_ranks_are_of_the_schedule_and_no_longer_than_it(name: str, pp: int, v: int, m: int) -> None:
    actions, stages = compiled(name, pp, v, m), [StageTimes(forward_s=F + s, backward_s=B) for s in range(pp * v)]
    chains = rank_chains(name, pp, v, m)
    for rank, (through, leaving) in enumerate(zip(chains[::2], chains[1::2], strict=True)):
        for chain in (through, leaving):
            assert all(j in (actions.before[i], actions.need[i]) for i, j in itertools.pairwise(chain))
            took_s = sum(durations_of(stages)[actions.duration[i]] for i in chain)
            assert took_s <= max(simulate(name, pp, m, stages).finish_s) * (1 + 1e-9)
        assert sum(actions.rank[i] == rank for i in through) >= 2 * v * m
        assert {actions.duration[i] // 3 for i in leaving} == {*range(pp * v)}


@SCHEDULES
def test_the_longest_chain_of_each_rank_takes_until_its_end(name: str, pp: int, v: int, m: int) -> None:
    actions = compiled(name, pp, v, m)
    sends = {"send_forward_s": 0.25, "send_backward_s": 0.5}
    for slow in range(pp * v):
        stages = [
            StageTimes(forward_s=F, backward_s=B + (s == slow), first_forward_s=s, **sends) for s in range(pp * v)
        ]
        times, chains = with_chains(name, pp, m, stages)
        assert times == simulate(name, pp, m, stages)
        assert sorted(chain.rank for chain in chains) == [*range(pp)]
        for chain in chains:
            links = [*itertools.pairwise((*chain.actions, -1))]
            assert chain.actions[0] == actions.last[chain.rank]
            assert all(j in (actions.before[i], actions.need[i]) for i, j in links)
            sent_s = sum(simulation.sends_of(stages)[actions.message[i]] for i, j in links if j != actions.before[i])
            counts = zip(chain.forwards, chain.backwards, chain.firsts, stages, strict=True)
            took_s = sum(f * s.forward_s + b * s.backward_s + first * s.first_forward_s for f, b, first, s in counts)
            assert chain.sends_s == pytest.approx(sent_s)
            assert chain.time_s == pytest.approx(took_s + sent_s) == pytest.approx(times.finish_s[chain.rank])


def _reference(name: str, pp: int, m: int, stages: list[StageTimes]) -> float:
    """Longest path, with nothing shared with the simulation but the orders."""
    graph, orders = networkx.DiGraph(), schedule_actions(name, pp, len(stages) // pp, m)
    own_s = {a: stages[a.stage].forward_s if a.kind == "F" else stages[a.stage].backward_s for r in orders for a in r}
    graph.add_weighted_edges_from((a, "end", own_s[a]) for a in own_s)
    for rank in orders:
        graph.add_weighted_edges_from((a, b, own_s[a]) for a, b in itertools.pairwise(rank))
        for action in rank:
            for need in dependencies(action, len(stages) - 1):
                if need.stage % pp != action.stage % pp:
                    sender = stages[need.stage]
                    sent_s = sender.send_forward_s if action.kind == "F" else sender.send_backward_s
                    graph.add_edge(need, action, weight=own_s[need] + sent_s)
    return float(networkx.dag_longest_path_length(graph))


seconds = st.integers(0, 8).map(lambda eighths: eighths / 8)
pipelines = st.one_of(
    st.tuples(st.sampled_from(["GPipe", "1F1B"]), st.integers(2, 4), st.just(1), st.integers(4, 8)),
    st.tuples(st.just("Interleaved1F1B"), st.just(2), st.integers(2, 3), st.sampled_from([2, 4, 6])),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, int, list[StageTimes]]:
    name, pp, v, m = draw(pipelines)
    names = ("forward_s", "backward_s", "send_forward_s", "send_backward_s")
    times = [StageTimes(**{name: draw(seconds) for name in names}) for _ in range(pp * v)]
    return name, pp, m, times


@settings(max_examples=50, deadline=None)
@given(cases())
def test_simulation_is_the_longest_path(case: tuple[str, int, int, list[StageTimes]]) -> None:
    name, pp, m, stages = case
    found = simulate(name, pp, m, stages)
    assert max(found.finish_s) == pytest.approx(_reference(name, pp, m, stages))
    for rank in range(pp):
        own = sum(stage.forward_s + stage.backward_s for stage in stages[rank::pp])
        assert found.busy_s[rank] == pytest.approx(m * own)
        assert found.busy_s[rank] + found.exposed_send_s[rank] <= found.finish_s[rank] + 1e-9


def test_a_longer_first_forward_delays_everything_behind_it_and_few_messages_are_exposed() -> None:
    stages = [StageTimes(forward_s=F, backward_s=B, first_forward_s=0.5), *equal(3)]
    assert max(simulate("1F1B", 4, 8, stages).finish_s) == pytest.approx((8 + 3) * (F + B) + 0.5)
    assert max(simulate("none", 1, 3, stages[:1]).finish_s) == pytest.approx(3 * (F + B) + 0.5)
    assert simulate("1F1B", 1, 7, equal(1)).exposed_send_s == (0.0,)
    found = simulate("GPipe", 4, 6, equal(4, send_forward_s=0.25, send_backward_s=0.25))
    assert found.exposed_send_s[-1] == pytest.approx(0.25)  # in fill and drain alone
