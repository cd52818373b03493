"""What a plan says of work that all ranks of an axis repeat."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autopar
from autopar.cli.models import with_free_links
from autopar.cluster import Cluster


def _square(y: Tensor, batch: object) -> Tensor:
    return y.square().mean()


def notes(cluster: Cluster) -> tuple[str, ...]:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    plan = autopar.search(
        model,
        example_inputs=[torch.randn(4, 8)],
        loss_fn=_square,
        cluster=cluster,
        global_batch_size=4,
        pins=["tp=2"],
    )
    return tuple(note for note in plan.notes if "repeated on each" in note)


def test_a_plan_says_what_all_ranks_repeat() -> None:
    cluster = Cluster.parse("cpu:1x2")
    (note,) = notes(cluster)
    assert note.startswith("100% of the FLOPs are repeated on each of the 2 ranks of tp (0, 2)")
    assert notes(with_free_links(cluster)) == ()
