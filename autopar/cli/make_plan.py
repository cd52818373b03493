"""What commands that make plans share: the plan of a MODEL on a cluster, written and printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autopar.cli.console import cache_dir, print_json, print_text, progress, warn
from autopar.cli.graph_cache import traced
from autopar.cli.options import (
    is_factory,
    parse_cluster,
)
from autopar.errors import UsageError

if TYPE_CHECKING:
    from autopar.plan.plan import Plan


Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan here.")]


def model_of(plan: Plan, plan_file: Path) -> str:
    """The MODEL that a plan was made from, where its name says it.

    Raises:
        UsageError: the plan was made in Python for a model without such a name.
    """
    if ":" not in plan.model.name:
        raise UsageError(
            f"The plan's model '{plan.model.name}' is no MODEL of the command line",
            where=str(plan_file),
            fix="Say which model with --model",
        )
    return plan.model.name


def sequence_of(plan: Plan, model: str) -> int | None:
    """``--seq`` of a plan's model; None for a factory and for a model that does not take tokens."""
    tokens = plan.model.tokens_per_sample
    return None if is_factory(model) or tokens < 2 else tokens


def make_plan(
    verb: Literal["search", "estimate"],
    model: str,
    *,
    cluster: str,
    global_batch_size: int,
    sequence: int | None,
    precision: str,
    optimizer: str,
    pins: list[str],
    opaque: list[str],
    options: dict[str, Any],
) -> Plan:
    """Resolve the model and the cluster, then call ``autopar.api``'s ``verb``.

    Raises:
        AutoparError: of any of these parts.
    """
    found = parse_cluster(cluster)
    with progress("reading the model") as advance:
        from autopar import api
        from autopar.planner.space.pins import Pins

        graph = traced(
            model,
            sequence=sequence,
            precision=precision,
            opaque=tuple(dict.fromkeys((*opaque, *Pins.parse(pins).opaque))),
            global_batch_size=global_batch_size,
            advance=advance,
        )
        call: Callable[..., Plan] = api.search if verb == "search" else api.estimate
        return call(
            graph,
            cluster=found,
            global_batch_size=global_batch_size,
            precision=precision,
            optimizer=optimizer,
            pins=pins,
            opaque=opaque,
            progress=advance,
            cache_dir=cache_dir() or Path.home() / ".cache" / "autopar",
            **options,
        )


def check_output(output: Path | None) -> None:
    """Before a search: its plan can be written.

    Raises:
        UsageError: it cannot.
    """
    from autopar.util.files import check_writable

    if output is not None:
        check_writable(output)


def give(plan: Plan, output: Path | None, as_json: bool) -> None:
    """Write the plan where it is asked for, and print it."""
    if output is not None:
        save(plan, output)
    if as_json:
        from autopar.report.json_summary import plan_summary

        print_json(plan_summary(plan))
    else:
        from autopar.plan.text import render_plan

        print_text(render_plan(plan))


def save(plan: Plan, output: Path) -> None:
    """Write the plan and say so."""
    from autopar.plan.file import save_plan

    save_plan(plan, output)
    warn(f"wrote {output}")
