"""The program: what each rank of a plan executes, as fx modules of plain PyTorch with typed collectives.

Ranks of one pipeline stage run the same code. Lowering needs no process group, device or weights. One step on a data rank:

1. Before the first micro-batch, the modules of :attr:`Program.sums` run on every micro-batch, and their results are summed over
   micro-batches and data ranks (counts of tokens).
2. For each micro-batch a stage runs its prelude, which reads inputs of the batch and these totals. It then runs its blocks in order over
   one environment of named values: received values, those of the prelude, and outputs of earlier blocks.
3. The stage sends ``sends`` to the next one. In the last stage ``Program.loss`` names this rank's part of the global loss, which is the
   sum over data ranks and micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from autopar.graph.elements import ancestors
from autopar.graph.graph import Block, Buffer, Graph, Ref, digest
from autopar.graph.operator_kinds import made_again
from autopar.graph.rewrites import signature
from autopar.lower.emit import Emitter, is_random, read_layout, readable, str_name
from autopar.lower.read_plan import local_graph
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan, Recompute, StagePlan

_HEADER = "import torch\nimport torch.nn.functional as F\nfrom autopar.ops import collectives, experts, plain, seeded, sequence, sharded\naten = torch.ops.aten"
"""The imports in front of a program's code."""


@dataclass(frozen=True, kw_only=True)
class PreludeProgram:
    """A module without parameters, which computes named values from inputs of the batch and totals of :attr:`Program.sums`.

    Attributes:
        module: takes ``inputs`` in order and returns the tuple of ``outputs``.
        inputs, outputs: names of the module's arguments and results, in order.
        buffers: names of the buffers registered in ``module``. Those with a name in the model (``Graph.buffers`` with value None) are on
            meta and must be loaded.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BlockProgram:
    """One block of one stage.

    Attributes:
        index, label: the index and the label of the block in the plan.
        module: takes ``inputs`` in order and returns the tuple of ``outputs``. Parameters are on meta.
        inputs: live values, prelude values and shared parameters; then ``rng_seed`` (a Python int) if the block draws random numbers,
            ``batch_share`` and ``micro_batch_weight`` (Python floats) if it takes means of samples, or sums of them over data ranks.
        outputs: values that later blocks or stages read; in the last block the loss is among them.
        parameters: names of ``Graph.parameters`` that the module holds, registered under these names.
        recompute: which activations are dropped and recomputed in backward.
        kind: a text that is equal for blocks whose code is equal up to names.
        offload: whether activations that the block keeps for backward are in host memory.
        again: names of the operators that are recomputed if ``recompute`` is ``selective``.
    """

    index: int
    label: str
    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parameters: tuple[str, ...]
    recompute: Recompute
    kind: str
    offload: bool = False
    again: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StageProgram:
    """One pipeline stage.

    Attributes:
        index, pp_rank: the index and the pipeline rank of the stage in the plan.
        blocks: the blocks, in order.
        prelude: the prelude of the stage; None if it needs no value of it.
        receives: values that the previous stage sends, including those that are only passed through.
        sends: values that the stage sends to the next one, including those that are only passed through; empty for the last stage.
        shared_parameters: parameters that several blocks of this stage read; they are passed to the blocks as inputs.
        is_last: whether the last block of the stage computes the loss.
        state: buffers that steps change and that the prelude of this stage reads as inputs.
        mutations: buffers that this stage changes, with the names of their new values.
    """

    index: int
    pp_rank: int
    blocks: tuple[BlockProgram, ...]
    prelude: PreludeProgram | None
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    shared_parameters: tuple[str, ...]
    is_last: bool
    state: tuple[str, ...] = ()
    mutations: tuple[tuple[str, str], ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        """All parameters of the stage, those of blocks first."""
        return (*(name for block in self.blocks for name in block.parameters), *self.shared_parameters)


@dataclass(frozen=True, kw_only=True)  # no slots: cached_property needs a dict
class Program:
    """What each rank of a plan executes; the docstring of this module describes one step.

    Attributes:
        plan: the plan.
        graph: the graph of one rank for one micro-batch; its ``parameters`` have the layouts.
        stages: all stages, in order of the model.
        sums: the sums over the batch, in rounds: a later one may read the totals of earlier ones. Their outputs are inputs of preludes.
        loss: the name of the loss.
        tied: parameters that several stages hold, with the indices of the stages; their gradients are summed.
        state: buffers that steps change, in the order of the graph.
    """

    plan: Plan
    graph: Graph
    stages: tuple[StageProgram, ...]
    sums: tuple[PreludeProgram, ...]
    loss: str
    tied: tuple[tuple[str, tuple[int, ...]], ...]
    state: tuple[Buffer, ...] = ()

    @property
    def mesh(self) -> Mesh:
        """The mesh of the plan."""
        return self.plan.mesh

    @cached_property
    def code(self) -> str:
        """The program as PyTorch code: the sums, the preludes, and every distinct block once."""
        parts = [f"# {self.graph.name} on {self.mesh}, micro-batch of {self.graph.batch_size}\n{_HEADER}"]
        title = "# sums over the global batch, before the first micro-batch"
        parts += [f"{title}\n{readable(sums.module)}" for sums in self.sums]
        uses_by_kind: dict[str, list[tuple[int, BlockProgram]]] = {}
        for stage in self.stages:
            if stage.prelude is not None:
                parts.append(f"# prelude of stage {stage.index}\n{readable(stage.prelude.module)}")
            for block in stage.blocks:
                uses_by_kind.setdefault(block.kind, []).append((stage.index, block))
        for uses in uses_by_kind.values():
            names = ", ".join(f"{block.index} {block.label or '-'} (stage {stage})" for stage, block in uses)
            note = "; recomputed in backward" if any(block.recompute == "full" for _, block in uses) else ""
            recomputed = next((block.again for _, block in uses if block.again), ())
            note += f"; made again in backward: {', '.join(recomputed)}" if recomputed else ""
            parts.append(f"# block {names}{note}\n{readable(uses[0][1].module)}")
        return "\n\n\n".join(parts) + "\n"


def lower(plan: Plan, graph: Graph, *, device: torch.device | str = "cpu", rank: int = 0) -> Program:
    """Return the program of a plan for a traced model.

    Args:
        graph: the complete graph of the model as traced; its fingerprint must be that of the plan.
        device: the device of tensors that depend on no input (positions).
        rank: the rank whose program is returned; it matters if data ranks take different numbers of samples (``Plan.data_shares``).

    Raises:
        PlanError: the plan is for another graph or names strategies that do not exist.
        RuleError: a typing of the plan does not hold.
    """
    local = local_graph(plan, graph, plan.mesh.data_index(rank))
    build = _Builder(plan, local, torch.device(device))
    holders: dict[str, list[int]] = {}
    for stage in plan.stages:
        blocks = local.blocks[stage.start : stage.stop]
        for name in dict.fromkeys(p.name for block in blocks for p in local.block_parameters(block)):
            holders.setdefault(name, []).append(stage.index)
    return Program(
        plan=plan,
        graph=local,
        stages=tuple(build.stage(stage) for stage in plan.stages),
        sums=build.sums(),
        loss=str_name(local.loss),
        tied=tuple((name, tuple(stages)) for name, stages in holders.items() if len(stages) > 1),
        state=tuple(b for b in local.buffers if b.name in build.changed),
    )


class _Builder:
    """Builds the parts of one program.

    Attributes:
        salts, period: as in :class:`autopar.lower.emit.Emitter`.
        changed: names of the buffers that steps change.
        homes: for each of these the index of the stage that computes its new value.
    """

    def __init__(self, plan: Plan, graph: Graph, device: torch.device) -> None:
        self.plan, self.graph, self.device = plan, graph, device
        random = (op.name for op in (*graph.prelude, *graph.ops) if is_random(op))
        self.salts = {name: number for number, name in enumerate(random)}
        self.period = plan.num_micro_batches + 1
        self.changed = {m.buffer for m in graph.mutations}
        # a value of the prelude, which needs no value of a block, is computed by the first stage
        self.homes = dict.fromkeys(self.changed, plan.stages[0].index) | {
            m.buffer: stage.index
            for stage in plan.stages
            for block in graph.blocks[stage.start : stage.stop]
            for m in graph.block_mutations(block)
        }

    def stage(self, stage: StagePlan) -> StageProgram:
        """Return the program of one stage."""
        graph = self.graph
        blocks = graph.blocks[stage.start : stage.stop]
        counts = Counter(p.name for block in blocks for p in graph.block_parameters(block))
        shared = {name for name, count in counts.items() if count > 1}
        needed = dict.fromkeys(ref for block in blocks for ref in graph.block_prelude(block))
        mutations = [m for m in graph.mutations if self.homes[m.buffer] == stage.index]
        needed |= dict.fromkeys(m.value for m in mutations if graph.is_prelude(m.value))
        prelude = self.prelude(f"Prelude{stage.index}", needed, frozenset(graph.sums)) if needed else None
        is_last = stage.stop == len(graph.blocks)
        before = graph.live_across(blocks[0].start) if blocks else ()
        after = () if is_last or not blocks else graph.live_across(blocks[-1].stop)
        return StageProgram(
            index=stage.index,
            pp_rank=stage.pp_rank,
            blocks=tuple(self.block(block, shared) for block in blocks),
            prelude=prelude,
            receives=tuple(str_name(ref) for ref in before),
            sends=tuple(str_name(ref) for ref in after),
            shared_parameters=tuple(name for name in counts if name in shared),
            is_last=is_last,
            state=tuple(name for name in (prelude.inputs if prelude is not None else ()) if name in self.changed),
            mutations=tuple((m.buffer, str_name(m.value)) for m in mutations),
        )

    def block(self, block: Block, shared: set[str]) -> BlockProgram:
        """Return the program of one block; ``shared`` are the parameters that several blocks of its stage read."""
        graph, ops = self.graph, self.graph.block_ops(block)
        emitter = Emitter(f"Block{block.index}", self.salts, self.device, self.period)
        reads = (*graph.block_inputs(block), *graph.block_prelude(block))
        inputs = [emitter.input(ref, graph.spec(ref), read_layout(graph, ref)) for ref in reads]
        parameters = graph.block_parameters(block)
        inputs += [emitter.shared_parameter(p) for p in parameters if p.name in shared]
        inputs += emitter.number_inputs(graph, ops)
        owned = {p.name: p for p in parameters if p.name not in shared}
        unread = dict(owned)
        for op in ops:
            for ref in op.operands:
                if ref.name in unread:
                    emitter.parameter(unread.pop(ref.name))
            emitter.op(op)
        outputs = tuple(dict.fromkeys((*graph.block_outputs(block), *(m.value for m in graph.block_mutations(block)))))
        is_shared = sorted(p.name in shared for p in parameters)
        mode = self.plan.blocks[block.index].recompute
        recomputed = sorted(made_again(graph, block)) if mode == "selective" else ()
        return BlockProgram(
            index=block.index,
            label=block.label,
            module=emitter.finish(
                outputs, [instead for _, instead in graph.evaluation.replaced] if graph.evaluation else ()
            ),
            inputs=tuple(inputs),
            outputs=tuple(str_name(ref) for ref in outputs),
            parameters=tuple(owned),
            recompute=mode,
            again=tuple(ops[i].name for i in recomputed),
            kind=f"{block.hash} {digest(signature(ops, graph.spec))} {len(inputs)} {len(outputs)} {is_shared}",
            offload=self.plan.blocks[block.index].offload,
        )

    def sums(self) -> tuple[PreludeProgram, ...]:
        """Return the sums over the batch. A sum that depends on totals is one round later than these."""
        rounds: dict[str, int] = {}
        for op in self.graph.prelude:
            rounds[op.name] = max((rounds.get(r.name, 0) + (r in self.graph.sums) for r in op.operands), default=0)
        numbers = sorted({rounds[ref.name] for ref in self.graph.sums})
        return tuple(
            self.prelude(
                f"Sums{number}",
                [ref for ref in self.graph.sums if rounds[ref.name] == number],
                frozenset(ref for ref in self.graph.sums if rounds[ref.name] < number),
            )
            for number in numbers
        )

    def prelude(self, name: str, wanted: Iterable[Ref], totals: frozenset[Ref]) -> PreludeProgram:
        """Return the module of the operators that ``wanted`` depends on; ``totals`` are sums that it takes as inputs."""
        graph, outputs = self.graph, tuple(wanted)
        ops = ancestors(graph.prelude, outputs, totals)
        reads = dict.fromkeys((*(ref for op in ops for ref in op.operands), *outputs))
        emitter = Emitter(name, self.salts, self.device, self.period)
        batch = {leaf.name for leaf in graph.inputs} | self.changed
        external = [ref for ref in reads if ref.name in batch or ref in totals]
        inputs = [emitter.input(ref, graph.spec(ref), read_layout(graph, ref)) for ref in external]
        inputs += emitter.number_inputs(graph, ops)
        buffers = tuple(emitter.buffer(b) for b in graph.buffers if Ref(b.name) in reads and b.name not in self.changed)
        for op in ops:
            emitter.op(op)
        return PreludeProgram(
            module=emitter.finish(outputs),
            inputs=tuple(inputs),
            outputs=tuple(str_name(ref) for ref in outputs),
            buffers=buffers,
        )
