"""What one block of one rank's graph costs: time, communication, what it keeps and what it needs in passing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import cast

from autopar.cost.collectives import CollectiveModel
from autopar.cost.compute import time_of_work
from autopar.cost.fusion import chains, fuse, fuse_loss, inner
from autopar.cost.work import COLLECTIVES, VIEWS, Work, operand_specs, work
from autopar.device import Device, Kind
from autopar.graph.ir import Block, Graph, Op, Ref
from autopar.graph.storage import storage_roots
from autopar.layout import parse_type
from autopar.mesh import DATA_AXES, Mesh
from autopar.rules.apply import OVER_DATA
from autopar.rules.conversions import conversion
from autopar.rules.sharded import ring_messages


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

    def shard_numel(self, ranks: int) -> int:
        """Elements of the largest shard when dim 0 (FSDP2's choice) is split, the last ranks' parts being smaller."""
        if not self.shape or ranks == 1 or self.spread:
            return self.numel
        return -(-self.shape[0] // ranks) * (self.numel // self.shape[0] if self.shape[0] else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A collective of one block; ``num_bytes`` as :func:`autopar.rules.conversions.collective_bytes` counts."""

    kind: str
    axis: str
    num_bytes: int
    backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One block on one rank for one micro-batch; seconds, bytes and flops.

    Attributes:
        key: equal for blocks of equal cost.
        forward_s, backward_s: computation.
        communication_forward_s, communication_backward_s: collectives of the block's own axes, exposed.
        context_forward_s, context_backward_s: what of these belongs to the axis ``cp``.
        saved_bytes: what backward needs of the block's own and its inputs' values; shared storages once.
        input_bytes: values that come from earlier blocks; what recompute keeps instead.
        saved_input_bytes: the part of ``saved_bytes`` that ``input_bytes`` counts too.
        prelude: name and bytes of the inputs and prelude values that it reads; a stage has them once.
        forward_transient_bytes, backward_transient_bytes: the most that is alive at once, over ``saved_bytes``.
        send_bytes, send_gradient_bytes: what a stage that ends here sends on, and gets back.
        flops, backward_flops: of matrix products.
        messages: its collectives.
        parameters: that it reads.
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
    send_bytes: int
    send_gradient_bytes: int
    flops: float
    backward_flops: float
    messages: tuple[Message, ...]
    parameters: tuple[ParameterCost, ...]
    context_forward_s: float = 0.0
    context_backward_s: float = 0.0

    @property
    def recompute_s(self) -> float:
        """What a recomputation in backward adds: the forward with its collectives."""
        return self.forward_s + self.communication_forward_s

    def kept_bytes(self, recompute: bool) -> int:
        """Bytes kept from forward to backward."""
        return self.input_bytes if recompute else self.saved_bytes

    def passing_bytes(self, recompute: bool) -> int:
        """The most that is alive in passing, over :meth:`kept_bytes`."""
        passing = max(self.forward_transient_bytes, self.backward_transient_bytes)
        return passing + self.saved_bytes if recompute else passing


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWork:
    """What a block does on one rank for one micro-batch, before any profile prices it; cheap to price again.

    Attributes:
        ops, works: its operators and their work, in order.
        again: positions of the operators that backward computes once more (selective recompute).
        fan_in: bytes of the gradients that are added up because several operators read a value.
        shape: everything of :class:`BlockCost` that no profile changes.
    """

    ops: tuple[Op, ...]
    works: tuple[Work, ...]
    again: frozenset[int]
    fan_in: tuple[int, ...]
    shape: BlockCost


def block_cost(graph: Graph, block: Block, mesh: Mesh, device: Device, collectives: CollectiveModel) -> BlockCost:
    """The cost of a block of one rank's graph for one micro-batch (see ``rules.apply``)."""
    return price_block(block_work(graph, block, device.kind), mesh, device, collectives)


def price_block(
    done: BlockWork,
    mesh: Mesh,
    device: Device,
    collectives: CollectiveModel,
    *,
    quantized: str | None = None,
    overlapped: bool = False,
) -> BlockCost:
    """The cost of a block's work on a device and its links.

    Args:
        quantized: see :func:`time_of_work`.
        overlapped: collectives of the block run beside the products that make or read their values, in parts
            (Transformer Engine's user buffers); the device's interference is what they cost.
    """
    times = [time_of_work(w, op, device, quantized=quantized) for w, op in zip(done.works, done.ops, strict=True)]
    bandwidth = device.memory_bandwidth_bytes_per_s * device.kernel_fraction
    fan_in_s = sum(size / bandwidth + device.launch_s for size in done.fan_in)
    calls = [device.overheads.collective_s * (mesh.size((m.axis,)) > 1) for m in done.shape.messages]
    exposed = device.interference if overlapped else 1.0
    seconds, context = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}
    for message, call_s in zip(done.shape.messages, calls, strict=True):
        time_s = exposed * collectives.time_s(message.kind, message.num_bytes, mesh, (message.axis,)) + call_s
        seconds[message.backward] += time_s
        context[message.backward] += time_s if message.axis == "cp" else 0.0
    return replace(
        done.shape,
        forward_s=sum(time.forward_s for time in times),
        backward_s=sum(time.backward_s for time in times) + fan_in_s + sum(times[i].forward_s for i in done.again),
        communication_forward_s=seconds[False],
        communication_backward_s=seconds[True],
        context_forward_s=context[False],
        context_backward_s=context[True],
    )


