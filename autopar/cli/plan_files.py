"""Commands on a plan file (``autopar show``, ``compare``, ``run`` and ``verify``), and ``trace``, which shows a model as a graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from autopar.cli.options import (
    Json,
    Model,
    ModelOfPlan,
    Opaque,
    Pin,
    Tokens,
    parse_cluster,
    print_result,
    progress,
    refuse_beside,
    split_pins,
    write_report,
)
from autopar.errors import UsageError

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file, written by 'autopar search -o FILE'.")]


def show(
    plan_file: PlanFile,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained HTML file.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Write the predicted step as a trace for Perfetto.")] = None,
    as_json: Json = False,
) -> None:
    """Print a plan, or draw it as HTML or as a trace."""
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
    if as_json or (html is None and perfetto is None):
        print_result(as_json, lambda: plan_summary(plan), lambda: render_plan(plan))


def compare(
    before: PlanFile,
    after: Annotated[Path, typer.Argument(metavar="PLAN", help="The plan to compare it with.")],
    as_json: Json = False,
) -> None:
    """Compare the predictions of two plans, and list all choices that differ."""
    from autopar.plan.plan import Plan
    from autopar.report.summaries import comparison, render_comparison

    old, new = Plan.load(before), Plan.load(after)
    print_result(
        as_json, lambda: comparison(old, new), lambda: render_comparison(old, new, names=(str(before), str(after)))
    )


RUN_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
"""Context settings of ``run``: all words after SCRIPT are arguments of the script, also those that look like options."""


def run(
    context: typer.Context,
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")],
    script: Annotated[
        str,
        typer.Argument(metavar="SCRIPT ...", help="A training script and its arguments; it calls parallelize(model)."),
    ],
    nodes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of machines; run the command on each of them.")
    ] = 1,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="With --nodes: address of one machine, at which all meet.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of times that all ranks are restarted after one has failed.")
    ] = 0,
) -> None:
    """Start a script by torchrun on the ranks of a plan; parallelize() uses the plan if the script gives none."""
    from autopar.plan.plan import Plan
    from autopar.runtime.job import start_script

    plan, words = Plan.load(plan_file), [script, *context.args]
    code = start_script(plan, plan_file, words, nodes=nodes, rendezvous=rendezvous, max_restarts=max_restarts)
    raise typer.Exit(code)


Target = Annotated[str, typer.Argument(metavar="PLAN|MODEL", help="A plan file, or a MODEL as in search.")]
VerifiedCluster = Annotated[str | None, typer.Option(metavar="CLUSTER", help="For a MODEL: cpu:1xRANKS.")]
VerifiedBatch = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="For a MODEL: samples of a step; 4 for each rank if not given.")
]
Steps = Annotated[int, typer.Option(min=1, metavar="N", help="AdamW steps to compare.")]
RunTimeout = Annotated[float, typer.Option(min=1, metavar="S", help="Seconds after which the processes are killed.")]
Bisect = Annotated[
    bool, typer.Option("--bisect", help="Look for the first operator that differs even if no result does.")
]
CompareIn = Annotated[
    Literal["fp32", "fp64"], typer.Option(help="fp32 (and fp64 if its limits are exceeded), or only fp64.")
]


def verify(
    target: Target,
    cluster: VerifiedCluster = None,
    pin: Pin = None,
    global_batch: VerifiedBatch = None,
    seq: Tokens = None,
    opaque: Opaque = None,
    model: ModelOfPlan = None,
    steps: Steps = 3,
    run_timeout: RunTimeout = 600,
    bisect: Bisect = False,
    compare_in: CompareIn = "fp32",
    as_json: Json = False,
) -> None:
    """Run a plan on local processes and compare losses, gradients and parameters with one device, on every rank.

    If results differ, the first block and operator with a wrong value or gradient is searched in float64.
    For a MODEL a plan is made first, under the pins and as if communication were free, so that it splits all it can.
    """
    from autopar.plan.plan import PRECISIONS
    from autopar.verification.against_one_device import verify as verify_plan
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
        report = verify_plan(
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
    seq: Tokens = None,
    batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Samples in the traced batch; 2 if not given.")
    ] = None,
    opaque: Opaque = None,
    as_json: Json = False,
) -> None:
    """Trace a model and print its parameters, FLOPs, repeated blocks, operators, and operators without a rule."""
    with progress("tracing the model"):
        from autopar.models.resolve import resolve_model
        from autopar.report.summaries import graph_summary, render_graph

        source = resolve_model(model, batch_size=batch or 2, sequence_length=seq)
        if batch not in (None, source.batch_size):
            raise UsageError(
                f"--batch {batch} does not go with a factory that returns example inputs, here of {source.batch_size} samples",
                fix="Leave --batch out",
            )
        graph = source.trace(opaque or ())
    print_result(as_json, lambda: graph_summary(graph), lambda: render_graph(graph))
