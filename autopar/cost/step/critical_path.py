"""The longest chains of actions of a simulated step: what its time is made of, as numbers of actions of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost.step.simulation import Compiled, StageTimes, compiled, durations_of, sends_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Actions that follow each other up to the end of a rank: with any stage times the rank ends no sooner than they take.

    Attributes:
        rank: at whose end it ends.
        time_s: what they take with the messages between them, and what follows on the rank.
        sends_s: of the messages.
        forwards, backwards, firsts: actions of each stage; the first forward of a step is among both ``forwards`` and ``firsts``.
        sends, sends_back: messages of each stage to the next one and to the one before.
        actions: as :class:`autopar.cost.step.simulation.Compiled` numbers them, the last one first.
    """

    rank: int
    time_s: float
    sends_s: float
    forwards: NDArray[np.int64]
    backwards: NDArray[np.int64]
    firsts: NDArray[np.int64]
    sends: NDArray[np.int64]
    sends_back: NDArray[np.int64]
    actions: tuple[int, ...] = ()


def longest_chains(
    name: str, pp: int, num_micro_batches: int, stages: Sequence[StageTimes], after_s: Sequence[float], most: int
) -> list[Chain]:
    """The longest chain up to the end of each rank, of the ``most`` ranks that end last; the longest of all first.

    Args:
        name, pp, num_micro_batches, stages: as :func:`autopar.cost.step.simulation.simulate` takes them.
        after_s: what follows on each rank.
    """
    actions = compiled(name, pp, len(stages) // pp, num_micro_batches)
    return chains_of(actions, durations_of(stages), sends_of(stages), after_s, most)


def chains_of(
    actions: Compiled, durations: Sequence[float], sends: Sequence[float], after_s: Sequence[float], most: int
) -> list[Chain]:
    """As :func:`longest_chains`, of times as :class:`autopar.cost.step.simulation.Compiled` numbers them.

    Args:
        durations: of each stage's forward, backward and first forward.
        sends: of each stage's message to the next one and of that back; one more, of no seconds, for the message -1.
    """
    pp, num_stages = len(after_s), len(sends) // 2
    ends = [0.0] * (len(actions.rank) + 1)  # the last one is what actions need that need none (-1)
    free = [0.0] * pp
    columns = zip(actions.rank, actions.need, actions.duration, actions.message, strict=True)
    for i, (rank, need, duration, message) in enumerate(columns):
        end, arrives = free[rank], ends[need] + sends[message]
        if arrives > end and need >= 0:
            end = arrives
        ends[i] = free[rank] = end + durations[duration]
    found = []
    for rank in sorted(range(pp), key=lambda r: -free[r] - after_s[r])[:most]:
        own, path, sent_on, i = [], [], [], actions.last[rank]
        while i >= 0:
            own.append(actions.duration[i])
            path.append(i)
            before, need, message = actions.before[i], actions.need[i], actions.message[i]
            if need >= 0 and ends[need] + sends[message] > (ends[before] if before >= 0 else 0.0):
                sent_on.append(message)
                i = need
            else:
                i = before
        count = np.bincount(own, minlength=3 * num_stages).reshape(-1, 3)
        messages = [message for message in sent_on if message >= 0]
        sent_count = np.bincount(messages, minlength=2 * num_stages).reshape(-1, 2)
        found.append(
            Chain(
                rank=rank,
                time_s=free[rank] + after_s[rank],
                sends_s=sum(sends[message] for message in messages),
                forwards=count[:, 0] + count[:, 2],
                backwards=count[:, 1],
                firsts=count[:, 2],
                sends=sent_count[:, 0],
                sends_back=sent_count[:, 1],
                actions=tuple(path),
            )
        )
    return found
