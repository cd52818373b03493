"""Exchange of recompute within a rank of several stages: one block recomputes less and another one more, while the step gets shorter.

How long a step takes depends on which of the stages of a rank recompute: some stages run while the pipeline fills or drains, and some wait
for other ranks anyway. :mod:`autopar.planner.stages.refinement` counts the time of each rank by itself; here the simulation decides.

The stages stay the same, so that choices differ in their backwards alone. As with moves of blocks, chains that were the longest of one
choice give a lower bound for other choices. Of all changes on one rank that its memory allows (one block recomputes less, or more, or both)
the one of least bound is simulated, and is taken if the step is shorter: a local search by 1-exchanges (Aarts and Lenstra 1997).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.planner.stages.cut_problem import CutProblem, Fitting, Modes
from autopar.planner.stages.recompute import OFFLOADED, BlockOption, Mode
from autopar.planner.stages.refinement import LEAST_GAIN, excess_bytes

Array = NDArray[np.float64]

TRIES = 10
"""The most changes that are tried in succession without a shorter step, including those that turn out not to fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """A change of the mode of one block.

    Attributes:
        stage: the stage of the block; -1 for no change.
        block: the index of the block.
        mode: its mode after the change.
        time_s: seconds of a micro-batch that the change adds.
        held_bytes: bytes of a micro-batch that the change adds.
    """

    stage: int
    block: int
    mode: Mode
    time_s: float
    held_bytes: float


_NO_CHANGE = _Change(stage=-1, block=-1, mode="none", time_s=0.0, held_bytes=0.0)


def exchanged(problem: CutProblem, fitting: Fitting, time_s: float) -> Fitting:
    """Return a cut with the same stages whose modes no tried change improves; it is never slower than the given one, and it fits.

    Cuts with one stage a rank, or whose blocks may keep on the host what they need, are returned unchanged.

    Args:
        problem: the problem.
        fitting: a cut that fits.
        time_s: seconds of its step.
    """
    if not problem.may_exchange(fitting):
        return fitting
    chains = _Chains(problem, fitting)
    best, seen, tries = fitting, {fitting.modes}, 0
    while True:
        for modes in _changes(problem, best, chains, time_s * (1 - LEAST_GAIN)):
            if modes in seen:
                continue
            if tries == TRIES:
                return best
            seen.add(modes)
            tries += 1
            changed = problem.fitting(best.stops, modes)
            if not problem.fits(changed):
                continue
            changed_s = chains.add(changed)
            if changed_s < time_s * (1 - LEAST_GAIN):
                best, time_s, tries = changed, changed_s, 0
            break
        else:
            return best


class _Chains:
    """The longest chains of the choices of modes that have been simulated, all with the same stages.

    Attributes:
        fixed_s: seconds of each chain without its backwards, each counted as the whole time of a micro-batch on its stage.
        backwards: for each chain the number of backwards on each stage.
    """

    def __init__(self, problem: CutProblem, fitting: Fitting) -> None:
        self.problem = problem
        self.fixed_s: list[float] = []
        self.backwards: list[tuple[int, ...]] = []
        self.add(fitting)

    def add(self, fitting: Fitting) -> float:
        """Return the seconds of the step of a choice, and add its longest chains."""
        blocks_s = self.blocks_s(fitting)
        known_counts = {*self.backwards}
        step_s, longest = self.problem.model.longest_chains(fitting.stages, self.problem.step)
        for chain in longest:
            counts = tuple(chain.backwards.tolist())
            if counts not in known_counts:
                self.backwards.append(counts)
                self.fixed_s.append(chain.time_s - float(chain.backwards @ blocks_s))
        return step_s

    def blocks_s(self, fitting: Fitting) -> Array:
        """Return the seconds of a micro-batch on each stage as cuts count them.

        Blocks in modes that no cut gives them are left out, as they do not change.
        """
        seconds = []
        for rank, start, stop in self.problem.spans(fitting.stops):
            options, indices = self.problem.block_options[rank], range(start, stop)
            seconds.append(sum(options.time_of.get((options.blocks[i].key, fitting.modes[i]), 0.0) for i in indices))
        return np.array(seconds)


def _changes(problem: CutProblem, fitting: Fitting, chains: _Chains, goal_s: float) -> Iterator[Modes]:
    """Yield the modes after the changes on one rank that its memory allows, by increasing bound; only bounds below ``goal_s`` count."""
    backwards = np.array(chains.backwards, dtype=float)
    base_s = np.array(chains.fixed_s) + backwards @ chains.blocks_s(fitting)
    excess = excess_bytes(problem, fitting)
    bounded_pairs: list[tuple[float, _Change, _Change]] = []
    for rank in range(problem.pp):
        changes = [_NO_CHANGE, *_changes_on_rank(problem, fitting, rank)]
        peaks = problem.peaks(rank)
        added_s = backwards[:, [c.stage for c in changes]] * np.array([c.time_s for c in changes])
        added_bytes = peaks[:, [c.stage // problem.pp for c in changes]] * np.array([c.held_bytes for c in changes])
        bounds_s = (base_s[:, None, None] + added_s[:, :, None] + added_s[:, None, :]).max(axis=0)
        fits = (added_bytes[:, :, None] + added_bytes[:, None, :] + excess[rank][:, None, None] <= 0).all(axis=0)
        for i, j in zip(*np.nonzero(np.triu(fits & (bounds_s < goal_s), 1)), strict=True):
            if changes[i].block != changes[j].block:
                bounded_pairs.append((float(bounds_s[i, j]), changes[i], changes[j]))
    for _, *pair in sorted(bounded_pairs, key=lambda entry: entry[0]):
        modes = [*fitting.modes]
        for change in pair:
            if change.stage >= 0:
                modes[change.block] = change.mode
        yield tuple(modes)


def _changes_on_rank(problem: CutProblem, fitting: Fitting, rank: int) -> list[_Change]:
    """Return the changes to each other mode of one block of each kind and mode, on each stage of a rank."""
    blocks, changes = problem.block_options[rank].blocks, []
    for turn, (_, start, stop) in enumerate(problem.spans(fitting.stops)[rank :: problem.pp]):
        first_block = {(blocks[i].key, fitting.modes[i]): i for i in reversed(range(start, stop))}
        for (_, mode), i in first_block.items():
            options: dict[Mode, BlockOption] = {o.mode: o for o in blocks[i].options if o.mode != OFFLOADED}
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
