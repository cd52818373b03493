"""``autopar run``: a training script on as many ranks as a plan has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""What stands after SCRIPT is the script's."""


def run(
    context: typer.Context,
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    script: Annotated[
        str,
        typer.Argument(metavar="SCRIPT ...", help="A training script and its arguments; it calls parallelize(model)."),
    ],
    nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Machines; run the command on each of them.")] = 1,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="With --nodes: where the machines meet, one of them.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="How often all ranks are started anew after one has failed.")
    ] = 0,
) -> None:
    """Start a script by torchrun on the plan's ranks; parallelize() takes the plan where the script names none."""
    from autopar.plan.plan import Plan
    from autopar.runtime.torchrun import start

    raise typer.Exit(
        start(
            Plan.load(plan_file),
            plan_file,
            [script, *context.args],
            nodes=nodes,
            rendezvous=rendezvous,
            max_restarts=max_restarts,
        )
    )
