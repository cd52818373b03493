"""What one block of one rank's graph costs: time, communication, what it keeps and what it needs in passing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from autopar.cost.collectives import CollectiveModel
from autopar.cost.compute import OperatorTimes, OpTime, time_of_work
from autopar.cost.fusion import (
    EAGER,
    Kernels,
    chains,
    fuse,
    fuse_dropout,
    fuse_loss,
    fuse_projections,
    fuse_ring,
    halve_loss,
    inner,
    joined_projections,
)
from autopar.cost.megatron import as_megatron, split_projections
from autopar.cost.messages import SENDING, Message, messages
from autopar.cost.storages import Storages, Wiring, wiring_of
from autopar.cost.work import Specs, Work, work
from autopar.device import Device, Kind
from autopar.errors import RuleError
from autopar.frozen import quickly, replaced
from autopar.graph.again import is_dear, made_again
from autopar.graph.ir import Block, Graph, Op, TensorSpec
from autopar.mesh import Mesh
from autopar.plan import Recompute


@quickly
@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCost:
    """A parameter as one rank of the tensor-parallel axes has it.

    Attributes:
        name: of the graph; equal where several blocks share it.
        shape: local.
        num_bytes: of ``shape`` in the graph's dtype.
        gradient_sum_axes: axes over which its gradient is summed once a step.
        trained: whether it has a gradient.
        shared: whether other blocks read it too (tied weights).
        spread: of experts over data ranks: neither gathered nor sharded by the data axes.
    """

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    gradient_sum_axes: tuple[str, ...] = ()
    trained: bool = True
    shared: bool = False
    spread: bool = False

    @property
    def numel(self) -> int:
        """Local elements."""
        return prod(self.shape)

    def shard_shape(self, ranks: int) -> tuple[int, ...]:
        """Of the largest shard; see :meth:`shard_numel`."""
        if not self.shape or ranks == 1 or self.spread:
            return self.shape
        return (-(-self.shape[0] // ranks), *self.shape[1:])

    def shard_numel(self, ranks: int) -> int:
        """Elements of the largest shard when dim 0 (FSDP2's choice) is split, the last ranks' parts being smaller."""
        if not self.shape or ranks == 1 or self.spread:
            return self.numel
        return -(-self.shape[0] // ranks) * (self.numel // self.shape[0] if self.shape[0] else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remade:
    """A block that makes again in backward what is cheap (:mod:`autopar.graph.again`).

    Attributes:
        time_s: seconds that making it again takes.
        least_bytes: of the values that are kept in every layout of the block, over all its ranks.
        saved_bytes, saved_input_bytes, forward_transient_bytes, backward_transient_bytes: as those of :class:`BlockCost`.
    """

    saved_bytes: int
    saved_input_bytes: int
    forward_transient_bytes: int
    backward_transient_bytes: int
    time_s: float = 0.0
    least_bytes: int = 0


@quickly
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One block on one rank for one micro-batch; seconds, bytes and flops.

    Attributes:
        key: equal for blocks of equal cost.
        forward_s, backward_s: computation.
        communication_forward_s, communication_backward_s: collectives of the block's own axes, exposed.
        communication_again_s: what of the forward ones runs again under recompute.
        context_forward_s, context_backward_s: what of these belongs to the axis ``cp``.
        context_again_s: likewise.
        saved_bytes: what backward needs of the block's own and its inputs' values; shared storages once.
        input_bytes: values that come from earlier blocks; what recompute keeps instead.
        saved_input_bytes: the part of ``saved_bytes`` that ``input_bytes`` counts too.
        prelude: name and bytes of the inputs and prelude values that it reads; a stage has them once.
        forward_transient_bytes, backward_transient_bytes: the most that is alive at once, over ``saved_bytes``.
        sends, send_gradients: bytes of each tensor that a stage that ends here sends on, and gets back.
        flops, backward_flops: of matrix products.
        messages: its collectives.
        parameters: that it reads.
        offloads: what it keeps lives on the host between its forward and its backward.
        selective: what differs under selective recompute; None where that was not asked for.
    """

    key: str
    forward_s: float
    backward_s: float
    communication_forward_s: float
    communication_backward_s: float
    saved_bytes: int
    input_bytes: int
    saved_input_bytes: int
    prelude: tuple[tuple[str, int], ...]
    forward_transient_bytes: int
    backward_transient_bytes: int
    sends: tuple[int, ...]
    send_gradients: tuple[int, ...]
    flops: float
    backward_flops: float
    messages: tuple[Message, ...]
    parameters: tuple[ParameterCost, ...]
    context_forward_s: float = 0.0
    context_backward_s: float = 0.0
    communication_again_s: float = 0.0
    context_again_s: float = 0.0
    offloads: bool = False
    selective: Remade | None = None

    @property
    def send_bytes(self) -> int:
        """Of all that is sent on."""
        return sum(self.sends)

    @property
    def send_gradient_bytes(self) -> int:
        """Of all that comes back."""
        return sum(self.send_gradients)

    @property
    def remade(self) -> Remade:
        """The block under selective recompute.

        Raises:
            RuleError: it was not asked for when the block's work was counted.
        """
        if self.selective is None:
            raise RuleError("a block that recomputes selectively was priced so", value=self.key)
        return self.selective

    def recompute_s(self, mode: Recompute) -> float:
        """What a recomputation in backward adds: the operators made again; of a whole forward its collectives too."""
        if mode == "none":
            return 0.0
        return self.remade.time_s if mode == "selective" else self.forward_s + self.communication_again_s

    def kept_bytes(self, mode: Recompute) -> int:
        """Bytes kept on the device from forward to backward."""
        return 0 if self.offloads else self._saved_bytes(mode)

    def moved_bytes(self, mode: Recompute) -> int:
        """Bytes that live on the host from forward to backward."""
        return self._saved_bytes(mode) if self.offloads else 0

    def _saved_bytes(self, mode: Recompute) -> int:
        if mode == "selective":
            return self.remade.saved_bytes
        return self.input_bytes if mode == "full" else self.saved_bytes

    def kept_input_bytes(self, mode: Recompute) -> int:
        """The part of :meth:`kept_bytes` that ``input_bytes`` counts too."""
        if mode == "selective":
            return self.remade.saved_input_bytes
        return self.input_bytes if mode == "full" else self.saved_input_bytes

    def passing_bytes(self, mode: Recompute) -> int:
        """The most that is alive in passing, over :meth:`kept_bytes`."""
        if mode == "selective":
            return max(self.remade.forward_transient_bytes, self.remade.backward_transient_bytes)
        passing = max(self.forward_transient_bytes, self.backward_transient_bytes)
        return passing + self.moved_bytes(mode) + (self.saved_bytes if mode == "full" else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """What a block does on one rank for one micro-batch, before any profile prices it; cheap to price again.

    Attributes:
        ops, works: its operators and their work, in order.
        again: positions of the operators that backward computes once more, whatever the block's mode.
        remade: positions of those that it computes once more under selective recompute.
        fan_in: bytes of the gradients that are added up because several operators read a value.
        shape: everything of :class:`BlockCost` that no profile changes.
        operands: local specs of each operator's operands; empty where operators are fused, so that none is as measured.
        same: for each operator the position of the first of equal work, dtype and target; empty: nobody knows.
    """

    ops: tuple[Op, ...]
    works: tuple[Work, ...]
    again: frozenset[int]
    fan_in: tuple[int, ...]
    shape: BlockCost
    operands: tuple[Specs, ...] = ()
    remade: frozenset[int] = frozenset()
    same: tuple[int, ...] = field(default=(), compare=False)


def block_cost(
    graph: Graph,
    block: Block,
    mesh: Mesh,
    device: Device,
    collectives: CollectiveModel,
    measured: OperatorTimes | None = None,
    *,
    quantized: str | None = None,
) -> BlockCost:
    """The cost of a block of one rank's graph for one micro-batch (see ``rules.apply`` and :func:`price_block`)."""
    done = block_work(graph, block, device.kind, selective=True)
    return price_block(done, mesh, device, collectives, quantized=quantized, measured=measured)


def price_block(
    done: BlockWork,
    mesh: Mesh,
    device: Device,
    collectives: CollectiveModel,
    *,
    quantized: str | None = None,
    overlapped: bool = False,
    overlapped_gradients: bool = False,
    measured: OperatorTimes | None = None,
) -> BlockCost:
    """The cost of a block's work on a device and its links.

    Args:
        quantized: see :func:`time_of_work`.
        overlapped: collectives of the block run beside the products that make or read their values, in as many parts as
            there are ranks, which copy engines move (Transformer Engine's user buffers): one part has no product beside
            it, and the others take nothing from the multiprocessors.
        overlapped_gradients: sums of a gradient over ``tp`` run beside the product that makes the weight's.
        measured: times of operators that go before the roofline, unless they are fused or quantized.
    """
    times: list[OpTime] = []
    for i, first in enumerate(done.same or range(len(done.ops))):
        own = times[first] if first < i else time_of_work(done.works[i], done.ops[i], device, quantized=quantized)
        times.append(own)
    if measured is not None and quantized is None and done.operands:
        times = [measured.time(op, own, t) for op, own, t in zip(done.ops, done.operands, times, strict=True)]
    bandwidth = device.memory_bandwidth_bytes_per_s * device.kernel_fraction
    fan_in_s = sum(size / bandwidth + device.launch_s for size in done.fan_in)
    calls = [device.overheads.collective_s * (mesh.size((m.axis,)) > 1) for m in done.shape.messages]
    seconds, context = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}
    again_s = context_again_s = 0.0
    for message, call_s in zip(done.shape.messages, calls, strict=True):
        beside = overlapped_gradients and message.sums_gradient and message.axis == "tp"
        exposed = 1.0 / mesh.size((message.axis,)) if overlapped else device.interference if beside else 1.0
        time_s = exposed * collectives.time_s(message.kind, message.num_bytes, mesh, (message.axis,)) + call_s
        in_context = time_s if message.axis == "cp" else 0.0
        seconds[message.backward] += time_s
        context[message.backward] += in_context
        if message.repeated and not message.backward:
            again_s += time_s
            context_again_s += in_context
    selective = done.shape.selective
    if selective is not None:
        selective = replace(selective, time_s=sum(times[i].forward_s for i in done.remade))
    return replaced(
        done.shape,
        selective=selective,
        forward_s=sum([time.forward_s for time in times]),
        backward_s=sum([time.backward_s for time in times]) + fan_in_s + sum([times[i].forward_s for i in done.again]),
        communication_forward_s=seconds[False],
        communication_backward_s=seconds[True],
        context_forward_s=context[False],
        context_backward_s=context[True],
        communication_again_s=again_s,
        context_again_s=context_again_s,
    )


def block_work(
    graph: Graph,
    block: Block,
    kind: Kind,
    *,
    again: Callable[[Op], bool] | None = None,
    kernels: Kernels = EAGER,
    selective: bool = False,
) -> BlockWork:
    """What a block of one rank's graph does for one micro-batch.

    Args:
        kind: of the device.
        kernels: which are not torch's, operator by operator.
        again: operators whose outputs are not kept but made once more in backward, as programs beside autopar do.
        selective: whether autopar's own selective recompute is looked at too.
    """
    ops = graph.block_ops(block)
    wiring = wiring_of(graph, block)
    specs = [spec for op in ops for spec in op.outputs]
    specs += [graph.spec(ref) for ref in wiring.values[len(specs) :]]
    operands = tuple([tuple([specs[v] for v in own]) for own in wiring.reads])
    works: list[Work] = []
    for i, first in enumerate(wiring.same or range(len(ops))):
        works.append(works[first] if first < i else work(ops[i], operands[i], kind))
    repeated = frozenset() if again is None else frozenset(i for i, op in enumerate(ops) if again(op))
    if kernels != EAGER:
        works = [_as_run(graph, op, own, done, kernels) for op, own, done in zip(ops, operands, works, strict=True)]
    fused = kernels.elementwise
    unkept = repeated.union(*(inner(graph, ops, chain) for chain in chains(graph, ops))) if fused else repeated
    storages = Storages(graph, block, works, specs, unkept)
    works = [storages.copied(i) for i in range(len(works))]
    inputs = storages.inputs()
    across = [graph.spec(ref) for ref in wiring.across]
    keeping = (i for i, done in enumerate(works) if done.saved or done.saves_output or done.saved_bytes)
    last_kept = max(keeping, default=-1)
    kept = _kept(storages, inputs)
    remade = storages.without(made_again(graph, block, storages.roots)) if selective else None
    shape = BlockCost(
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
        flops=sum([done.flops for done in works]),
        backward_flops=sum([done.backward_flops for done in works]),
        messages=tuple(
            message if i <= last_kept else replace(message, repeated=False)
            for i, op in enumerate(ops)
            if op.target in SENDING
            for message in messages(op, graph)
        ),
        parameters=_parameters(graph, block, wiring),
    )
    if fused and not kernels.megatron:
        works = fuse(graph, ops, works)
    inside: set[int] = set()
    if kernels.projections:
        works = fuse_projections(ops, operands, works)
        joined = joined_projections(ops)
        inside = {i for group in joined for i in group[1:]}
        for group in joined if kernels.megatron else ():
            split_projections(group, works, sum(ops[i].spec.num_bytes for i in group))
    fan_in = tuple(fan_in_bytes(ops, wiring, specs, inside))
    operands = operands if kernels == EAGER else ()
    same = tuple([first if works[i] is works[first] else i for i, first in enumerate(wiring.same)])
    return BlockWork(
        ops=ops, works=tuple(works), again=repeated, fan_in=fan_in, shape=shape, operands=operands,
        remade=frozenset() if remade is None else remade.remade, same=same if kernels == EAGER else (),
    )  # fmt: skip


def _parameters(graph: Graph, block: Block, wiring: Wiring) -> tuple[ParameterCost, ...]:
    """The parameters that a block reads; the same ones for graphs that differ in the shapes of other values alone."""
    known, key = graph._index.named, f"parameters {block.start}:{block.stop}"
    if key not in known:
        known[key] = tuple(
            [
                ParameterCost(
                    name=p.name,
                    shape=p.spec.shape,
                    num_bytes=p.spec.num_bytes,
                    gradient_sum_axes=p.gradient_sum_axes,
                    trained=p.spec.requires_grad,
                    spread=any(axis == "ep_data" for axis, _ in p.layout),
                    shared=is_shared,
                )
                for p, is_shared in zip(graph.block_parameters(block), wiring.shared, strict=True)
            ]
        )
    found: tuple[ParameterCost, ...] = known[key]
    return found


def _kept(storages: Storages, inputs: Mapping[int, int]) -> Remade:
    """What a block keeps and needs in passing; ``inputs``: bytes of the values of earlier blocks that it reads."""
    saved = storages.saved_bytes
    return Remade(
        saved_bytes=saved,
        saved_input_bytes=sum([size for root, size in inputs.items() if root in storages.saved]),
        forward_transient_bytes=max(storages.forward_peak() - saved, 0),
        backward_transient_bytes=max(storages.backward_peak() - saved, 0) + storages.again_bytes,
    )


def _as_run(graph: Graph, op: Op, operands: Specs, done: Work, kernels: Kernels) -> Work:
    """The work of one operator by other kernels of its own."""
    if kernels.loss:
        done = fuse_loss(op, operands[0].num_bytes if operands else 0, done)
    elif kernels.half_loss:
        done = halve_loss(op, operands[0].num_bytes if operands else 0, done)
    if kernels.ring:
        done = fuse_ring(op, operands, done)
    if kernels.dropout:
        done = fuse_dropout(graph, op, operands, done, in_chain=kernels.elementwise)
    if kernels.megatron:
        done = as_megatron(
            graph, op, operands, done, biased_scores=kernels.biased_scores, copied_logits=kernels.copied_logits
        )
    return done


def fan_in_bytes(
    ops: Sequence[Op], wiring: Wiring, specs: Sequence[TensorSpec], beside: Collection[int] = ()
) -> Iterator[int]:
    """Adding up the gradients of values that several operators of the block read: bytes of each sum.

    Args:
        specs: of the values of ``wiring``.
        beside: positions of operators that do not count.
    """
    if not beside:
        for v, count in wiring.fan_in:
            yield from (3 * specs[v].num_bytes,) * count
        return
    uses: dict[int, int] = {}
    for i, (op, own) in enumerate(zip(ops, wiring.distinct, strict=True)):
        if i not in beside and any(spec.requires_grad for spec in op.outputs):
            for v in own:
                uses[v] = uses.get(v, 0) + 1
    for v, count in uses.items():
        if count > 1 and specs[v].requires_grad and not wiring.is_parameter[v]:
            yield from (3 * specs[v].num_bytes,) * (count - 1)
