"""Counts what one block of one rank's graph does for one micro-batch, operator by operator, and prices it on a device and its links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autopar.cost.blocks.activation_lifetimes import Storages, Wiring, wiring_of
from autopar.cost.blocks.block_cost import SENDING, BlockCost, Message, ParameterCost, SelectiveCost, messages
from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.operators.operator_times import OperatorTimes, time_of_work
from autopar.cost.operators.work import Specs, Work, work
from autopar.graph.graph import Block, Graph, Op, Ref, TensorSpec
from autopar.graph.operator_kinds import is_dear, made_again
from autopar.hardware.device import Device, KernelKind
from autopar.plan.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """What a block does on one rank for one micro-batch, independently of any profile; cheap to price again.

    Attributes:
        ops, works: its operators and their work, in order.
        again: the positions of the operators that backward recomputes in every mode of the block.
        remade: the positions of those that it recomputes under selective recompute.
        fan_in: the bytes of each sum of gradients, where several operators read a value.
        shape: the parts of :class:`BlockCost` that do not depend on a profile.
        operands: the local specs of each operator's operands; empty where kernels are fused and measured times do not hold.
    """

    ops: tuple[Op, ...]
    works: tuple[Work, ...]
    again: frozenset[int]
    fan_in: tuple[int, ...]
    shape: BlockCost
    operands: tuple[Specs, ...] = ()
    remade: frozenset[int] = frozenset()


class Kernels(Protocol):
    """The kernels of a program that does not run torch's operators one by one as eager mode does."""

    def operator(self, graph: Graph, op: Op, operands: Specs, op_work: Work) -> Work:
        """Return the work of one operator; ``op_work`` is that of torch's kernel."""

    def unkept(self, graph: Graph, ops: Sequence[Op]) -> frozenset[int]:
        """Return the positions of operators whose values its kernels recompute instead of keeping them for backward."""

    def joined(
        self, graph: Graph, ops: Sequence[Op], operands: Sequence[Specs], works: Sequence[Work]
    ) -> tuple[list[Work], Collection[int]]:
        """Return the works with fused kernels, and the positions of operators that add no gradient of their own."""


def block_work(
    graph: Graph,
    block: Block,
    kind: KernelKind,
    *,
    again: Callable[[Op], bool] | None = None,
    kernels: Kernels | None = None,
    selective: bool = False,
) -> BlockWork:
    """Return what a block of one rank's graph does for one micro-batch.

    Args:
        graph: the rank's graph.
        block: the block of it.
        kind: the kind of the device's kernels.
        again: the operators whose outputs are recomputed in backward in every mode, as programs other than autopar do.
        kernels: the kernels, where they are not those of torch's eager mode.
        selective: whether autopar's selective recompute is counted too.
    """
    ops = graph.block_ops(block)
    wiring = wiring_of(graph, block)
    specs = [spec for op in ops for spec in op.outputs]
    specs += [graph.spec(ref) for ref in wiring.values[len(specs) :]]
    operands = tuple([tuple([specs[v] for v in numbers]) for numbers in wiring.reads])
    works = [work(op, operand_specs, kind) for op, operand_specs in zip(ops, operands, strict=True)]
    repeated = frozenset() if again is None else frozenset(i for i, op in enumerate(ops) if again(op))
    unkept = repeated
    if kernels is not None:
        works = [kernels.operator(graph, *operator) for operator in zip(ops, operands, works, strict=True)]
        unkept = repeated | kernels.unkept(graph, ops)
    storages = Storages(ops, wiring, works, specs, unkept)
    works = [storages.copied(i) for i in range(len(works))]
    remade = storages.without(made_again(graph, block, storages.roots)) if selective else None
    shape = _shape(graph, block, storages, works, remade)
    joined: Collection[int] = ()
    if kernels is not None:
        works, joined = kernels.joined(graph, ops, operands, works)
    fan_in = tuple(fan_in_bytes(ops, wiring, specs, joined))
    if kernels is not None:  # no operator is then one that was measured
        operands = ()
    return BlockWork(
        ops=ops, works=tuple(works), again=repeated, fan_in=fan_in, shape=shape, operands=operands,
        remade=frozenset() if remade is None else remade.remade,
    )  # fmt: skip


def _shape(graph: Graph, block: Block, storages: Storages, works: Sequence[Work], remade: Storages | None) -> BlockCost:
    """Return the parts of a block's cost that do not depend on a profile; ``remade`` has its storages under selective recompute."""
    ops, inputs = graph.block_ops(block), storages.inputs()
    across = [graph.spec(ref) for ref in graph.live_across(block.stop)]
    keeping = (i for i, op_work in enumerate(works) if op_work.saved or op_work.saves_output or op_work.saved_bytes)
    last_kept = max(keeping, default=-1)
    kept = _kept(storages, inputs)
    return BlockCost(
        key=block.hash,
        forward_s=0.0,
        backward_s=0.0,
        communication_forward_s=0.0,
        communication_backward_s=0.0,
        saved_bytes=storages.saved_bytes,
        input_bytes=sum(inputs.values()),
        saved_input_bytes=kept.saved_input_bytes,
        prelude=storages.prelude(),
        forward_transient_bytes=kept.forward_transient_bytes,
        backward_transient_bytes=kept.backward_transient_bytes,
        selective=None if remade is None else replace(_kept(remade, inputs), least_bytes=storages.kept_by(is_dear)),
        sends=tuple([spec.num_bytes for spec in across]),
        send_gradients=tuple([spec.num_bytes for spec in across if spec.requires_grad]),
        flops=sum([op_work.flops for op_work in works]),
        backward_flops=sum([op_work.backward_flops for op_work in works]),
        messages=tuple(
            message if i <= last_kept else replace(message, repeated=False)
            for i, op in enumerate(ops)
            if op.target in SENDING
            for message in messages(op, graph.spec)
        ),
        parameters=_parameters(graph, block),
    )


