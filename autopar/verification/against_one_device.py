"""Comparison of a plan's program with one device: losses, gradients and parameters on every rank, in fp32 or fp64.

Worker processes on this machine run as ranks over gloo. The reference is the model itself, trained on global batches in one process.
Dropout is off in both, since one device and several ranks drop different elements. Other random numbers are drawn by one device, and each rank
gets its parts of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import UsageError, VerificationError
from autopar.graph.graph import Graph, Op, TensorSpec
from autopar.graph.operator_kinds import draws_values, without_dropout
from autopar.lower.program import lower
from autopar.plan.plan import FP32, FP64, Plan, Precision
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.weights import ModelWeights
from autopar.runtime.world import World
from autopar.tracing.batch import tensors_of
from autopar.tracing.model_with_loss import LossFunction
from autopar.tracing.modes import in_double
from autopar.verification.first_difference import bisect
from autopar.verification.rank_pool import WorkerPool
from autopar.verification.reference import (
    Compared,
    Draws,
    Subject,
    Trained,
    errors,
    give_draws,
    loss_with,
    places_of_draws,
    traced_in_double,
    trained_alone,
    trained_in_parallel,
)
from autopar.verification.results import (
    DOUBLE_CEILING,
    DOUBLE_NUDGES,
    LOSS_TOLERANCE,
    NUDGES,
    Confirmation,
    RankErrors,
    VerifyReport,
)

MAX_RANKS = 32
"""Most processes that are started."""

PRELOAD = (
    "torch",
    "transformers",
    "transformers.modeling_utils",
    "transformers.generation",
    "autopar.api",
    "autopar.verification.compared_models",
    "autopar.verification.against_one_device",
)
"""Modules that workers share with the process that forks them."""


def verify(  # noqa: PLR0913  keywords of the public call
    subject: Subject,
    plan: Plan,
    graph: Graph,
    *,
    steps: int = 3,
    run_timeout_s: float = 300.0,
    pool: WorkerPool | None = None,
    precision: Precision = FP32,
    find: Literal["if it differs", "always", "never"] = "if it differs",
    loss_fn: LossFunction | None = None,
) -> VerifyReport:
    """Run the plan's program on local processes and compare it with one process.

    If an error in fp32 exceeds a tolerance, the same plan runs again in fp64, and one device is compared in fp32 with itself in fp64.

    Args:
        subject: makes the model and its batches.
        plan: the plan; its precision is ignored.
        graph: the traced model that the plan is for.
        steps: steps of AdamW.
        run_timeout_s: the time limit of a run of all ranks, after which processes are killed.
        pool: workers to use; without it a pool is made for this call.
        precision: fp32 or fp64.
        find: when to search for the first operator that differs, in float64 (:mod:`autopar.verification.first_difference`). Plans whose
            data ranks take different numbers of samples are never searched, since parts of tensors are compared by equal cuts.
        loss_fn: ``loss_fn(output, batch)``, with which the graph was traced; every rank imports it by its name.

    Raises:
        UsageError: the plan has more ranks than :data:`MAX_RANKS`.
        AutoparError: a rank failed or exceeded the time limit.
        VerificationError: fp64 is wanted, and the model has other operators in float64; or results differ, and one device does not give the
            same loss twice either.
    """
    if plan.mesh.world_size > MAX_RANKS:
        raise UsageError(
            f"The plan has {plan.mesh.world_size} ranks, and verify starts at most {MAX_RANKS} processes on this machine",
            fix="Verify a smaller plan of the same kind: a MODEL with --cluster cpu:1x4 and pins",
        )
    drawing = frozenset(op.module for op in graph.ops if draws_values(op) and op.module)
    compared = Compared(subject, loss_fn, drawing=drawing)
    graph = in_dtype(_without_dropout(graph), getattr(torch, plan.precision.compute), torch.float32)
    plan = replace(plan, precision=FP32)
    lower(plan, graph)  # an invalid plan is reported here once, and not by every rank
    with WorkerPool(plan.mesh.world_size, preload=PRELOAD) if pool is None else nullcontext(pool) as workers:
        draws: Draws | None = [] if any(map(draws_values, graph.ops)) else None
        run = _Run(plan=plan, steps=steps, timeout_s=run_timeout_s, pool=workers, draws=draws)
        report = (run.in_double if precision == FP64 else run.compared)(compared, graph)
        if find == "never" or (report.passed and find != "always") or plan.data_shares or draws is not None:
            return report
        bisection = bisect(
            compared,
            plan,
            in_dtype(graph, torch.float32, torch.float64),
            [tensors_of(batch) for batch in run.batches(compared)],
            report.reference_losses,
            pool=workers,
            timeout_s=run_timeout_s,
            thorough=find == "always",
        )
    return replace(report, bisection=bisection)


def _nudge(model: nn.Module, seed: int) -> None:
    """Move each parameter by at most one unit in the last place, at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.mul_(1 + signs.to(parameter.dtype) * torch.finfo(parameter.dtype).eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The comparison of a plan in fp32, and what it takes to run it."""

    plan: Plan
    steps: int
    timeout_s: float
    pool: WorkerPool
    draws: Draws | None

    def compared(self, subject: Compared, graph: Graph) -> VerifyReport:
        """Compare in fp32; if an error exceeds a tolerance, in fp64 as well."""
        report, alone = self._report(subject, self.plan, graph)
        if report.is_within:
            return report
        self._check_repeats(subject)
        try:
            double_report, double_reference = self.compared_in_double(subject, graph)
            rows, why = double_report.rows, ""
        except VerificationError as error:
            rows, why, double_reference = (), str(error), self._reference(replace(subject, is_double=True))
        confirmation = self._nudged_double(
            subject, Confirmation(rows=rows, alone=errors(0, alone, double_reference), why=why), double_reference
        )
        if confirmation.agrees or not confirmation.rows:
            confirmation = self._nudged(subject, confirmation, report, double_reference)
        return replace(report, confirmation=confirmation)

    def in_double(self, subject: Compared, graph: Graph) -> VerifyReport:
        """Compare in fp64 alone; if an error exceeds a tolerance by little, one device is compared with itself."""
        report, reference = self.compared_in_double(subject, graph)
        if report.is_within:
            return report
        exact = Confirmation(rows=report.rows, alone=errors(0, reference, reference, FP64))
        moved = self._nudged_double(subject, exact, reference).nudged_double
        return replace(report, confirmation=replace(exact, nudged=moved, nudged_double=moved)) if moved else report

    def _nudged_double(self, subject: Compared, confirmation: Confirmation, double_reference: Trained) -> Confirmation:
        """Add runs of one device in fp64 from moved parameters, where the plan exceeds the tolerances of fp64 by little."""
        if not confirmation.rows or confirmation.error > DOUBLE_CEILING:
            return confirmation
        for seed in range(DOUBLE_NUDGES):
            if confirmation.agrees:
                break
            row = errors(0, self._reference(replace(subject, is_double=True), nudge=seed), double_reference, FP64)
            confirmation = replace(confirmation, nudged_double=(*confirmation.nudged_double, row))
        return confirmation

    def _nudged(
        self, subject: Compared, confirmation: Confirmation, report: VerifyReport, double_reference: Trained
    ) -> Confirmation:
        """Add runs of one device in fp32 from moved parameters, until they explain the errors of the plan or all are done."""
        for seed in range(NUDGES):
            if confirmation.explains(report.rows):
                break
            row = errors(0, self._reference(subject, nudge=seed), double_reference)
            confirmation = replace(confirmation, nudged=(*confirmation.nudged, row))
        return confirmation

    def compared_in_double(self, subject: Compared, graph: Graph) -> tuple[VerifyReport, Trained]:
        """Compare in fp64; return the report and the results of one device.

        Raises:
            VerificationError: the model has other operators in float64.
        """
        double = replace(subject, is_double=True)
        double_graph = traced_in_double(double, graph)
        if double_graph is None:
            raise VerificationError(
                "The model traces to other operators in float64 than in float32",
                where=graph.name,
                fix="Verify in fp32 (--compare-in fp32), or make the model's operators independent of its dtype",
            )
        return self._report(double, replace(self.plan, precision=FP64), _without_dropout(double_graph))

    def _report(self, subject: Compared, plan: Plan, graph: Graph) -> tuple[VerifyReport, Trained]:
        """Return the report of one comparison, and the results of one device, which ranks read from a file."""
        reference = self._reference(subject)
        with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
            path = Path(folder) / "reference.pt"
            torch.save((reference, [[draw.value for draw in step] for step in self.draws or ()]), path)
            places = places_of_draws(graph, self.draws[0], plan.global_batch_size) if self.draws is not None else {}
            job = (_compare, subject, plan, graph, self.batches(subject), str(path), places)
            rows = self.pool.run(*job, size=plan.mesh.world_size, timeout_s=self.timeout_s)
        return VerifyReport(steps=self.steps, reference_losses=reference["losses"], rows=rows), reference

    def batches(self, subject: Compared) -> list[dict[str, Tensor]]:
        """Return the global batch of every step."""
        return [subject.make_batch(self.plan.global_batch_size, seed=step) for step in range(self.steps)]

    def _check_repeats(self, subject: Compared) -> None:
        """Check that one device gives the same loss twice; otherwise nothing can be compared with it.

        Raises:
            VerificationError: the two losses differ.
        """
        batch = self.batches(subject)[0]
        with torch.no_grad():
            models = (subject.build(), subject.build())
            losses = [loss_with(self.draws, 0, model, batch).item() for model in models]
        if abs(losses[0] - losses[1]) > LOSS_TOLERANCE / 10 * abs(losses[0]):
            first, second = (dict(model.named_parameters()) for model in models)
            problem = f"One device gives two losses for one batch: {losses[0]!r} and {losses[1]!r}"
            fix = "Turn off what draws random numbers besides dropout modules: dropout that forward makes, noise that it adds"
            if name := next((name for name in first if not torch.equal(first[name], second[name])), None):
                problem = f"The function that builds the model gives other weights each time: '{name}'"
                fix = "Seed in that function what draws them (random, numpy or another generator); torch's generator is seeded"
            raise VerificationError(problem, fix=fix)

    def _reference(self, subject: Compared, *, nudge: int | None = None) -> Trained:
        """Return the results of one device. With a seed ``nudge`` its parameters are moved first."""
        model, batches = subject.build(), self.batches(subject)  # before in_double: random numbers depend on the dtype
        if nudge is not None:
            _nudge(model, nudge)
        with in_double() if subject.is_double else nullcontext():
            return trained_alone(model, batches, self.draws)


def _without_dropout(graph: Graph) -> Graph:
    """Return the graph with dropout turned off and the same fingerprint."""
    return replace(graph, ops=tuple(without_dropout(op) for op in graph.ops))


def in_dtype(graph: Graph, compute: torch.dtype, wanted: torch.dtype) -> Graph:
    """Return the graph with ``wanted`` in place of the dtype ``compute``, and the same fingerprint."""
    if compute == wanted:
        return graph

    def spec(old: TensorSpec) -> TensorSpec:
        return replace(old, dtype=wanted) if old.dtype == compute else old

    def op(old: Op) -> Op:
        arguments = pytree.tree_map(lambda value: wanted if value is compute else value, (old.args, old.kwargs))
        return replace(old, args=arguments[0], kwargs=arguments[1], outputs=tuple(map(spec, old.outputs)))

    def value(old: Tensor | None) -> Tensor | None:
        return old.to(wanted) if old is not None and old.dtype == compute else old

    return replace(
        graph,
        inputs=tuple(replace(leaf, spec=spec(leaf.spec)) for leaf in graph.inputs),
        parameters=tuple(replace(leaf, spec=spec(leaf.spec)) for leaf in graph.parameters),
        buffers=tuple(replace(leaf, spec=spec(leaf.spec), value=value(leaf.value)) for leaf in graph.buffers),
        prelude=tuple(op(leaf) for leaf in graph.prelude),
        ops=tuple(op(leaf) for leaf in graph.ops),
    )


def _compare(
    subject: Compared,
    plan: Plan,
    graph: Graph,
    batches: Sequence[Mapping[str, Tensor]],
    path: str,
    places: Mapping[str, int],
) -> RankErrors:
    """Train one rank's part, and return its errors against the reference in the file at ``path``, with the same random numbers."""
    world = World(plan.mesh, "cpu")
    reference, draws = torch.load(path, mmap=True)
    program = lower(plan, graph, rank=world.rank)
    if places:
        give_draws(program, world.rank, draws, places)
    parallel = ParallelModel(program, world, ModelWeights(subject.build(), 0))
    with in_double() if subject.is_double else nullcontext():  # opaque regions run the user's code
        results = trained_in_parallel(parallel, batches)
    return errors(dist.get_rank(), results, reference, plan.precision)
