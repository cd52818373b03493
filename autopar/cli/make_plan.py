"""What commands that make plans share: the plan of a MODEL on a cluster, written and printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autopar.cli.console import kept_dir, print_json, print_text, progress, warn
from autopar.cli.options import parse_cluster

if TYPE_CHECKING:
    from autopar.plan.plan import Plan


Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan here.")]


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
    space: str = "default",
    options: dict[str, Any] | None = None,
) -> Plan:
    """Resolve the model and the cluster, then call ``autopar.api``'s ``verb``.

    Raises:
        AutoparError: of any of these parts.
    """
    found = parse_cluster(cluster)
    with progress("reading the model") as advance:
        from autopar import api
        from autopar.models.graph_cache import traced
        from autopar.planner.sharding.batch_axis import samples_apart
        from autopar.planner.space.pins import Pins

        graph = traced(
            model,
            sequence=sequence,
            precision=precision,
            opaque=tuple(dict.fromkeys((*opaque, *Pins.parse(pins).opaque))),
            global_batch_size=global_batch_size,
            samples_apart=samples_apart,
            cache_dir=kept_dir(),
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
            space=space,
            progress=advance,
            cache_dir=kept_dir(),
            **(options or {}),
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
    plan.save(output)
    warn(f"wrote {output}")