def block_work(
    graph: Graph,
    block: Block,
    kind: Kind,
    *,
    again: Callable[[Op], bool] | None = None,
    fused: bool = False,
    fused_loss: bool = False,
) -> BlockWork:
    """What a block of one rank's graph does for one micro-batch.

    Args:
        kind: of the device.
        fused: chains of elementwise operators run as one kernel each (compiled, or written by hand).
        fused_loss: so does the cross entropy.
        again: operators whose outputs are not kept but made once more in backward (selective recompute).
    """
    ops = graph.block_ops(block)
    works = [work(op, operand_specs(op, graph.spec), kind) for op in ops]
    repeated = frozenset(i for i, op in enumerate(ops) if again is not None and again(op))
    if fused_loss:
        works = [fuse_loss(op, graph.spec(op.operands[0]).num_bytes if op.operands else 0, done)
                 for op, done in zip(ops, works, strict=True)]  # fmt: skip
    unkept = repeated.union(*(inner(graph, ops, chain) for chain in chains(graph, ops))) if fused else repeated
    storages = _Storages(graph, block, works, unkept)
    works = [storages.copied(op, done) for op, done in zip(ops, works, strict=True)]
    inputs = storages.inputs()
    across = graph.live_across(block.stop)
    shape = BlockCost(
        key=block.hash,
        forward_s=0.0,
        backward_s=0.0,
        communication_forward_s=0.0,
        communication_backward_s=0.0,
        saved_bytes=storages.saved_bytes,
        input_bytes=sum(inputs.values()),
        saved_input_bytes=sum(size for ref, size in inputs.items() if ref in storages.saved),
        prelude=storages.prelude(),
        forward_transient_bytes=max(storages.forward_peak() - storages.saved_bytes, 0),
        backward_transient_bytes=max(storages.backward_peak() - storages.saved_bytes, 0) + storages.again_bytes,
        send_bytes=sum(graph.spec(ref).num_bytes for ref in across),
        send_gradient_bytes=sum(graph.spec(ref).num_bytes for ref in across if graph.spec(ref).requires_grad),
        flops=sum(done.flops for done in works),
        backward_flops=sum(done.backward_flops for done in works),
        messages=tuple(message for op in ops for message in messages(op, graph)),
        parameters=tuple(
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
        ),
    )
    if fused:
        works = fuse(graph, ops, works)
    fan_in = tuple(_fan_in_bytes(graph, ops))
    return BlockWork(ops=ops, works=tuple(works), again=repeated, fan_in=fan_in, shape=shape)


def messages(op: Op, graph: Graph) -> Iterator[Message]:
    """The collectives that an operator of a local graph runs, forward and backward."""
    if op.target == "autopar.cross_entropy_vocabulary":
        axis, smoothing = str(op.args[2]), op.args[4] if len(op.args) > 4 else 0.0
        logits, target = (graph.spec(ref) for ref in op.operands[:2])
        token_bytes = target.numel * max(4, logits.dtype.itemsize)
        for count in (1, 3 if smoothing else 2):
            yield Message(kind="all_reduce", axis=axis, num_bytes=count * token_bytes, backward=False)
        return
    if op.target in ("autopar.experts_dispatch", "autopar.experts_dispatch_split"):
        yield from _travels(op, graph)
        return
    if op.target == "autopar.attention_ring":
        known = dict(op.kwargs)
        whole = sum(graph.spec(ref).num_bytes for ref in op.operands[1:3]) * cast("int", known["ranks"])
        for inside in ring_messages(whole, backward=op.spec.requires_grad):
            yield Message(kind=inside.kind, axis=str(known["axis"]), num_bytes=whole, backward=inside.backward)
        return
    if op.target == OVER_DATA:
        yield from _over_data(op, graph)
        return
    if op.target not in COLLECTIVES:
        return
    name, axis = op.target.removeprefix("autopar.").removeprefix("zigzag_"), str(op.args[1])
    before, after = graph.spec(op.operands[0]).num_bytes, op.spec.num_bytes
    forward, backward = _directions(name, op)
    size = before if name == "all_to_all" else max(before, after)
    if forward:
        yield Message(kind=forward, axis=axis, num_bytes=size, backward=False)
    if backward and op.spec.requires_grad:
        yield Message(kind=backward, axis=axis, num_bytes=size, backward=True)


