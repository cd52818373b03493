"""The plan's program run otherwise than as it stands: on fewer samples than the plan's, as in ``eval()``, with values inside given out.

Samples are taken in the order of the data ranks, as many micro-batches each as it takes. A micro-batch that is not full has its
samples several times, each equally often, and counts for as much less; so a rest of 3 in micro-batches of 4 is one micro-batch of
2 samples twice, and one of 1 sample four times. One without samples, where other ranks have some, counts for nothing. All sums over
samples (the loss, token counts) weigh micro-batches like this, and means over samples divide by those that there are: the loss and
its gradients are those of one device on the batch.

Where samples meet inside of a step (statistics of a batch norm, the auxiliary loss of a router) a rank has one micro-batch for all of
its samples: there are as many of them as divide it, and a batch that data ranks cannot divide like this is refused.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import UsageError
from autopar.graph.graph import Op, Ref
from autopar.graph.operator_kinds import draws_random
from autopar.lower.emit import moves_samples
from autopar.lower.program import Program
from autopar.ops import seeded, sharded
from autopar.ops import sequence as sequence_ops
from autopar.plan.mesh import DATA_AXES, MESH_AXES
from autopar.plan.plan import Plan
from autopar.rules.apply import OVER_DATA, crosses_samples

_PROBABILITIES: dict[Callable[..., Any], str] = {
    seeded.dropout: "p",
    seeded.attention: "dropout_p",
    sequence_ops.attention_gathered: "dropout_p",
    sequence_ops.attention_ring: "dropout_p",
}
"""The argument of each function that drops."""

_AT_REST: dict[Callable[..., Any], Callable[..., Any]] = {sharded.batch_norm_running: sharded.batch_norm_at_rest}
"""What functions that take statistics of the batch are where running ones are read: their arguments and results are the same."""


def variant(body: fx.GraphModule, code: fx.Graph, *, trains: bool, taps: Sequence[Ref]) -> Callable[..., Any]:
    """``code`` as a function that reads parameters, buffers and regions where ``body`` has them.

    Args:
        trains: as ``code`` stands; else as in ``eval()``: nothing is dropped, and batch norms read their running statistics.
        taps: values that it returns behind its outputs.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs = graph.graph_copy(code, copies)
    assert isinstance(outputs, tuple)
    made = {node.meta["op"]: copies[node] for node in code.nodes if "op" in node.meta}
    graph.output((*outputs, *(_part(graph, made[ref.name], ref.index) for ref in taps)))
    if not trains:
        _rest(graph)
    return partial(type(fx.GraphModule(body, graph)).forward, body)


