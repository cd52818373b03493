"""``autopar verify``: a plan, or the best plan for a model, against one device."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.console import print_json, print_text, progress
from autopar.cli.make_plan import model_of, sequence_of
from autopar.cli.options import Json, Opaque, Pin, Sequence_, is_factory, parse_cluster, split_pins
from autopar.errors import UsageError

if TYPE_CHECKING:
    from autopar.graph.graph import Graph
    from autopar.plan.plan import Plan
    from autopar.verification.verified_model import VerifiedModel

MAX_RANKS = 32
"""Processes that ``verify`` starts at most."""

DEFAULT_TOKENS, DEFAULT_SAMPLES = 32, 4
"""Length of a sample and samples a rank of ``verify``: what is compared does not get righter with more."""


Target = Annotated[str, typer.Argument(metavar="PLAN|MODEL", help="A plan file, or a MODEL as in search.")]
VerifiedCluster = Annotated[str | None, typer.Option("--cluster", metavar="CLUSTER", help="For a MODEL: cpu:1xRANKS.")]
VerifiedBatch = Annotated[
    int | None, typer.Option("--global-batch", min=1, metavar="N", help="For a MODEL: default 4 samples a rank.")
]
ModelOfPlan = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="For a PLAN made from a model without a name.")
]
Steps = Annotated[int, typer.Option("--steps", min=1, metavar="N", help="AdamW steps to compare.")]
Timeout = Annotated[float, typer.Option("--timeout", min=1, metavar="S", help="Processes are killed after it.")]
Bisect = Annotated[
    bool, typer.Option("--bisect", help="Look for the first operator that differs even when all is well.")
]
ComparedIn = Annotated[str, typer.Option("--precision", help="fp32 (past its limits fp64 as well) or fp64 alone.")]


def verify(
    target: Target,
    cluster: VerifiedCluster = None,
    pin: Pin = None,
    global_batch: VerifiedBatch = None,
    seq: Sequence_ = None,
    opaque: Opaque = None,
    model: ModelOfPlan = None,
    steps: Steps = 3,
    timeout: Timeout = 600,
    bisect: Bisect = False,
    precision: ComparedIn = "fp32",
    as_json: Json = False,
) -> None:
    """Run a plan on local processes and compare losses, gradients and parameters with one device, on every rank.

    What differs is followed, in float64, to the first block and operator whose value or gradient is wrong.
    For a MODEL a plan is made first, under the pins and as if links were free, so that it splits what it can.
    """
    from autopar.verification.as_text import render_verification, verification

    if precision not in ("fp32", "fp64"):
        raise UsageError(f"Cannot verify in '{precision}'", where="--precision", fix="Choose fp32 or fp64")
    if Path(target).suffix == ".json" or _is_file(target):
        plan, subject, graph = _from_file(Path(target), model)
    else:
        plan, subject, graph = _from_model(target, cluster, split_pins(pin or ()), global_batch, seq, opaque or [])
    if plan.mesh.world_size > MAX_RANKS:
        raise UsageError(
            f"The plan has {plan.mesh.world_size} ranks, and verify starts at most {MAX_RANKS} processes on this machine",
            where=target,
            fix="Verify a smaller plan of the same kind: a MODEL with --cluster cpu:1x4 and pins",
        )
    from autopar.plan.plan import FP32, FP64
    from autopar.verification.against_one_device import verify as compare

    with progress(f"running {plan.mesh.world_size} ranks"):
        report = compare(
            subject,
            plan,
            graph,
            steps=steps,
            timeout_s=timeout,
            precision=FP64 if precision == "fp64" else FP32,
            find="always" if bisect else "if it differs",
        )
    if as_json:
        print_json({"mesh": str(plan.mesh), **verification(report)})
    else:
        print_text(render_verification(report, plan))
    report.check()


def _is_file(text: str) -> bool:
    """Whether a file has that name; the description of a model may be longer than names can be."""
    try:
        return Path(text).is_file()
    except OSError:
        return False


def _from_file(path: Path, model: str | None) -> tuple[Plan, VerifiedModel, Graph]:
    """A plan and the model that it is for, traced as the plan was: with or without a padding mask, in its dtype.

    Raises:
        PlanError: the plan is for another model.
    """
    import torch

    from autopar.models.resolve import resolve_model
    from autopar.plan.check import check_model
    from autopar.plan.file import load_plan
    from autopar.verification.verified_model import VerifiedModel

    plan = load_plan(path)
    name = model or model_of(plan, path)
    sequence = sequence_of(plan, name)
    with progress("tracing the model"):
        source = resolve_model(name, sequence_length=sequence)
        traced = resolve_model(name, sequence_length=sequence, dtype=getattr(torch, plan.precision.compute))
        graphs = {
            masked: VerifiedModel(traced, masked).trace(
                global_batch_size=plan.global_batch_size, opaque=plan.opaque, as_trained=True
            )
            for masked in (False, True)
        }
    for masked, graph in graphs.items():
        if graph.fingerprint == plan.model.fingerprint:
            return plan, VerifiedModel(source, masked), graph
    check_model(plan, graphs[False].name, graphs[False].fingerprint, place=str(path))
    raise AssertionError("no fingerprint is equal")


def _from_model(
    name: str, cluster: str | None, pins: list[str], global_batch: int | None, seq: int | None, opaque: list[str]
) -> tuple[Plan, VerifiedModel, Graph]:
    """The best plan for the model traced with a padding mask, under the pins.

    Links count as free: a small model on slow links is best not split at all, which would verify nothing.
    """
    from autopar.models.resolve import resolve_model

    if cluster is None:
        raise UsageError(
            f"No cluster to verify '{name}' on, and no plan file of that name",
            fix="Give a plan file, or write --cluster cpu:1x4",
        )
    from autopar.hardware.scale import with_free_links
    from autopar.verification.verified_model import VerifiedModel

    found = with_free_links(parse_cluster(cluster))
    with progress("tracing the model") as advance:
        from autopar import api
        from autopar.planner.space.pins import Pins

        opaque = [*opaque, *Pins.parse(pins).opaque]
        source = resolve_model(name, sequence_length=seq)
        tokens = source.example_inputs.get("input_ids")
        if seq is None and not is_factory(name) and tokens is not None and tokens.shape[1] > DEFAULT_TOKENS:
            source = resolve_model(name, sequence_length=DEFAULT_TOKENS)
        subject = VerifiedModel(source, masked=True)
        samples = global_batch or DEFAULT_SAMPLES * found.world_size
        graph = subject.trace(global_batch_size=samples, opaque=opaque)
        plan = api.search(
            graph,
            cluster=found,
            global_batch_size=samples,
            opaque=opaque,
            pins=pins,
            progress=advance,
        )
    return plan, subject, graph
