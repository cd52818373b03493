"""Plans of several objectives in a pool that is too large for a search for each limit of memory: NSGA-II over its candidates.

A candidate is asked for by its choices, as in any search with a sampler, and has two values: the time of its fastest plan and the
memory that this one takes. No bound excludes a candidate for being slow, as it may take less memory; those that fit in no
layout are never asked. (Deb et al. 2002 for the method.)
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from autopar.planner.branch_and_bound.sampler import POPULATION, Sampler
from autopar.planner.evaluate.evaluator import Evaluation
from autopar.planner.evaluate.families import Evaluator
from autopar.planner.outcome import peak_bytes
from autopar.planner.space.candidates import Candidate


def several(
    evaluator: Evaluator,
    pool: tuple[Candidate, ...],
    seeds: Mapping[int, str],
    *,
    trials: int,
    seed: int,
    below_s: float,
) -> list[Evaluation]:
    """Of so many candidates those that no other one equals or beats in both, the fastest first; of equals the first of the pool.

    Args:
        seeds: what is asked first, with reasons.
        seed: of the sampler.
        below_s: slower plans do not count.
    """
    sampler = Sampler("nsga2", pool, seed=seed, objectives=2)
    for index, why in seeds.items():
        sampler.enqueue(index, why)
    bounds = np.array(evaluator.bounds_s(0, pool))
    found: dict[int, Evaluation] = {}
    left = trials
    while left:
        asked: list[int] = []
        while len(asked) < min(POPULATION, left) and (named := sampler.ask(bounds, below_s)) is not None:
            asked.append(named)
        for index in asked:
            made = evaluator.evaluate(pool[index], at_most_s=below_s)
            values = None
            if isinstance(made, Evaluation) and made.prediction.step_time_s < below_s:
                found[index] = made
                values = [made.prediction.step_time_s, float(peak_bytes(made.prediction))]
            sampler.tell(index, values, np.inf)
        left = left - len(asked) if asked else 0
    order = sorted(found, key=lambda i: (found[i].prediction.step_time_s, peak_bytes(found[i].prediction), i))
    kept: list[Evaluation] = []
    for index in order:
        if not kept or peak_bytes(found[index].prediction) < peak_bytes(kept[-1].prediction):
            kept.append(found[index])
    return kept
