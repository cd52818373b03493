"""``autopar trace`` and ``autopar verify``: commands that look into a model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.commands.estimate import model_of, sequence_of
from autopar.cli.console import print_json, print_text, progress
from autopar.cli.options import Json, Model, Opaque, Pin, Sequence_, is_factory, parse_cluster, split_pins
from autopar.errors import UsageError

if TYPE_CHECKING:
    import torch

    from autopar.graph.graph import Graph
    from autopar.hardware.cluster import Cluster
    from autopar.hardware.link import Link
    from autopar.models.resolve import ModelSource
    from autopar.plan.plan import Plan

MAX_RANKS = 32
"""Processes that ``verify`` starts at most."""

DEFAULT_TOKENS, DEFAULT_SAMPLES = 32, 4
"""Length of a sample and samples a rank of ``verify``: what is compared does not get righter with more."""

_NOISE = 0.02
"""Standard deviation of what is added to each parameter before ``verify``."""


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
        from autopar.report.traced_model import graph_summary, render_graph

        graph = resolve_model(model, batch_size=batch, sequence_length=seq).trace(opaque or ())
    if as_json:
        print_json(graph_summary(graph))
    else:
        print_text(render_graph(graph))


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
        raise UsageError("verify compares in fp32 or fp64", value=precision, place="--precision")
    if Path(target).suffix == ".json" or _is_file(target):
        plan, subject, graph = _from_file(Path(target), model)
    else:
        plan, subject, graph = _from_model(target, cluster, split_pins(pin or ()), global_batch, seq, opaque or [])
    if plan.mesh.world_size > MAX_RANKS:
        raise UsageError(
            f"verify starts a process for each rank on this machine, at most {MAX_RANKS}",
            value=plan.mesh.world_size,
            place=target,
            remedy="verify a smaller plan of the same kind: a MODEL with --cluster cpu:1x4 and pins",
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


@dataclass(frozen=True)
class VerifiedModel:
    """A model whose batches hold only the inputs that were traced; every process makes the same one.

    With ``masked`` the padding mask is one of them; labels are ignored where a sample ends in any case.
    """

    source: ModelSource
    masked: bool

    def build(self) -> torch.nn.Module:
        """The model on CPU; no parameter is left at zero or one, where a wrong sum or factor would not show."""
        import torch

        model = self.source.build()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator) * _NOISE
                parameter.add_(noise.to(parameter.dtype))
        return model

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = False) -> dict[str, torch.Tensor]:
        """Random inputs."""
        batch = self.source.make_batch(batch_size, seed=seed, padded=padded)
        names = batch if self.masked else self.source.example_inputs
        return {name: batch[name] for name in names if name in batch}

    def trace(
        self, *, global_batch_size: int | None = None, opaque: Sequence[str] = (), as_trained: bool = False
    ) -> Graph:
        """The graph on such batches.

        Args:
            global_batch_size: at which the model is traced where samples meet; without it they must be apart.
            opaque: modules that are not looked into.
            as_trained: with the noise that training draws, as plans are made for; otherwise a model that draws any
                is traced without dropping anything: what two processes draw cannot be compared, and one device, in
                float64 as well, runs without.
        """
        from autopar.graph.random import draws_random
        from autopar.models.graph_for_plan import for_batch
        from autopar.models.resolve import without_dropout
        from autopar.planner.request import samples_apart
        from autopar.tracing.trace import trace as trace_model

        model = self.source.model

        def trace_at(samples: int | None) -> Graph:
            batch = self.make_batch(samples or self.source.batch_size, seed=0, padded=True)
            example = {name: value.to("meta") for name, value in batch.items()}
            options: dict[str, Any] = {"name": self.source.name, "opaque": opaque, "exact": samples is not None}
            return trace_model(model, (), example, **options)

        def trace_one() -> Graph:
            return (
                trace_at(None) if global_batch_size is None else for_batch(trace_at, global_batch_size, samples_apart)
            )

        graph = trace_one()
        if as_trained or not any(draws_random(op.target) or op.target == "autopar.dropout" for op in graph.ops):
            return graph
        model = copy.deepcopy(self.source.model)
        without_dropout(model)
        return trace_one()


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


def with_free_links(cluster: Cluster) -> Cluster:
    """The same devices, joined by links that take no time worth counting."""

    def free(link: Link) -> Link:
        return replace(
            link, bandwidth_bytes_per_s=1e18, latency_s=0.0, half_bandwidth_bytes=0.0, provenance="taken as free"
        )

    groups = (replace(group, intra_node=free(group.intra_node), nic=free(group.nic)) for group in cluster.groups)
    tiers = (replace(tier, uplink=free(tier.uplink)) for tier in cluster.tiers)
    return replace(cluster, groups=tuple(groups), tiers=tuple(tiers))


def _from_model(
    name: str, cluster: str | None, pins: list[str], global_batch: int | None, seq: int | None, opaque: list[str]
) -> tuple[Plan, VerifiedModel, Graph]:
    """The best plan for the model traced with a padding mask, under the pins.

    Links count as free: a small model on slow links is best not split at all, which would verify nothing.
    """
    from autopar.models.resolve import resolve_model

    if cluster is None:
        raise UsageError(
            "verify takes a plan file, or a MODEL and --cluster",
            value=repr(name),
            remedy="write for example --cluster cpu:1x4",
        )
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
