"""Recording of one training step: the values of operators, and the gradient on each edge from a value to an operator that reads it.

A rank's emitted code runs node by node in an fx interpreter; on one device the graph itself is run. Both write to a :class:`Tape`. An
operator reads an alias of each operand, so that the gradient that it passes back is apart from those of the operand's other readers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from torch import Tensor, fx, nn

from autopar.graph.graph import Graph, Op, Ref, map_refs
from autopar.graph.interpreter import function_of, leaves
from autopar.lower.emit import SEED
from autopar.runtime.parallel_model import ParallelModel

PRELUDE = -1
"""The place of the prelude, where blocks have their index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """The values and gradients that are recorded.

    Attributes:
        values: outputs of operators; their gradients are recorded too.
        edges: operands, by operator name and position in ``Op.operands``; the gradient that is passed back to each is recorded.
        places: blocks (or :data:`PRELUDE`) that record the values that they read.
    """

    values: frozenset[Ref]
    edges: frozenset[tuple[str, int]]
    places: frozenset[int] = frozenset()


@dataclass(slots=True, kw_only=True)
class Tape:
    """The recorded tensors, on CPU. The last part of each key is the micro-batch.

    Attributes:
        watch: the values and gradients to record.
        values: outputs of operators.
        gradients: sums of the gradients that the readers of an output pass back.
        edges: gradients by operator name and position of the operand.
        reads: values by the place that reads them.
    """

    watch: Watch
    values: dict[tuple[Ref, int], Tensor] = field(default_factory=dict)
    gradients: dict[tuple[Ref, int], Tensor] = field(default_factory=dict)
    edges: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    reads: dict[tuple[int, Ref, int], Tensor] = field(default_factory=dict)

    def taken(self, op: str, position: int, value: Any, micro_batch: int) -> Any:
        """Return the operand that an operator reads in place of ``value``: an alias whose gradient is recorded, if the edge is watched."""
        if not isinstance(value, Tensor) or not value.requires_grad or (op, position) not in self.watch.edges:
            return value
        alias = value.view_as(value)
        alias.register_hook(_keep(self.edges, (op, position, micro_batch)))  # type: ignore[no-untyped-call]
        return alias

    def made(self, op: str, result: Any, operands: Iterable[Any], micro_batch: int) -> Any:
        """Record the result of an operator (one tensor or several), and return the result that its readers get."""
        is_sequence = isinstance(result, tuple | list)
        values = list(result) if is_sequence else [result]
        operand_ids = {id(operand) for operand in operands}
        for index, value in enumerate(values):
            ref = Ref(op, index)
            if not isinstance(value, Tensor) or ref not in self.watch.values:
                continue
            if id(value) in operand_ids:  # the operator returned its operand: an alias keeps their gradients apart
                values[index] = value = value.view_as(value)
            self.values.setdefault((ref, micro_batch), _copy(value))
            if value.requires_grad:
                value.register_hook(_keep(self.gradients, (ref, micro_batch)))  # type: ignore[no-untyped-call]
        return values if is_sequence else values[0]

    def read(self, place: int, ref: Ref, value: Any, micro_batch: int) -> None:
        """Record a leaf or a value of another place that a place reads."""
        if isinstance(value, Tensor) and place in self.watch.places:
            self.reads.setdefault((place, ref, micro_batch), _copy(value))


def _copy(value: Tensor) -> Tensor:
    """Return a copy on CPU."""
    return value.detach().to("cpu", copy=True)


def _keep(table: dict[Any, Tensor], key: Any) -> Callable[[Tensor], None]:
    """Return a hook that stores a gradient in a table."""

    def hook(gradient: Tensor) -> None:
        table[key] = _copy(gradient)

    return hook


# --- a rank --------------------------------------------------------------------------------------


