"""Time of a pipelined step: an event simulation of the actions that the runtime executes.

Sends do not occupy the sender; a receiver waits for them. The dependencies of a schedule are computed once for each (schedule, ranks,
virtual stages, micro-batches); a simulation is then one pass over the actions. The longest chains of actions of a simulated step, its
critical paths, say what its time consists of: numbers of actions of each stage.
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
    """The seconds of one stage for one micro-batch.

    Attributes:
        forward_s, backward_s: with everything that the stage waits for (its collectives, recompute), except other stages.
        send_forward_s: until the next stage has this stage's outputs; 0 for the last stage.
        send_backward_s: until the stage before has this stage's input gradients; 0 for the first stage.
        first_forward_s: by how much the step's first forward is longer.
        schedule_s: the part of ``forward_s`` and ``backward_s`` that the rank spends on the schedule and its messages.
    """

    forward_s: float
    backward_s: float
    send_forward_s: float = 0.0
    send_backward_s: float = 0.0
    first_forward_s: float = 0.0
    schedule_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """One step up to its last backward, for each pipeline rank.

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
    """The actions of all ranks in a topological order: each comes after the actions that it needs.

    Attributes:
        rank: the rank of each action.
        need: the position of the action that it depends on; -1: none.
        duration: an index into (forward, backward, first forward of stage 0, of stage 1, ...).
        message: an index into (send forward 0, send backward 0, ...) of the message that it waits for; -1: none.
        before: the position of the action before it on its rank; -1: none.
        last: the position of each rank's last action.
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
    """Return the actions of a schedule in an order in which they can be simulated."""
    numbers = schedule_numbers(name, pp, virtual_stages, num_micro_batches)
    stages, m = pp * virtual_stages, num_micro_batches
    # Actions are numbered by stage, then forwards and backwards by micro-batch. ``needs``: what each action needs.
    actions = np.arange(2 * stages * m)
    stage, offset = np.divmod(actions, 2 * m)
    is_backward = offset >= m
    needs = np.where(is_backward, actions + 2 * m, actions - 2 * m)
    last = actions >= 2 * (stages - 1) * m
    needs = np.where(is_backward & last, actions - m, np.where(~is_backward & (stage == 0), -1, needs))
    order = _in_turn(numbers, needs)
    positions = np.full(len(actions) + 1, -1)  # one more entry, read by the index -1
    positions[order] = actions
    sender = needs // (2 * m)  # the stage that sends: the one before, or the one after
    message = np.where((needs < 0) | (sender % pp == stage % pp), -1, 2 * sender + is_backward)
    duration = 3 * stage + np.where(offset == 0, 2, is_backward)
    by_rank = positions[numbers]
    before = np.full(len(order), -1)
    before[by_rank[:, 1:]] = by_rank[:, :-1]
    columns = np.stack([(stage % pp)[order], positions[needs[order]], duration[order], message[order], before])
    ranks, need, durations, messages, befores = (tuple[int, ...](column.tolist()) for column in columns)
    return Compiled(ranks, need, durations, messages, befores, tuple(by_rank[:, -1].tolist()), columns)


def _in_turn(numbers: NDArray[np.int64], needs: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the actions of all ranks in a topological order: each rank in turn, until it waits.

    Args:
        numbers: the numbers of each rank's actions [ranks, actions].
        needs: for each action the number of the action that it needs; -1: none.
    """
    is_placed, needed = [False] * len(needs), needs.tolist()
    order: list[int] = []
    waiting: dict[int, int] = {}  # the rank that waits for each action
    queues = [iter(queue) for queue in numbers.tolist()]
    next_actions = [next(queue, -1) for queue in queues]
    ready = list(range(len(queues)))
    while ready:
        rank = ready.pop()
        number, queue = next_actions[rank], queues[rank]
        while number >= 0:
            need = needed[number]
            if need >= 0 and not is_placed[need]:
                waiting[need] = rank
                break
            is_placed[number] = True
            order.append(number)
            if number in waiting:
                ready.append(waiting.pop(number))
            number = next(queue, -1)
        next_actions[rank] = number
    return np.array(order)


