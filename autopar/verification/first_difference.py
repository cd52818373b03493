"""Finds where a plan's program first differs from one device: the block, then the operator in it.

Both sides run one step in float64, where rounding is no excuse. Each rank records values where they cross from block
to block and the gradients that come back on the same ways; what the types say of them must be the values and gradients
of one device. Forward order finds the first value that is wrong though all before it are right; if none is, backward
order finds the first gradient. A second run records every operator of that block. What no operator does wrong is
between them: what a stage receives, the sum of a parameter's gradient, the step of the optimizer.
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
from autopar.verification.record import OneDevice, Tape, Watch, attach
from autopar.verification.reference import Subject, adamw, widened
from autopar.verification.slices import TOLERANCE, Mismatch, largest
from autopar.verification.walk import Spot, Trail

LOSS_TOLERANCE = 1e-6
"""Of the loss of the global batch, which a step returns in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first difference, in the words of the model and of the plan; empty where nothing is to be said.

    Attributes:
        step: of training, from 1 on.
        what: is wrong.
        while_right: what agrees around it.
        block, label, stage: where; None where it is no block's.
        op, target, module, source: the operator; ``source`` is the line of the user's code.
        strategies: by axis, as the plan names them.
        reads, makes: types of operands and outputs, in order.
        mismatch: ranks, error, shapes and elements.
        remedy: what to do about it.
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
        """``block 2 (layers.1), operator linear_3 (aten.linear.default)``, as far as there is one."""
        block = "" if self.block is None else f"block {self.block} ({self.label or '-'})"
        operator = f"operator {self.op} ({self.target})" if self.op else ""
        return ", ".join(part for part in (block, operator) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """What a search for the first difference came to; None: in float64 nothing differs in ``steps`` steps.

    ``graph_loss``: the largest relative error of the traced graph's own losses on one device against the model's.
    """

    difference: Difference | None
    steps: int
    graph_loss: float


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """What one rank leaves of a step."""

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
    """Runs steps until one differs, and finds the place in that one.

    Args:
        subject: makes the model, the same in every process.
        plan: its precision is taken as float64.
        graph: that the plan is for, without dropout, in float64.
        batches: of the global size, one for each step.
        losses: of the model itself on one device.
        pool: workers for the ranks.
        timeout_s: for each run of all ranks.
        thorough: compares values and gradients between blocks also in steps whose results agree.

    Raises:
        AutoparError: a rank failed, or the time is up.
    """
    search = _Search(
        subject, replace(plan, precision=FP64), graph, [widened(batch) for batch in batches], pool, timeout_s
    )
    graph_loss = 0.0
    for step, expected in enumerate(losses):
        found = search.step(step, thorough=thorough)
        loss = float(search.one.loss)
        graph_loss = max(graph_loss, abs(loss - expected) / abs(expected) if expected else abs(loss))
        if found is not None:
            return Bisection(difference=found, steps=step + 1, graph_loss=graph_loss)
    return Bisection(difference=None, steps=len(batches), graph_loss=graph_loss)


@dataclass
class _Search:
    """One device and the ranks, step by step."""

    subject: Subject
    plan: Plan
    graph: Graph
    batches: Sequence[Mapping[str, Tensor]]
    pool: WorkerPool
    timeout_s: float

    def __post_init__(self) -> None:
        self.trail = Trail(self.plan, self.graph)
        self.one = OneDevice(self.trail.whole, self.subject.build())
        self.optimizer = adamw(self.one.parameters.values())

    def step(self, step: int, *, thorough: bool) -> Difference | None:
        """The first difference of one step; None when losses, gradients and parameters after it agree."""
        ranks = self._run(step, self.trail.boundaries())
        gradients = {name: gradient.clone() for name, gradient in self.one.gradients().items()}
        loss = self.one.loss
        losses = [torch.tensor(rank.loss, dtype=torch.float64) for rank in ranks]
        wrong_loss = self._same_everywhere(losses, loss, tolerance=LOSS_TOLERANCE)
        wrong_gradient = self._worst([rank.gradients for rank in ranks], gradients)
        self.optimizer.step()
        trained = {name: p.detach() for name, p in self.one.parameters.items() if name in gradients}
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
            self.one.end_step()
            return None
        return Difference(step=step + 1, what=what, while_right=right, mismatch=mismatch, remedy=_REPORT)

    def _find(self, step: int, ranks: Sequence[_Recorded]) -> Spot | None:
        spot = self.trail.first([rank.tape for rank in ranks], self.tape, self.one.values)
        if spot is None or not spot.is_block:
            return spot
        with torch.no_grad():
            for name, value in self.before.items():
                self.one.parameters[name].copy_(value)
        again = self._run(step, self.trail.inside(spot.place))
        return self.trail.first([rank.tape for rank in again], self.tape, self.one.values) or spot

    def _run(self, step: int, watches: tuple[Watch, Watch]) -> Sequence[_Recorded]:
        """Has one step recorded by all ranks, and by one device."""
        watch, own = watches
        self.before = {name: p.detach().clone() for name, p in self.one.parameters.items()}
        job = (_record, self.subject, self.plan, self.graph, self.batches[: step + 1], watch)
        found = self.pool.run(*job, size=self.plan.mesh.world_size, timeout_s=self.timeout_s)
        self.tape = self.one.record(self.batches[step], own)
        return found

    def _same_everywhere(
        self, found: Sequence[Tensor | None], whole: Tensor, *, scale: float = 0.0, tolerance: float = TOLERANCE
    ) -> Mismatch | None:
        """What of a step's results, whole on every rank, differs."""
        pieces = {(rank, 0): value for rank, value in enumerate(found)}
        wrong = self.trail.split.compare(pieces, whole, (), scale=scale, tolerance=tolerance)
        return None if wrong is None else replace(wrong, micro_batches=())

    def _worst(
        self, found: Sequence[Mapping[str, Tensor]], expected: Mapping[str, Tensor]
    ) -> tuple[str, Mismatch] | None:
        """The tensor with the largest error; one that is missing counts as zero."""
        scale = largest(expected.values())
        wrong = [
            (name, mismatch)
            for name, whole in expected.items()
            if (mismatch := self._same_everywhere([rank.get(name) for rank in found], whole, scale=scale))
        ]
        return max(wrong, key=lambda pair: pair[1].error, default=None)


def _record(
    subject: Subject, plan: Plan, graph: Graph, batches: Sequence[Mapping[str, Tensor]], watch: Watch
) -> _Recorded:
    """One rank's side: trains up to the last batch; what its step records."""
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


# --- in words ------------------------------------------------------------------------------------

_REPORT = "report it with this text and the plan file (`autopar show PLAN` prints it): a plan is right or refused"


def _difference(trail: Trail, spot: Spot, step: int) -> Difference:
    """A spot in the graph."""
    said: dict[str, Any] = {"step": step + 1, "mismatch": spot.mismatch}
    said["what"], said["while_right"] = trail.words(spot)
    if spot.place >= 0:
        block = trail.local.blocks[spot.place]
        said |= {"block": block.index, "label": block.label, "stage": trail.stage_of(block.index)}
    if spot.op is not None:
        said |= _operator(trail, spot.op)
    return Difference(**said, remedy=_remedy(trail, spot))


def _operator(trail: Trail, op: Op) -> dict[str, Any]:
    """What a difference says of its operator."""
    said = {"op": op.name, "target": op.target, "module": op.module, "source": op.source}
    return {**said, "strategies": trail.strategies(op), "reads": trail.reads(op), "makes": trail.makes(op)}


def _remedy(trail: Trail, spot: Spot) -> str:
    """How to go round an operator until it is mended."""
    if spot.op is None:
        return _REPORT
    axes = [axis for axis, _ in trail.strategies(spot.op) if axis in ("cp", "tp")]
    parameters = [trail.local.parameter(r.name) for r in trail.operands(spot.op) if trail.local.is_parameter(r)]
    ways = [f"--pin '{p.fqn}=tp:I'" for p in parameters if "tp" in axes][:1]
    ways += [f"--pin {axis}=1" for axis in axes]
    if "cp" in axes and "attention" in spot.op.target:
        ways.insert(0, "another --pin cp_attention=gather|ulysses|ring")
    return f"{_REPORT}; until then go round it: {' or '.join(ways)}" if ways else _REPORT


def _of_sum(trail: Trail, name: str, mismatch: Mismatch, step: int) -> Difference:
    """Every operator passes back the right gradient of a parameter: their sum is wrong."""
    readers = trail.readers(name)
    axes = trail.sum_axes(name)
    said: dict[str, Any] = {}
    if readers:
        index = trail.local.block_of(readers[0].name)
        said = {"block": index, "label": trail.local.blocks[index].label, "stage": trail.stage_of(index)}
        said |= _operator(trail, readers[0])
    return Difference(
        step=step + 1,
        what=f"the sum of the gradient of parameter {name} (over {', '.join(axes) or 'micro-batches'})",
        while_right="every operator passes back the right gradient on every rank in every micro-batch",
        mismatch=mismatch,
        remedy=f"{_REPORT}; until then another --pin zero=N or dp_replicate=N sums in another way",
        **said,
    )
