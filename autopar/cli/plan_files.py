"""Commands on a plan file (``autopar show``, ``compare``, ``run`` and ``verify``), and ``trace``, which shows a model as a graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from autopar.cli.options import (
    Json,
    Model,
    Opaque,
    Pin,
    Sequence_,
    parse_cluster,
    print_json,
    print_result,
    print_text,
    progress,
    refuse_beside,
    split_pins,
    write_report,
)

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, written by 'autopar search -o FILE'.")]


def show(
    plan_file: PlanFile,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained HTML file.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write the predicted step as a trace for Perfetto.")] = None,
    as_json: Json = False,
) -> None:
    """Print a plan; or draw it as HTML or as a trace."""
    from autopar.plan.plan import Plan
    from autopar.plan.text import render_plan
    from autopar.report.summaries import plan_summary

    plan = Plan.load(plan_file)
    if html is not None:
        from autopar.report.pictures import render_html

        write_report(html, render_html(plan))
    if perfetto is not None:
        from autopar.report.pictures import perfetto_trace

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
    from autopar.report.summaries import comparison, render_comparison

    old, new = Plan.load(before), Plan.load(after)
    print_result(
        as_json, lambda: comparison(old, new), lambda: render_comparison(old, new, names=(str(before), str(after)))
    )


SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""Words after SCRIPT are arguments of the script."""


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
    from autopar.runtime.job import start_script

    raise typer.Exit(
        start_script(
            Plan.load(plan_file),
            plan_file,
            [script, *context.args],
            nodes=nodes,
            rendezvous=rendezvous,
            max_restarts=max_restarts,
        )
    )


Target = Annotated[str, typer.Argument(metavar="PLAN|MODEL", help="A plan file, or a MODEL as in search.")]
VerifiedCluster = Annotated[str | None, typer.Option("--cluster", metavar="CLUSTER", help="For a MODEL: cpu:1xRANKS.")]
VerifiedBatch = Annotated[
    int | None, typer.Option("--global-batch", min=1, metavar="N", help="For a MODEL: default 4 samples a rank.")
]
ModelOfPlan = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="For a PLAN made from a model without a name.")
]
Steps = Annotated[int, typer.Option("--steps", min=1, metavar="N", help="AdamW steps to compare.")]
RunTimeout = Annotated[float, typer.Option("--run-timeout", min=1, metavar="S", help="Processes are killed after it.")]
Bisect = Annotated[
    bool, typer.Option("--bisect", help="Look for the first operator that differs even when all is well.")
]
CompareIn = Annotated[
    Literal["fp32", "fp64"], typer.Option("--compare-in", help="fp32 (past its limits fp64 as well) or fp64 alone.")
]


def verify(
    target: Target,
    cluster: VerifiedCluster = None,
    pin: Pin = None,
    global_batch: VerifiedBatch = None,
    seq: Sequence_ = None,
    opaque: Opaque = None,
    model: ModelOfPlan = None,
    steps: Steps = 3,
    run_timeout: RunTimeout = 600,
    bisect: Bisect = False,
    compare_in: CompareIn = "fp32",
    as_json: Json = False,
) -> None:
    """Run a plan on local processes and compare losses, gradients and parameters with one device, on every rank.

    What differs is followed, in float64, to the first block and operator whose value or gradient is wrong.
    For a MODEL a plan is made first, under the pins and as if links were free, so that it splits what it can.
    """
    from autopar.plan.plan import PRECISIONS
    from autopar.verification.against_one_device import verify as compare
    from autopar.verification.compared_models import is_plan, of_file, of_model
    from autopar.verification.results import render_verification, verification

    if is_plan(target):
        refuse_beside("on a plan", cluster=cluster, pin=pin, global_batch=global_batch, seq=seq, opaque=opaque)
    else:
        refuse_beside("without a plan", model=model)
    with progress("tracing the model") as advance:
        if is_plan(target):
            plan, subject, graph = of_file(Path(target), model)
        else:
            plan, subject, graph = of_model(
                target, None if cluster is None else parse_cluster(cluster), pins=split_pins(pin or ()),
                global_batch_size=global_batch, sequence=seq, opaque=opaque or (), progress=advance,
            )  # fmt: skip
    with progress(f"running {plan.mesh.world_size} ranks"):
        report = compare(
            subject,
            plan,
            graph,
            steps=steps,
            run_timeout_s=run_timeout,
            precision=PRECISIONS[compare_in],
            find="always" if bisect else "if it differs",
        )
    print_result(
        as_json, lambda: {"mesh": str(plan.mesh), **verification(report)}, lambda: render_verification(report, plan)
    )
    report.check()


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
        from autopar.report.summaries import graph_summary, render_graph

        graph = resolve_model(model, batch_size=batch, sequence_length=seq).trace(opaque or ())
    print_result(as_json, lambda: graph_summary(graph), lambda: render_graph(graph))