def _over_data(op: Op, graph: Graph) -> Iterator[Message]:
    """A change of type over all data ranks: whole tensors, over one data axis after the other.

    A gather over both axes moves less on the one inside.
    """
    before, after = (parse_type(str(op.args[i])) for i in (1, 2))
    change = conversion(before, after, requires_grad=op.spec.requires_grad)
    if change is None:
        return
    whole = max(graph.spec(op.operands[0]).num_bytes, op.spec.num_bytes)
    for axis in DATA_AXES:
        for kind, is_backward in ((change.forward, False), (change.backward, True)):
            if kind:
                yield Message(kind=kind, axis=axis, num_bytes=whole, backward=is_backward)


def _travels(op: Op, graph: Graph) -> Iterator[Message]:
    """Rows to their experts and back, as if routing were even."""
    hidden, weights = (graph.spec(ref) for ref in op.operands[:2])
    sent = hidden.num_bytes * weights.shape[-1]
    if op.target == "autopar.experts_dispatch_split":
        sent //= cast("int", op.args[10])
    for is_backward, count in ((False, 2), (True, 2 if hidden.requires_grad else 1)):
        message = Message(kind="all_to_all", axis=str(op.args[7]), num_bytes=sent, backward=is_backward)
        yield from (message,) * count


def _directions(name: str, op: Op) -> tuple[str, str]:
    """Collectives forward and backward of an emitted change of type; the table of ``rules.conversions``."""
    end = op.args[-1]
    match name:
        case "all_reduce":
            return "all_reduce", "all_reduce" if end == "R" else ""
        case "all_gather":
            return "all_gather", "reduce_scatter" if end == "R" else ""
        case "reduce_scatter":
            return "reduce_scatter", "all_gather"
        case "all_to_all":
            return "all_to_all", "all_to_all"
        case "shard":
            return "", "all_gather" if end == "I" else ""
        case "invariant_to_replicate":
            return "", "all_reduce"
        case _:
            return "", ""


def _fan_in_bytes(graph: Graph, ops: tuple[Op, ...]) -> Iterator[int]:
    """Adding up the gradients of values that several operators of the block read: bytes of each sum."""
    uses = Counter(ref for op in ops if any(s.requires_grad for s in op.outputs) for ref in dict.fromkeys(op.operands))
    for ref, count in uses.items():
        spec = graph.spec(ref)
        if count > 1 and spec.requires_grad and not graph.is_parameter(ref):
            yield from (3 * spec.num_bytes,) * (count - 1)


