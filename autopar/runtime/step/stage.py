"""One pipeline stage as a module: its blocks, run in order over named values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from autopar.graph.graph import Op
from autopar.graph.random import draws_random
from autopar.lower.emit import SEED, SHARE
from autopar.lower.program import BlockProgram, PreludeProgram, Program, StageProgram
from autopar.ops import seeded
from autopar.ops import sequence as sequence_ops
from autopar.ops.collectives import on_meshes
from autopar.runtime.step.activation_offload import Mover
from autopar.runtime.step.recomputation import Tape, with_tape
from autopar.runtime.step.stage_io import ends_of, enter, leave

INPUT = "autopar_input_"
"""Stands before the names of batch inputs where torch's schedules have keywords of their own (``target``)."""


class BlockModule(nn.Module):
    """A block's emitted code with its parameters; the unit of FSDP and of recompute. After ``eval()`` it drops nothing."""

    def __init__(self, program: BlockProgram, meshes: Sequence[DeviceMesh]) -> None:
        super().__init__()
        self.inputs, self.outputs = program.inputs, program.outputs
        self.recompute = program.recompute
        self.body = program.module
        self._meshes = meshes
        self._mover: Mover | None = None
        self._tape: Tape | None = None
        self._code = program.module.graph
        self._quiet: Callable[..., Any] | None = None
        if self.recompute == "selective":
            self.body = with_tape(program.module, program.again, lambda: self._tape)

    def forward(self, *values: Any) -> tuple[Tensor, ...]:
        """From ``inputs`` to ``outputs``, both in order."""
        if self._mover is not None and torch.is_grad_enabled():
            with self._mover.block((*self.body.parameters(), *self.body.buffers())):
                return self._run(*values)
        return self._run(*values)

    def move_by(self, mover: Mover | None) -> None:
        """What the block keeps for backward lives on the host in the meantime; None: on the device."""
        self._mover = mover

    def _run(self, *values: Any) -> tuple[Tensor, ...]:
        if not self.training:
            if self._quiet is None:
                self._quiet = without_dropout(self.body, self._code)
            return cast("tuple[Tensor, ...]", self._quiet(*values))
        if self.recompute == "full" and torch.is_grad_enabled():
            # emitted code draws from streams of its own: there is no state of generators to bring back
            run_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            return cast("tuple[Tensor, ...]", run_again(self._with_mesh, *values))
        if self.recompute == "selective" and torch.is_grad_enabled():
            return self._on_tape(values)
        return cast("tuple[Tensor, ...]", self.body(*values))

    def _on_tape(self, values: Sequence[Any]) -> tuple[Tensor, ...]:
        tape = self._tape = Tape(partial(on_meshes, self._meshes))
        try:
            with tape.record():
                return cast("tuple[Tensor, ...]", self.body(*values))
        finally:
            self._tape = None

    def _with_mesh(self, *values: Any) -> tuple[Tensor, ...]:
        with on_meshes(self._meshes):  # backward runs it again, on a thread of its own
            return cast("tuple[Tensor, ...]", self.body(*values))


