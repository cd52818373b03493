"""Bounds of pipelines whose ranks share cores, by those of stated times.

Times are stated as they are while all ranks work; where fewer do, each has more of the cores, up to one of its own
(:func:`autopar.cost.step.simulation.shared_ends_s`): nothing takes less than a part s of its time, where s is the cores for each of p
pipeline ranks, or 1 / p if that is more. A rank ends with what follows its actions once a step: with work as these are, or, on
several nodes, with a wait for sums of gradients and then work (:mod:`autopar.cost.step.shared_cores`). The step is the end of
the last rank. The first rank's last action is the last of all. A step takes

1. no less than a bound of stated times in which all but messages takes s of its time: such a bound is the length of a chain of
   actions, with the messages between them, up to the last action of a rank, and of what follows there. Nothing in it is done in
   less than s of its time, and each begins when the one before has ended;
2. no less than the work of all ranks over p: together they are never faster than where all work. What follows the actions is
   part of it, or, where ranks wait for sums, s of it comes behind the last action of the first rank;
3. no less than s times any chain of actions, the messages in it, and s times what follows on the first rank, behind all
   actions. One chain goes through all stages before some stage, through all micro-batches there, and back.

What each rank does once a step whatever its blocks is part of what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar.cost.model import CostModel, Step
from autopar.frozen import replaced
from autopar.mesh import Mesh
from autopar.planner.bounds.bound_rows import BlockPrice, Row
from autopar.planner.bounds.mixed_rows import MixedRow
from autopar.planner.layouts.types import Option
from autopar.planner.space.candidates import Candidate


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

    @property
    def are_shared(self) -> bool:
        """Whether a rank has less than a core of its own."""
        return self.model.device.core_share != 1.0

    def speed(self, candidate: Candidate) -> float:
        """The least part of their stated times that a pipeline's ranks take."""
        return least_part(self.model.device.core_share, candidate.mesh.pp)

    def least_speed(self, candidates: Sequence[Candidate]) -> float:
        """Of some candidates."""
        if not self.are_shared:
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

    def quickest(self, candidates: Sequence[Candidate], rows: Sequence[Row | MixedRow]) -> Sequence[Row | MixedRow]:
        """Rows with all but messages in the least part of its time; those of ranks that differ as they are."""
        if not self.are_shared:
            return rows
        pairs = zip(candidates, rows, strict=True)
        return [row if isinstance(row, MixedRow) else at_part(row, self.speed(c)) for c, row in pairs]

    def rows_s(
        self,
        candidates: Sequence[Candidate],
        found_s: Sequence[float],
        rows: Sequence[Row | MixedRow],
        options: Sequence[Option] | None = None,
    ) -> list[float]:
        """Bounds of steps.

        Args:
            found_s: of :meth:`quickest` of the rows.
            rows: of the candidates, in stated times.
            options: the layouts that the rows are of; None where they are below those of several.
        """
        if not self.are_shared:
            return [*found_s]
        layouts: Sequence[Option | None] = options or [None] * len(rows)
        return [self._row_s(*own) for own in zip(candidates, found_s, rows, layouts, strict=True)]

    def _row_s(self, candidate: Candidate, found_s: float, row: Row | MixedRow, option: Option | None) -> float:
        speed = self.speed(candidate)
        if speed == 1.0:
            return found_s
        if isinstance(row, MixedRow):
            return speed * found_s
        return at_speed_s(
            row,
            found_s,
            speed=speed,
            host_s=self._host_s(candidate, option),
            always_s=self._always_s(candidate, option),
            is_work=self.model.sums_are_work,
        )

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


def at_part(row: Row, part: float) -> Row:
    """A row of which all but messages takes so much of its time."""
    if part == 1.0:
        return row

    def price(own: BlockPrice) -> BlockPrice:
        return replaced(
            own,
            time_s=part * own.time_s,
            forward_s=part * own.forward_s,
            again_s=part * own.again_s,
            least_again_s=part * own.least_again_s,
            once_s=part * own.once_s,
            gather_s=part * own.gather_s,
            more_byte_s=part * own.more_byte_s,
            more_free_s=part * own.more_free_s,
            full_s=part * own.full_s,
            beside_s=part * own.beside_s,
        )

    def each(times: Sequence[float]) -> tuple[float, ...]:
        return tuple(part * time_s for time_s in times)

    return replaced(
        row,
        first=price(row.first),
        last=price(row.last),
        group=price(row.group),
        total_s=part * row.total_s,
        forward_s=part * row.forward_s,
        before_s=each(row.before_s),
        before_forward_s=each(row.before_forward_s),
        after_backward_s=each(row.after_backward_s),
        once_s=part * row.once_s,
        gathers_s=part * row.gathers_s,
        stage_gathers_s=each(row.stage_gathers_s),
        every_s=part * row.every_s,
    )


def at_speed_s(
    row: Row, found_s: float, *, speed: float, host_s: float, always_s: float = 0.0, is_work: bool = True
) -> float:
    """A bound of the step of a pipeline whose ranks share cores.

    Args:
        row: in stated times.
        found_s: the bound of :func:`at_part` of it at this speed.
        speed: :func:`least_part`, below 1.
        host_s: what the row does not count of the work of all stages for one micro-batch, at the least.
        always_s: what each rank does once a step whatever its blocks.
        is_work: whether all that follows the actions is work.
    """
    stages, m = row.pp * row.virtual_stages, row.num_micro_batches
    total_s = row.total_s + stages * row.every_s + host_s
    work_s = m * total_s + row.gathers_s + row.stage_gathers_s[-1]
    first_s = speed * (row.least_once_s + always_s)
    chained_s = max(work_s / row.pp, chain_s(speed * total_s, row.send_s + row.send_back_s, stages, m)) + first_s
    shared_s = (work_s + row.once_s) / row.pp + always_s if is_work else 0.0
    return max(found_s + speed * always_s, chained_s, shared_s)


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
