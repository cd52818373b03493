"""Time of a pipelined step: an event simulation of the actions that the runtime carries out.

Sends do not occupy the sender; a receiver waits for them. The schedule's dependencies are worked out once for each
(schedule, ranks, virtual stages, micro-batches); a simulation is then one pass over the actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from autopar.schedule import schedule_actions


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds that one stage takes for one micro-batch.

    Attributes:
        forward_s, backward_s: with everything that the stage waits for by itself (its collectives, recompute).
        send_forward_s: until the next stage has this stage's outputs; 0 for the last stage.
        send_backward_s: until the stage before has this stage's input gradients; 0 for the first stage.
        first_forward_s: what the step's first forward takes longer.
        waits_s: of ``forward_s`` and of ``backward_s`` each, what messages hold up the rank.
    """

    forward_s: float
    backward_s: float
    send_forward_s: float = 0.0
    send_backward_s: float = 0.0
    first_forward_s: float = 0.0
    waits_s: float = 0.0


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

    @property
    def time_s(self) -> float:
        """When the last rank has finished."""
        return max(self.finish_s)

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """Idle time of each rank until the last has finished, waiting for messages aside."""
        parts = zip(self.busy_s, self.exposed_send_s, strict=True)
        return tuple(max(self.time_s - busy - send, 0.0) for busy, send in parts)


@dataclass(frozen=True, slots=True)
class _Compiled:
    """Actions of all ranks in an order in which each stands behind what it needs.

    Attributes:
        rank: of each action.
        need: position of the action on which it depends; -1 for none.
        duration: index into (forward, backward, first forward of stage 0, of stage 1, ...).
        message: index into (send forward 0, send backward 0, ...) for the message it waits for, -1 for none.
    """

    rank: tuple[int, ...]
    need: tuple[int, ...]
    duration: tuple[int, ...]
    message: tuple[int, ...]


@lru_cache(maxsize=64)
def _compile(name: str, pp: int, virtual_stages: int, num_micro_batches: int) -> _Compiled:
    actions = schedule_actions(name, pp, virtual_stages, num_micro_batches)
    stages, m = pp * virtual_stages, num_micro_batches
    # an action as a number: those of a stage side by side, first its forwards, then its backwards
    numbers = [[(2 * a.stage + (a.kind == "B")) * m + a.micro_batch for a in own] for own in actions]
    place = [-1] * (2 * stages * m)
    next_of = [0] * pp
    rows: list[tuple[int, int, int, int]] = []
    waiting: dict[int, int] = {}
    ready = list(range(pp))
    while ready:
        rank = ready.pop()
        own = numbers[rank]
        while next_of[rank] < len(own):
            number = own[next_of[rank]]
            stage, rest = divmod(number, 2 * m)
            is_backward = rest >= m
            need = _needed(number, stage, is_backward, stages, m)
            before = place[need] if need >= 0 else -1
            if need >= 0 and before < 0:
                waiting[need] = rank
                break
            place[number] = len(rows)
            made = need // (2 * m)  # the stage before, or the one after
            message = -1 if need < 0 or made % pp == stage % pp else 2 * made + is_backward
            rows.append((rank, before, 3 * stage + (is_backward if rest else 2), message))
            next_of[rank] += 1
            if number in waiting:
                ready.append(waiting.pop(number))
    rank_column, need_column, duration, message_column = zip(*rows, strict=True)
    return _Compiled(rank_column, need_column, duration, message_column)


def _needed(number: int, stage: int, is_backward: bool, stages: int, num_micro_batches: int) -> int:
    """What :func:`autopar.schedule.dependencies` says, in the numbers of :func:`_compile`; -1 for nothing."""
    if is_backward:
        return number - num_micro_batches if stage == stages - 1 else number + 2 * num_micro_batches
    return number - 2 * num_micro_batches if stage else -1


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
    compiled = _compile(name, pp, len(stages) // pp, num_micro_batches)
    durations = [
        time
        for stage in stages
        for time in (stage.forward_s, stage.backward_s, stage.forward_s + stage.first_forward_s)
    ]
    # one more for the message -1 that nobody sends
    sends = [*(time for stage in stages for time in (stage.send_forward_s, stage.send_backward_s)), 0.0]
    ends: list[float] = []
    free, busy_s, exposed = [0.0] * pp, [0.0] * pp, [0.0] * pp
    for rank, need, duration, message in zip(
        compiled.rank, compiled.need, compiled.duration, compiled.message, strict=True
    ):
        start = free[rank]
        if need >= 0:
            sent = ends[need]
            arrives = sent + sends[message]
            if arrives > start:
                exposed[rank] += arrives - (sent if sent > start else start)
                start = arrives
        end = start + durations[duration]
        busy_s[rank] += durations[duration]
        free[rank] = end
        ends.append(end)
    return PipelineTimes(finish_s=tuple(free), busy_s=tuple(busy_s), exposed_send_s=tuple(exposed))
