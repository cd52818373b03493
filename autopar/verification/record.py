"""Records what a step computes: values, and gradients on every way from a value to an operator that reads it.

The same on a rank, whose emitted code is run node by node, and on one device, whose graph is. An operator reads
an alias of each operand, so that the gradient that it passes back can be told from those of the other readers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, fx, nn

from autopar.graph.graph import Argument, Graph, Op, Ref
from autopar.graph.interpreter import function_of, leaves
from autopar.lower.emit import SEED
from autopar.ops import plain
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.step.stage import BlockModule, StageModule

PRELUDE = -1
"""Stands for the index of a block where the prelude is meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """What is recorded.

    Attributes:
        values: of operators, with their gradients.
        edges: operands, by operator name and position in ``Op.operands``: the gradient passed back to each.
        places: blocks (or :data:`PRELUDE`) that record what they read.
    """

    values: frozenset[Ref]
    edges: frozenset[tuple[str, int]]
    places: frozenset[int]


@dataclass(slots=True, kw_only=True)
class Tape:
    """What was recorded, on CPU; the last part of each key is the micro-batch."""

    watch: Watch
    values: dict[tuple[Ref, int], Tensor] = field(default_factory=dict)
    gradients: dict[tuple[Ref, int], Tensor] = field(default_factory=dict)
    edges: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    reads: dict[tuple[int, Ref, int], Tensor] = field(default_factory=dict)

    def taken(self, op: str, position: int, value: Any, micro_batch: int) -> Any:
        """What the operator reads in place of ``value``."""
        if not isinstance(value, Tensor) or not value.requires_grad or (op, position) not in self.watch.edges:
            return value
        alias = value.view_as(value)
        alias.register_hook(_keep(self.edges, (op, position, micro_batch)))  # type: ignore[no-untyped-call]
        return alias

    def made(self, op: str, result: Any, operands: Iterable[Any], micro_batch: int) -> Any:
        """What others read in place of the operator's ``result``: one tensor, or several."""
        several = isinstance(result, tuple | list)
        values = list(result) if several else [result]
        known = {id(operand) for operand in operands}
        for index, value in enumerate(values):
            ref = Ref(op, index)
            if not isinstance(value, Tensor) or ref not in self.watch.values:
                continue
            if id(value) in known:  # an operator that gives back what it got: the gradients of both are told apart
                values[index] = value = value.view_as(value)
            self.values.setdefault((ref, micro_batch), _copy(value))
            if value.requires_grad:
                value.register_hook(_keep(self.gradients, (ref, micro_batch)))  # type: ignore[no-untyped-call]
        return values if several else values[0]

    def read(self, place: int, ref: Ref, value: Any, micro_batch: int) -> None:
        """A place reads a leaf or what another place made."""
        if isinstance(value, Tensor) and place in self.watch.places:
            self.reads.setdefault((place, ref, micro_batch), _copy(value))


