"""``autopar trace`` and ``autopar verify``: commands that look into a model."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.console import print_json, print_text, progress
from autopar.cli.options import Json, Model, Sequence_

if TYPE_CHECKING:
    from autopar.graph.ir import Graph


def trace(
    model: Model,
    seq: Sequence_ = None,
    batch: Annotated[int, typer.Option("--batch", min=1, metavar="N", help="Samples in the traced batch.")] = 2,
    as_json: Json = False,
) -> None:
    """Trace a model: parameters, FLOPs, repeated blocks, operators, and what has no rule."""
    pass


def verify() -> None:
    """x"""
