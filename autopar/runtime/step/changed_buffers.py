"""Buffers that steps change, on one rank: loaded, read by every micro-batch of a step, replaced after it.

New values replace old ones and never write into them: what a step keeps for backward, recompute included, stays as it
was. The stage that makes a value passes it on to the stages that read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.lower.program import Program
from autopar.runtime.step.stage import StageModule
from autopar.runtime.weights.from_model import Weights
from autopar.runtime.world import World


class State:
    """What this rank holds of them.

    Attributes:
        values: by the graph's names; those that the rank's stages, or the sums before a step, read or make.
        own: names of those that its stages make.
    """

    def __init__(self, program: Program, world: World, weights: Weights, stages: Sequence[StageModule]) -> None:
        here = [stage for stage in program.stages if stage.pp_rank == world.coordinate["pp"]]
        sums = program.sums.inputs if program.sums is not None else ()
        makers = {name: stage.pp_rank for stage in program.stages for name, _ in stage.mutations}
        self.own = tuple(name for stage in here for name, _ in stage.mutations)
        wanted = {*self.own, *sums, *(name for stage in here for name in stage.state)}
        self._stages, self._world = stages, world
        self._fqns = {buffer.name: buffer.fqn for buffer in program.state}
        self.values = {
            buffer.name: weights.buffer(buffer.fqn, buffer.value).to(world.device, buffer.spec.dtype, copy=True)
            for buffer in program.state
            if buffer.name in wanted
        }
        self._moved = tuple(
            (buffer.name, makers[buffer.name])
            for buffer in program.state
            if buffer.name in sums or any(_reads(program, makers[buffer.name], buffer.name))
        )
        self._group = world.axis_group(("pp",)) if self._moved else None
        self._specs = {buffer.name: buffer.spec for buffer in program.state}
        self._lend()

    def commit(self) -> None:
        """After a step: what its last micro-batch made takes the place of what it read. All ranks call it."""
        made = {name: value for stage in self._stages for name, value in stage.new_state.items()}
        if self._group is not None:
            for name, maker in self._moved:
                spec = self._specs[name]
                value = made.get(name)
                empty = torch.empty(spec.shape, dtype=spec.dtype, device=self._world.device)
                value = empty if value is None else value.contiguous().clone()
                dist.broadcast(value, src=dist.get_global_rank(self._group, maker), group=self._group)
                made[name] = value
        self.values |= {name: value.clone() for name, value in made.items() if name in self.values}
        self._lend()

    def named(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Values by the model's names; those of all names here when None."""
        return {self._fqns[name]: self.values[name] for name in (self.values if names is None else names)}

    def _lend(self) -> None:
        for stage in self._stages:
            stage.state = self.values


def _reads(program: Program, maker: int, name: str) -> Iterable[bool]:
    """For each stage whether it reads a buffer that another pipeline rank makes."""
    return (name in stage.state and stage.pp_rank != maker for stage in program.stages)