def _copy(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


def _keep(table: dict[Any, Tensor], key: Any) -> Callable[[Tensor], None]:
    """A hook that stores a gradient."""

    def hook(gradient: Tensor) -> None:
        table[key] = _copy(gradient)

    return hook


# --- a rank --------------------------------------------------------------------------------------


def attach(parallel: ParallelModel, watch: Watch) -> Tape:
    """Has the next training step of this rank recorded."""
    tape = Tape(watch=watch)
    for sums in parallel._program.sums:
        sums.module.forward = partial(_run_sums, sums.module, count(), tape)
    indices = {stage.index: [block.index for block in stage.blocks] for stage in parallel._program.stages}
    for stage in parallel._assembly.stages:
        _StageRecorder(stage, indices[stage.index], tape)
    return tape


def _run_sums(module: fx.GraphModule, micro_batches: Iterator[int], tape: Tape, *values: Tensor) -> Any:
    return run_module(module, values, tape, PRELUDE, next(micro_batches))


class _StageRecorder:
    """Puts itself before the calls of a stage's modules. What checkpointing runs again is not recorded again."""

    def __init__(self, stage: StageModule, indices: list[int], tape: Tape) -> None:
        self.tape, self.count, self.micro_batch = tape, 0, 0
        self.inside = False
        stage.forward = partial(self.stage, stage.forward)  # type: ignore[method-assign]
        if isinstance(stage.prelude, fx.GraphModule):
            stage.prelude.forward = partial(self.body, stage.prelude, PRELUDE)
        for index, block in zip(indices, stage.blocks, strict=True):
            assert isinstance(block, BlockModule)
            block.body.forward = partial(self.body, block.body, index)

    def stage(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.micro_batch, self.inside = self.count, True
        self.count += 1
        try:
            return forward(*args, **kwargs)
        finally:
            self.inside = False

    def body(self, module: fx.GraphModule, place: int, *values: Any) -> tuple[Any, ...]:
        return run_module(module, values, self.tape if self.inside else None, place, self.micro_batch)


def run_module(
    module: fx.GraphModule, values: Iterable[Any], tape: Tape | None, place: int, micro_batch: int
) -> tuple[Any, ...]:
    """What the emitted module does, node by node."""
    env: dict[fx.Node, Any] = {}
    given = iter(values)
    tape = tape or Tape(watch=Watch(values=frozenset(), edges=frozenset(), places=frozenset()))
    for node in module.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(given)
        elif node.op == "get_attr":
            env[node] = getattr(module, node.target)
        elif node.op == "output":
            return tuple(env[source] for source in node.args[0])
        elif "op" in node.meta:
            env[node] = _call(node, env, tape, micro_batch)
        elif node.target is operator.getitem:
            env[node] = env[node.args[0]][node.args[1]]
        elif node.target is operator.floordiv:  # the seed of a step
            env[node] = env[node.args[0]] // node.args[1]
        else:
            assert node.target is plain.local
            env[node] = plain.local(env[node.args[0]])
        if "reads" in node.meta:
            tape.read(place, node.meta["reads"], env[node], micro_batch)
    raise AssertionError("an emitted module ends in its outputs")


def _call(node: fx.Node, env: Mapping[fx.Node, Any], tape: Tape, micro_batch: int) -> Any:
    name, positions, operands = node.meta["op"], count(), list[Any]()

    def value(source: fx.Node) -> Any:
        if source.name == SEED or not isinstance(env[source], Tensor):
            return env[source]
        operands.append(tape.taken(name, next(positions), env[source], micro_batch))
        return operands[-1]

    args = fx.node.map_arg(node.args, value)
    kwargs = fx.node.map_arg(node.kwargs, value)
    assert callable(node.target)
    return tape.made(name, node.target(*args, **kwargs), operands, micro_batch)


# --- one device ----------------------------------------------------------------------------------


class OneDevice:
    """The model of a graph, trained on whole batches.

    Args:
        graph: for the global batch.
        model: its parameters and buffers; taken in the dtypes of the graph.
    """

    def __init__(self, graph: Graph, model: nn.Module) -> None:
        self.graph, self._model = graph, model
        self.parameters: dict[str, nn.Parameter] = {}
        for leaf in graph.parameters:
            value = model.get_parameter(leaf.fqn)
            self.parameters[leaf.fqn] = nn.Parameter(value.detach().to(leaf.spec.dtype, copy=True), value.requires_grad)
        self._buffers = {b.fqn: model.get_buffer(b.fqn).to(b.spec.dtype) for b in graph.buffers if b.fqn}
        self.values: dict[Ref, Tensor] = {}

    @property
    def loss(self) -> Tensor:
        """Of the last batch."""
        return self.values[self.graph.loss]

    def record(self, batch: Mapping[str, Tensor], watch: Watch) -> Tape:
        """Forward and backward of one batch; parameters have its gradients after it, and ``values`` all values."""
        for parameter in self.parameters.values():
            parameter.grad = None
        tape = Tape(watch=watch)
        env = leaves(self.graph, batch, self.parameters, self._buffers)
        for op in (*self.graph.prelude, *self.graph.ops):
            result = self._run(op, env, tape)
            for index, value in enumerate(result if isinstance(result, tuple | list) else (result,)):
                env[Ref(op.name, index)] = value
        env[self.graph.loss].backward()  # type: ignore[no-untyped-call]
        self.values = {ref: value.detach() for ref, value in env.items() if isinstance(value, Tensor)}
        self.values |= {Ref(p.name): self.values[Ref(p.name)].clone() for p in self.graph.parameters}  # before the step
        return tape

    def gradients(self) -> dict[str, Tensor]:
        """By the model's names, those that the loss depends on."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def _run(self, op: Op, env: Mapping[Ref, Tensor], tape: Tape) -> Any:
        positions, operands = count(), list[Any]()

        def value(argument: Argument) -> Any:
            if isinstance(argument, Ref):
                operands.append(tape.taken(op.name, next(positions), env[argument], 0))
                return operands[-1]
            return [value(item) for item in argument] if isinstance(argument, tuple) else argument

        args = [value(argument) for argument in op.args]
        kwargs = {key: value(argument) for key, argument in op.kwargs}
        return tape.made(op.name, function_of(op, self._model)(*args, **kwargs), operands, 0)