class StageModule(nn.Module):
    """Runs one stage for one micro-batch: from what it receives and the batch to what it sends, or the loss.

    Attributes:
        totals: values of ``Program.sums`` over the global batch, set before the step's first micro-batch.
        state: buffers that steps change, as they were at the step's begin.
        new_state: what the last micro-batch made of those that this stage changes.
        seed: of the step; every micro-batch draws from a stream of its own.
        micro_batch: number of the one that the next forward is given.
        share: part of the plan's global batch that the step has.
        first_micro_batch: of the pipeline's schedule that runs.
        weights: by what the loss of each micro-batch counts; None: each as it is.
    """

    def __init__(self, program: StageProgram, whole: Program, meshes: Sequence[DeviceMesh]) -> None:
        super().__init__()
        self.index, self.is_last = program.index, program.is_last
        self.receives, self.sends, self.loss = program.receives, program.sends, whole.loss
        self.ends = ends_of(whole, program)
        self._is_whole = len(whole.stages) == 1
        self.blocks = nn.ModuleList(BlockModule(block, meshes) for block in program.blocks)
        self.mover = Mover() if any(block.offload for block in program.blocks) else None
        for block, block_program in zip(self.blocks, program.blocks, strict=True):
            assert isinstance(block, BlockModule)
            block.move_by(self.mover if block_program.offload else None)
        self.prelude = None if program.prelude is None else program.prelude.module
        self.shared_names = program.shared_parameters
        self._prelude_program: PreludeProgram | None = program.prelude
        self._meshes = meshes
        self.is_random = any(SEED in block.inputs for block in program.blocks)
        if program.prelude is not None:
            self.is_random = self.is_random or SEED in program.prelude.inputs
        self.mutations = program.mutations
        self.totals: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}
        self.new_state: dict[str, Tensor] = {}
        self.seed = self.micro_batch = self.first_micro_batch = 0
        self._num_streams = whole.plan.num_micro_batches
        self.share = 1.0
        self.weights: Sequence[float] | None = None

    def forward(self, *received: Tensor, **batch: Any) -> Tensor | tuple[Tensor, ...]:
        """One micro-batch.

        Args:
            received: one tensor for each of ``receives``, as the stage before gave it.
            batch: the micro-batch's inputs by name (with or without :data:`INPUT`).

        Returns:
            The loss on the last stage (this rank's part of the global sum), else the tuple of ``sends``, as they are sent.
        """
        taken, link = enter(self.ends, received)
        values: dict[str, Any] = {name.removeprefix(INPUT): value for name, value in batch.items()}
        values.update(zip(self.receives, taken, strict=True))
        values.update(self.state)
        values.update(self.totals)
        values[SHARE] = self.share
        for name in self.shared_names:
            values[name] = self._parameters[name]
        if self.is_random:
            values[SEED] = self.seed + self.micro_batch % self._num_streams
        with on_meshes(self._meshes):
            if self._prelude_program is not None and self.prelude is not None:
                with torch.no_grad():
                    made = self.prelude(*[values[name] for name in self._prelude_program.inputs])
                values.update(zip(self._prelude_program.outputs, made, strict=True))
            if self.mover is not None:
                self.mover.begin(value for name, value in values.items() if name not in self.receives)
            for block in self.blocks:
                assert isinstance(block, BlockModule)
                made = block(*[values[name] for name in block.inputs])
                values.update(zip(block.outputs, made, strict=True))
        self.new_state = {buffer: values[name].detach() for buffer, name in self.mutations}
        if self.is_last and self.weights is not None:
            values[self.loss] = values[self.loss] * self.weights[self.micro_batch]
        if self._is_whole:
            return cast("Tensor", values[self.loss])
        given = leave(self.ends, link, [values[name] for name in ((self.loss,) if self.is_last else self.sends)])
        return given[0] if self.is_last else given

    def holders(self) -> dict[str, nn.Module]:
        """For each parameter name the module that has it registered under that name."""
        found: dict[str, nn.Module] = {}
        for block in self.blocks:
            assert isinstance(block, BlockModule)
            found |= dict.fromkeys(block.body._parameters, block.body)
        return found | dict.fromkeys(self.shared_names, self)


_PROBABILITIES: dict[Callable[..., Any], str] = {
    seeded.dropout: "p",
    seeded.attention: "dropout_p",
    sequence_ops.attention_gathered: "dropout_p",
    sequence_ops.attention_ring: "dropout_p",
}
"""The argument of each function that drops."""


def without_dropout(body: fx.GraphModule, code: fx.Graph) -> Callable[..., Any]:
    """``code`` that drops nothing, as a function that reads parameters, buffers and regions where ``body`` has them."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(code, {}))
    for node in graph.nodes:
        name = _PROBABILITIES.get(node.target) if node.op == "call_function" else None
        if name is None:
            continue
        position = list(inspect.signature(node.target).parameters).index(name)
        if position < len(node.args):
            node.update_arg(position, 0.0)
        else:
            node.update_kwarg(name, 0.0)
    return partial(type(fx.GraphModule(body, graph)).forward, body)


def noise(made: Sequence[Op]) -> Op | None:
    """An operator that draws random numbers which are no dropout; None: there is none."""
    return next((op for op in made if draws_random(op.target) and op.target != "autopar.dropout"), None)
