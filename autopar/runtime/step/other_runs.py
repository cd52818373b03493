"""Runs of the plan's program that differ from a full training step: on fewer samples, as in ``eval()``, or with inner values as outputs.

**Fewer samples.** Samples are dealt in the order of the data ranks, which all have the same number of micro-batches. A micro-batch that is
not full repeats its samples, each equally often, with a weight that is smaller by as much. So 3 samples in micro-batches of 4 are one
micro-batch of 2 samples, each twice, and one of 1 sample four times. A micro-batch without samples, where other ranks have some, has weight
zero. All sums over samples (the loss, counts of tokens) use these weights, and means divide by the samples that exist: the loss and its
gradients are those of one device on the batch.

If samples interact within a step (statistics of a batch norm, the auxiliary loss of a router) a rank has one micro-batch for all of its
samples. Their number must divide its size; a batch that data ranks cannot divide like this is refused.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, fx

from autopar.errors import UsageError
from autopar.graph.graph import Evaluation, Op, Ref
from autopar.lower.emit import moves_samples
from autopar.lower.program import Program
from autopar.ops import seeded, sharded
from autopar.ops import sequence as sequence_ops
from autopar.plan.mesh import DATA_AXES, MESH_AXES, Type
from autopar.plan.plan import Plan
from autopar.rules.apply import OVER_DATA, crosses_samples

_PROBABILITIES: dict[Callable[..., Any], str] = {
    seeded.dropout: "p",
    seeded.attention: "dropout_p",
    sequence_ops.attention_gathered: "dropout_p",
    sequence_ops.attention_ring: "dropout_p",
}
"""The argument of each function with dropout that is its probability."""

EVALUATE_ALONE = "Put par.full_state_dict() into the model itself, and evaluate that in eval()"
"""What to do where a plan cannot evaluate."""

_AT_REST: dict[Callable[..., Any], Callable[..., Any]] = {sharded.batch_norm_running: sharded.batch_norm_at_rest}
"""For functions that take statistics of the batch those that read running statistics, with the same arguments and results."""


def variant(
    body: fx.GraphModule, code: fx.Graph, evaluation: Evaluation | None, *, taps: Sequence[Ref] = ()
) -> Callable[..., Any]:
    """``code`` as a function that reads parameters, buffers and regions from ``body``.

    Args:
        evaluation: makes it run as in ``eval()``: without dropout, with running statistics in batch norms, and with what the model computes
            otherwise there. None: as in training.
        taps: values that it returns after its outputs.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs = graph.graph_copy(code, copies)
    assert isinstance(outputs, tuple)
    nodes = {node.meta["op"]: copies[node] for node in code.nodes if "op" in node.meta}
    graph.output((*outputs, *(_part(graph, nodes[ref.name], ref.index) for ref in taps)))
    if evaluation is not None:
        _replace_training_functions(graph)
        for node, instead in replacements(code, evaluation).values():
            copies[node].replace_all_uses_with(copies[instead])
    return partial(type(fx.GraphModule(body, graph)).forward, body)


