"""``autopar show`` and ``autopar compare``: commands that read plan files alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.console import print_json, print_text, write_report

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, written by 'autopar search -o FILE'.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def show(
    plan_file: PlanFile,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained HTML file.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write the predicted step as a trace for Perfetto.")] = None,
    as_json: Json = False,
) -> None:
    """Print a plan; or draw it as HTML or as a trace."""
    from autopar.plan.plan import Plan
    from autopar.plan.text import render_plan
    from autopar.report.json_summary import plan_summary

    plan = Plan.load(plan_file)
    if html is not None:
        from autopar.report.html import render_html

        write_report(html, render_html(plan))
    if perfetto is not None:
        from autopar.report.timeline import perfetto_trace

        write_report(perfetto, json.dumps(perfetto_trace(plan)) + "\n")
    if as_json:
        print_json(plan_summary(plan))
    elif html is None and perfetto is None:
        print_text(render_plan(plan))


def compare(
    before: PlanFile,
    after: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan to compare it with.")],
    as_json: Json = False,
) -> None:
    """Compare two plans: predictions side by side, then every choice that differs."""
    from autopar.plan.plan import Plan
    from autopar.report.compare import comparison, render_comparison

    one, other = Plan.load(before), Plan.load(after)
    if as_json:
        print_json(comparison(one, other))
    else:
        print_text(render_comparison(one, other, names=(str(before), str(after))))
