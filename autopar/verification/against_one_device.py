"""Compares a plan's program with one device: losses, gradients and parameters, on every rank, in fp32 or fp64.

Worker processes on this machine play the ranks over gloo. The reference is the model itself, run
on the whole batch in one process. Dropout is off in both: one device and many draw other numbers.
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
from autopar.graph.operator_kinds import DROPOUT_ARGUMENT, draws_random, without_dropout
from autopar.lower.program import lower
from autopar.plan.plan import FP32, FP64, Plan, Precision
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.weights import ModelWeights
from autopar.runtime.world import World
from autopar.tracing.batch import tensors_of
from autopar.tracing.modes import in_double
from autopar.tracing.trace import LossFunction
from autopar.verification.first_difference import bisect
from autopar.verification.rank_pool import WorkerPool
from autopar.verification.reference import (
    Compared,
    Subject,
    Trained,
    errors,
    loss_of,
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
"""Processes that are started at most."""

PRELOAD = (
    "torch",
    "transformers",
    "transformers.modeling_utils",
    "transformers.generation",
    "autopar.api",
    "autopar.verification.compared_models",
    "autopar.verification.against_one_device",
)


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
    """Runs the plan's program on local processes and compares it with one process.

    Where fp32 is past a limit the same plan runs again in fp64, and one device alone is compared between the two.

    Args:
        subject: makes the model and its batches.
        plan: its own precision does not count.
        graph: the traced model, for which the plan is.
        steps: of AdamW.
        run_timeout_s: for all ranks together; processes are killed after it.
        pool: workers to use; otherwise made for this call.
        precision: fp32, or fp64.
        find: when the first operator that differs is sought, in float64: see :mod:`autopar.verification.first_difference`. Never where data
            ranks take different numbers of samples: parts of tensors are compared by equal cuts.
        loss_fn: ``loss_fn(output, batch)``, with which the graph was traced; every rank imports it by its name.

    Raises:
        UsageError: the plan has more ranks than this machine is asked to play.
        AutoparError: a rank failed, or the time is up.
        VerificationError: fp64 is asked for, and the model in float64 is another one; or results differ, and those of
            one device differ as well from one time to the next.
    """
    _check_size(plan)
    compared = Compared(subject, loss_fn)
    graph = in_dtype(_without_dropout(graph), getattr(torch, plan.precision.compute), torch.float32)
    plan = replace(plan, precision=FP32)
    lower(plan, graph)  # what is wrong with the plan is said here once, and not by every rank
    with WorkerPool(plan.mesh.world_size, preload=PRELOAD) if pool is None else nullcontext(pool) as workers:
        run = _Run(plan=plan, steps=steps, timeout_s=run_timeout_s, pool=workers)
        report = run.compared_in_double(compared, graph)[0] if precision == FP64 else run.compared(compared, graph)
        if find == "never" or (report.passed and find != "always") or plan.data_shares:
            return report
        found = bisect(
            compared,
            plan,
            in_dtype(graph, torch.float32, torch.float64),
            [tensors_of(batch) for batch in run.batches(compared)],
            report.reference_losses,
            pool=workers,
            timeout_s=run_timeout_s,
            thorough=find == "always",
        )
    return replace(report, bisection=found)


def _check_size(plan: Plan) -> None:
    if plan.mesh.world_size > MAX_RANKS:
        raise UsageError(
            f"The plan has {plan.mesh.world_size} ranks, and verify starts at most {MAX_RANKS} processes on this machine",
            fix="Verify a smaller plan of the same kind: a MODEL with --cluster cpu:1x4 and pins",
        )


def _nudge(model: nn.Module, seed: int) -> None:
    """Moves parameters by at most one unit in the last place, at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            moves = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.mul_(1 + moves.to(parameter.dtype) * torch.finfo(parameter.dtype).eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """How a plan in fp32 is compared."""

    plan: Plan
    steps: int
    timeout_s: float
    pool: WorkerPool

    def compared(self, subject: Compared, graph: Graph) -> VerifyReport:
        """In fp32; past the limits, in fp64 as well."""
        report, alone = self._report(subject, self.plan, graph)
        if report.is_within:
            return report
        self._check_repeats(subject)
        try:
            double, truth = self.compared_in_double(subject, graph)
            rows, why = double.rows, ""
        except VerificationError as error:
            rows, why, truth = (), str(error), self._reference(replace(subject, is_double=True))
        confirmation = self._nudged_double(
            subject, Confirmation(rows=rows, alone=errors(0, alone, truth), why=why), truth
        )
        if confirmation.agrees:
            confirmation = self._nudged(subject, confirmation, report, truth)
        return replace(report, confirmation=confirmation)

    def _nudged_double(self, subject: Compared, confirmation: Confirmation, truth: Trained) -> Confirmation:
        """With further runs of one device in fp64, where the plan is a little past the tolerances of fp64."""
        if not confirmation.rows or confirmation.error > DOUBLE_CEILING:
            return confirmation
        for seed in range(DOUBLE_NUDGES):
            if confirmation.agrees:
                break
            own = errors(0, self._reference(replace(subject, is_double=True), nudge=seed), truth, FP64)
            confirmation = replace(confirmation, nudged_double=(*confirmation.nudged_double, own))
        return confirmation

    def _nudged(
        self, subject: Compared, confirmation: Confirmation, report: VerifyReport, truth: Trained
    ) -> Confirmation:
        """With as many further runs of one device as it takes to explain what the plan is off by, or all of them."""
        for seed in range(NUDGES):
            if confirmation.is_rounding(report.rows):
                break
            own = errors(0, self._reference(subject, nudge=seed), truth)
            confirmation = replace(confirmation, nudged=(*confirmation.nudged, own))
        return confirmation

    def compared_in_double(self, subject: Compared, graph: Graph) -> tuple[VerifyReport, Trained]:
        """In fp64, and what one device came to."""
        double = replace(subject, is_double=True)
        wide = traced_in_double(double, graph)
        if wide is None:
            raise VerificationError(
                "The model traces to other operators in float64 than in float32",
                where=graph.name,
                fix="Verify in fp32 (--compare-in fp32), or make the model's operators independent of its dtype",
            )
        return self._report(double, replace(self.plan, precision=FP64), _without_dropout(wide))

    def _report(self, subject: Compared, plan: Plan, graph: Graph) -> tuple[VerifyReport, Trained]:
        reference = self._reference(subject)
        with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
            path = Path(folder) / "reference.pt"
            torch.save(reference, path)
            job = (_compare, subject, plan, graph, self.batches(subject), str(path))
            rows = self.pool.run(*job, size=plan.mesh.world_size, timeout_s=self.timeout_s)
        return VerifyReport(steps=self.steps, reference_losses=reference["losses"], rows=rows), reference

    def batches(self, subject: Compared) -> list[dict[str, Tensor]]:
        """Of every step."""
        return [subject.make_batch(self.plan.global_batch_size, seed=step) for step in range(self.steps)]

    def _check_repeats(self, subject: Compared) -> None:
        """One device gives the same loss twice, or nothing can be compared with it."""
        batch = self.batches(subject)[0]
        with torch.no_grad():
            losses = [loss_of(model(**batch)).item() for model in (subject.build(), subject.build())]
        if abs(losses[0] - losses[1]) > LOSS_TOLERANCE / 10 * abs(losses[0]):
            raise VerificationError(
                f"One device gives two losses for one batch: {losses[0]!r} and {losses[1]!r}",
                fix="Turn off what draws random numbers besides dropout modules: dropout that forward makes, noise that it adds",
            )

    def _reference(self, subject: Compared, *, nudge: int | None = None) -> Trained:
        """What one device comes to; ``nudge``: the seed by which its parameters are moved before."""
        model, batches = subject.build(), self.batches(subject)  # outside: random numbers depend on the dtype
        if nudge is not None:
            _nudge(model, nudge)
        with in_double() if subject.is_double else nullcontext():
            return trained_alone(model, batches)


def _without_dropout(graph: Graph) -> Graph:
    """The same graph, fingerprint included, that drops nothing.

    Raises:
        VerificationError: it draws other random numbers besides.
    """
    drawn = next((op for op in graph.ops if draws_random(op.target) and op.target not in DROPOUT_ARGUMENT), None)
    if drawn is not None:
        raise VerificationError(
            f"The model draws random numbers besides dropout ({drawn.target}), which differ on one device and many",
            where=drawn.source or drawn.module or drawn.name,
            fix="Turn it off in the model that is verified",
        )
    return replace(graph, ops=tuple(without_dropout(op) for op in graph.ops))


def in_dtype(graph: Graph, compute: torch.dtype, wanted: torch.dtype) -> Graph:
    """The same graph, fingerprint included, with ``wanted`` wherever it has the dtype ``compute``."""
    if compute == wanted:
        return graph

    def spec(old: TensorSpec) -> TensorSpec:
        return replace(old, dtype=wanted) if old.dtype == compute else old

    def op(old: Op) -> Op:
        given = pytree.tree_map(lambda value: wanted if value is compute else value, (old.args, old.kwargs))
        return replace(old, args=given[0], kwargs=given[1], outputs=tuple(map(spec, old.outputs)))

    def value(old: Tensor | None) -> Tensor | None:
        return old.to(wanted) if old is not None and old.dtype == compute else old

    return replace(
        graph,
        inputs=tuple(replace(one, spec=spec(one.spec)) for one in graph.inputs),
        parameters=tuple(replace(one, spec=spec(one.spec)) for one in graph.parameters),
        buffers=tuple(replace(one, spec=spec(one.spec), value=value(one.value)) for one in graph.buffers),
        prelude=tuple(op(one) for one in graph.prelude),
        ops=tuple(op(one) for one in graph.ops),
    )


def _compare(
    subject: Compared,
    plan: Plan,
    graph: Graph,
    batches: Sequence[Mapping[str, Tensor]],
    path: str,
) -> RankErrors:
    """One rank's side."""
    world = World(plan.mesh, "cpu")
    parallel = ParallelModel(lower(plan, graph, rank=world.rank), world, ModelWeights(subject.build(), 0))
    with in_double() if subject.is_double else nullcontext():  # regions run as the user wrote them
        mine = trained_in_parallel(parallel, batches)
    return errors(dist.get_rank(), mine, torch.load(path, mmap=True), plan.precision)
