"""What a plan says beside its numbers: of work that all ranks of an axis repeat, of what its space leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import with_free_links
from autopar.planner.space.space import load_space


def _square(y: Tensor, batch: object) -> Tensor:
    return y.square().mean()


def _power(y: Tensor, batch: object) -> Tensor:
    return y.pow(2).mean()


@cache
def graph_of(loss_fn: Any, precision: Any) -> Graph:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    return autopar.trace(model, example_inputs=[torch.randn(4, 8)], loss_fn=loss_fn, precision=precision)


def notes(
    cluster: Cluster,
    *,
    about: str = "repeated on each",
    pins: Sequence[str] = ("tp=2",),
    space: str = "default",
    precision: Any = "fp32",
    loss_fn: Any = _square,
) -> tuple[str, ...]:
    graph = graph_of(loss_fn, precision)
    plan = autopar.search(graph, cluster=cluster, global_batch_size=4, pins=pins, space=space, precision=precision)
    return tuple(note for note in plan.notes if about in note)


def test_a_plan_says_what_all_ranks_repeat() -> None:
    cluster = Cluster.parse("cpu:1x2")
    (note,) = notes(cluster)
    assert note.startswith("100% of the FLOPs are repeated on each of the 2 ranks of tp (0, 2)")
    assert notes(with_free_links(cluster)) == ()


@pytest.mark.slow
def test_a_plan_with_full_recompute_says_that_the_space_has_no_selective_one(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "search/default.toml").read_text().replace('name = "default"', 'name = "mine"')
    full, both = tmp_path / "full.toml", tmp_path / "both.toml"
    full.write_text(text.replace('recompute = ["none", "selective", "full"]', 'recompute = ["full"]'))
    both.write_text(text.replace('recompute = ["none", "selective", "full"]', 'recompute = ["selective", "full"]'))
    cluster, about = Cluster.parse("cpu:1x2"), "no selective recompute"
    (note,) = notes(cluster, about=about, space=str(full))
    assert note.startswith(
        "blocks recompute fully, as the space mine has no selective recompute: the space default has"
    )
    assert "selective" in load_space("default").recompute
    assert notes(cluster, about=about, space=str(both)) == ()
    assert notes(cluster, about=about, pins=("tp=2", "recompute=full"), space=str(full)) == ()
    assert notes(cluster, about=about) == ()  # nothing is made again


def test_what_may_leave_the_range_of_float16_is_named() -> None:
    cluster = Cluster.parse("cpu:1x2")
    (note,) = notes(cluster, about="autocast", precision="fp16", loss_fn=_power)
    assert note.startswith("computed in float16, where autocast would in float32: aten.pow.Tensor_Scalar of ")
    assert not notes(cluster, about="autocast", precision="bf16", loss_fn=_power)


def test_the_precision_that_is_proposed_is_one_that_the_device_has() -> None:
    for cluster, name in (("v100-sxm2-32gb:1x2", "fp16"), ("h100-sxm5-80gb:1x2", "bf16")):
        (note,) = notes(Cluster.parse(cluster), about="computed in float32")
        assert f"precision {name} " in note
