"""The linear program of a candidate in a layout: what its blocks and its stages add, at the least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cost.blocks.block_cost import BlockCost
from autopar.cost.model import CostModel, Step
from autopar.cost.step.stage_time import own_times
from autopar.cost.step.traffic import gathering_share
from autopar.plan import RECOMPUTES, Recompute
from autopar.planner.bounds.bound_rows import Row
from autopar.planner.bounds.linear import Every, Kind, LinearProgram
from autopar.planner.bounds.rows import RowMaker
from autopar.planner.layouts.types import PricedLayout
from autopar.planner.space.candidates import Candidate

LONGEST: tuple[tuple[int, Recompute], ...] = ((0, "none"), (1, "full"))
"""Forward and backward, each in the mode in which it takes longest."""


def program(rows: RowMaker, candidate: Candidate, option: PricedLayout, step: Step) -> LinearProgram:
    """The program of a candidate in a layout."""
    costs, prices, _ = rows.priced(option, step)
    modes = [tuple(sorted(own, key=RECOMPUTES.index)) for own in rows.modes]
    blocks = [(k, modes[k]) for k in rows.class_of]
    row = rows.exact(candidate, option, step)
    kinds = kinds_of(rows.model, costs, blocks, [price.once_s for price in prices], rows.largest(option), step)
    return LinearProgram(row, kinds, every_of(rows.model, costs, row, step))


def kinds_of(
    model: CostModel, costs: Sequence[BlockCost], blocks: Sequence[tuple[int, tuple[Recompute, ...]]], once_s: Sequence[float],
    group: Sequence[int], step: Step,
) -> list[Kind]:  # fmt: skip
    """Kinds of blocks at their least prices.

    Args:
        costs: of the blocks of the compact graph, each with the parameters that count for it.
        blocks: for each block of the model that of the compact graph that stands for it, and its modes.
        once_s: of each block of the compact graph.
        group: those of the largest group of equal ones.
    """
    data, interference = model.of(step).data, model.device.interference
    longest_s = [max(own_times(cost, mode)[part] for cost in costs) for part, mode in LONGEST]
    made: list[Kind] = []
    known: dict[object, Kind] = {}
    last: object = None
    for place, (k, modes) in enumerate(blocks):
        key = (id(costs[k]), modes, once_s[k], k in group)
        if key == last:
            made[-1] = _longer(made[-1])
            continue
        last = key
        if key not in known:
            cost, unit = costs[k], model.of(step).unit(costs[k])
            beside = [unit.gather_s - (1 - interference) * min(unit.gather_s, own) for own in longest_s]
            later = [b * data.gathers_always for b in beside]
            adding_s = model.of(step).block_adding_s(cost)
            known[key] = Kind(
                first=place,
                count=1,
                in_group=k in group,
                forward_s=tuple(own_times(cost, mode)[0] for mode in modes),
                backward_s=tuple(own_times(cost, mode)[1] + unit.hooks_s + later[1] + adding_s for mode in modes),
                shared_forward_s=unit.hooks_s + later[0],
                gather_s=beside[0] if data.uses_fsdp and not data.gathers_always else 0.0,
                once_s=once_s[k],
                static_bytes=model.of(step).block_static_bytes(cost),
                held_bytes=tuple(cost.kept_bytes(mode) for mode in modes),
                passing_bytes=tuple(cost.passing_bytes(mode) for mode in modes),
                stage_bytes=sum(dict(cost.prelude).values()),
            )
        made.append(_at(known[key], place))
    return made


def every_of(model: CostModel, costs: Sequence[BlockCost], row: Row, step: Step) -> Every:
    """What stages have beside blocks: a gather that nothing hides, and what every rank does once."""
    data, stages = model.of(step).data, row.pp * row.virtual_stages
    rest = 1 - model.device.interference
    gathers_s = [model.of(step).unit(cost).gather_s for cost in costs]
    hidden_s = [
        rest * min(min(gather_s, max(own_times(cost, mode)[part] for cost in costs)) for gather_s in gathers_s)
        for part, mode in LONGEST
    ]
    shares = tuple(gathering_share(data, row.schedule, stages, row.num_micro_batches, s) for s in range(stages))
    action_s, _ = model.device.overheads.of_actions(row.virtual_stages)
    always = data.gathers_always
    return Every(
        shares=shares,
        forward_s=tuple(row.every_s + action_s + always * share * hidden_s[0] for share in shares),
        backward_s=action_s + always * hidden_s[1],
        first_s=hidden_s[0] if data.uses_fsdp and not always else 0.0,
        once_s=model.of(step).scalars_s(),
    )


def _longer(kind: Kind) -> Kind:
    return replace(kind, count=kind.count + 1)


def _at(kind: Kind, place: int) -> Kind:
    return replace(kind, first=place, count=1)
