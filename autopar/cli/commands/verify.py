"""``autopar verify``: a plan, or the best plan for a model, against one device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from autopar.cli.console import print_json, print_text, progress
from autopar.cli.options import Json, Opaque, Pin, Sequence_, parse_cluster, split_pins

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
    from autopar.verification.against_one_device import check_size
    from autopar.verification.against_one_device import verify as compare
    from autopar.verification.as_text import render_verification, verification
    from autopar.verification.described_model import is_plan, of_file, of_model

    with progress("tracing the model") as advance:
        if is_plan(target):
            plan, subject, graph = of_file(Path(target), model)
        else:
            plan, subject, graph = of_model(
                target, None if cluster is None else parse_cluster(cluster), pins=split_pins(pin or ()),
                global_batch_size=global_batch, sequence=seq, opaque=opaque or (), progress=advance,
            )  # fmt: skip
    check_size(plan)
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
    if as_json:
        print_json({"mesh": str(plan.mesh), **verification(report)})
    else:
        print_text(render_verification(report, plan))
    report.check()
