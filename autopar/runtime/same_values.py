"""Compares ranks' copies of the same elements of parameters bit by bit, by checksums on their devices, and repairs differences.

Parameters that ranks of ``tp`` or ``cp`` replicate (norms, routers, attention that is not split) are stepped on each of them by a gradient
that the rank has computed itself. Kernels with atomics (backward of attention, scattered sums) add in varying order, so such gradients
differ by rounding, and the copies would drift apart for good. See docs/adr/0021-replicas.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import compress

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.step.gradients import Group, RankParameter, local_part
from autopar.runtime.world import World
from autopar.util.formatting import some

_CHUNK = 2**19
"""Elements that are multiplied and summed at once, which bounds the memory of temporaries: 4 MiB."""

_FACTORS = (-7046029254386353131, -4658895280553007687)
"""The factors of splitmix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"), as signed numbers."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return a checksum of each tensor's bits and their positions: [tensors] of int64 on their device, without waiting for it.

    It sums integers, so that the order does not matter, each multiplied by an odd number of its position in a chunk and of its chunk. So it
    sees a change of any single element, and exchanged elements and chunks.

    Args:
        tensors: on one device, at least one.

    >>> one, other = checksums([torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])]).tolist()
    >>> one == other, one == int(checksums([torch.tensor([1.0, 2.0])]))
    (False, True)
    """
    chunks = [torch.split(_bits(tensor), _CHUNK) for tensor in tensors]
    count = max(max(len(parts), parts[0].numel()) for parts in chunks)
    weights = _weights(count, tensors[0].device)
    sums = [torch.stack([(part * weights[: len(part)]).sum() for part in parts]) for parts in chunks]
    squares = weights**2  # so that the same number in the other place of chunk and position counts otherwise
    return torch.stack([(of_chunks * squares[: len(of_chunks)]).sum() for of_chunks in sums])  # modulo 2**64


def _bits(value: Tensor) -> Tensor:
    """Return the elements as integers, flattened."""
    value = value.detach()
    flat = (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value.resolve_neg()).contiguous()
    flat = flat.view(-1)
    return flat.to(torch.int8) if flat.dtype == torch.bool else flat.view(_INTEGERS[flat.element_size()])


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers without a pattern."""
    number = torch.arange(1, count + 1, device=device) * _FACTORS[0]
    return (((number >> 30) ^ number) * _FACTORS[1]) | 1


_LOGGER = logging.getLogger("autopar")

EVERY = 1000
"""Steps between comparisons. Each reads all parameters once, so it costs at most a thousandth of the time."""

AXES = ("ep_outer", "dp_replicate", "dp_shard", "cp", "tp")


class Replicas:
    """Compares copies of parameters; every rank of the job makes one and makes the same calls.

    Args:
        held: the parameters of this rank.
    """

    def __init__(self, held: Sequence[RankParameter], world: World) -> None:
        self._rank, self._has_warned = world.rank, False
        self._last_step = 0
        self._of_axis: list[tuple[Group, list[RankParameter]]] = []
        for axis in AXES:
            if (group := world.axis_group((axis,))) is not None:
                members = [h for h in held if axis in h.replicated and h.parameter.numel()]
                if members:  # the ranks of a group hold the same parameters
                    self._of_axis.append((group, members))

    def check(self, step: int) -> None:
        """Compare before a step or evaluation with the number ``step``, if it is a multiple of :data:`EVERY`, once. All ranks call it."""
        if step % EVERY == 0 and step != self._last_step:  # an evaluation of many batches has one number
            self._last_step = step
            self.check_now()

    def check_now(self) -> None:
        """Give copies that differ the value of the first rank of their group, with a warning, once. All ranks call it.

        It goes axis by axis: copies that are equal along each axis are equal everywhere.
        """
        names = dict[str, None]()
        with torch.no_grad():
            for group, members in self._of_axis:
                differs = differing(checksums([local_part(h.parameter) for h in members]), group)
                if bool(differs.any()):
                    for held in compress(members, differs.tolist()):
                        dist.broadcast(local_part(held.parameter), group_src=0, group=group)
                        names[held.key] = None
        if names and not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "rank %d: copies of %s differed from those of other ranks, and have the values of the first of them again: kernels "
                "that add in no fixed order let them drift apart by rounding (torch.use_deterministic_algorithms(True) keeps most "
                "from it); a larger difference is a fault of the device or of code that changes parameters on some ranks alone",
                self._rank,
                some(names),
            )


def differing(sums: Tensor, group: Group | None = None) -> Tensor:
    """Return for each checksum whether ranks of the group (None: of the job) have different ones; the same on all of them."""
    ends = torch.stack((sums, ~sums))
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    return ends[0] != ~ends[1]
