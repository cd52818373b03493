"""Which blocks of a rank with several stages recompute, made better: one recomputes less and another one more, as long as the step gets shorter.

How long a step takes depends on which of a rank's stages recompute: some of them stand in the fill or in the drain of the pipeline, some wait
for other ranks anyway. The choice of :mod:`autopar.planner.stages.refinement` counts what each rank takes by itself; here the simulation decides.

As where blocks move, chains of actions that were the longest of some choice say how long other choices take at least: the stages are the
same, so that only backwards differ. Of all changes of one rank that its memory allows (one block recomputes less, or more, or both) that
of the shortest longest chain is simulated, and taken where the step is shorter: a local search by 1-exchanges (Aarts and Lenstra 1997).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.planner.stages.cut_problem import CutProblem, Fitting, Modes
from autopar.planner.stages.recompute import MOVED, BlockOption, Mode
from autopar.planner.stages.refinement import LEAST_GAIN, needs_of

Array = NDArray[np.float64]

TRIES = 10
"""Changes that are tried one after the other without a shorter step, at most, those that turn out not to fit counted in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """Of the mode of one block; none at all where ``stage`` is -1."""

    stage: int
    block: int
    mode: Mode
    time_s: float
    held_bytes: float


_NONE = _Change(stage=-1, block=-1, mode="none", time_s=0.0, held_bytes=0.0)


def exchanged(problem: CutProblem, found: Fitting, time_s: float) -> Fitting:
    """Stages as they are, from whose modes no change that was tried shortens the step; never a slower choice, nor one that does not fit.

    Cuts whose ranks hold one stage, or whose blocks may keep on the host what they need, are left as they are.

    Args:
        found: a cut that fits.
        time_s: of its step.
    """
    if problem.candidate.virtual_stages == 1 or problem.candidate.moves or not {"selective", "full"} & {*found.modes}:
        return found
    chains = _Chains(problem, found)
    best, seen, tries = found, {found.modes}, 0
    while True:
        for modes in _changes(problem, best, chains, time_s * (1 - LEAST_GAIN)):
            if modes in seen:
                continue
            if tries == TRIES:
                return best
            seen.add(modes)
            tries += 1
            other = problem.fitting(best.stops, modes)
            if not problem.fits(other):
                continue
            other_s = chains.add(other)
            if other_s < time_s * (1 - LEAST_GAIN):
                best, time_s, tries = other, other_s, 0
            break
        else:
            return best


class _Chains:
    """The longest chains of some choices of modes of the same stages.

    Attributes:
        others_s: of each chain, without what the blocks of its backwards take, forwards of these counted in.
        backwards: of each stage, for each chain.
    """

    def __init__(self, problem: CutProblem, found: Fitting) -> None:
        self.problem = problem
        self.others_s: list[float] = []
        self.backwards: list[tuple[int, ...]] = []
        self.add(found)

    def add(self, found: Fitting) -> float:
        """What the step takes whose longest chains are added."""
        blocks_s = self.blocks_s(found)
        known = {*self.backwards}
        step_s, longest = self.problem.model.longest_chains(found.made, self.problem.step)
        for chain in longest:
            counts = tuple(chain.backwards.tolist())
            if counts not in known:
                self.backwards.append(counts)
                self.others_s.append(chain.time_s - float(chain.backwards @ blocks_s))
        return step_s

    def blocks_s(self, found: Fitting) -> Array:
        """What a micro-batch takes on each stage, as cuts count it, but for blocks in modes that no cut gives them: these stay."""
        seconds = []
        for rank, start, stop in self.problem.spans(found.stops):
            options, own = self.problem.block_options[rank], range(start, stop)
            seconds.append(sum(options.time_of.get((options.blocks[i].key, found.modes[i]), 0.0) for i in own))
        return np.array(seconds)


def _changes(problem: CutProblem, found: Fitting, chains: _Chains, goal_s: float) -> Iterator[Modes]:
    """Modes after a change of one rank that its memory allows, by the longest chain that they leave; those of less than ``goal_s``."""
    backwards = np.array(chains.backwards, dtype=float)
    base_s = np.array(chains.others_s) + backwards @ chains.blocks_s(found)
    needs = needs_of(problem, found)
    every: list[tuple[float, _Change, _Change]] = []
    for rank in range(problem.pp):
        changes = [_NONE, *_changes_of(problem, found, rank)]
        peaks = problem.peaks(rank)
        more_s = backwards[:, [c.stage for c in changes]] * np.array([c.time_s for c in changes])
        more_bytes = peaks[:, [c.stage // problem.pp for c in changes]] * np.array([c.held_bytes for c in changes])
        ends_s = (base_s[:, None, None] + more_s[:, :, None] + more_s[:, None, :]).max(axis=0)
        fits = (more_bytes[:, :, None] + more_bytes[:, None, :] + needs[rank][:, None, None] <= 0).all(axis=0)
        for i, j in zip(*np.nonzero(np.triu(fits & (ends_s < goal_s), 1)), strict=True):
            if changes[i].block != changes[j].block:
                every.append((float(ends_s[i, j]), changes[i], changes[j]))
    for _, *pair in sorted(every, key=lambda one: one[0]):
        modes = [*found.modes]
        for change in pair:
            if change.stage >= 0:
                modes[change.block] = change.mode
        yield tuple(modes)


def _changes_of(problem: CutProblem, found: Fitting, rank: int) -> list[_Change]:
    """Of one block of each kind in each mode on each stage of a rank, to each other mode."""
    blocks, changes = problem.block_options[rank].blocks, []
    for turn, (_, start, stop) in enumerate(problem.spans(found.stops)[rank :: problem.pp]):
        first = {(blocks[i].key, found.modes[i]): i for i in reversed(range(start, stop))}
        for (_, mode), i in first.items():
            options: dict[Mode, BlockOption] = {o.mode: o for o in blocks[i].options if o.mode != MOVED}
            if mode not in options:
                continue
            changes += [
                _Change(
                    stage=rank + turn * problem.pp,
                    block=i,
                    mode=other.mode,
                    time_s=other.time_s - options[mode].time_s,
                    held_bytes=other.held_bytes - options[mode].held_bytes,
                )
                for other in options.values()
                if other.mode != mode
            ]
    return changes
