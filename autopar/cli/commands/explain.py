"""``autopar explain``: why a plan was chosen, and how the best one under other pins compares."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.console import print_json, print_text
from autopar.cli.make_plan import make_plan
from autopar.cli.options import Asked, Json, split_pins


def explain(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    why_not: Annotated[
        list[str] | None,
        typer.Option("--why-not", metavar="K=V,...", help="Compare with the best plan under these pins."),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="The model, where the plan's name does not say it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say why a plan was chosen, and how the best plan with other pins would compare."""
    from autopar.plan.plan import Plan
    from autopar.report.compare import comparison, render_comparison

    plan = Plan.load(plan_file)
    if not why_not:
        if as_json:
            print_json({"reasons": list(plan.search.reasons), "pins": list(plan.pins), "notes": list(plan.notes)})
        else:
            print_text("\n".join(plan.search.reasons) or "the plan records no reasons")
        return
    from autopar.models.described import model_of, sequence_of
    from autopar.planner.space.pins import replaced

    pins = split_pins(why_not)
    name = model or model_of(plan, plan_file)
    other = make_plan(
        "search",
        Asked(
            model=name,
            cluster=plan.cluster,
            global_batch=plan.global_batch_size,
            seq=sequence_of(plan, name),
            precision=plan.precision.name,
            optimizer=plan.optimizer,
            pin=replaced(plan.pins, pins),
            opaque=list(plan.opaque),
        ),
    )
    if as_json:
        print_json({"why_not": pins, **comparison(plan, other)})
    else:
        print_text(render_comparison(plan, other, names=(str(plan_file), ", ".join(pins))))