def _part(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    """One output of a call, which may have several."""
    parts = [user for user in node.users if user.target is operator.getitem]
    is_one = not parts and index == 0 and "types" in node.meta
    if is_one:
        return node
    known = next((part for part in parts if part.args[1] == index), None)
    return known or graph.call_function(operator.getitem, (node, index))


def _rest(graph: fx.Graph) -> None:
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


def noise(made: Sequence[Op]) -> Op | None:
    """An operator that draws random numbers which are no dropout; None: there is none."""
    return next((op for op in made if draws_random(op.target) and op.target != "autopar.dropout"), None)


Batch = Mapping[str, Tensor]


class WholeBatch(dict[str, Any]):
    """A batch of which the one who made it knows that every rank has the same samples: all that there are of it.

    Copies that keep the class (those of libraries that move batches to a device do) still say so.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialBatch:
    """What one rank computes of a batch that does not fill the plan's.

    Attributes:
        share: part of the plan's global batch that there is.
        micro_batches: which samples of the batch each of this rank's micro-batches has; all data ranks have as many.
        size: samples of a micro-batch of this rank's.
        counts: samples of each data rank.
    """

    share: float
    micro_batches: tuple[range, ...]
    size: int
    counts: tuple[int, ...]

    @property
    def weights(self) -> tuple[float, ...]:
        """By what each micro-batch counts."""
        return tuple(len(samples) / self.size for samples in self.micro_batches)

    def taken(self, value: Tensor, dim: int) -> Tensor:
        """The samples of all micro-batches, one after the other; any sample stands where there is none."""
        index = [
            samples.start + place % len(samples) if samples else 0
            for samples in self.micro_batches
            for place in range(self.size)
        ]
        return value.index_select(dim, torch.tensor(index, device=value.device))

    def weighed(self, total: Tensor, number: int) -> Tensor:
        """A sum over the samples of the micro-batch ``number``, each counted once."""
        count = len(self.micro_batches[number])
        if not total.is_floating_point():
            return total * count // self.size  # a multiple: samples stand there equally often
        return total * (count / self.size)


def partial_batch(plan: Plan, num_samples: int, data_rank: int) -> PartialBatch:
    """How the data rank computes ``num_samples``, fewer than the plan's global batch.

    Pipelines run their schedule once or more often, with all its micro-batches.
    """
    sizes = [plan.micro_batch_of(rank) for rank in range(plan.mesh.data)]
    cuts = [_cut(taken, size) for taken, size in zip(_shares(num_samples, sizes), sizes, strict=True)]
    return _of_cuts(plan, cuts, data_rank)


def partial_of(program: Program, num_samples: int, data_rank: int, *, trains: bool) -> PartialBatch:
    """As :func:`partial_batch`, for a model whose samples may meet.

    Args:
        trains: in a step of training; else in an evaluation, where batch norms read their running statistics.

    Raises:
        UsageError: samples depend on each other, and the batch cannot be computed.
    """
    graph, plan = program.graph, program.plan
    meeting = _meeting(program, trains=trains)
    bound = next((op for op in meeting if op.target == OVER_DATA and moves_samples(op)), None)
    meet = bool(graph.mixing) or bound is not None
    if graph.exact or meet:
        raise _refused(
            program,
            num_samples,
            "and samples of this model depend on each other" if meet else "and numbers in this model count samples",
            where=graph.mixing or (_place(bound) if bound is not None else graph.name),
            otherwise="fill it up with further samples" if meet else "take means in it, no sums over len(x)",
        )
    if not meeting:
        return partial_batch(plan, num_samples, data_rank)
    if num_samples == 1 and any(map(_has_one_value, meeting)):
        raise _refused(
            program,
            num_samples,
            "and of one sample a batch norm has no statistics",
            where=_place(next(filter(_has_one_value, meeting))),
            otherwise="fill it up with further samples",
        )
    size, ranks = plan.micro_batch_size, plan.mesh.data
    taken = _at_once(num_samples, size, ranks)
    if taken is None:
        near = (range(num_samples, 0, -1), range(num_samples, plan.global_batch_size + 1))
        is_apart_in_eval = not _meeting(program, trains=False)
        less, more = (next((n for n in sizes if _at_once(n, size, ranks) is not None), 0) for sizes in near)
        raise _refused(
            program,
            num_samples,
            f"and samples of this model meet: each of {ranks} data rank{'s' * (ranks > 1)} takes a number of them at once that "
            f"divides {size}, or none",
            where=_place(meeting[0]),
            otherwise=f"make it one of {less} or {more} samples"
            + ("; evaluations take any number (make a loader for them after par.eval())" * is_apart_in_eval),
        )
    return _of_cuts(plan, [[count] if count else [] for count in taken], data_rank)


def _of_cuts(plan: Plan, cuts: Sequence[Sequence[int]], data_rank: int) -> PartialBatch:
    """Of the sizes of each data rank's micro-batches."""
    counts = tuple(map(sum, cuts))
    count = max(len(cut) for cut in cuts)
    if plan.mesh.pp > 1 or len(plan.stages) > 1:
        count += -count % plan.num_micro_batches
    made, start = list[range](), sum(counts[:data_rank])
    for size in cuts[data_rank]:
        made.append(range(start, start + size))
        start += size
    made += [range(0)] * (count - len(made))
    return PartialBatch(
        share=sum(counts) / plan.global_batch_size,
        micro_batches=tuple(made),
        size=plan.micro_batch_of(data_rank),
        counts=counts,
    )


def _meeting(program: Program, *, trains: bool) -> tuple[Op, ...]:
    """Operators by which samples of all data ranks meet."""
    graph = program.graph
    statistics = [op for op in (*graph.prelude, *graph.ops) if any(axis in op.args for axis in DATA_AXES)]
    return (*crosses_samples(graph), *(op for op in statistics if trains or op.target != "autopar.batch_norm_running"))


def _has_one_value(op: Op) -> bool:
    """Whether it is a batch norm that has one value of each channel in a batch of one sample."""
    if op.target not in ("autopar.batch_norm", "autopar.batch_norm_running"):
        return False
    spaces = set(op.args) & (set(MESH_AXES) - set(DATA_AXES))
    return prod(op.outputs[0].shape[2:]) == 1 and not spaces


def _place(op: Op) -> str:
    return f"{op.name} ({op.target}), {op.module}"


def _refused(program: Program, num_samples: int, problem: str, *, where: str, otherwise: str) -> UsageError:
    wanted = program.plan.global_batch_size
    return UsageError(
        f"A batch of {num_samples} samples is smaller than that of the plan ({wanted}), {problem}",
        where=where,
        fix=f"Leave the last batch out (drop_last=True in the DataLoader), or {otherwise}",
    )


def _at_once(num_samples: int, size: int, ranks: int) -> tuple[int, ...] | None:
    """Samples of each data rank, each a divisor of ``size`` or none, the largest first; None: there are no such.

    >>> _at_once(11, 8, 4), _at_once(7, 8, 2)
    ((8, 2, 1, 0), None)
    """
    fewest, left, parts = _fewest_parts(size, size * ranks), num_samples, list[int]()
    while left and len(parts) < ranks:
        parts.append(fewest[left][1])
        left -= parts[-1]
    return None if left else (*sorted(parts, reverse=True), *(0,) * (ranks - len(parts)))


@cache
def _fewest_parts(size: int, limit: int) -> tuple[tuple[int, int], ...]:
    """For each number up to ``limit`` how many divisors of ``size``, at least, add up to it, and the largest of these."""
    divisors = [part for part in range(1, size + 1) if size % part == 0]
    found = [(0, 0)]
    for number in range(1, limit + 1):
        count, part = min((found[number - part][0], -part) for part in divisors if part <= number)
        found.append((count + 1, -part))
    return tuple(found)


def _shares(num_samples: int, sizes: Sequence[int]) -> list[int]:
    """Samples of each data rank: a micro-batch for each, in turns, until none is left."""
    taken = [0] * len(sizes)
    while num_samples:
        for rank, size in enumerate(sizes):
            here = min(size, num_samples)
            taken[rank] += here
            num_samples -= here
    return taken


def _cut(num_samples: int, size: int) -> list[int]:
    """Sizes of micro-batches that divide ``size`` and add up to ``num_samples``, the largest first."""
    made: list[int] = []
    while num_samples:
        made.append(next(part for part in range(min(size, num_samples), 0, -1) if size % part == 0))
        num_samples -= made[-1]
    return made


class BatchSizes:
    """Tells whether a batch is one for all ranks together that has fewer samples than the plan's.

    A batch of as many samples as a data rank takes of a complete one may be either. Where complete ones have been given for the
    same purpose it is this rank's own samples if other data ranks have others.

    Args:
        are_equal: whether all ranks were given the same batch; all ranks ask together.
    """

    def __init__(self, plan: Plan, data_rank: int, are_equal: Callable[[Batch], bool]) -> None:
        self._plan, self._are_equal = plan, are_equal
        self._part = len(plan.samples_of(data_rank))
        self._are_global: set[str] = set()

    def is_partial(self, batch: Batch, num_samples: int, purpose: str) -> bool:
        """False where it is complete, or has another size than a batch may have.

        Args:
            num_samples: of the batch, where its inputs agree.
            purpose: such as ``train_step``.
        """
        complete = self._plan.global_batch_size
        if num_samples in (0, complete) or num_samples > complete:
            if num_samples == complete != self._part:
                self._are_global.add(purpose)
            return False
        if num_samples != self._part or isinstance(batch, WholeBatch):
            return True
        return purpose in self._are_global and self._are_equal(batch)