def attach(parallel: ParallelModel, watch: Watch) -> Tape:
    """Record the next training step of this rank on the returned tape."""
    tape = Tape(watch=watch)
    for sums in parallel._program.sums:  # as part of the prelude
        _record(sums.module, PRELUDE, tape, count().__next__)
    programs = {stage.index: stage for stage in parallel._program.stages}
    for stage in parallel._assembly.stages:
        blocks = zip(programs[stage.index].blocks, stage.blocks, strict=True)
        bodies = [(program.index, block.body) for program, block in blocks]
        if isinstance(stage.prelude, fx.GraphModule):
            bodies.append((PRELUDE, stage.prelude))
        for place, module in bodies:
            _record(module, place, tape, partial(getattr, stage, "micro_batch"))
    return tape


def _record(module: fx.GraphModule, place: int, tape: Tape, micro_batch: Callable[[], int]) -> None:
    """Record the module of one place at each run. Of a micro-batch only the first run counts: backward may run it again."""
    module.forward = lambda *values: _Recorder(module, tape, place, micro_batch()).run(*values)


class _Recorder(fx.Interpreter):
    """Runs an emitted module node by node and records on a tape."""

    def __init__(self, module: fx.GraphModule, tape: Tape, place: int, micro_batch: int) -> None:
        super().__init__(module)
        self.tape, self.place, self.micro_batch = tape, place, micro_batch

    def run_node(self, n: fx.Node) -> Any:
        """Return the value of a node."""
        value = self._call(n) if "op" in n.meta else super().run_node(n)
        if "reads" in n.meta:
            self.tape.read(self.place, n.meta["reads"], value, self.micro_batch)
        return value

    def _call(self, node: fx.Node) -> Any:
        """Run the operator of a node on recorded operands."""
        name, positions, operands = node.meta["op"], count(), list[Any]()

        def value(source: fx.Node) -> Any:
            operand = self.env[source]
            if source.name == SEED or not isinstance(operand, Tensor):
                return operand
            operands.append(self.tape.taken(name, next(positions), operand, self.micro_batch))
            return operands[-1]

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
        assert callable(node.target)
        return self.tape.made(name, node.target(*args, **kwargs), operands, self.micro_batch)


# --- one device ----------------------------------------------------------------------------------


class OneDevice:
    """The model of a graph, trained on global batches.

    Args:
        graph: the graph for the global batch.
        model: gives parameters and buffers, which are converted to the dtypes of the graph.
    """

    def __init__(self, graph: Graph, model: nn.Module) -> None:
        self.graph, self._model = graph, model
        self.parameters: dict[str, nn.Parameter] = {}
        for leaf in graph.parameters:
            value = model.get_parameter(leaf.fqn)
            self.parameters[leaf.fqn] = nn.Parameter(value.detach().to(leaf.spec.dtype, copy=True), value.requires_grad)
        self._buffers = {b.fqn: model.get_buffer(b.fqn).to(b.spec.dtype) for b in graph.buffers if b.fqn}
        self.values: dict[Ref, Tensor] = {}
        self._changed: dict[str, Tensor] = {}

    @property
    def loss(self) -> Tensor:
        """The loss of the last batch."""
        return self.values[self.graph.loss]

    def record(self, batch: Mapping[str, Tensor], watch: Watch) -> Tape:
        """Run forward and backward of one batch.

        Afterwards parameters have its gradients, and ``values`` has all values, parameters as they were before the step.
        """
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
        names = {buffer.name: buffer.fqn for buffer in self.graph.buffers}
        self._changed = {names[m.buffer]: self.values[m.value] for m in self.graph.mutations}
        return tape

    def end_step(self) -> None:
        """Let the next batch find the buffers as the last one left them; until then it can be recorded again."""
        self._buffers |= self._changed

    def gradients(self) -> dict[str, Tensor]:
        """Return gradients by the model's names; parameters that the loss does not depend on are left out."""
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    def _run(self, op: Op, env: Mapping[Ref, Tensor], tape: Tape) -> Any:
        """Run one operator on recorded operands."""
        positions, operands = count(), list[Any]()

        def taken(ref: Ref) -> Any:
            operands.append(tape.taken(op.name, next(positions), env[ref], 0))
            return operands[-1]

        args = [map_refs(argument, taken) for argument in op.args]
        kwargs = {key: map_refs(argument, taken) for key, argument in op.kwargs}
        return tape.made(op.name, function_of(op, self._model)(*args, **kwargs), operands, 0)