def _parameters(graph: Graph, block: Block) -> tuple[ParameterCost, ...]:
    """Return the parameters that a block reads."""
    return tuple(
        [
            ParameterCost(
                name=p.name,
                shape=p.spec.shape,
                num_bytes=p.spec.num_bytes,
                gradient_sum_axes=p.gradient_sum_axes,
                trained=p.spec.requires_grad,
                spread=any(axis == "ep_data" for axis, _ in p.layout),
                shared=not all(block.start <= user < block.stop for user in graph.users(Ref(p.name))),
            )
            for p in graph.block_parameters(block)
        ]
    )


def _kept(storages: Storages, inputs: Mapping[int, int]) -> SelectiveCost:
    """Return what a block keeps and its peaks; ``inputs`` has the bytes of the values of earlier blocks that it reads."""
    saved = storages.saved_bytes
    return SelectiveCost(
        saved_bytes=saved,
        saved_input_bytes=sum([size for root, size in inputs.items() if root in storages.saved]),
        forward_transient_bytes=max(storages.forward_peak() - saved, 0),
        backward_transient_bytes=max(storages.backward_peak() - saved, 0) + storages.again_bytes,
    )


def fan_in_bytes(
    ops: Sequence[Op], wiring: Wiring, specs: Sequence[TensorSpec], fused: Collection[int]
) -> Iterator[int]:
    """Yield the bytes of each sum of gradients of a value that several operators of the block read.

    Args:
        ops, wiring: the operators and their wiring.
        specs: the specs of the values of ``wiring``.
        fused: the positions of operators that add no gradient, as they run in another's kernel.
    """
    uses: Counter[int] = Counter()
    for i, (op, operands) in enumerate(zip(ops, wiring.reads, strict=True)):
        if i not in fused and any(spec.requires_grad for spec in op.outputs):
            uses.update(list(dict.fromkeys(operands)))
    for v, count in uses.items():
        if count > 1 and specs[v].requires_grad and not wiring.is_parameter[v]:
            yield from (3 * specs[v].num_bytes,) * (count - 1)


def price_block(
    counted: BlockWork,
    mesh: Mesh,
    device: Device,
    collectives: CollectiveModel,
    *,
    quantized: str | None = None,
    exposed: Callable[[Message], float] | None = None,
    measured: OperatorTimes | None = None,
) -> BlockCost:
    """Return the cost of a block's work on a device and its links.

    Args:
        counted: the work.
        mesh, collectives: the mesh whose axes the block's collectives use, and their times.
        device: the device.
        quantized: see :func:`time_of_work`.
        exposed: the fraction of each collective that the block waits for; None: all of it, as in autopar's runtime.
        measured: times of operators that replace the roofline, unless these are fused or quantized.
    """
    times = [
        time_of_work(item, op, device, quantized=quantized) for item, op in zip(counted.works, counted.ops, strict=True)
    ]
    if measured is not None and quantized is None and counted.operands:
        times = [measured.time(op, specs, t) for op, specs, t in zip(counted.ops, counted.operands, times, strict=True)]
    bandwidth = device.memory_bandwidth_bytes_per_s * device.kernel_fraction
    fan_in_s = sum(size / bandwidth + device.launch_s for size in counted.fan_in)
    calls = [device.overheads.collective_s * (mesh.size((m.axis,)) > 1) for m in counted.shape.messages]
    seconds, context = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}
    again_s = context_again_s = 0.0
    for message, call_s in zip(counted.shape.messages, calls, strict=True):
        share = 1.0 if exposed is None else exposed(message)
        time_s = share * collectives.time_s(message.kind, message.num_bytes, mesh, (message.axis,)) + call_s
        in_context = time_s if message.axis == "cp" else 0.0
        seconds[message.backward] += time_s
        context[message.backward] += in_context
        if message.repeated and not message.backward:
            again_s += time_s
            context_again_s += in_context
    selective = counted.shape.selective
    if selective is not None:
        selective = replace(selective, time_s=sum(times[i].forward_s for i in counted.remade))
    return replace(
        counted.shape,
        selective=selective,
        forward_s=sum([time.forward_s for time in times]),
        backward_s=sum([time.backward_s for time in times])
        + fan_in_s
        + sum([times[i].forward_s for i in counted.again]),
        communication_forward_s=seconds[False],
        communication_backward_s=seconds[True],
        context_forward_s=context[False],
        context_backward_s=context[True],
        communication_again_s=again_s,
        context_again_s=context_again_s,
    )
