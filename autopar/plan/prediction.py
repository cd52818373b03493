"""The prediction of the cost model for a plan: seconds by their causes, and bytes of every pipeline rank."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add

RARE = {"rare": True}
"""Metadata of a field that a plan file has only if it differs from its default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Predicted bytes of the largest rank of one pipeline rank, at the peak; of one node group where shares of data differ."""

    pp_rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    transient: int
    reserved: int
    host: int = field(default=0, metadata=RARE)
    """Of the host's memory, no part of the total: states of optimizers with parameters and gradients, what blocks keep."""
    group: int = field(default=0, metadata=RARE)
    """Which of ``Plan.groups``, where there are ``Plan.data_shares`` (and so one pipeline rank)."""

    @property
    def total(self) -> int:
        """The sum of the device's bytes."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.transient + self.reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the step time goes, in seconds on the critical pipeline rank; the parts add up to the step."""

    compute_s: float
    recompute_s: float
    tensor_parallel_s: float
    """Collectives of the axis ``tp``, experts included."""
    data_parallel_s: float
    """Exposed part alone."""
    pipeline_s: float
    """Exposed sends."""
    bubble_s: float
    optimizer_s: float
    context_parallel_s: float = 0.0
    """Collectives of the axis ``cp``, its sums of gradients included."""
    offload_s: float = field(default=0.0, metadata=RARE)
    """Copies to and from the host that nothing hides."""

    @property
    def total_s(self) -> float:
        """The sum of all parts, in seconds."""
        # not by sum(), which rounds otherwise from Python 3.12 on
        return float(reduce(add, (getattr(self, part.name) for part in fields(self))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model says of the plan.

    ``step_time_interval_s`` and ``peak_memory_interval_bytes`` bound the two predictions, by the spread that the
    profiles state.
    """

    step_time_s: float
    step_time_interval_s: tuple[float, float]
    peak_memory_bytes: int
    memory_limit_bytes: int
    mfu: float
    tokens_per_s: float
    breakdown: Breakdown
    memory: tuple[Memory, ...]
    stage_times: tuple[tuple[float, float], ...] = ()
    """For each stage the seconds of one micro-batch's forward and backward (recompute included); may be empty."""
    peak_memory_interval_bytes: tuple[int, ...] = ()
    """Lower and upper end; empty in plans of older versions."""
    memory_limits_bytes: tuple[int, ...] = ()
    """For each entry of ``memory`` what its smallest device has, where devices differ; empty: ``memory_limit_bytes`` each.
    ``memory_limit_bytes`` is then that of the rank with the largest peak."""
    host_memory_limit_bytes: int = field(default=0, metadata=RARE)
    """Of the host's memory, a device's share, where something is offloaded; 0: the profile does not know it."""

    @property
    def memory_spread(self) -> float:
        """Upper end of the memory interval over the prediction; 1 if no interval is known."""
        if not self.peak_memory_interval_bytes or not self.peak_memory_bytes:
            return 1.0
        return max(self.peak_memory_interval_bytes[1] / self.peak_memory_bytes, 1.0)

    @property
    def fits(self) -> bool:
        """Whether on every pipeline rank the upper end of the memory interval is within the limit, and host memory within the host's."""
        if not all(map(self.host_fits, self.memory)):
            return False
        if self.memory_limits_bytes:
            return all(self.rank_fits(memory) for memory in self.memory)
        return max((self.peak_memory_bytes, *self.peak_memory_interval_bytes)) <= self.memory_limit_bytes

    def limit_of(self, memory: Memory) -> int:
        """Bytes of the smallest device of a pipeline rank, or of a node group."""
        place = memory.pp_rank + memory.group  # one of the two is 0
        return self.memory_limits_bytes[place] if self.memory_limits_bytes else self.memory_limit_bytes

    def rank_fits(self, memory: Memory) -> bool:
        """Whether the upper end of a pipeline rank's memory is within its limit."""
        most = self.limit_of(memory) + 1  # the interval is in whole bytes
        return memory.total * self.memory_spread <= most and self.host_fits(memory)

    def host_fits(self, memory: Memory) -> bool:
        """Whether the host memory of a pipeline rank is within its share."""
        return not self.host_memory_limit_bytes or memory.host <= self.host_memory_limit_bytes
