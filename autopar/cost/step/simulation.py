"""Time of a pipelined step: an event simulation of the actions that the runtime carries out.

Sends do not occupy the sender; a receiver waits for them. The schedule's dependencies are worked out once for each
(schedule, ranks, virtual stages, micro-batches); a simulation is then one pass over the actions.

The longest chains of actions of a simulated step say what its time is made of, as numbers of actions of each stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.plan.schedule import check_schedule, schedule_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds that one stage takes for one micro-batch.

    Attributes:
        forward_s, backward_s: with everything that the stage waits for by itself (its collectives, recompute).
        send_forward_s: until the next stage has this stage's outputs; 0 for the last stage.
        send_backward_s: until the stage before has this stage's input gradients; 0 for the first stage.
        first_forward_s: what the step's first forward takes longer.
        schedule_s: of ``forward_s`` and ``backward_s`` together, what the schedule and its messages take of the rank.
    """

    forward_s: float
    backward_s: float
    send_forward_s: float = 0.0
    send_backward_s: float = 0.0
    first_forward_s: float = 0.0
    schedule_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """One step without what comes after its last backward, for each pipeline rank.

    Attributes:
        finish_s: when the rank's last action ends.
        busy_s: the sum of its actions.
        exposed_send_s: idle time while a message to the rank was under way.
    """

    finish_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    exposed_send_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Compiled:
    """Actions of all ranks in an order in which each stands behind what it needs.

    Attributes:
        rank: of each action.
        need: position of the action on which it depends; -1 for none.
        duration: index into (forward, backward, first forward of stage 0, of stage 1, ...).
        message: index into (send forward 0, send backward 0, ...) for the message it waits for, -1 for none.
        before: position of the action before it on its rank, -1 for none.
        last: position of each rank's last action.
        columns: the first five as an array.
    """

    rank: tuple[int, ...]
    need: tuple[int, ...]
    duration: tuple[int, ...]
    message: tuple[int, ...]
    before: tuple[int, ...]
    last: tuple[int, ...]
    columns: NDArray[np.int64]


@lru_cache(maxsize=64)
def compiled(name: str, pp: int, virtual_stages: int, num_micro_batches: int) -> Compiled:
    """The actions of a schedule in an order in which they can be simulated."""
    numbers = schedule_numbers(name, pp, virtual_stages, num_micro_batches)
    stages, m = pp * virtual_stages, num_micro_batches
    # of every action what it needs
    every = np.arange(2 * stages * m)
    stage, rest = np.divmod(every, 2 * m)
    is_backward = rest >= m
    needs = np.where(is_backward, every + 2 * m, every - 2 * m)
    last = every >= 2 * (stages - 1) * m
    needs = np.where(is_backward & last, every - m, np.where(~is_backward & (stage == 0), -1, needs))
    took = _in_turn(numbers, needs)
    positions = np.full(len(every) + 1, -1)  # one more for the actions that need nothing
    positions[took] = every
    made = needs // (2 * m)  # the stage before, or the one after
    message = np.where((needs < 0) | (made % pp == stage % pp), -1, 2 * made + is_backward)
    duration = 3 * stage + np.where(rest == 0, 2, is_backward)
    by_rank = positions[numbers]
    before = np.full(len(took), -1)
    before[by_rank[:, 1:]] = by_rank[:, :-1]
    columns = np.stack([(stage % pp)[took], positions[needs[took]], duration[took], message[took], before])
    ranks, need, durations, messages, befores = (tuple[int, ...](column.tolist()) for column in columns)
    return Compiled(ranks, need, durations, messages, befores, tuple(by_rank[:, -1].tolist()), columns)


