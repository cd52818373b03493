"""One rank of a random plan: its stages as the runtime runs them, and the random numbers that it draws."""

from __future__ import annotations

import copy
import operator
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from autopar.graph.graph import Buffer, Graph, Op, Parameter, Ref
from autopar.graph.operator_kinds import draws_random
from autopar.lower.program import Program, StageProgram
from autopar.ops import seeded
from autopar.plan.mesh import DATA_AXES, Type
from autopar.rules.apply import BATCH
from autopar.rules.local_calls import SPREAD
from autopar.rules.strategy import RING
from autopar.runtime import assemble
from autopar.runtime.monitor import Monitor
from autopar.runtime.step.runner import Pipeline, micro_batches
from autopar.runtime.step.stage import StageModule
from tests.support.lower.ranks import axis_group, slice_of, these_meshes, this_mesh

STEP = 7
"""Of training: random streams follow from it."""
MANY = 16
"""Numbers that two streams do not have in common by chance."""

Draws = dict[tuple[str, int], Tensor]
"""What random operators drew, by name and micro-batch; of dropout the factors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Of one rank; the loss None where another stage makes it, gradients of the parameters that it has."""

    loss: Tensor | None
    gradients: dict[str, Tensor]
    draws: Draws


def run_rank(program: Program, values: Mapping[str, Tensor], rank: int) -> Result:
    """Loss and gradients of the global batch, micro-batch by micro-batch, data ranks included.

    ``values``: inputs, buffers that steps change, and parameters as the plan lengthens them, all whole, by name.
    """
    graph, mesh, plan = program.graph, program.mesh, program.plan
    count = plan.num_micro_batches
    samples = plan.micro_batch_size * count
    first = mesh.data_index(rank) * samples
    batch = {
        i.name: values[i.name] if i.batch_dim is None else values[i.name][first : first + samples] for i in graph.inputs
    }
    state = {buffer.name: values[buffer.name] for buffer in program.state}
    totals = _totals(program, [{**state, **part} for part in micro_batches(batch, graph.inputs, count)])
    parts = {p.name: slice_of(values[p.name], p.layout, mesh, rank) for p in graph.parameters}
    own = [stage for stage in program.stages if stage.pp_rank == mesh.coordinate(rank)["pp"]]
    modules = [_module(stage, program, parts) for stage in own]
    for module in modules:
        module.totals, module.state, module.seed = totals, state, STEP * (count + 1)
    if mesh.pp > 1:
        world: Any = types.SimpleNamespace(device_mesh=this_mesh(), device=torch.device("cpu"))
        monitor = Monitor(program.plan, world)
        monitor.close()
        loss = Pipeline(modules, program, world, monitor, lambda loss: loss).run(batch, count)
    else:
        loss = _in_turn(modules, batch, program)
    if loss is not None:
        _sum(loss, DATA_AXES)
    gradients: dict[str, Tensor] = {}
    for module in modules:
        for name, gradient in _gradients(module, program).items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return Result(loss=loss, gradients=gradients, draws=_draws(own, count))


