"""Compares a plan's program with one device: losses, gradients and parameters, on every rank, in fp32.

Worker processes on this machine play the ranks over gloo. The reference is the model itself, run
on the whole batch in one process. Dropout is off in both: one device and many draw other numbers.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import VerificationError
from autopar.graph.ir import Argument, Graph, Op, TensorSpec
from autopar.graph.trace import pick_loss
from autopar.lower.program import lower
from autopar.plan import FP32, Plan
from autopar.runtime.bisect import Bisection, bisect
from autopar.runtime.materialize import ModelWeights
from autopar.runtime.parallel import Parallel
from autopar.runtime.workers import WorkerPool
from autopar.runtime.world import World

LOSS_TOLERANCE = 1e-5
TENSOR_TOLERANCE = 1e-4
LEARNING_RATE = 1e-3
ADAM_EPSILON = 1e-5
"""Larger than rounding noise: a gradient that is zero but for rounding (of a key's bias) must not become a step."""

_DROPOUT_ARGUMENT = {"autopar.dropout": 1, "aten.scaled_dot_product_attention.default": 4}
"""Position of the probability among the arguments."""

PRELOAD = ("torch", "transformers", "autopar.runtime.verify")


class Subject(Protocol):
    """What is verified; picklable, the same in every process."""

    def build(self) -> nn.Module:
        """The model on CPU with real weights, without dropout, always the same ones."""

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = False) -> dict[str, Tensor]:
        """Inputs by name; ``padded``: samples of different lengths, with ignored labels where they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankErrors:
    """The largest relative errors (largest difference over largest reference, by tensor) on one rank."""

    rank: int
    losses: tuple[float, ...]
    loss: float
    gradient: float
    gradient_name: str
    parameter: float
    parameter_name: str

    @property
    def passed(self) -> bool:
        """Within the tolerances."""
        return self.loss <= LOSS_TOLERANCE and max(self.gradient, self.parameter) <= TENSOR_TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """A row for each rank; ``reference_losses`` are those of one device; ``bisection``: where it differs, if sought."""

    steps: int
    reference_losses: tuple[float, ...]
    rows: tuple[RankErrors, ...]
    bisection: Bisection | None = None

    @property
    def passed(self) -> bool:
        """Every rank is within the tolerances."""
        return all(row.passed for row in self.rows)

    def check(self) -> None:
        """Nothing when all is well.

        Raises:
            VerificationError: names the worst rank and tensor.
        """
        for row in self.rows:
            if row.loss > LOSS_TOLERANCE:
                raise VerificationError(
                    f"losses agree with one device within {LOSS_TOLERANCE:g}",
                    value=f"{row.loss:.2e}: {row.losses} for {self.reference_losses}",
                    place=self._place(row),
                )
        worst = max(self.rows, key=lambda row: max(row.gradient, row.parameter))
        for what, error, name in (
            ("gradients of the first step", worst.gradient, worst.gradient_name),
            (f"parameters after {self.steps} AdamW steps", worst.parameter, worst.parameter_name),
        ):
            if error > TENSOR_TOLERANCE:
                raise VerificationError(
                    f"{what} agree with one device within {TENSOR_TOLERANCE:g}",
                    value=f"{error:.2e} for {name}",
                    place=self._place(worst),
                )

    def _place(self, row: RankErrors) -> str:
        """The rank, and the first operator that differs where it was found."""
        first = self.bisection.difference if self.bisection is not None else None
        return f"rank {row.rank}" + (f", first in {first.place}" if first is not None and first.place else "")


def verify(
    subject: Subject,
    plan: Plan,
    graph: Graph,
    *,
    steps: int = 3,
    padded: bool = True,
    timeout_s: float = 300.0,
    pool: WorkerPool | None = None,
    find: Literal["if it differs", "always", "never"] = "if it differs",
) -> VerifyReport:
    """Runs the plan's program on local processes and compares it with one process.

    Args:
        subject: makes the model and its batches.
        plan: its precision is taken as fp32.
        graph: the traced model, for which the plan is.
        steps: of AdamW.
        timeout_s: for all ranks together; processes are killed after it.
        pool: workers to use; otherwise made for this call.
        find: when the first operator that differs is sought, in float64: see :mod:`autopar.runtime.bisect`.

    Raises:
        AutoparError: a rank failed, or the time is up.
    """
    graph = in_dtype(_without_dropout(graph), getattr(torch, plan.precision.compute), torch.float32)
    plan = replace(plan, precision=FP32)
    lower(plan, graph)  # what is wrong with the plan is said here once, and not by every rank
    batches = [subject.make_batch(plan.global_batch_size, seed=step, padded=padded) for step in range(steps)]
    with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
        path = Path(folder) / "reference.pt"
        losses = _save_reference(subject.build(), batches, path)
        job = (_compare, subject, plan, graph, batches, str(path), losses)
        with nullcontext(pool) if pool is not None else WorkerPool(plan.mesh.world_size, preload=PRELOAD) as workers:
            rows = workers.run(*job, size=plan.mesh.world_size, timeout_s=timeout_s)
            report = VerifyReport(steps=steps, reference_losses=losses, rows=rows)
            if find == "never" or (report.passed and find != "always"):
                return report
            graph = in_dtype(graph, torch.float32, torch.float64)
            is_thorough = find == "always"
            found = bisect(
                subject, plan, graph, batches, losses, pool=workers, timeout_s=timeout_s, thorough=is_thorough
            )
    return replace(report, bisection=found)


def adamw(parameters: Any) -> torch.optim.AdamW:
    """The optimizer of both sides."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=ADAM_EPSILON)


