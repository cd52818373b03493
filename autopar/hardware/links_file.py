"""Measured links as a file that clusters take: ``links = "FILE"`` in a cluster's file, ``?links=FILE`` behind its name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.hardware.cluster import Cluster
from autopar.hardware.link import CollectiveLibrary, Link
from autopar.hardware.measured_times import CollectiveTime
from autopar.util.toml import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Links of a cluster and collectives on them, as measured.

    Attributes:
        library: name of the collective library that ran.
        intra_node, nic: fitted; they price groups of shapes that were not measured.
        measured: collectives on groups that were.
        points: name of the file of raw points, beside this one.
    """

    library: str
    intra_node: Link
    nic: Link
    measured: tuple[CollectiveTime, ...]
    points: str
    provenance: str

    def to_dict(self) -> dict[str, Any]:
        """The tables of the file."""
        return {
            "library": self.library,
            "points": self.points,
            "provenance": self.provenance,
            "intra_node": self.intra_node.to_dict(),
            "nic": self.nic.to_dict(),
            "measured": [item.to_dict() for item in self.measured],
        }

    @classmethod
    def load(cls, path: Path) -> Links:
        """Read the file.

        Raises:
            UsageError: names file, line and key.
        """
        table = Table.load(path)
        found = cls(
            library=table.text("library"),
            intra_node=Link.from_table(table.table("intra_node")),
            nic=Link.from_table(table.table("nic")),
            measured=tuple(CollectiveTime.from_table(item) for item in table.tables("measured")),
            points=table.text("points"),
            provenance=table.text("provenance"),
        )
        table.finish()
        return found

    def on(self, cluster: Cluster, library: CollectiveLibrary) -> Cluster:
        """The cluster with these links and collectives; ``library``: the one named, as shipped."""
        groups = tuple(replace(group, intra_node=self.intra_node, nic=self.nic) for group in cluster.groups)
        return replace(cluster, groups=groups, library=replace(library, measured=self.measured))