def _ends(actions: Compiled, durations: Sequence[float], sends: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return when each action ends, and when each rank ends.

    The last entry of the first list is 0: the index -1 of actions that need nothing reads it.
    """
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
    """Simulate a step of several stages; cached, as a search simulates a cut when it is tested and again when it fits."""
    check_schedule(name, pp, len(stages) // pp, num_micro_batches)
    actions = compiled(name, pp, len(stages) // pp, num_micro_batches)
    durations, sends = durations_of(stages), sends_of(stages)
    return _times(actions, durations, sends, _ends(actions, durations, sends)[0])


def _times(
    actions: Compiled, durations: Sequence[float], sends: Sequence[float], ends: Sequence[float]
) -> PipelineTimes:
    """Return the times of ranks; ``ends`` is the first result of :func:`_ends`."""
    end_s = np.array(ends)
    ranks, needs, lengths, messages, befores = actions.columns
    free, done, sent, took = end_s[befores], end_s[needs], np.array(sends)[messages], np.array(durations)[lengths]
    exposed = np.where(done + sent > free, done + sent - np.maximum(done, free), 0.0)
    return PipelineTimes(
        finish_s=tuple(end_s[list(actions.last)].tolist()),
        busy_s=tuple(np.bincount(ranks, took).tolist()),
        exposed_send_s=tuple(np.bincount(ranks, exposed).tolist()),
    )


def simulate(name: str, pp: int, num_micro_batches: int, stages: Sequence[StageTimes]) -> PipelineTimes:
    """Simulate one step.

    Args:
        name: the name of the schedule.
        pp: the number of pipeline ranks; ``len(stages)`` is a multiple of it, stage ``s`` runs on rank ``s % pp``.
        num_micro_batches: the micro-batches of the step.
        stages: the stages in the order of the model.

    Raises:
        UsageError: the schedule cannot serve these numbers.
    """
    if pp == 1 and len(stages) == 1:  # every schedule is a plain sum
        busy = num_micro_batches * (stages[0].forward_s + stages[0].backward_s) + stages[0].first_forward_s
        return PipelineTimes(finish_s=(busy,), busy_s=(busy,), exposed_send_s=(0.0,))
    return _simulated(name, pp, num_micro_batches, tuple(stages))


def durations_of(stages: Sequence[StageTimes]) -> list[float]:
    """Return the seconds of each stage's actions: forward, backward, first forward; ``Compiled.duration`` is an index into it."""
    return [
        time
        for stage in stages
        for time in (stage.forward_s, stage.backward_s, stage.forward_s + stage.first_forward_s)
    ]


def sends_of(stages: Sequence[StageTimes]) -> list[float]:
    """Return the seconds of each stage's messages, to the next stage and back, and a last entry of 0 for the index -1 (no message)."""
    return [*(time for stage in stages for time in (stage.send_forward_s, stage.send_backward_s)), 0.0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Consecutive actions up to the end of a rank, of which each waits for the one before.

    With any stage times the rank ends no sooner than the sum of their seconds.

    Attributes:
        rank: the rank at whose end it ends.
        time_s: the seconds of the actions and of the messages between them, and of what follows on the rank.
        sends_s: the seconds of the messages.
        forwards, backwards, firsts: the actions of each stage; the first forward of a step is in both ``forwards`` and ``firsts``.
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
    """Return the result of :func:`simulate` and the longest chain up to the end of each rank, the longest of all first."""
    actions = compiled(name, pp, len(stages) // pp, num_micro_batches)
    durations, sends = durations_of(stages), sends_of(stages)
    ends, free = _ends(actions, durations, sends)
    times = _times(actions, durations, sends, ends)
    return times, _chains(actions, sends, ends, free, [0.0] * pp, pp)


def chains_of(
    actions: Compiled, durations: Sequence[float], sends: Sequence[float], after_s: Sequence[float], most: int
) -> list[Chain]:
    """Return the longest chain up to the end of each of the ``most`` ranks that end last; the longest of all first.

    Args:
        actions: the compiled schedule.
        durations: the seconds of each stage's forward, backward and first forward, as :class:`Compiled` numbers them.
        sends: the seconds of each stage's message to the next one and of the message back, and a last entry of 0 for no message.
        after_s: the seconds that follow on each rank.
        most: the number of chains.
    """
    return _chains(actions, sends, *_ends(actions, durations, sends), after_s, most)


def _chains(
    actions: Compiled, sends: Sequence[float], ends: Sequence[float], free: Sequence[float], after_s: Sequence[float],
    most: int,
) -> list[Chain]:  # fmt: skip
    """Return the result of :func:`chains_of`; ``ends`` and ``free`` are those of :func:`_ends`."""
    pp, num_stages, chains = len(after_s), len(sends) // 2, list[Chain]()
    paths: list[list[int]] = []
    messages: list[list[int]] = []  # for each action the message that it waited for; -1: none
    # The path that an action is on, and its position there: two paths that meet are the same from there on.
    on_path: dict[int, tuple[int, int]] = {}
    for rank in sorted(range(pp), key=lambda r: -free[r] - after_s[r])[:most]:
        path, sent, i = list[int](), list[int](), actions.last[rank]
        while i >= 0 and i not in on_path:
            on_path[i] = len(paths), len(path)
            path.append(i)
            before, need, message = actions.before[i], actions.need[i], actions.message[i]
            is_sent = need >= 0 and ends[need] + sends[message] > (ends[before] if before >= 0 else 0.0)
            sent.append(message if is_sent else -1)
            i = need if is_sent else before
        if i >= 0:
            path_index, place = on_path[i]
            path += paths[path_index][place:]
            sent += messages[path_index][place:]
        paths.append(path)
        messages.append(sent)
        count = np.bincount(actions.columns[2][path], minlength=3 * num_stages).reshape(-1, 3)
        chains.append(
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
    return chains


@lru_cache(maxsize=64)
def rank_chains(name: str, pp: int, virtual_stages: int, num_micro_batches: int) -> tuple[tuple[int, ...], ...]:
    """Return two chains through each rank, up to the last action of the first rank, as :class:`Chain.actions` numbers them.

    One chain has all of the rank's actions, behind the forwards that its first action needs and before the backwards that need its last
    one. The other leaves the rank at its first backward and follows what that needs: backwards and forwards on all later stages.
    """
    actions = compiled(name, pp, virtual_stages, num_micro_batches)
    chains: list[tuple[int, ...]] = []
    after: list[int] = []
    i = actions.last[0]
    for rank in range(pp):
        while actions.rank[i] != rank:
            after.append(i)
            i = actions.need[i]
        through = [*_back(actions.before, i)]
        backward = max(place for place, action in enumerate(through) if actions.duration[action] % 3 == 1)
        variants = (through, through[: backward + 1])
        chains += [(*after, *variant, *_back(actions.need, actions.need[variant[-1]])) for variant in variants]
    return tuple(chains)


def _back(links: Sequence[int], action: int) -> Iterator[int]:
    """Yield an action and those before it along these links; -1 ends them."""
    while action >= 0:
        yield action
        action = links[action]