def loss_of(output: Any) -> Tensor:
    """The loss in what a model returns: itself, its ``loss``, or its first scalar, as a trace takes it."""
    return pick_loss(output, "verify")


def _without_dropout(graph: Graph) -> Graph:
    """The same graph, fingerprint included, that drops nothing.

    Raises:
        VerificationError: it draws random numbers for something else, which no two runs draw alike.
    """
    for op in graph.ops:
        if op.target == "autopar.noise":
            raise VerificationError(
                "what is compared draws no random numbers but those of dropout, which is off",
                value="noise",
                place=op.source or op.module or op.name,
                remedy="verify the MODEL instead of the plan, or one without stochastic depth (drop_path_rate=0.0)",
            )
    return replace(graph, ops=tuple(_muted(op) for op in graph.ops))


def in_dtype(graph: Graph, compute: torch.dtype, wanted: torch.dtype) -> Graph:
    """The same graph, fingerprint included, with ``wanted`` wherever it has the dtype ``compute``."""
    if compute == wanted:
        return graph

    def spec(old: TensorSpec) -> TensorSpec:
        return replace(old, dtype=wanted) if old.dtype == compute else old

    def argument(old: Argument) -> Argument:
        if isinstance(old, tuple):
            return tuple(argument(item) for item in old)
        return wanted if old is compute else old

    def op(old: Op) -> Op:
        kwargs = tuple((key, argument(value)) for key, value in old.kwargs)
        outputs = tuple(spec(output) for output in old.outputs)
        return replace(old, args=tuple(argument(a) for a in old.args), kwargs=kwargs, outputs=outputs)

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


def _muted(op: Op) -> Op:
    position = _DROPOUT_ARGUMENT.get(op.target)
    if position is None:
        return op
    args = tuple(0.0 if i == position else arg for i, arg in enumerate(op.args))
    return replace(op, args=args, kwargs=tuple((k, 0.0 if k == "dropout_p" else v) for k, v in op.kwargs))


def _save_reference(model: nn.Module, batches: Sequence[Mapping[str, Tensor]], path: Path) -> tuple[float, ...]:
    optimizer = adamw(model.parameters())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(model(**batch))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in _named(model) if p.grad is not None}
        optimizer.step()
    trained = {name: p.detach() for name, p in _named(model) if p.grad is not None}
    trained |= {name: new for name, new in model.named_buffers() if not torch.equal(new, buffers[name])}
    torch.save({"gradients": gradients, "parameters": trained}, path)
    return tuple(losses)


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def _compare(
    subject: Subject,
    plan: Plan,
    graph: Graph,
    batches: Sequence[Mapping[str, Tensor]],
    path: str,
    losses: Sequence[float],
) -> RankErrors:
    """One rank's side."""
    world = World(plan.mesh, "cpu")
    parallel = Parallel(lower(plan, graph), world, ModelWeights(subject.build(), 0))
    optimizer = adamw(parallel.parameters())
    found: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        found.append(parallel.train_step(batch).item())
        if step == 0:
            gradients = parallel.full_gradients()
        optimizer.step()
    reference = torch.load(path, mmap=True)
    gradient_name, gradient = _worst(gradients, reference["gradients"])
    parameter_name, parameter = _worst(parallel.full_state_dict(), reference["parameters"])
    return RankErrors(
        rank=dist.get_rank(),
        losses=tuple(found),
        loss=max(_relative(abs(a - b), abs(b)) for a, b in zip(found, losses, strict=True)),
        gradient=gradient,
        gradient_name=gradient_name,
        parameter=parameter,
        parameter_name=parameter_name,
    )


def _worst(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[str, float]:
    """The tensor with the largest relative error; one that is missing counts as infinitely wrong.

    A tensor that is nothing but rounding beside the others (1e-6 of the largest) is measured against that.
    """
    floor = 1e-6 * max((float(tensor.abs().max()) for tensor in reference.values()), default=0.0)
    errors = {
        name: _relative(float((found[name] - tensor).abs().max()), max(float(tensor.abs().max()), floor))
        if name in found
        else float("inf")
        for name, tensor in reference.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return worst, errors[worst]


def _relative(difference: float, size: float) -> float:
    """Their ratio; infinity for what is not a number."""
    if difference == 0.0:
        return 0.0
    ratio = difference / size if size else float("inf")
    return float("inf") if math.isnan(ratio) else ratio
