"""Search for the first place where a plan's program differs from one device: the block, then the operator in it.

Both sides run one step in float64, where errors exceed rounding by far. In a first run each rank records the values that pass between
blocks and the gradients that come back; they are compared with those of one device as their types say. Forward order finds the first wrong
value, whose inputs are right. If all values are right, backward order finds the first wrong gradient. A second run records every operator
of that block. A fault may also lie between operators: in what a stage receives, in the sum of a parameter's gradient, or in the step of the
optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autopar.graph.graph import Graph, Op
from autopar.lower.program import lower
from autopar.plan.plan import FP64, Plan
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.weights import ModelWeights
from autopar.runtime.world import World
from autopar.verification.rank_pool import WorkerPool
from autopar.verification.record import PRELUDE, OneDevice, Tape, Watch, attach
from autopar.verification.reference import Subject, adamw, widened
from autopar.verification.slices import TOLERANCE, Mismatch, largest
from autopar.verification.walk import Spot, Trail

LOSS_TOLERANCE = 1e-6
"""Relative error up to which losses of the global batch agree, which a step returns in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference in terms of the model and of the plan. Fields that do not apply are empty.

    Attributes:
        step: the training step, from 1 on.
        what: what is wrong.
        while_right: what agrees around it.
        mismatch: ranks, error, shapes and elements.
        remedy: what the user can do.
        block, label, stage: the block and its stage; None where the difference is in no block.
        op, target, module, source: the operator; ``source`` is the line of the user's code.
        strategies: strategies of the operator by axis, as the plan names them.
        reads, makes: types of operands and outputs, in order.
    """

    step: int
    what: str
    while_right: str
    mismatch: Mismatch
    remedy: str
    block: int | None = None
    label: str = ""
    stage: int | None = None
    op: str = ""
    target: str = ""
    module: str = ""
    source: str = ""
    strategies: tuple[tuple[str, str], ...] = ()
    reads: tuple[str, ...] = ()
    makes: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """The block and operator, such as ``block 2 (layers.1), operator linear_3 (aten.linear.default)``."""
        block = "" if self.block is None else f"block {self.block} ({self.label or '-'})"
        operator = f"operator {self.op} ({self.target})" if self.op else ""
        return ", ".join(part for part in (block, operator) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """The result of a search for the first difference.

    Attributes:
        difference: the first difference; None if nothing differs in float64.
        steps: the steps that were compared.
        graph_loss: the largest relative error of the losses of the traced graph against those of the model, both on one device.
    """

    difference: Difference | None
    steps: int
    graph_loss: float


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """The results of one step on one rank."""

    tape: Tape
    loss: float
    gradients: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]


def bisect(
    subject: Subject,
    plan: Plan,
    graph: Graph,
    batches: Sequence[Mapping[str, Tensor]],
    losses: Sequence[float],
    *,
    pool: WorkerPool,
    timeout_s: float = 300.0,
    thorough: bool = False,
) -> Bisection:
    """Run steps until one differs, and find the first difference in that step.

    Args:
        subject: makes the model, the same in every process.
        plan: the plan, which is run in float64.
        graph: the graph that the plan is for, without dropout, in float64.
        batches: global batches, one for each step.
        losses: losses of the model on one device.
        pool: workers that run as ranks.
        timeout_s: the time limit of each run of all ranks.
        thorough: whether to compare values and gradients between blocks also in steps whose results agree.

    Raises:
        AutoparError: a rank failed or exceeded the time limit.
    """
    search = _Search(
        subject, replace(plan, precision=FP64), graph, [widened(batch) for batch in batches], pool, timeout_s
    )
    graph_loss = 0.0
    for step, expected in enumerate(losses):
        difference = search.step(step, thorough=thorough)
        loss = float(search.one_device.loss)
        graph_loss = max(graph_loss, abs(loss - expected) / abs(expected) if expected else abs(loss))
        if difference is not None:
            return Bisection(difference=difference, steps=step + 1, graph_loss=graph_loss)
    return Bisection(difference=None, steps=len(batches), graph_loss=graph_loss)


@dataclass
class _Search:
    """One device and the ranks, which run step by step."""

    subject: Subject
    plan: Plan
    graph: Graph
    batches: Sequence[Mapping[str, Tensor]]
    pool: WorkerPool
    timeout_s: float

    def __post_init__(self) -> None:
        self.trail = Trail(self.plan, self.graph)
        self.one_device = OneDevice(self.trail.whole, self.subject.build())
        self.optimizer = adamw(self.one_device.parameters.values())

    def step(self, step: int, *, thorough: bool) -> Difference | None:
        """Return the first difference in one step, or None if losses, gradients and the parameters after it agree."""
        ranks = self._run(step, self.trail.boundaries())
        gradients = {name: gradient.clone() for name, gradient in self.one_device.gradients().items()}
        loss = self.one_device.loss
        losses = [torch.tensor(rank.loss, dtype=torch.float64) for rank in ranks]
        wrong_loss = self._same_everywhere(losses, loss, tolerance=LOSS_TOLERANCE)
        wrong_gradient = self._worst([rank.gradients for rank in ranks], gradients)
        self.optimizer.step()
        trained = {name: p.detach() for name, p in self.one_device.parameters.items() if name in gradients}
        wrong_parameter = self._worst([rank.parameters for rank in ranks], trained)
        wrong = wrong_loss or wrong_gradient or wrong_parameter
        spot = self._find(step, ranks) if wrong or thorough else None
        if spot is not None:
            return _difference(self.trail, spot, step)
        if wrong_gradient is not None:
            return _of_sum(self.trail, *wrong_gradient, step)
        if wrong_loss is not None:
            what = "the sum of the loss over data ranks and micro-batches"
            right, mismatch = "every value and gradient in the graph agrees", wrong_loss
        elif wrong_parameter is not None:
            name, mismatch = wrong_parameter
            what = f"parameter {name} after the step of the optimizer"
            right = "it agreed before the step, and so does every gradient"
        else:
            self.one_device.end_step()
            return None
        return Difference(step=step + 1, what=what, while_right=right, mismatch=mismatch, remedy=_REPORT)

    def _find(self, step: int, ranks: Sequence[_Recorded]) -> Spot | None:
        """Return the first difference of the recorded tapes; one inside a block is narrowed down to an operator by a second run."""
        spot = self.trail.first([rank.tape for rank in ranks], self.tape, self.one_device.values)
        if spot is None or spot.place == PRELUDE or spot.kind not in ("value", "passed"):
            return spot  # no block whose operators could be compared one by one
        with torch.no_grad():
            for name, value in self.before.items():
                self.one_device.parameters[name].copy_(value)
        second_run = self._run(step, self.trail.inside(spot.place))
        return self.trail.first([rank.tape for rank in second_run], self.tape, self.one_device.values) or spot

    def _run(self, step: int, watches: tuple[Watch, Watch]) -> Sequence[_Recorded]:
        """Record one step on all ranks and on one device."""
        rank_watch, device_watch = watches
        self.before = {name: p.detach().clone() for name, p in self.one_device.parameters.items()}
        job = (_record, self.subject, self.plan, self.graph, self.batches[: step + 1], rank_watch)
        recorded = self.pool.run(*job, size=self.plan.mesh.world_size, timeout_s=self.timeout_s)
        self.tape = self.one_device.record(self.batches[step], device_watch)
        return recorded

    def _same_everywhere(
        self, results: Sequence[Tensor | None], whole: Tensor, *, scale: float = 0.0, tolerance: float = TOLERANCE
    ) -> Mismatch | None:
        """Return the difference of a result of the step that every rank has as a whole tensor."""
        pieces = {(rank, 0): value for rank, value in enumerate(results)}
        wrong = self.trail.split.compare(pieces, whole, (), scale=scale, tolerance=tolerance)
        return None if wrong is None else replace(wrong, micro_batches=())

    def _worst(
        self, by_rank: Sequence[Mapping[str, Tensor]], expected: Mapping[str, Tensor]
    ) -> tuple[str, Mismatch] | None:
        """Return the tensor with the largest error, or None; a missing tensor counts as zero."""
        scale = largest(expected.values())
        wrong = [
            (name, mismatch)
            for name, whole in expected.items()
            if (mismatch := self._same_everywhere([rank.get(name) for rank in by_rank], whole, scale=scale))
        ]
        return max(wrong, key=lambda pair: pair[1].error, default=None)


def _record(
    subject: Subject, plan: Plan, graph: Graph, batches: Sequence[Mapping[str, Tensor]], watch: Watch
) -> _Recorded:
    """Train one rank up to the last batch, and return the recorded last step."""
    parallel = ParallelModel(lower(plan, graph), World(plan.mesh, "cpu"), ModelWeights(subject.build(), 0))
    optimizer = adamw(parallel.parameters())
    for batch in batches[:-1]:
        parallel.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()
    tape = attach(parallel, watch)
    loss = parallel.train_step(batches[-1]).item()
    gradients = parallel.full_gradients()
    optimizer.step()
    return _Recorded(tape=tape, loss=loss, gradients=gradients, parameters=parallel.full_state_dict())


# --- texts ---------------------------------------------------------------------------------------

_REPORT = "report it with this text and the plan file (`autopar show PLAN` prints it): a plan is right or refused"


def _difference(trail: Trail, spot: Spot, step: int) -> Difference:
    """Return the difference at a spot of the graph."""
    what, right = trail.words(spot)
    fields, remedy = _place(trail, spot.place, spot.op), _remedy(trail, spot)
    return Difference(step=step + 1, what=what, while_right=right, mismatch=spot.mismatch, remedy=remedy, **fields)


def _place(trail: Trail, place: int, op: Op | None) -> dict[str, Any]:
    """Return the fields of a difference that describe its block (``place`` is its index or ``PRELUDE``) and its operator."""
    fields: dict[str, Any] = {}
    if place != PRELUDE:
        fields |= {"block": place, "label": trail.local.blocks[place].label, "stage": trail.stage_of(place)}
    if op is not None:
        fields |= {"op": op.name, "target": op.target, "module": op.module, "source": op.source}
        fields |= {"strategies": trail.strategies(op), "reads": trail.reads(op), "makes": trail.makes(op)}
    return fields


def _remedy(trail: Trail, spot: Spot) -> str:
    """Return how to report the fault and which pins avoid the operator."""
    if spot.op is None:
        return _REPORT
    axes = [axis for axis, _ in trail.strategies(spot.op) if axis in ("cp", "tp")]
    parameters = [
        trail.local.parameter(r.name) for r in map(trail.origin, spot.op.operands) if trail.local.is_parameter(r)
    ]
    pins = [f"--pin '{p.fqn}=tp:I'" for p in parameters if "tp" in axes][:1]
    pins += [f"--pin {axis}=1" for axis in axes]
    if "cp" in axes and "attention" in spot.op.target:
        pins.insert(0, "another --pin cp_attention=gather|ulysses|ring")
    return f"{_REPORT}; until then go round it: {' or '.join(pins)}" if pins else _REPORT


def _of_sum(trail: Trail, name: str, mismatch: Mismatch, step: int) -> Difference:
    """Return the difference in a parameter's gradient whose summands are right on all ranks: their sum is wrong."""
    reader = next(iter(trail.readers(name)), None)
    axes = trail.sum_axes(name)
    place = PRELUDE if reader is None else trail.local.block_of(reader.name)
    return Difference(
        step=step + 1,
        what=f"the sum of the gradient of parameter {name} (over {', '.join(axes) or 'micro-batches'})",
        while_right="every operator passes back the right gradient on every rank in every micro-batch",
        mismatch=mismatch,
        remedy=f"{_REPORT}; until then another --pin zero=N or dp_replicate=N sums in another way",
        **_place(trail, place, reader),
    )
