"""Which groups of a job's ranks links are measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSet:
    """Disjoint groups of ranks that communicate at the same time.

    Attributes:
        tier: ``node`` or ``network``.
        pattern: ``contiguous`` or ``strided`` ranks.
        groups: each sorted.
        num_nodes, ranks_per_node: of each group.
        alone: one group communicates while its siblings are silent.
    """

    tier: str
    pattern: str
    groups: tuple[tuple[int, ...], ...]
    num_nodes: int
    ranks_per_node: int
    alone: bool = False

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return len(self.groups[0])

    @property
    def name(self) -> str:
        """For people and for the file of points."""
        where = f"{self.num_nodes} nodes x {self.ranks_per_node}" if self.num_nodes > 1 else f"node x {self.size}"
        return f"{where} {self.pattern}" + (" alone" if self.alone else f" x {len(self.groups)} at once")

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"name": self.name, **{key: getattr(self, key) for key in self.__dataclass_fields__}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> GroupSet:
        """Read what :meth:`to_dict` gives."""
        values = {key: data[key] for key in cls.__dataclass_fields__}
        return cls(**{**values, "groups": tuple(tuple(group) for group in values["groups"])})


def group_sets(nodes: Sequence[int]) -> tuple[GroupSet, ...]:
    """The groups worth measuring: each size inside a node and across nodes, with all siblings at once and alone.

    Args:
        nodes: the node of each rank; nodes of a job have equally many ranks.

    >>> for found in group_sets([0, 0, 1, 1]):
    ...     print(found.name, found.groups)
    node x 2 contiguous x 2 at once ((0, 1), (2, 3))
    node x 2 contiguous alone ((0, 1),)
    2 nodes x 1 strided x 2 at once ((0, 2), (1, 3))
    2 nodes x 1 strided alone ((0, 2),)
    2 nodes x 2 contiguous x 1 at once ((0, 1, 2, 3),)
    """
    members = [[rank for rank, node in enumerate(nodes) if node == found] for found in dict.fromkeys(nodes)]
    width = min(len(ranks) for ranks in members)
    members = [ranks[:width] for ranks in members]
    found: list[GroupSet] = []
    for size in _sizes(width):
        if size > 1:
            chunks = [ranks[i : i + size] for ranks in members for i in range(0, width - size + 1, size)]
            found += _with_alone("node", "contiguous", chunks, 1, size)
            if size < width and width % size == 0:
                stride = width // size
                found += _with_alone(
                    "node", "strided", [r[i::stride] for r in members for i in range(stride)], 1, size
                )[:1]
    if len(members) > 1:
        for size in _sizes(width):
            across = [
                [rank for ranks in members for rank in ranks[i : i + size]] for i in range(0, width - size + 1, size)
            ]
            pattern = "contiguous" if size == width else "strided"
            found += _with_alone("network", pattern, across, len(members), size)
        if len(members) > 2:
            pairs = zip(members[::2], members[1::2], strict=False)
            couples = [[a, b] for one, other in pairs for a, b in zip(one, other, strict=True)]
            found += _with_alone("network", "strided", couples, 2, 1)
    return tuple(found)


def _sizes(width: int) -> list[int]:
    powers = [2**i for i in range(width.bit_length()) if 2**i < width]
    return [*powers, width]


def _with_alone(tier: str, pattern: str, groups: list[list[int]], num_nodes: int, per_node: int) -> list[GroupSet]:
    rows = tuple(tuple(sorted(group)) for group in groups)
    every = GroupSet(tier=tier, pattern=pattern, groups=rows, num_nodes=num_nodes, ranks_per_node=per_node)
    if len(rows) == 1:
        return [every]
    first = GroupSet(
        tier=tier, pattern=pattern, groups=rows[:1], num_nodes=num_nodes, ranks_per_node=per_node, alone=True
    )
    return [every, first]