def _in_turn(numbers: NDArray[np.int64], needs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Actions of all ranks, each behind what it needs: rank by rank as far as it comes.

    Args:
        numbers: of each rank's actions [ranks, actions].
        needs: of every action the number of that which it needs, -1 for none.
    """
    is_placed, needed = [False] * len(needs), needs.tolist()
    order: list[int] = []
    waiting: dict[int, int] = {}  # ranks by what their next action needs
    left = [iter(own) for own in numbers.tolist()]
    following = [next(own, -1) for own in left]
    ready = list(range(len(left)))
    while ready:
        rank = ready.pop()
        number, own = following[rank], left[rank]
        while number >= 0:
            need = needed[number]
            if need >= 0 and not is_placed[need]:
                waiting[need] = rank
                break
            is_placed[number] = True
            order.append(number)
            if number in waiting:
                ready.append(waiting.pop(number))
            number = next(own, -1)
        following[rank] = number
    return np.array(order)


def _ends(actions: Compiled, durations: Sequence[float], sends: Sequence[float]) -> tuple[list[float], list[float]]:
    """When each action ends, with one of no seconds behind them (-1), which those need that need nothing; and each rank."""
    ends = [0.0] * (len(actions.rank) + 1)
    free = [0.0] * (max(actions.rank) + 1)
    columns = zip(actions.rank, actions.need, actions.duration, actions.message, strict=True)
    for i, (rank, need, duration, message) in enumerate(columns):
        end = free[rank]
        if (arrives := ends[need] + sends[message]) > end:
            end = arrives
        free[rank] = ends[i] = end + durations[duration]
    return ends, free


@lru_cache(maxsize=16)
def _simulated(name: str, pp: int, num_micro_batches: int, stages: tuple[StageTimes, ...]) -> PipelineTimes:
    """A step of several stages; a search asks for the same one again where a cut that is in time is the one that fits."""
    check_schedule(name, pp, len(stages) // pp, num_micro_batches)
    actions = compiled(name, pp, len(stages) // pp, num_micro_batches)
    durations, sends = durations_of(stages), sends_of(stages)
    return _times(actions, durations, sends, _ends(actions, durations, sends)[0])


def _times(
    actions: Compiled, durations: Sequence[float], sends: Sequence[float], ends: Sequence[float]
) -> PipelineTimes:
    """``ends``: the first of :func:`_ends`."""
    every = np.array(ends)
    ranks, needs, lengths, messages, befores = actions.columns
    idle, made, sent, took = every[befores], every[needs], np.array(sends)[messages], np.array(durations)[lengths]
    exposed = np.where(made + sent > idle, made + sent - np.maximum(made, idle), 0.0)
    return PipelineTimes(
        finish_s=tuple(every[list(actions.last)].tolist()),
        busy_s=tuple(np.bincount(ranks, took).tolist()),
        exposed_send_s=tuple(np.bincount(ranks, exposed).tolist()),
    )


def simulate(name: str, pp: int, num_micro_batches: int, stages: Sequence[StageTimes]) -> PipelineTimes:
    """Simulate one step.

    Args:
        name: of the schedule.
        pp: pipeline ranks; ``len(stages)`` is a multiple of it, stage ``s`` runs on rank ``s % pp``.
        num_micro_batches: of the step.
        stages: in order of the model.

    Raises:
        UsageError: the schedule cannot serve these numbers.
    """
    if pp == 1 and len(stages) == 1:  # every schedule is the plain sum
        busy = num_micro_batches * (stages[0].forward_s + stages[0].backward_s) + stages[0].first_forward_s
        return PipelineTimes(finish_s=(busy,), busy_s=(busy,), exposed_send_s=(0.0,))
    return _simulated(name, pp, num_micro_batches, tuple(stages))


def durations_of(stages: Sequence[StageTimes]) -> list[float]:
    """Of the actions of each stage: forward, backward, first forward; ``Compiled.duration`` counts in it."""
    return [
        time
        for stage in stages
        for time in (stage.forward_s, stage.backward_s, stage.forward_s + stage.first_forward_s)
    ]


def sends_of(stages: Sequence[StageTimes]) -> list[float]:
    """Of the messages of each stage, to the next one and back; one more for the message -1 that nobody sends."""
    return [*(time for stage in stages for time in (stage.send_forward_s, stage.send_backward_s)), 0.0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Actions that follow each other up to the end of a rank: with any stage times the rank ends no sooner than they take.

    Attributes:
        rank: at whose end it ends.
        time_s: what they take with the messages between them, and what follows on the rank.
        sends_s: of the messages.
        forwards, backwards, firsts: actions of each stage; the first forward of a step is among both ``forwards`` and ``firsts``.
        actions: as :class:`autopar.cost.step.simulation.Compiled` numbers them, the last one first.
    """

    rank: int
    time_s: float
    sends_s: float
    forwards: NDArray[np.int64]
    backwards: NDArray[np.int64]
    firsts: NDArray[np.int64]
    actions: tuple[int, ...] = ()


def with_chains(
    name: str, pp: int, num_micro_batches: int, stages: Sequence[StageTimes]
) -> tuple[PipelineTimes, list[Chain]]:
    """As :func:`simulate`, with the longest chain up to the end of each rank; the longest of all first."""
    actions = compiled(name, pp, len(stages) // pp, num_micro_batches)
    durations, sends = durations_of(stages), sends_of(stages)
    ends, free = _ends(actions, durations, sends)
    times = _times(actions, durations, sends, ends)
    return times, _chains(actions, sends, ends, free, [0.0] * pp, pp)


def chains_of(
    actions: Compiled, durations: Sequence[float], sends: Sequence[float], after_s: Sequence[float], most: int
) -> list[Chain]:
    """The longest chain up to the end of each rank, of the ``most`` ranks that end last; the longest of all first.

    Args:
        actions: of which stages' times and messages are given as :class:`Compiled` numbers them.
        durations: of each stage's forward, backward and first forward.
        sends: of each stage's message to the next one and of that back; one more, of no seconds, for the message -1.
        after_s: what follows on each rank.
    """
    return _chains(actions, sends, *_ends(actions, durations, sends), after_s, most)


def _chains(
    actions: Compiled, sends: Sequence[float], ends: Sequence[float], free: Sequence[float], after_s: Sequence[float],
    most: int,
) -> list[Chain]:  # fmt: skip
    """As :func:`chains_of`; ``ends``, ``free``: of :func:`_ends`."""
    pp, num_stages, found = len(after_s), len(sends) // 2, list[Chain]()
    paths: list[list[int]] = []
    messages: list[list[int]] = []  # of each action the one that it waited for; -1: none
    seen: dict[
        int, tuple[int, int]
    ] = {}  # which path an action is on, and where: from there on another one is the same
    for rank in sorted(range(pp), key=lambda r: -free[r] - after_s[r])[:most]:
        path, sent, i = list[int](), list[int](), actions.last[rank]
        while i >= 0 and i not in seen:
            seen[i] = len(paths), len(path)
            path.append(i)
            before, need, message = actions.before[i], actions.need[i], actions.message[i]
            is_sent = need >= 0 and ends[need] + sends[message] > (ends[before] if before >= 0 else 0.0)
            sent.append(message if is_sent else -1)
            i = need if is_sent else before
        if i >= 0:
            which, place = seen[i]
            path += paths[which][place:]
            sent += messages[which][place:]
        paths.append(path)
        messages.append(sent)
        count = np.bincount(actions.columns[2][path], minlength=3 * num_stages).reshape(-1, 3)
        found.append(
            Chain(
                rank=rank,
                time_s=free[rank] + after_s[rank],
                sends_s=sum(sends[message] for message in sent if message >= 0),
                forwards=count[:, 0] + count[:, 2],
                backwards=count[:, 1],
                firsts=count[:, 2],
                actions=tuple(path),
            )
        )
    return found


@lru_cache(maxsize=64)
def rank_chains(name: str, pp: int, virtual_stages: int, num_micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Two chains through each rank up to the last action of the first one, as :class:`Chain.actions` numbers them.

    One runs all of the rank's own actions, behind the forwards that its first one needs and before the backwards that need its last
    one. The other leaves them at the rank's first backward, for what that one needs: backwards and forwards on all stages behind.
    """
    actions = compiled(name, pp, virtual_stages, num_micro_batches)
    found: list[tuple[int, ...]] = []
    after: list[int] = []
    i = actions.last[0]
    for rank in range(pp):
        while actions.rank[i] != rank:
            after.append(i)
            i = actions.need[i]
        own = [*_back(actions.before, i)]
        backward = max(place for place, action in enumerate(own) if actions.duration[action] % 3 == 1)
        ways = (own, own[: backward + 1])
        found += [(*after, *way, *_back(actions.need, actions.need[way[-1]])) for way in ways]
    return tuple(found)


def _back(links: Sequence[int], action: int) -> Iterator[int]:
    """An action and those before it by these links, -1 being none."""
    while action >= 0:
        yield action
        action = links[action]