def _part(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    """Return the node of one output of a call, which may have several."""
    parts = [user for user in node.users if user.target is operator.getitem]
    is_one = not parts and index == 0 and "types" in node.meta
    if is_one:
        return node
    part = next((part for part in parts if part.args[1] == index), None)
    return part or graph.call_function(operator.getitem, (node, index))


def _replace_training_functions(graph: fx.Graph) -> None:
    for node in graph.nodes:
        node.target = _AT_REST.get(node.target, node.target) if node.op == "call_function" else node.target
        name = _PROBABILITIES.get(node.target) if node.op == "call_function" else None
        if name is None:
            continue
        position = list(inspect.signature(node.target).parameters).index(name)
        if position < len(node.args):
            node.update_arg(position, 0.0)
        else:
            node.update_kwarg(name, 0.0)


def replacements(code: fx.Graph, evaluation: Evaluation) -> dict[Ref, tuple[fx.Node, fx.Node]]:
    """Return for each value that ``code`` computes, and that ``eval()`` replaces, its node and the one that its readers use instead.

    Raises:
        UsageError: the plan splits the two values in different ways, or computes the other one elsewhere.
    """
    nodes = {ref: node for node in code.nodes if (ref := _value_of(node)) is not None}
    found = {}
    for ref, instead in evaluation.replaced:
        if ref not in nodes or "reads" in nodes[ref].meta:
            continue  # another block makes it, and passes on the other value
        if instead not in nodes or _split_of(nodes[ref]) != _split_of(nodes[instead]):
            raise UsageError(
                f"The model cannot be evaluated by its plan: in eval() it reads {instead} in place of {ref}, which the plan "
                "splits otherwise or computes elsewhere",
                fix=EVALUATE_ALONE,
            )
        found[ref] = nodes[ref], nodes[instead]
    return found


def _split_of(node: fx.Node) -> dict[str, Type]:
    """Return the types of the value of a node on the axes on which ranks do not all have it."""
    return {axis: kind for axis, kind in node.meta["types"] if kind.kind not in ("I", "R")}


def _value_of(node: fx.Node) -> Ref | None:
    """Return the value of the graph that a node holds; None if it holds none."""
    if "types" not in node.meta:
        return None
    if "op" in node.meta:
        return Ref(node.meta["op"])
    if node.target is operator.getitem:
        source, index = cast("tuple[fx.Node, int]", node.args)
        return Ref(source.meta["op"], index)
    return cast("Ref | None", node.meta.get("reads"))


Batch = Mapping[str, Tensor]


class WholeBatch(dict[str, Any]):
    """A batch of which every rank has all samples; whoever makes one knows this.

    Copies that keep the class (such as those of libraries that move batches to a device) still say so.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSplit:
    """What one rank computes of a batch: of the plan's size, or smaller.

    Attributes:
        share: samples of the batch over the plan's global batch.
        micro_batches: the samples of the batch in each of this rank's micro-batches; all data ranks have the same number of these.
        size: samples that a micro-batch of this rank has room for.
        counts: samples of each data rank.
    """

    share: float
    micro_batches: tuple[range, ...]
    size: int
    counts: tuple[int, ...]

    @property
    def is_full(self) -> bool:
        """Whether the batch has the plan's size."""
        return self.share == 1.0

    @property
    def weights(self) -> tuple[float, ...]:
        """The weight of each micro-batch: its samples over its size."""
        return tuple(len(samples) / self.size for samples in self.micro_batches)

    def taken(self, value: Tensor, dim: int) -> Tensor:
        """Return the samples of all micro-batches in order, repeated to their size; an empty micro-batch repeats the first sample."""
        index = [
            samples.start + place % len(samples) if samples else 0
            for samples in self.micro_batches
            for place in range(self.size)
        ]
        return value.index_select(dim, torch.tensor(index, device=value.device))

    def weighed(self, total: Tensor, number: int) -> Tensor:
        """Return a sum over the samples of micro-batch ``number``, corrected so that each counts once."""
        count = len(self.micro_batches[number])
        if count == self.size:
            return total
        if not total.is_floating_point():
            return total * count // self.size  # exact: samples are repeated equally often
        return total * (count / self.size)


def split_batch(plan: Plan, num_samples: int, data_rank: int) -> BatchSplit:
    """Return how the data rank computes ``num_samples``, at most the plan's global batch.

    A pipeline runs its schedule a whole number of times, with all its micro-batches.
    """
    sizes = [plan.micro_batch_of(rank) for rank in range(plan.mesh.data)]
    cuts = [_cut(taken, size) for taken, size in zip(_shares(num_samples, sizes), sizes, strict=True)]
    return _from_sizes(plan, cuts, data_rank)


def split_of(program: Program, num_samples: int, data_rank: int, *, trains: bool) -> BatchSplit:
    """As :func:`split_batch`, for a model whose samples may interact.

    Args:
        trains: whether it is a training step; in an evaluation batch norms read their running statistics.

    Raises:
        UsageError: samples depend on each other, and the batch cannot be computed.
    """
    graph, plan = program.graph, program.plan
    meeting = _interacting(program, trains=trains)
    bound = next((op for op in meeting if op.target == OVER_DATA and moves_samples(op)), None)
    meet = bool(graph.mixing) or bound is not None
    if graph.exact or meet:
        raise _refusal(
            program,
            num_samples,
            "and samples of this model depend on each other" if meet else "and numbers in this model count samples",
            where=graph.mixing or (_place(bound) if bound is not None else graph.name),
            otherwise="fill it up with further samples" if meet else "take means in it, no sums over len(x)",
        )
    if not meeting:
        return split_batch(plan, num_samples, data_rank)
    if num_samples == 1 and any(map(_has_one_value, meeting)):
        raise _refusal(
            program,
            num_samples,
            "and of one sample a batch norm has no statistics",
            where=_place(next(filter(_has_one_value, meeting))),
            otherwise="fill it up with further samples",
        )
    size, ranks = plan.micro_batch_size, plan.mesh.data
    taken = _divided(num_samples, size, ranks)
    if taken is None:
        near = (range(num_samples, 0, -1), range(num_samples, plan.global_batch_size + 1))
        is_apart_in_eval = not _interacting(program, trains=False)
        less, more = (next((n for n in sizes if _divided(n, size, ranks) is not None), 0) for sizes in near)
        raise _refusal(
            program,
            num_samples,
            f"and samples of this model meet: each of {ranks} data rank{'s' * (ranks > 1)} takes a number of them at once that "
            f"divides {size}, or none",
            where=_place(meeting[0]),
            otherwise=f"make it one of {less} or {more} samples"
            + ("; evaluations take any number (make a loader for them after par.eval())" * is_apart_in_eval),
        )
    return _from_sizes(plan, [[count] if count else [] for count in taken], data_rank)


def _from_sizes(plan: Plan, cuts: Sequence[Sequence[int]], data_rank: int) -> BatchSplit:
    """Return the rank's part, given the sizes of each data rank's micro-batches."""
    counts = tuple(map(sum, cuts))
    count = max(len(cut) for cut in cuts)
    if plan.mesh.pp > 1 or len(plan.stages) > 1:
        count += -count % plan.num_micro_batches
    micro_batches, start = list[range](), sum(counts[:data_rank])
    for size in cuts[data_rank]:
        micro_batches.append(range(start, start + size))
        start += size
    micro_batches += [range(0)] * (count - len(micro_batches))
    return BatchSplit(
        share=sum(counts) / plan.global_batch_size,
        micro_batches=tuple(micro_batches),
        size=plan.micro_batch_of(data_rank),
        counts=counts,
    )


def _interacting(program: Program, *, trains: bool) -> tuple[Op, ...]:
    """Operators by which samples of all data ranks interact."""
    graph = program.graph
    statistics = [op for op in (*graph.prelude, *graph.ops) if any(axis in op.args for axis in DATA_AXES)]
    return (*crosses_samples(graph), *(op for op in statistics if trains or op.target != "autopar.batch_norm_running"))


def _has_one_value(op: Op) -> bool:
    """Return whether the operator is a batch norm that has one value of each channel in a batch of one sample."""
    if op.target not in ("autopar.batch_norm", "autopar.batch_norm_running"):
        return False
    spaces = set(op.args) & (set(MESH_AXES) - set(DATA_AXES))
    return prod(op.outputs[0].shape[2:]) == 1 and not spaces


def _place(op: Op) -> str:
    return f"{op.name} ({op.target}), {op.module}"


def _refusal(program: Program, num_samples: int, problem: str, *, where: str, otherwise: str) -> UsageError:
    wanted = program.plan.global_batch_size
    return UsageError(
        f"A batch of {num_samples} samples is smaller than that of the plan ({wanted}), {problem}",
        where=where,
        fix=f"Leave the last batch out (drop_last=True in the DataLoader), or {otherwise}",
    )


def _divided(num_samples: int, size: int, ranks: int) -> tuple[int, ...] | None:
    """Return samples of each data rank, each a divisor of ``size`` or zero, in descending order; None if these would be more ranks.

    The largest divisors are taken first. For sizes up to 64 but 20, 35, 40, 42, 55, 56, 60 and 63 no other choice needs fewer ranks.

    >>> _divided(11, 8, 4), _divided(7, 8, 2)
    ((8, 2, 1, 0), None)
    """
    parts = _cut(num_samples, size)
    return None if len(parts) > ranks else (*parts, *(0,) * (ranks - len(parts)))


def _shares(num_samples: int, sizes: Sequence[int]) -> list[int]:
    """Return samples of each data rank: one micro-batch for each in turn, until none is left."""
    taken = [0] * len(sizes)
    while num_samples:
        for rank, size in enumerate(sizes):
            count = min(size, num_samples)
            taken[rank] += count
            num_samples -= count
    return taken


def _cut(num_samples: int, size: int) -> list[int]:
    """Sizes of micro-batches that divide ``size`` and add up to ``num_samples``, in descending order."""
    sizes: list[int] = []
    while num_samples:
        sizes.append(next(part for part in range(min(size, num_samples), 0, -1) if size % part == 0))
        num_samples -= sizes[-1]
    return sizes


class BatchSizes:
    """Tells whether a batch is one for all ranks together that has fewer samples than the plan's.

    A batch that is as large as a data rank's share of a complete one is ambiguous. If complete ones have been given for the same purpose,
    it is a batch for all ranks unless other data ranks have different samples. Otherwise it is the rank's share.

    Args:
        are_equal: whether all ranks were given the same batch; all ranks call it together.
    """

    def __init__(self, plan: Plan, data_rank: int, are_equal: Callable[[Batch], bool]) -> None:
        self._plan, self._are_equal = plan, are_equal
        self._part = len(plan.samples_of(data_rank))
        self._are_global: set[str] = set()

    def is_partial(self, batch: Batch, num_samples: int, purpose: str) -> bool:
        """Return whether the batch is for all ranks and smaller than the plan's; False too if its size is invalid.

        Args:
            num_samples: samples of the batch.
            purpose: the kind of call, such as ``train_step``.
        """
        complete = self._plan.global_batch_size
        if num_samples in (0, complete) or num_samples > complete:
            if num_samples == complete != self._part:
                self._are_global.add(purpose)
            return False
        if num_samples != self._part or isinstance(batch, WholeBatch):
            return True
        return purpose in self._are_global and self._are_equal(batch)
