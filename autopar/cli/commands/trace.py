"""``autopar trace``: what a model looks like as a graph."""

from __future__ import annotations

from typing import Annotated

import typer

from autopar.cli.console import print_json, print_text, progress
from autopar.cli.options import Json, Model, Opaque, Sequence_


def trace(
    model: Model,
    seq: Sequence_ = None,
    batch: Annotated[int, typer.Option("--batch", min=1, metavar="N", help="Samples in the traced batch.")] = 2,
    opaque: Opaque = None,
    as_json: Json = False,
) -> None:
    """Trace a model: parameters, FLOPs, repeated blocks, operators, and what has no rule."""
    with progress("tracing the model"):
        from autopar.models.resolve import resolve_model
        from autopar.report.traced_model import graph_summary, render_graph

        graph = resolve_model(model, batch_size=batch, sequence_length=seq).trace(opaque or ())
    if as_json:
        print_json(graph_summary(graph))
    else:
        print_text(render_graph(graph))