class _Storages:
    """Lifetimes of the storages that a block makes, keeps and reads."""

    def __init__(self, graph: Graph, block: Block, works: list[Work], again: frozenset[int] = frozenset()) -> None:
        self.graph, self.block, self.works = graph, block, works
        self.ops = graph.block_ops(block)
        self.operands = [op.operands for op in self.ops]
        self._roots = storage_roots(self.ops, graph._index.specs)
        self.saved: dict[Ref, int] = {}
        """Kept storages by the position of the first operator that keeps them."""
        for i, (op, done) in enumerate(zip(self.ops, works, strict=True)):
            kept = [op.operands[k] for k in done.saved] + ([Ref(op.name)] if done.saves_output else [])
            for root in map(self.root, kept):
                if not graph.is_parameter(root) and not graph.is_prelude(root):
                    self.saved.setdefault(root, i)
        self._inner = [done.saved_bytes for done in works]
        self.again_bytes = self._drop(again)
        self.saved_bytes = sum(map(self.size, self.saved)) + sum(self._inner)

    def _drop(self, again: frozenset[int]) -> int:
        """Forget what the operators at these positions make; keep what they read. Bytes that are made once more."""
        makers = {self.ops[i].name: i for i in again}
        made = {root for root in self.saved if root.name in makers}
        dropped = sum(map(self.size, made)) + sum(self._inner[i] for i in again)
        needed = [makers[root.name] for root in made] + [i for i in again if self._inner[i]]
        for root in made:
            del self.saved[root]
        seen: set[int] = set()
        while needed:  # what the dropped values are made of, as far as it is dropped too
            i = needed.pop()
            if i in seen:
                continue
            seen.add(i)
            self._inner[i] = 0
            for root in map(self.root, self.operands[i]):
                if root.name in makers:
                    needed.append(makers[root.name])
                elif not self.graph.is_parameter(root) and not self.graph.is_prelude(root):
                    self.saved.setdefault(root, i)
        return dropped

    def root(self, ref: Ref) -> Ref:
        """The value whose storage ``ref`` lies in, as far back as the block goes."""
        return self._roots.get(ref, ref)

    def copies(self, op: Op) -> bool:
        """Whether a view is none: strides do not allow it, so that it copies."""
        return op.target in VIEWS and self.root(Ref(op.name)) == Ref(op.name)

    def copied(self, op: Op, done: Work) -> Work:
        """The work of ``op`` when it is a view that copies, else ``done``."""
        return replace(done, launches=1, num_bytes=2 * op.spec.num_bytes) if self.copies(op) else done

    def size(self, ref: Ref) -> int:
        return self.graph.spec(ref).num_bytes

    def inputs(self) -> dict[Ref, int]:
        """Storages of earlier blocks that this one reads."""
        roots = dict.fromkeys(self.root(ref) for ref in self.graph.block_inputs(self.block))
        return {root: self.size(root) for root in roots if not self.graph.is_parameter(root)}

    def prelude(self) -> tuple[tuple[str, int], ...]:
        roots = dict.fromkeys(self.root(ref) for ref in self.graph.block_prelude(self.block))
        constants = {buffer.name for buffer in self.graph.buffers}
        return tuple((root.name, self.size(root)) for root in roots if root.name not in constants)

    def forward_peak(self) -> int:
        """Kept so far and still to be read, at the fullest moment of forward; inputs count where they are kept."""
        last: dict[Ref, int] = {}
        for i, op in enumerate(self.ops):
            for ref in (*self.operands[i], *(Ref(op.name, k) for k in range(len(op.outputs)))):
                last[self.root(ref)] = i
        outputs = {self.root(ref) for ref in self.graph.block_outputs(self.block)}
        alive: dict[Ref, int] = {}
        kept = peak = 0
        keeps: dict[int, int] = {}
        position = {op.name: i for i, op in enumerate(self.ops)}
        for ref, i in self.saved.items():
            made_at = position.get(ref.name, i)
            keeps[made_at] = keeps.get(made_at, 0) + self.size(ref)
        for i, op in enumerate(self.ops):
            if op.target not in VIEWS or self.copies(op):
                made = (Ref(op.name, k) for k in range(len(op.outputs)))
                alive |= {ref: self.size(ref) for ref in made if ref not in self.saved}
            kept += keeps.get(i, 0) + self._inner[i]
            peak = max(peak, kept + sum(alive.values()) + self.works[i].workspace_bytes)
            for ref in [ref for ref in alive if last[ref] <= i and ref not in outputs]:
                del alive[ref]
        return peak

    def backward_peak(self) -> int:
        """Kept values not yet used up and gradients on their way, at the fullest moment of backward."""
        outputs = (self.root(ref) for ref in self.graph.block_outputs(self.block))
        gradients = {root: self.size(root) for root in outputs if self.graph.spec(root).requires_grad}
        kept, peak = self.saved_bytes, 0
        frees: dict[int, int] = {}
        for ref, first in self.saved.items():
            frees[first] = frees.get(first, 0) + self.size(ref)
        for i in reversed(range(len(self.ops))):
            op = self.ops[i]
            if op.target not in VIEWS or self.copies(op):
                for root in map(self.root, self.operands[i]):
                    if self.graph.spec(root).requires_grad and not self.graph.is_parameter(root):
                        gradients.setdefault(root, self.size(root))
                peak = max(peak, kept + sum(gradients.values()) + self.works[i].backward_workspace_bytes)
                for k in range(len(op.outputs)):
                    gradients.pop(Ref(op.name, k), None)
            kept -= frees.get(i, 0) + self._inner[i]
        return peak
