"""A MODEL of the command line, or a plan's file, as what is compared: a plan, a model with its batches, and their graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from autopar.errors import InternalError, UsageError
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import with_free_links
from autopar.models.graph_cache import is_factory, model_of, sequence_of
from autopar.models.resolve import resolve_model
from autopar.plan.check import check_model
from autopar.plan.plan import Plan
from autopar.planner.planner import Planner
from autopar.planner.space.pins import Pins
from autopar.planner.task import Limits, Progress, task_of
from autopar.request import Request
from autopar.verification.verified_model import VerifiedModel

DEFAULT_TOKENS, DEFAULT_SAMPLES = 32, 4
"""Length of a sample and samples a rank: what is compared does not get righter with more."""


def is_plan(text: str) -> bool:
    """Whether PLAN or MODEL is a file; the description of a model may be longer than names can be."""
    try:
        return Path(text).suffix == ".json" or Path(text).is_file()
    except OSError:
        return False


def of_file(path: Path, model: str | None) -> tuple[Plan, VerifiedModel, Graph]:
    """A plan and the model that it is for, traced as the plan was: with or without a padding mask, in its dtype.

    Args:
        model: where the plan does not say it.

    Raises:
        PlanError: the plan is for another model.
    """
    plan = Plan.load(path)
    name = model or model_of(plan, path)
    sequence = sequence_of(plan, name)
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
    raise InternalError("A plan is for a model that has another fingerprint")


def of_model(
    name: str,
    cluster: Cluster | None,
    *,
    pins: Sequence[str],
    global_batch_size: int | None,
    sequence: int | None,
    opaque: Sequence[str],
    progress: Progress | None = None,
) -> tuple[Plan, VerifiedModel, Graph]:
    """The best plan for the model traced with a padding mask, under the pins.

    Links count as free: a small model on slow links is best not split at all, which would verify nothing.
    """
    if cluster is None:
        raise UsageError(
            f"No cluster to verify '{name}' on, and no plan file of that name",
            fix="Give a plan file, or write --cluster cpu:1x4",
        )
    free = with_free_links(cluster)
    opaque = [*opaque, *Pins.parse(pins).opaque]
    source = resolve_model(name, sequence_length=sequence)
    tokens = source.example_inputs.get("input_ids")
    if sequence is None and not is_factory(name) and tokens is not None and tokens.shape[1] > DEFAULT_TOKENS:
        source = resolve_model(name, sequence_length=DEFAULT_TOKENS)
    subject = VerifiedModel(source, masked=True)
    samples = global_batch_size or DEFAULT_SAMPLES * free.world_size
    graph = subject.trace(global_batch_size=samples, opaque=opaque)
    request = Request(cluster=free, global_batch_size=samples, opaque=opaque, pins=pins)
    plan = Planner(task_of(graph, request, progress)).search(limits=Limits(), progress=progress)
    return plan, subject, graph
