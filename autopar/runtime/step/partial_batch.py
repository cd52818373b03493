"""A batch of fewer samples than the plan's, run by the plan's own program.

Samples are taken in the order of the data ranks, as many micro-batches each as it takes. A micro-batch that is not full has its
samples several times, each equally often, and counts for as much less; so a rest of 3 in micro-batches of 4 is one micro-batch of
2 samples twice, and one of 1 sample four times. One without samples, where other ranks have some, counts for nothing. All sums over
samples (the loss, token counts) weigh micro-batches like this, and means over samples divide by those that there are: the loss and
its gradients are those of one device on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import UsageError
from autopar.lower.program import Program
from autopar.plan.mesh import DATA_AXES
from autopar.plan.plan import Plan
from autopar.rules.apply.apply import crosses_samples

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
    """

    share: float
    micro_batches: tuple[range, ...]
    size: int

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
    ranks = range(plan.mesh.data)
    taken = _shares(num_samples, [plan.micro_batch_of(rank) for rank in ranks])
    cuts = [_cut(taken[rank], plan.micro_batch_of(rank)) for rank in ranks]
    count = max(len(cut) for cut in cuts)
    if plan.mesh.pp > 1 or len(plan.stages) > 1:
        count += -count % plan.num_micro_batches
    made, start = list[range](), sum(taken[:data_rank])
    for size in cuts[data_rank]:
        made.append(range(start, start + size))
        start += size
    made += [range(0)] * (count - len(made))
    return PartialBatch(
        share=num_samples / plan.global_batch_size,
        micro_batches=tuple(made),
        size=plan.micro_batch_of(data_rank),
    )


def check_partial(program: Program, num_samples: int) -> None:
    """Nothing, where a batch of fewer samples than the plan's can be computed.

    Raises:
        UsageError: it cannot, as samples depend on each other.
    """
    graph, wanted = program.graph, program.plan.global_batch_size
    statistics = (op for op in graph.ops if any(axis in op.args for axis in DATA_AXES))  # of all data ranks
    crossing = (*crosses_samples(graph), *statistics)
    if not (graph.exact or graph.mixing or crossing):
        return
    where = graph.mixing or (
        f"{crossing[0].name} ({crossing[0].target}), {crossing[0].module}" if crossing else graph.name
    )
    raise UsageError(
        f"A batch of {num_samples} samples is smaller than that of the plan ({wanted}), and samples of this model depend on each other",
        where=where,
        fix="Leave the last batch out (drop_last=True in the DataLoader), or fill it up with further samples",
    )


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
        self._plan, self._data_rank, self._are_equal = plan, data_rank, are_equal
        self._part = len(plan.samples_of(data_rank))
        self._are_global: set[str] = set()

    def partial(self, batch: Batch, num_samples: int | None, purpose: str) -> PartialBatch | None:
        """How this rank computes it; None where it is complete, or has another size than a batch may have.

        Args:
            num_samples: of the batch, where its inputs agree.
            purpose: such as ``train_step``.
        """
        complete = self._plan.global_batch_size
        if num_samples is None or num_samples in (0, complete) or num_samples > complete:
            if num_samples == complete != self._part:
                self._are_global.add(purpose)
            return None
        is_known = isinstance(batch, WholeBatch)
        if num_samples == self._part and not (is_known or (purpose in self._are_global and self._are_equal(batch))):
            return None
        return partial_batch(self._plan, num_samples, self._data_rank)