def _totals(program: Program, batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Over micro-batches and data ranks."""
    totals: dict[str, Tensor] = {}
    for sums in program.sums:
        found: dict[str, Tensor] = {}
        for batch in batches:
            given = {**batch, **totals, "batch_share": 1.0, "micro_batch_weight": 1.0}
            for name, value in zip(sums.outputs, sums.module(*(given[n] for n in sums.inputs)), strict=True):
                found[name] = found[name] + value if name in found else value
        for value in found.values():
            _sum(value, DATA_AXES)
        totals |= found
    return totals


def _gradients(module: StageModule, program: Program) -> dict[str, Tensor]:
    """Of one stage, in an order that is that of all ranks: whole over the data ranks, and on axes where they are pending."""
    found, holders = dict[str, Tensor](), module.holders()
    for parameter in program.graph.parameters:
        if parameter.name not in holders:
            continue
        leaf = holders[parameter.name]._parameters[parameter.name]
        assert leaf is not None
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.detach()
        axes: tuple[str, ...] = ("ep_outer",) if _is_spread(parameter) else DATA_AXES
        if isinstance(gradient, DTensor):  # FSDP has summed it
            gradient, axes = gradient.full_tensor(), ()
        gradient = gradient.contiguous()
        _sum(gradient, (*axes, *parameter.gradient_sum_axes))
        found[parameter.name] = gradient
    return found


def _is_spread(parameter: Parameter) -> bool:
    return any(axis == SPREAD for axis, _ in parameter.layout)


def _sum(value: Tensor, axes: Sequence[str]) -> None:
    """In place, over all of the axes."""
    for axis in axes:
        if (group := axis_group(axis)).size() > 1:
            dist.all_reduce(value, group=group)


class _Body(nn.Module):
    """A block's code with one rank's parameters: ranks are threads, which share the code."""

    def __init__(self, module: fx.GraphModule, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._code, self.graph = type(module).forward, module.graph
        self._parameters.update(parameters)  # type: ignore[arg-type]
        self._buffers.update(module._buffers)
        for name, region in module.named_children():
            self.add_module(name, copy.deepcopy(region))

    def forward(self, *values: Any) -> Any:
        return self._code(self, *values)


def _module(stage: StageProgram, program: Program, parts: Mapping[str, Tensor]) -> StageModule:
    """A stage with parameters of its own, under FSDP where the plan shards them over data ranks."""
    learns = {p.name: p.spec.requires_grad for p in program.graph.parameters}
    leaves = {name: nn.Parameter(parts[name].clone(), learns[name]) for name in stage.parameters}
    blocks = tuple(
        replace(block, module=_Body(block.module, {name: leaves[name] for name in block.parameters}))  # type: ignore[arg-type]
        for block in stage.blocks
    )
    module = StageModule(replace(stage, blocks=blocks), program, these_meshes())
    module._parameters.update({name: leaves[name] for name in stage.shared_parameters})
    if assemble.uses_fsdp(program.plan):
        _shard(module, program, leaves)
    return module


def _shard(module: StageModule, program: Program, leaves: Mapping[str, nn.Parameter]) -> None:
    """As the runtime does; FSDP takes no scalars and no experts over data ranks."""
    mesh = assemble.fsdp_mesh(program.plan, this_mesh())
    left = {
        leaves[p.name] for p in program.graph.parameters if p.name in leaves and (_is_spread(p) or not p.spec.shape)
    }
    for block in module.blocks:
        own = set(block.parameters())
        if own:
            assemble.shard_block(block, program.plan, mesh, ignored=own & left)
    assemble.shard_block(module, program.plan, mesh, keep_gathered=True, ignored=left & set(module.parameters()))
    assemble.sum_gradients(module)


def _in_turn(modules: Sequence[StageModule], batch: Mapping[str, Tensor], program: Program) -> Tensor:
    """All stages in one process; what they pass on is cut off and its gradient handed back, as in a pipeline."""
    total = torch.zeros((), dtype=torch.float64)
    for number, part in enumerate(micro_batches(batch, program.graph.inputs, program.plan.num_micro_batches)):
        for module in modules:
            assemble.before_backward(module, program.plan, is_last=number == program.plan.num_micro_batches - 1)
        taken: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
        passed: tuple[Tensor, ...] = ()
        for module in modules:
            received = tuple(x.detach().requires_grad_(x.requires_grad) for x in passed)
            module.micro_batch = number
            made = module(*received, **part)
            passed = made if isinstance(made, tuple) else (made,)
            taken.append((received, passed))
        total += passed[0].detach()
        gradients: list[Tensor | None] = [torch.ones_like(passed[0])]
        for received, made in reversed(taken):
            ends = [(x, g) for x, g in zip(made, gradients, strict=True) if x.requires_grad and g is not None]
            if ends:
                torch.autograd.backward([x for x, _ in ends], [g for _, g in ends])
            gradients = [x.grad for x in received]
    return total


# --- random numbers


def _draws(stages: Sequence[StageProgram], count: int) -> Draws:
    """What the random operators of this rank draw: it depends on shapes and streams, not on values."""
    found: Draws = {}
    for stage in stages:
        for block in stage.blocks:
            for node in block.module.graph.nodes:
                if node.target in (seeded.dropout, seeded.draw):
                    for number in range(count):
                        found[node.name, number] = _drawn(node, STEP * (count + 1) + number)
    return found


def _drawn(node: fx.Node, seed: int) -> Tensor:
    kwargs: dict[str, Any] = dict(node.kwargs)
    source = kwargs["seed"]
    kwargs["seed"] = seed // source.args[1] if source.target is operator.floordiv else seed
    args = [torch.ones(x.meta["spec"].shape, dtype=torch.float64) if isinstance(x, fx.Node) else x for x in node.args]
    if node.target is seeded.dropout and not isinstance(node.args[0], fx.Node):
        raise AssertionError(node)
    made = node.target(*args, **kwargs)  # type: ignore[operator]
    assert isinstance(made, Tensor)
    return made.detach()


class Drawn:
    """The random numbers of all ranks put together: those that one device would have drawn.

    The law: ranks and micro-batches that hold the same part have the same numbers, different parts have different
    ones, and with these numbers one device computes what all ranks do.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ops = {op.name: op for op in program.graph.ops if draws_random(op.target)}
        self.is_zigzag = any(op.target == RING for op in program.graph.ops)
        self.values: dict[str, Tensor] = {}
        self.parts: dict[str, dict[bytes, Tensor]] = {}

    def add(self, rank: int, draws: Draws) -> str:
        """Notes what a rank drew; says what is wrong with it, or nothing."""
        for (name, number), value in draws.items():
            layout = self.ops[name].layouts[0]
            shape = self.whole_shape(value.shape, layout)
            places = self._places(shape, layout, rank, number).reshape(-1)
            known = self.values.setdefault(
                name,
                torch.full(
                    (prod(shape),),
                    float("nan"),
                    dtype=value.dtype if value.dtype.is_floating_point else torch.float64,
                ),
            )
            flat = value.reshape(-1).to(known.dtype)
            before = known[places]
            if not (before.isnan() | (before == flat)).all():
                return (
                    f"rank {rank}, micro-batch {number}: {name} draws other numbers than a replica: {flat} for {before}"
                )
            known[places] = flat
            key = places.numpy().tobytes()
            for other, numbers in self.parts.setdefault(name, {}).items():
                if other != key and numbers.numel() >= MANY and torch.equal(numbers, flat):
                    return f"rank {rank}, micro-batch {number}: {name} draws the numbers of another part"
            self.parts[name][key] = flat
        return ""

    def whole_shape(self, shape: Sequence[int], layout: Sequence[tuple[str, Type]]) -> tuple[int, ...]:
        mesh, whole = self.program.mesh, list(shape)
        for axis, kind in layout:
            if kind.is_split:
                whole[kind.dim] *= (
                    mesh.data * self.program.plan.num_micro_batches if axis == BATCH else getattr(mesh, axis)
                )
        return tuple(whole)

    def _places(self, shape: tuple[int, ...], layout: Sequence[tuple[str, Type]], rank: int, number: int) -> Tensor:
        """Where the elements of a rank's part stand in the whole."""
        mesh, count = self.program.mesh, self.program.plan.num_micro_batches
        places = torch.arange(torch.Size(shape).numel()).view(shape)
        for axis, kind in layout:
            if not kind.is_split:
                continue
            if axis == BATCH:
                places = places.chunk(mesh.data * count, kind.dim)[mesh.data_index(rank) * count + number]
            elif axis == "cp" and self.is_zigzag:
                at, chunks = mesh.coordinate(rank)["cp"], places.chunk(2 * mesh.cp, kind.dim)
                places = torch.cat((chunks[at], chunks[2 * mesh.cp - 1 - at]), kind.dim)
            else:
                places = places.chunk(getattr(mesh, axis), kind.dim)[mesh.coordinate(rank)[axis]]
        return places.contiguous()

    def fixed(self, graph: Graph) -> Graph:
        """The model on one device with these numbers in place of its own."""
        buffers, kept = list(graph.buffers), list[Op]()
        for op in graph.ops:
            if op.name not in self.values:
                kept.append(op)
                continue
            value = self.values[op.name].view(op.spec.shape)
            is_dropout = op.target == "autopar.dropout"
            name = f"{op.name}_drawn" if is_dropout else op.name
            spec = replace(op.spec, dtype=value.dtype, requires_grad=False)
            buffers.append(Buffer(name=name, fqn="", spec=spec, value=value))
            if is_dropout:
                kept.append(replace(op, target="aten.mul.Tensor", args=(op.operands[0], Ref(name))))
        return replace(graph, ops=tuple(kept), buffers=tuple(buffers))
