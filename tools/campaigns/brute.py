"""The search against every plan of small problems: ``python -m tools.campaigns.brute`` writes ``docs/evidence/brute.md``.

Each drawn problem (:mod:`tools.campaigns.small`) is priced whole (:mod:`tools.campaigns.product`), then searched under limits on
memory that lie between what the leanest plan needs and what the fastest one takes, so that they bind, and once below the leanest.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autopar.api import PRECISIONS, search
from autopar.cost.model import CostModel
from autopar.errors import InfeasibleError
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import BUCKET_BYTES, Plan
from autopar.planner.search import Task
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space
from tools.campaigns.product import Product, Small, every_plan
from tools.campaigns.small import draw

ROUNDING = 1e-9
"""Of a step time, up to which two are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One problem: a drawn one under one limit on memory. Times in seconds; None where nothing fits.

    Attributes:
        plans: how many plans the drawn problem has.
        layouts: the most of one micro-batch and degree of ``tp``.
        binds: the fastest plan without a limit does not fit.
        best_s: of all plans.
        found_s, bound_s: of the search of space ``exhaustive``, and its certificate.
        usual_s, usual_bound_s: of the search of space ``default``.
        best, found: the plans in words.
    """

    seed: int
    model: str
    cluster: str
    precision: str
    memory_bytes: int
    plans: int
    layouts: int
    binds: bool
    best_s: float | None
    found_s: float | None
    bound_s: float | None
    usual_s: float | None
    usual_bound_s: float | None
    best: str
    found: str

    @property
    def gap(self) -> float:
        """Of the search's plan over the best of all; infinite where one of the two has a plan and the other none."""
        return _gap(self.found_s, self.best_s)

    @property
    def usual_gap(self) -> float:
        """The same of space ``default``."""
        return _gap(self.usual_s, self.best_s)

    @property
    def is_certified(self) -> bool:
        """Whether no plan is quicker than the certificate of ``exhaustive``."""
        return self.bound_s is None or self.best_s is None or self.bound_s <= self.best_s * (1 + ROUNDING)

    @property
    def is_usually_certified(self) -> bool:
        """The same of space ``default``."""
        return self.usual_bound_s is None or self.best_s is None or self.usual_bound_s <= self.best_s * (1 + ROUNDING)


def _gap(found_s: float | None, best_s: float | None) -> float:
    if found_s is None or best_s is None:
        return 0.0 if found_s is best_s else math.inf
    return found_s / best_s - 1.0


def problems(seeds: Iterable[int], *, limits: int = 3, usual: bool = True) -> Iterator[Result]:
    """All problems of these seeds: each under ``limits`` limits, the last of every fourth seed below what any plan needs."""
    for seed in seeds:
        yield from limited(seed, draw(seed), limits=limits, usual=usual)


def limited(seed: int, small: Small, *, limits: int = 3, usual: bool = True) -> Iterator[Result]:
    """A problem under different limits."""
    whole, rng = every_plan(small), random.Random(seed)
    peaks = _peaks(whole, rng, limits)
    if seed % 4 == 0:
        peaks[-1] = whole.least_bytes - 1
    for peak in peaks:
        yield compare(seed, small, whole, peak, usual=usual)


def _peaks(whole: Product, rng: random.Random, count: int) -> list[int]:
    """Different peaks of plans between the leanest of all and the fastest of all; the latter's where there is nothing else."""
    peaks = sorted({point.peak_bytes for front in whole.fronts.values() for point in front})
    fastest = whole.best(math.inf)
    assert fastest is not None
    below = [peak for peak in peaks if peak < fastest[1].peak_bytes]
    return rng.sample(below, min(count, len(below))) or [fastest[1].peak_bytes]


