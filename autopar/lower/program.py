"""The program: what each rank of a plan executes, as fx modules of plain PyTorch with typed collectives.

Ranks of one pipeline stage run the same code; nothing here needs a process group, a device or the
weights. One step on a data rank:

1. before the first micro-batch :attr:`Program.sums` runs on every micro-batch; its results are
   summed over micro-batches and data ranks (token counts);
2. for each micro-batch a stage runs its prelude (from batch inputs and those totals), then its
   blocks in order over one environment of named values: those received, those of the prelude, and
   what earlier blocks made;
3. it passes ``sends`` on; the last stage's environment holds ``Program.loss``: this rank's part of
   the global loss, a sum over data ranks and micro-batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from autopar.graph.graph import Block, Buffer, Graph, Layout, Ref, digest
from autopar.graph.operator_kinds import made_again
from autopar.graph.rewrites import signature
from autopar.lower.emit import Emitter, ancestors, is_random, layout_of, readable, str_name
from autopar.lower.read_plan import local_graph
from autopar.plan.mesh import Mesh, R
from autopar.plan.plan import Plan, Recompute, StagePlan
from autopar.rules.apply import BATCH

_HEADER = "import torch\nimport torch.nn.functional as F\nfrom autopar.ops import collectives, experts, plain, seeded, sequence, sharded\naten = torch.ops.aten"


@dataclass(frozen=True, kw_only=True)
class PreludeProgram:
    """A module without parameters: from batch inputs (and totals of sums) to values, both by name.

    ``buffers``: names of buffers registered in ``module``; those with a model's name behind them
    (``Graph.buffers``, value None) are on meta and must be loaded.
    """

    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    buffers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BlockProgram:
    """One block of one stage.

    Attributes:
        index, label: as in the plan.
        module: takes ``inputs`` in order and returns the tuple of ``outputs``. Parameters are on meta.
        inputs: live values, prelude values, shared parameters, ``rng_seed`` (a Python int, there only when the
            block draws random numbers), ``batch_share`` and ``micro_batch_weight`` (Python floats, where it takes means, or sums
            over data ranks, of samples).
        outputs: values that later blocks or stages read; the loss among them in the last block.
        parameters: names of ``Graph.parameters`` that the module owns, registered under these names.
        recompute: which activations are dropped and made again in backward.
        again: names of the operators that are made again where that is ``selective``.
        offload: whether what the block keeps for backward lives on the host.
        kind: equal for blocks with equal code, names aside.
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
        index, pp_rank: as in the plan.
        receives: live values from the stage before, those only passed through included.
        sends: likewise to the stage after; empty for the last.
        prelude: None if no block needs anything of the batch.
        shared_parameters: parameters that several blocks of this stage read, passed to them as inputs.
        state: buffers that steps change and this stage reads: inputs of its prelude.
        mutations: buffers that this stage changes, with the names of their new values.
        is_last: its last block makes the loss.
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


@dataclass(frozen=True, kw_only=True)  # no slots: the code is made when asked for
class Program:
    """See the module's text.

    Attributes:
        graph: one rank's graph for one micro-batch; its ``parameters`` say how each is laid out.
        stages: in order of the model, all of them.
        sums: over the batch, in rounds: a later one may read the totals of those before. Their outputs are inputs of preludes.
        loss: name of the loss.
        tied: parameters that several stages hold, with the stages: their gradients are summed.
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
        """The plan's."""
        return self.plan.mesh

    @cached_property
    def code(self) -> str:
        """The program as PyTorch: sums, preludes, and every distinct block once."""
        parts = [f"# {self.graph.name} on {self.mesh}, micro-batch of {self.graph.batch_size}\n{_HEADER}"]
        title = "# sums over the global batch, before the first micro-batch"
        parts += [f"{title}\n{readable(sums.module)}" for sums in self.sums]
        printed: dict[str, list[tuple[int, BlockProgram]]] = {}
        for stage in self.stages:
            if stage.prelude is not None:
                parts.append(f"# prelude of stage {stage.index}\n{readable(stage.prelude.module)}")
            for block in stage.blocks:
                printed.setdefault(block.kind, []).append((stage.index, block))
        for uses in printed.values():
            names = ", ".join(f"{block.index} {block.label or '-'} (stage {stage})" for stage, block in uses)
            again = "; recomputed in backward" if any(block.recompute == "full" for _, block in uses) else ""
            remade = next((block.again for _, block in uses if block.again), ())
            again += f"; made again in backward: {', '.join(remade)}" if remade else ""
            parts.append(f"# block {names}{again}\n{readable(uses[0][1].module)}")
        return "\n\n\n".join(parts) + "\n"


