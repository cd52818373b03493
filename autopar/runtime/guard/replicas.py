"""Whether ranks that hold the same elements of a parameter still do, and what is done where they do not.

What several ranks of ``tp`` or ``cp`` hold whole (norms, routers, attention that is not split) each of them steps by a gradient
that it has computed itself. Kernels with atomics (backward of attention, scattered sums) add in another order from run to run,
so such gradients differ by rounding, and nothing brings the copies together again. See docs/adr/0021-replicas.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.optimizer.checksum import checksums
from autopar.runtime.step.gradients import Group, Held, local_part
from autopar.runtime.world import World

_LOGGER = logging.getLogger("autopar")

EVERY = 1000
"""Steps from one look to the next, each of which reads all parameters once: a thousandth of a step, or less."""

AXES = ("ep_outer", "dp_replicate", "dp_shard", "cp", "tp")


class Replicas:
    """Compares copies of parameters; every rank of the job makes one and enters the same calls.

    Args:
        held: of this rank.
        everyone: the group of all ranks for sums on devices; None for one rank alone.
    """

    def __init__(self, held: Sequence[Held], world: World, everyone: Group | None) -> None:
        self._everyone, self._device, self._rank = everyone, world.device, world.rank
        self._told = False
        self._looked_at = 0
        self._of_axis: list[tuple[Group, list[Held]]] = []
        for axis in AXES:
            if getattr(world.mesh, axis) > 1:
                group = world.axis_group((axis,))
                assert group is not None
                members = [h for h in held if axis in h.replicated and h.parameter.numel()]
                if members:  # the ranks of a group hold the same parameters
                    self._of_axis.append((group, members))

    def check(self, step: int) -> None:
        """Before a step, or an evaluation, that has the number ``step``; looks at one in :data:`EVERY`, once. All ranks call it."""
        if step % EVERY == 0 and step != self._looked_at:  # an evaluation of many batches has one number
            self._looked_at = step
            self.check_now()

    def check_now(self) -> None:
        """Brings copies that differ back to the value of the first rank that has one, with a warning, once. All ranks call it."""
        if self._everyone is None:
            return
        differs = torch.zeros((), dtype=torch.int64, device=self._device)
        for group, members in self._of_axis:
            differs |= _differing(group, members).any()
        dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=self._everyone)
        if int(differs):
            self._mend()

    def _mend(self) -> None:
        """Axis by axis: what is equal along each is equal everywhere."""
        names = dict[str, None]()
        with torch.no_grad():
            for group, members in self._of_axis:
                for held, is_other in zip(members, _differing(group, members).tolist(), strict=True):
                    if is_other:
                        dist.broadcast(local_part(held.parameter), group_src=0, group=group)
                        names[held.key] = None
        if names and not self._told:
            self._told = True
            _LOGGER.warning(
                "rank %d: copies of %s%s differed from those of other ranks, and have the values of the first of them again: kernels "
                "that add in no fixed order let them drift apart by rounding (torch.use_deterministic_algorithms(True) keeps most "
                "from it); a larger difference is a fault of the device or of code that changes parameters on some ranks alone",
                self._rank,
                ", ".join(list(names)[:3]),
                f" and {len(names) - 3} more" if len(names) > 3 else "",
            )


def _differing(group: Group, members: Sequence[Held]) -> Tensor:
    """Which of them differ anywhere in the group, on the device and the same on all its ranks."""
    sums = checksums([local_part(h.parameter) for h in members])
    ends = torch.stack((sums, ~sums))
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    return ends[0] != ~ends[1]