def compare(seed: int, small: Small, whole: Product, peak_bytes: int, *, usual: bool = True) -> Result:
    """The search of a problem beside its product, where a plan of this peak is the largest that fits."""
    model = CostModel(Cluster.parse(small.cluster), PRECISIONS[small.precision], small.optimizer)
    memory_bytes = math.ceil(peak_bytes * model.memory_spread)
    limited = CostModel(Cluster.parse(small.on(memory_bytes)), PRECISIONS[small.precision], small.optimizer)
    assert limited.fitting_bytes in (peak_bytes, peak_bytes + 1)
    best, free = whole.best(limited.fitting_bytes), whole.best(math.inf)
    plan = _search(small, memory_bytes, "exhaustive")
    other = _search(small, memory_bytes, "default") if usual else None
    return Result(
        seed=seed,
        model=small.graph.name,
        cluster=small.on(memory_bytes),
        precision=small.precision,
        memory_bytes=memory_bytes,
        plans=whole.plans,
        layouts=whole.layouts,
        binds=best is None or free is None or best[1].time_s > free[1].time_s,
        best_s=best[1].time_s if best else None,
        found_s=plan.predicted.step_time_s if plan else None,
        bound_s=plan.search.lower_bound_s if plan else None,
        usual_s=other.predicted.step_time_s if other else None,
        usual_bound_s=other.search.lower_bound_s if other else None,
        best=f"{best[0].mesh}, zero={best[0].zero_stage}, micro_batch={best[0].micro_batch_size}, {best[0].schedule}, "
        f"v={best[0].virtual_stages}, {best[1].stops}, recompute {[way[0] for way in best[1].ways]}"
        f"{_more(best[0].offload, best[1].bucket_bytes)}"
        if best
        else "none",
        found=_words(plan) if plan else "none",
    )


LEFT_OUT = ("offload=none", f"bucket_bytes={BUCKET_BYTES}")
"""What ``tools.campaigns.product`` goes through in whole problems alone (``Small.is_whole``)."""


def _search(small: Small, memory_bytes: int, space: str) -> Plan | None:
    try:
        return search(
            small.graph,
            cluster=small.on(memory_bytes),
            global_batch_size=small.global_batch_size,
            precision=small.precision,
            optimizer=small.optimizer,
            space=space,
            pins=(*(() if small.is_whole else LEFT_OUT), *(() if small.splits else ("tp=1",))),
        )
    except InfeasibleError:
        return None


def task_of(small: Small, memory_bytes: int | None, pins: Sequence[str], space: Space) -> Task:
    """A problem as a search is asked it, where each device has so much memory; None: as much as its profile says."""
    return Task(
        graph=small.graph,
        cluster=Cluster.parse(small.on(memory_bytes)),
        global_batch_size=small.global_batch_size,
        precision=PRECISIONS[small.precision],
        optimizer=small.optimizer,
        pins=Pins.parse(pins),
        space=space,
    )


def _words(plan: Plan) -> str:
    again = ["m" if block.offload else block.recompute[0] for block in plan.blocks]
    return (
        f"{plan.mesh}, zero={plan.zero_stage}, micro_batch={plan.micro_batch_size}, {plan.schedule}, "
        f"v={plan.virtual_stages}, {tuple(stage.stop for stage in plan.stages)}, recompute {again}{_more(plan.offload, plan.bucket_bytes)}"
    )


def _more(offload: Sequence[str], bucket_bytes: int) -> str:
    """What is unlike the usual."""
    of_buckets = f", buckets of {bucket_bytes} B" if bucket_bytes != BUCKET_BYTES else ""
    return "".join(f", {one} on the host" for one in offload) + of_buckets


def main(arguments: list[str]) -> int:
    """Runs the campaign, chunk by chunk: what is done stands in ``--log``, so that it goes on where it was stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=80)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("out/brute.jsonl"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(arguments)
    options.log.parent.mkdir(parents=True, exist_ok=True)
    done = read(options.log) if options.log.exists() else []
    known = {result.seed for result in done}
    for seed in (s for s in range(options.first, options.first + options.seeds) if s not in known):
        start = time.process_time()
        made = list(problems([seed]))
        with options.log.open("a") as file:
            file.writelines(json.dumps(asdict(result)) + "\n" for result in made)
        done += made
        for r in made:
            print(f"seed {seed} {r.model} {r.cluster}: {r.plans} plans, gap {r.gap:.3g}, default {r.usual_gap:.3g}, "
                  f"certified {r.is_certified} {r.is_usually_certified}, {time.process_time() - start:.1f} s", flush=True)  # fmt: skip
            if r.gap > ROUNDING:
                print(f"   best  {r.best_s} {r.best}\n   found {r.found_s} {r.found}", flush=True)
    if options.page:
        from tools.campaigns.brute_page import page

        options.page.write_text(page(done))
    return int(any(r.gap > ROUNDING or not r.is_certified for r in done))


def read(log: Path) -> list[Result]:
    """What a log holds."""
    return [Result(**json.loads(line)) for line in log.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
