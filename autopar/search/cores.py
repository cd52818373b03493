"""Bounds of pipelines whose ranks share cores, by those of stated times.

Times are stated as they are while all ranks work; where fewer do, each has more of the cores, up to one of its own
(:func:`autopar.cost.pipeline.shared_time_s`): no action takes less than a part s of its time, where s is the cores for each of p
pipeline ranks, or 1 / p if that is more. A prediction is f * (end of a rank) + what follows there once a step, where the rank is
the last one done by stated times, and f the time of the shared pipeline over the stated one: s <= f <= 1. The first rank's
last action is the last of all. Let r be the rank of the prediction, E the ends and A what follows. A step takes

1. no less than the shared pipeline and what follows on the first rank: f * E[r] + A[r] = (E[r] + A[r]) - (1 - f) * E[r] >= (E[0] +
   A[0]) - (1 - f) * E[0], as no sum is larger than that of r, and no end than that of the first rank;
2. no less than s * b + (1 - s) * A[0], with b a bound of stated times: E[r] + A[r] is no less than b, and (1 - f) * E[r] no more
   than (1 / s - 1) times the shared pipeline, of which 1 says how much shorter than the step it is.

To both is added what each rank does once a step whatever its blocks.

The shared pipeline takes no less than

- the work of all ranks over p: together they are never faster than where all work;
- s times any chain of actions, and the messages in it, which are under way for as long as ever. One goes through all stages
  before some stage, through all micro-batches there, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.cost.model import CostModel, Step
from autopar.mesh import Mesh
from autopar.search.bound_rows import Row
from autopar.search.candidates import Candidate
from autopar.search.mixed_rows import MixedRow
from autopar.search.options import Option


class SharedCores:
    """Bounds of steps on one cluster from bounds of stated times; the same ones where no rank shares a core.

    Args:
        model: the cost model.
        step_of: how a candidate runs in a layout.
        whole_of: the layout of its micro-batch with neither ``cp`` nor ``tp``.
    """

    def __init__(
        self,
        model: CostModel,
        step_of: Callable[[Candidate, Option], Step],
        whole_of: Callable[[Candidate], Option],
    ) -> None:
        self.model, self.step_of, self.whole_of = model, step_of, whole_of
        self._always: dict[tuple[Mesh, tuple[int, ...]], float] = {}
        self._host: dict[
            tuple[int, int, int], tuple[Option, float]
        ] = {}  # the layout is kept, so that its id stays its own

    def speed(self, candidate: Candidate) -> float:
        """The least part of their stated times that a pipeline's ranks take."""
        return least_part(self.model.device.core_share, candidate.mesh.pp)

    def least_speed(self, candidates: Sequence[Candidate]) -> float:
        """Of some candidates."""
        if self.model.device.core_share == 1.0:
            return 1.0
        return min(map(self.speed, candidates), default=1.0)

    def work_s(self, candidate: Candidate, stated_s: float, work_s: float) -> float:
        """A bound of a step.

        Args:
            stated_s: a bound of stated times.
            work_s: seconds of one micro-batch through all stages at the least.
        """
        speed = self.speed(candidate)
        if speed == 1.0:
            return stated_s
        return max(speed * stated_s, candidate.num_micro_batches * work_s / candidate.mesh.pp)

    def row_s(self, candidate: Candidate, stated_s: float, row: Row | MixedRow, option: Option | None = None) -> float:
        """A bound of a step.

        Args:
            stated_s: that of the row in stated times.
            row: of the candidate.
            option: the layout that the row is of; None where it is below those of several.
        """
        speed = self.speed(candidate)
        if speed == 1.0:
            return stated_s
        if isinstance(row, MixedRow):
            return speed * stated_s
        more_s = self._host_s(candidate, option)
        return at_speed_s(row, stated_s, speed=speed, host_s=more_s) + self._always_s(candidate, option)

    def rows_s(
        self,
        candidates: Sequence[Candidate],
        stated_s: Sequence[float],
        rows: Sequence[Row | MixedRow],
        options: Sequence[Option] | None = None,
    ) -> list[float]:
        """:meth:`row_s` of several rows."""
        if self.model.device.core_share == 1.0:
            return [*stated_s]
        layouts: Sequence[Option | None] = options or [None] * len(rows)
        return [self.row_s(*own) for own in zip(candidates, stated_s, rows, layouts, strict=True)]

    def _always_s(self, candidate: Candidate, option: Option | None) -> float:
        """What each rank does once a step whatever its blocks."""
        layout = option or self.whole_of(candidate)
        # counts of a layout that is not known may be smaller
        is_known = option is not None or candidate.mesh.cp * candidate.mesh.tp == 1
        key = candidate.mesh, layout.totals if is_known else ()
        if key not in self._always:
            self._always[key] = self.model.scalars_s(replace(self.step_of(candidate, layout), totals=key[1]))
        return self._always[key]

    def _host_s(self, candidate: Candidate, option: Option | None) -> float:
        """What actions and messages take of the cores for one micro-batch on all stages.

        Between any two stages there are as many tensors as between the blocks with the fewest, whatever the layout; both stages handle each.
        """
        option = option or self.whole_of(candidate)
        key = id(option), candidate.mesh.pp, candidate.virtual_stages
        if key not in self._host:
            action_s, message_s = self.model.device.overheads.of_actions(candidate.virtual_stages)
            stages, inner = candidate.mesh.pp * candidate.virtual_stages, option.costs[:-1]
            tensors = min((len(cost.sends) for cost in inner), default=0)
            gradients = min((len(cost.send_gradients) for cost in inner), default=0)
            passed = (stages - 1) * (tensors + gradients)
            self._host[key] = option, 2 * stages * action_s + 2 * passed * message_s
        return self._host[key][1]


def least_part(core_share: float, pp: int) -> float:
    """The least part of its stated time that an action takes, while no other rank of the pipeline works.

    Args:
        core_share: cores for each rank; 1 where none shares any.
        pp: pipeline ranks.
    """
    return max(core_share, 1 / pp) if pp > 1 else 1.0


def at_speed_s(row: Row, stated_s: float, *, speed: float, host_s: float) -> float:
    """A bound of the step of a pipeline whose ranks share cores.

    Args:
        row: in stated times.
        stated_s: its bound in them.
        speed: :func:`least_part`, below 1.
        host_s: what the row does not count of the work of all stages for one micro-batch, at the least.
    """
    stages, m = row.pp * row.virtual_stages, row.num_micro_batches
    total_s = row.total_s + stages * row.every_s + host_s
    work_s = (m * total_s + row.gathers_s + row.stage_gathers_s[-1]) / row.pp
    pipeline_s = max(work_s, chain_s(speed * total_s, row.send_s + row.send_back_s, stages, m))
    return max(speed * stated_s + (1 - speed) * row.least_once_s, pipeline_s + row.least_once_s)


def chain_s(total_s: float, messages_s: float, stages: int, num_micro_batches: int) -> float:
    """The least of the longest chain that has all micro-batches on one stage, and one on those before it, there and back.

    Stages r = 0, 1, ... that each fill such a chain of T seconds hold S[r] seconds of a micro-batch together, S[r] = S[r - 1] + (T -
    S[r - 1] - r * messages) / m: the total that T allows is a straight line in T.

    Args:
        total_s: of one micro-batch on all stages.
        messages_s: of a message to the next stage and of one back.
    """
    rest, m = 1 - 1 / num_micro_batches, num_micro_batches
    late_s = sum(rest ** (stages - 1 - r) * r * messages_s / m for r in range(stages))
    return (total_s + late_s) / (1 - rest**stages)
