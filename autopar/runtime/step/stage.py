"""One pipeline stage as a module: its blocks, run in order over named values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from autopar.graph.graph import Ref
from autopar.lower.emit import MICRO_BATCH_WEIGHT, SEED, SHARE
from autopar.lower.program import BlockProgram, PreludeProgram, Program, StageProgram
from autopar.ops.collectives import on_meshes
from autopar.runtime.step.activation_offload import Mover
from autopar.runtime.step.block_code import variant
from autopar.runtime.step.recomputation import Tape, with_tape
from autopar.runtime.step.stage_io import ends_of, enter, leave

INPUT = "autopar_input_"
"""Stands before the names of batch inputs where torch's schedules have keywords of their own (``target``)."""


class BlockModule(nn.Module):
    """A block's emitted code with its parameters; the unit of FSDP and of recompute. After ``eval()`` it runs as models do then.

    Attributes:
        taps: values inside that outputs of the model are.
        taken: where they are put, without their history; None: nowhere.
    """

    def __init__(self, program: BlockProgram, meshes: Sequence[DeviceMesh]) -> None:
        super().__init__()
        self.inputs, self.outputs = program.inputs, program.outputs
        self.recompute = program.recompute
        self.body = program.module
        self._meshes = meshes
        self._mover: Mover | None = None
        self._tape: Tape | None = None
        self._code = program.module.graph
        self._variants: dict[tuple[bool, bool], Callable[..., Any]] = {}
        self.taps: tuple[Ref, ...] = ()
        self.taken: dict[Ref, Tensor] | None = None
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
        code = self._function()
        if self.training and self.recompute == "full" and torch.is_grad_enabled():
            # emitted code draws from streams of its own: there is no state of generators to bring back
            run_again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
            made = cast("tuple[Tensor, ...]", run_again(partial(self._with_mesh, code), *values))
        elif self.training and self.recompute == "selective" and torch.is_grad_enabled():
            made = self._on_tape(code, values)
        else:
            made = cast("tuple[Tensor, ...]", code(*values))
        if self.taken is None or not self.taps:
            return made
        count = len(self.outputs)
        self.taken |= {ref: value.detach() for ref, value in zip(self.taps, made[count:], strict=True)}
        return made[:count]

    def _function(self) -> Callable[..., Any]:
        """What computes the outputs, and the taps where they are taken."""
        taps = self.taps if self.taken is not None else ()
        if self.training and not taps:
            return self.body
        key = self.training, bool(taps)
        if key not in self._variants:
            code = self.body.graph if self.training else self._code
            self._variants[key] = variant(self.body, code, trains=self.training, taps=taps)
        return self._variants[key]

    def _on_tape(self, code: Callable[..., Any], values: Sequence[Any]) -> tuple[Tensor, ...]:
        tape = self._tape = Tape(partial(on_meshes, self._meshes))
        try:
            with tape.record():
                return cast("tuple[Tensor, ...]", code(*values))
        finally:
            self._tape = None

    def _with_mesh(self, code: Callable[..., Any], *values: Any) -> tuple[Tensor, ...]:
        with on_meshes(self._meshes):  # backward runs it again, on a thread of its own
            return cast("tuple[Tensor, ...]", code(*values))


class StageModule(nn.Module):
    """Runs one stage for one micro-batch: from what it receives and the batch to what it sends, or the loss.

    Attributes:
        totals: values of ``Program.sums`` over the global batch, set before the step's first micro-batch.
        state: buffers that steps change, as they were at the step's begin.
        new_state: what the last micro-batch made of those that this stage changes.
        taken: for each micro-batch the values that outputs of the model are; None: they are not kept.
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
        self._prelude_at_rest: Callable[..., Any] | None = None
        self._meshes = meshes
        self.is_random = any(SEED in block.inputs for block in program.blocks)
        if program.prelude is not None:
            self.is_random = self.is_random or SEED in program.prelude.inputs
        self.mutations = program.mutations
        self.totals: dict[str, Tensor] = {}
        self.state: dict[str, Tensor] = {}
        self.new_state: dict[str, Tensor] = {}
        self.taken: dict[int, dict[Ref, Tensor]] | None = None
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
        weight = 1.0 if self.weights is None else self.weights[self.micro_batch]
        values[SHARE], values[MICRO_BATCH_WEIGHT] = self.share, weight
        for name in self.shared_names:
            values[name] = self._parameters[name]
        if self.is_random:
            values[SEED] = self.seed + self.micro_batch % self._num_streams
        with on_meshes(self._meshes):
            if self._prelude_program is not None and self.prelude is not None:
                with torch.no_grad():
                    made = self._prelude_code(self.prelude)(*[values[name] for name in self._prelude_program.inputs])
                values.update(zip(self._prelude_program.outputs, made, strict=True))
            if self.mover is not None:
                self.mover.begin(value for name, value in values.items() if name not in self.receives)
            own = None if self.taken is None else self.taken.setdefault(self.micro_batch, {})
            for block in self.blocks:
                assert isinstance(block, BlockModule)
                block.taken = own
                made = block(*[values[name] for name in block.inputs])
                values.update(zip(block.outputs, made, strict=True))
        self.new_state = {buffer: values[name].detach() for buffer, name in self.mutations}
        if self.is_last and self.weights is not None:
            values[self.loss] = values[self.loss] * weight
        if self._is_whole:
            return cast("Tensor", values[self.loss])
        given = leave(self.ends, link, [values[name] for name in ((self.loss,) if self.is_last else self.sends)])
        return given[0] if self.is_last else given

    def _prelude_code(self, prelude: fx.GraphModule) -> Callable[..., Any]:
        if self.training:
            return prelude
        if self._prelude_at_rest is None:
            self._prelude_at_rest = variant(prelude, prelude.graph, trains=False, taps=())
        return self._prelude_at_rest

    def keep(self, taps: Mapping[int, Sequence[Ref]]) -> None:
        """Which values inside of its blocks, by their positions here, are taken when values are."""
        for position, block in enumerate(self.blocks):
            assert isinstance(block, BlockModule)
            block.taps = tuple(taps.get(position, ()))

    def holders(self) -> dict[str, nn.Module]:
        """For each parameter name the module that has it registered under that name."""
        found: dict[str, nn.Module] = {}
        for block in self.blocks:
            assert isinstance(block, BlockModule)
            found |= dict.fromkeys(block.body._parameters, block.body)
        return found | dict.fromkeys(self.shared_names, self)
