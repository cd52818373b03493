"""``autopar trace`` and ``autopar verify``: commands that look into a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.console import print_json, print_text, progress
from autopar.cli.options import Json, Model, Pin, Sequence_, split_pins
from autopar.errors import UsageError

if TYPE_CHECKING:
    from autopar.plan import Plan


def trace(
    model: Model,
    seq: Sequence_ = None,
    batch: Annotated[int, typer.Option("--batch", min=1, metavar="N", help="Samples in the traced batch.")] = 2,
    as_json: Json = False,
) -> None:
    """Trace a model: parameters, FLOPs, repeated blocks, operators, and what has no rule."""
    with progress("tracing the model"):
        from autopar.models import resolve_model
        from autopar.report.graph import graph_summary, render_graph

        graph = resolve_model(model, batch_size=batch, sequence_length=seq).trace()
    if as_json:
        print_json(graph_summary(graph))
    else:
        print_text(render_graph(graph))


def verify(
    plan_or_model: Annotated[str, typer.Argument(metavar="PLAN|MODEL", help="A plan file, or a MODEL as in search.")],
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="CLUSTER", help="For a MODEL: cpu:1xRANKS.")
    ] = None,
    pin: Pin = None,
    global_batch: Annotated[
        int | None,
        typer.Option("--global-batch", min=1, metavar="N", help="For a MODEL; two samples a rank if not given."),
    ] = None,
    seq: Sequence_ = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="For a PLAN whose model has another name.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, metavar="N", help="AdamW steps to compare.")] = 3,
    as_json: Json = False,
) -> None:
    """Run a plan on local processes and compare losses, gradients and parameters with one device, on every rank."""
    raise UsageError("x")