def lower(plan: Plan, graph: Graph, *, device: torch.device | str = "cpu", rank: int = 0) -> Program:
    """The program of a plan for a traced model.

    Args:
        graph: the whole model as traced; the plan's fingerprint names it.
        device: where preludes make tensors that depend on no input (positions).
        rank: whose program; it matters where data ranks take different numbers of samples (``Plan.data_shares``).

    Raises:
        PlanError: the plan is for another graph or names strategies that do not exist.
        RuleError: a typing of the plan does not hold.
    """
    return from_local_graph(plan, local_graph(plan, graph, plan.mesh.data_index(rank)), device=device)


def from_local_graph(plan: Plan, local: Graph, *, device: torch.device | str = "cpu") -> Program:
    """The program of one rank's graph, cut into the plan's stages."""
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
    """What all stages of one program share."""

    def __init__(self, plan: Plan, graph: Graph, device: torch.device) -> None:
        self.plan, self.graph, self.device = plan, graph, device
        random = (op.name for op in (*graph.prelude, *graph.ops) if is_random(op))
        self.salts = {name: number for number, name in enumerate(random)}
        self.period = plan.num_micro_batches + 1
        self.changed = {m.buffer for m in graph.mutations}
        self.homes = self._homes()

    def _homes(self) -> dict[str, int]:
        """For each buffer that steps change the stage that makes its new value: where its module runs, else the first."""
        graph, homes = self.graph, dict[str, int]()
        modules: dict[str, int] = {}
        for stage in self.plan.stages:
            blocks = graph.blocks[stage.start : stage.stop]
            for block in blocks:
                homes |= {m.buffer: stage.index for m in graph.block_mutations(block)}
            for op in graph.ops[blocks[0].start : blocks[-1].stop] if blocks else ():
                modules.setdefault(op.module, stage.index)
        for buffer in graph.buffers:
            if buffer.name in self.changed:
                homes.setdefault(buffer.name, modules.get(buffer.fqn.rpartition(".")[0], self.plan.stages[0].index))
        return homes

    def stage(self, stage: StagePlan) -> StageProgram:
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
        graph, ops = self.graph, self.graph.block_ops(block)
        emitter = Emitter(f"Block{block.index}", self.salts, self.device, self.period)
        reads = (*graph.block_inputs(block), *graph.block_prelude(block))
        inputs = [emitter.input(ref, graph.spec(ref), self.layout(ref)) for ref in reads]
        parameters = graph.block_parameters(block)
        inputs += [emitter.shared_parameter(p) for p in parameters if p.name in shared]
        inputs += emitter.number_inputs(graph, ops)
        owned = {p.name: p for p in parameters if p.name not in shared}
        waiting = dict(owned)
        for op in ops:
            for ref in op.operands:
                if ref.name in waiting:
                    emitter.parameter(waiting.pop(ref.name))
            emitter.op(op)
        outputs = tuple(dict.fromkeys((*graph.block_outputs(block), *(m.value for m in graph.block_mutations(block)))))
        shared_here = sorted(p.name in shared for p in parameters)
        mode = self.plan.blocks[block.index].recompute
        again = sorted(made_again(graph, block)) if mode == "selective" else ()
        return BlockProgram(
            index=block.index,
            label=block.label,
            module=emitter.finish(outputs),
            inputs=tuple(inputs),
            outputs=tuple(str_name(ref) for ref in outputs),
            parameters=tuple(owned),
            recompute=mode,
            again=tuple(ops[i].name for i in again),
            kind=f"{block.hash} {digest(signature(ops, graph.spec))} {len(inputs)} {len(outputs)} {shared_here}",
            offload=self.plan.blocks[block.index].offload,
        )

    def layout(self, ref: Ref) -> Layout:
        """Types of a value where a block or the prelude reads it: a total is whole."""
        found = layout_of(self.graph, ref)
        return tuple((axis, R if axis == BATCH else kind) for axis, kind in found) if ref in self.graph.sums else found

    def sums(self) -> tuple[PreludeProgram, ...]:
        """Sums over the batch, those that depend on totals in the round after these."""
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
        """The operators behind ``wanted``; values of ``totals`` come from outside."""
        graph, outputs = self.graph, tuple(wanted)
        ops = ancestors(graph.prelude, outputs, totals)
        reads = dict.fromkeys((*(ref for op in ops for ref in op.operands), *outputs))
        emitter = Emitter(name, self.salts, self.device, self.period)
        batch = {leaf.name for leaf in graph.inputs} | self.changed
        given = [ref for ref in reads if ref.name in batch or ref in totals]
        inputs = [emitter.input(ref, graph.spec(ref), self.layout(ref)) for ref in given]
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
