"""The prediction of the cost model for a plan: the seconds of a step by their causes, and the bytes of every pipeline rank."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add

from autopar.util.toml import RARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The predicted peak memory in bytes: of the fullest rank of one pipeline rank, or of one node group if data shares differ."""

    pp_rank: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    transient: int
    reserved: int
    host: int = field(default=0, metadata=RARE)
    """Bytes of host memory, which are not in the total: optimizer states with their parameters and gradients, offloaded activations."""
    group: int = field(default=0, metadata=RARE)
    """The index of the node group in ``Plan.groups`` if the plan has ``Plan.data_shares`` (and so one pipeline rank)."""

    @property
    def total(self) -> int:
        """The sum of all bytes of device memory."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.transient + self.reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The parts of the step time in seconds on the critical pipeline rank; they add up to the step time."""

    compute_s: float
    recompute_s: float
    tensor_parallel_s: float
    """Collectives on axis ``tp``, those of experts included."""
    data_parallel_s: float
    """Collectives of data parallelism, as far as computation does not hide them."""
    pipeline_s: float
    """Sends between pipeline stages, as far as computation does not hide them."""
    bubble_s: float
    optimizer_s: float
    context_parallel_s: float = 0.0
    """Collectives on axis ``cp``, its sums of gradients included."""
    offload_s: float = field(default=0.0, metadata=RARE)
    """Copies to and from the host, as far as computation does not hide them."""

    @property
    def total_s(self) -> float:
        """The sum of all parts, in seconds."""
        # not by sum(), which rounds otherwise from Python 3.12 on
        return float(reduce(add, (getattr(self, part.name) for part in fields(self))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The prediction of the cost model.

    ``step_time_interval_s`` and ``peak_memory_interval_bytes`` are the intervals of the two predictions, from the spread that the
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
    """Seconds of forward and backward (recompute included) of one micro-batch in each stage; may be empty."""
    peak_memory_interval_bytes: tuple[int, ...] = ()
    """Lower and upper end of the interval; empty in plans of older versions."""
    memory_limits_bytes: tuple[int, ...] = ()
    """The memory of the smallest device for each entry of ``memory``, if devices differ; ``memory_limit_bytes`` is then that of the
    rank with the largest peak. Empty if ``memory_limit_bytes`` holds for all."""
    host_memory_limit_bytes: int = field(default=0, metadata=RARE)
    """A device's share of host memory, if something is offloaded; 0 if the profile does not state it."""

    @property
    def memory_spread(self) -> float:
        """The ratio of the upper end of the memory interval to the prediction; 1 if there is no interval."""
        if not self.peak_memory_interval_bytes or not self.peak_memory_bytes:
            return 1.0
        return max(self.peak_memory_interval_bytes[1] / self.peak_memory_bytes, 1.0)

    @property
    def fits(self) -> bool:
        """Whether the upper end of the memory interval and the host memory are within their limits on every pipeline rank."""
        if not all(map(self.host_fits, self.memory)):
            return False
        if self.memory_limits_bytes:
            return all(self.rank_fits(memory) for memory in self.memory)
        return max((self.peak_memory_bytes, *self.peak_memory_interval_bytes)) <= self.memory_limit_bytes

    def limit_of(self, memory: Memory) -> int:
        """Return the bytes of the smallest device of a pipeline rank, or of a node group."""
        place = memory.pp_rank + memory.group  # one of the two is 0
        return self.memory_limits_bytes[place] if self.memory_limits_bytes else self.memory_limit_bytes

    def rank_fits(self, memory: Memory) -> bool:
        """Return whether the upper end of a pipeline rank's memory interval is within its limit, and its host memory too."""
        limit = self.limit_of(memory) + 1  # the interval is in whole bytes
        return memory.total * self.memory_spread <= limit and self.host_fits(memory)

    def host_fits(self, memory: Memory) -> bool:
        """Return whether the host memory of a pipeline rank is within its share."""
        return not self.host_memory_limit_bytes or memory.host <= self.host_memory_limit_bytes
