"""What commands that make plans share: the plan of a MODEL on a cluster, written and printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autopar.cli.console import kept_dir, print_json, print_text, progress, warn
from autopar.cli.options import Asked, parse_cluster

if TYPE_CHECKING:
    from autopar.plan.plan import Plan


def make_plan(verb: Literal["search", "estimate"], asked: Asked, **options: Any) -> Plan:
    """Resolve the model and the cluster, then call ``autopar.api``'s ``verb``.

    Args:
        options: of this verb alone, as ``autopar.api`` names them.

    Raises:
        AutoparError: of any of these parts.
    """
    found, pins, opaque = parse_cluster(asked.cluster), asked.pins, asked.opaque or []
    with progress("reading the model") as advance:
        from autopar import api
        from autopar.models.graph_cache import traced
        from autopar.planner.sharding.batch_axis import samples_apart
        from autopar.planner.space.pins import Pins

        graph = traced(
            asked.model,
            sequence=asked.seq,
            precision=asked.precision,
            opaque=tuple(dict.fromkeys((*opaque, *Pins.parse(pins).opaque))),
            global_batch_size=asked.global_batch,
            samples_apart=samples_apart,
            cache_dir=kept_dir(),
            advance=advance,
        )
        call: Callable[..., Plan] = api.search if verb == "search" else api.estimate
        return call(
            graph,
            cluster=found,
            global_batch_size=asked.global_batch,
            precision=asked.precision,
            optimizer=asked.optimizer,
            pins=pins,
            opaque=opaque,
            space=asked.space,
            progress=advance,
            cache_dir=kept_dir(),
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
    plan.save(output)
    warn(f"wrote {output}")
