"""``autopar explain``: why a plan was chosen, and how the best one under other pins compares."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.console import print_json, print_text
from autopar.cli.make_plan import make_plan, model_of, sequence_of
from autopar.cli.options import (
    Json,
    split_pins,
)


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
    from autopar.plan.file import load_plan
    from autopar.report.compare import comparison, render_comparison

    plan = load_plan(plan_file)
    if not why_not:
        if as_json:
            print_json({"reasons": list(plan.search.reasons), "pins": list(plan.pins), "notes": list(plan.notes)})
        else:
            print_text("\n".join(plan.search.reasons) or "the plan records no reasons")
        return
    pins = split_pins(why_not)
    name = model or model_of(plan, plan_file)
    changed = {pin_key(pin) for pin in pins}
    other = make_plan(
        "search",
        name,
        cluster=plan.cluster,
        global_batch_size=plan.global_batch_size,
        sequence=sequence_of(plan, name),
        precision=plan.precision.name,
        optimizer=plan.optimizer,
        pins=[*(pin for pin in plan.pins if pin_key(pin) not in changed), *pins],
        opaque=list(plan.opaque),
        options={},
    )
    if as_json:
        print_json({"why_not": pins, **comparison(plan, other)})
    else:
        print_text(render_comparison(plan, other, names=(str(plan_file), ", ".join(pins))))


def pin_key(pin: str) -> str:
    """What a pin is about.

    >>> pin_key("tp<=4"), pin_key("recompute=full@layers.0-3")
    ('tp', 'recompute')
    """
    return re.split(r"[<>=!]", pin, maxsplit=1)[0].strip()
