"""What the ranks of a job tell each other about a checkpoint, on their hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.errors import AutoparError

_T = TypeVar("_T")


class Meeting:
    """All ranks call the same of its methods in the same order.

    Args:
        group: of all ranks, that nothing else uses meanwhile; None for one rank alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def all(self, value: _T) -> list[_T]:
        """What each rank says."""
        if self.group is None:
            return [value]
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, value, group=self.group)
        return said

    def gather(self, value: _T) -> list[_T]:
        """What each rank says, on rank 0; on the others nothing."""
        if self.group is None:
            return [value]
        said: list[Any] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(value, said, group=self.group, group_dst=0)
        return said or []

    def scatter(self, values: Sequence[_T]) -> _T:
        """For each rank its own of rank 0's values, of which the others give none."""
        if self.group is None:
            return values[0]
        got: list[Any] = [None]
        dist.scatter_object_list(got, list(values) if self.rank == 0 else None, group=self.group, group_src=0)
        mine: _T = got[0]
        return mine

    def first(self, make: Callable[[], _T]) -> _T:
        """What rank 0 makes, on all ranks.

        Raises:
            AutoparError: what it raised; on all ranks alike.
        """
        made: list[Any] = [None]
        if self.rank == 0:
            try:
                made = [make()]
            except AutoparError as error:
                made = [error]
        if self.group is not None:
            dist.broadcast_object_list(made, group=self.group, group_src=0)
        if isinstance(made[0], AutoparError):
            raise made[0]
        result: _T = made[0]
        return result

    def agree(self, failure: AutoparError | None) -> None:
        """Nothing, where no rank has failed.

        Raises:
            AutoparError: of the first rank that has; on all ranks alike.
        """
        if failed := [one for one in self.all(failure) if one is not None]:
            raise failed[0]
