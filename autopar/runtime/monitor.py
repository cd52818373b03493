"""Times the first steps of a run by category and compares them with the plan's prediction.

A clock switches between exclusive categories: one that starts inside another stops that one until it ends. On a CPU it reads wall time.
Collectives are caught in torch.distributed, only during the measured steps, and their category is that of their process group. On a GPU the
clock records events in the stream of computation, which are read after the step. Collectives run on other streams, and waiting for each
would change what is measured, so a step is only divided into the optimizer and the rest.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from autopar.plan import run_log
from autopar.plan.plan import Plan
from autopar.runtime.world import Peers, World

logger = logging.getLogger("autopar")

WARM_UP_STEPS, MEASURED_STEPS = 2, 5

_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
)
_FUNCTIONAL = ("all_reduce", "all_gather_tensor", "reduce_scatter_tensor", "all_to_all_single")
_BETWEEN = "between"


class Clock:
    """Adds up exclusive times by category, for one step at a time."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.current_stream(device) if self._is_cuda else None
        self._stack: list[str] = []
        self._marks: list[tuple[str, Any]] = []

    def begin(self) -> dict[str, float]:
        """End a step and begin the next; return the seconds by category of the one that ended, with ``between`` for time outside any."""
        self._mark()
        marks, self._marks = self._marks, self._marks[-1:]
        self._stack.clear()
        self._marks[0] = (_BETWEEN, self._marks[0][1])
        seconds: dict[str, float] = {}
        for (name, start), (_, end) in pairwise(marks):
            seconds[name] = seconds.get(name, 0.0) + self._between(start, end)
        return seconds

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Enter the context whose time belongs to ``name``, except for parts inside it."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        """Begin a part; on a GPU only the stream of computation is timed."""
        self._stack.append(name)
        self._mark()

    def leave(self) -> None:
        """End the last part that was begun in this step."""
        if self._stack:
            self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        if self._is_cuda:
            if torch.cuda.current_stream() != self._stream:
                return
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
            now: Any = event
        else:
            now = time.perf_counter()
        self._marks.append((self._stack[-1] if self._stack else _BETWEEN, now))

    def _between(self, start: Any, end: Any) -> float:
        if not self._is_cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class Monitor:
    """Times the first steps of a :class:`ParallelModel` on this rank; every rank of the job has one.

    Args:
        plan, world: of the run.
        log_dir: the folder in which rank 0 writes the log; None for no log.

    Attributes:
        record: the comparison, on every rank, after it is made.
        is_active: whether steps are still timed; if not, the methods cost next to nothing.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        *,
        log_dir: Path | None = None,
    ) -> None:
        self._plan, self._world = plan, world
        self._path = None if log_dir is None else log_dir / run_log.FILE_NAME
        if self._path is not None and world.rank == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._memory = _Memory(world.device)
        self._is_coarse = world.device.type == "cuda"
        self._clock: Clock | None = None
        self._seen, self._steps = 0, list[dict[str, float]]()
        self._caught = ExitStack()
        self._groups: dict[str, str] = {}
        self._has_ended = self._is_timed = False
        self.record: run_log.RunRecord | None = None
        self.is_active = True

    # --- a step

    def begin_step(self, *, is_timed: bool = True) -> None:
        """Begin a step before its forward. After the last measured step all ranks meet here and compare.

        Args:
            is_timed: whether the time of the step is to be compared with the plan.
        """
        self._is_timed = is_timed and self.is_active
        if not self._is_timed:
            return
        self._seen += 1
        self._caught.close()
        if self._clock is not None:
            done = self._clock.begin()
            if self._has_ended:  # a step without backward has no end
                self._steps.append(done)
        elif self._seen > WARM_UP_STEPS:
            self._start()
        self._has_ended = False
        if len(self._steps) == MEASURED_STEPS:
            self._finish()
        elif self._clock is not None:
            if not self._is_coarse:
                self._caught.enter_context(_caught(dist, _COLLECTIVES, self._clock, self._groups, waits=False))
                self._caught.enter_context(_caught(funcol, _FUNCTIONAL, self._clock, self._groups, waits=True))
            self._clock.enter(run_log.COMPUTE)

    def end_step(self) -> None:
        """End a step after its gradient sums."""
        if self._is_timed and self._clock is not None:
            self._caught.close()
            self._clock.leave()
            self._has_ended = True

    def part(self, name: str) -> AbstractContextManager[None]:
        """As :meth:`Clock.part`, while steps are timed."""
        return nullcontext() if self._clock is None or self._is_coarse else self._clock.part(name)

    def optimizer_step(self) -> AbstractContextManager[None]:
        """Return the context of a step of this model's optimizer, also on a GPU."""
        return nullcontext() if self._clock is None else self._clock.part(run_log.OPTIMIZER)

    def close(self) -> None:
        """Stop timing."""
        self.is_active, self._clock = False, None
        self._caught.close()

    # --- inside

    def _start(self) -> None:
        self._clock = Clock(self._world.device)
        self._clock.begin()
        self._memory.reset()
        self._groups = _categories(self._world)

    def _finish(self) -> None:
        """Compute the medians of all ranks and the comparison, and write the log."""
        steps, self._steps = self._steps, []
        self.close()
        world = self._world
        seconds = run_log.step_of([{k: v for k, v in step.items() if k != _BETWEEN} for step in steps])
        between = sorted(step.get(_BETWEEN, 0.0) for step in steps)[len(steps) // 2]
        times = run_log.RankTimes(
            rank=world.rank,
            seconds=seconds,
            between_s=between,
            reserved_bytes=self._memory.reserved_bytes(),
            measured_bytes=self._memory.peak_bytes(),
            predicted_bytes=run_log.predicted_bytes(self._plan, world.rank),
        )
        ranks = Peers(world.host_group()).all_gather(times)
        self.record = run_log.record_of(
            self._plan, ranks, num_steps=len(steps), memory_kind=self._memory.kind, is_coarse=self._is_coarse
        )
        if world.rank == 0:
            self._tell(self.record, ranks, steps)

    def _tell(self, record: run_log.RunRecord, ranks: list[run_log.RankTimes], steps: list[dict[str, float]]) -> None:
        if self._path is not None:
            first = self._seen - len(steps)
            rows = ({"step": first + i, "rank": 0, "seconds": step} for i, step in enumerate(steps))
            run_log.write_log(self._path, record, ranks, rows)
        parts = ", ".join(f"{p.name} {p.measured_s:.3g} ({p.predicted_s:.3g})" for p in record.parts)
        logger.info("step %.3g s, predicted %.3g s; by category: %s", record.measured_s, record.predicted_s, parts)
        warning = record.warning(self._path)
        if warning:
            logger.warning("%s", warning)


def _categories(world: World) -> dict[str, str]:
    """Categories by process group; groups that are not included sum gradients and losses over data ranks."""
    mesh, categories = world.device_mesh, dict[str, str]()
    for axis, name in (("tp", run_log.TENSOR), ("cp", run_log.CONTEXT), ("pp", run_log.PIPELINE)):
        if mesh.get_group(axis).size() > 1:
            categories[mesh.get_group(axis).group_name] = name
    for expert in world.meshes[:-1]:
        for axis in sorted(set(expert.mesh_dim_names or ()) & {"ep", "ep_data"}):
            categories.setdefault(expert.get_group(axis).group_name, run_log.TENSOR)
    return categories


@contextmanager
def _caught(home: Any, names: Iterable[str], clock: Clock, groups: Mapping[str, str], *, waits: bool) -> Iterator[None]:
    """Time the functions of a module in the category of their process group, until the context ends.

    With ``waits`` it waits for results that are asynchronous.
    """

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            arguments = (*args, *kwargs.values())
            group = next((g for g in arguments if isinstance(g, dist.ProcessGroup)), None)
            with clock.part(run_log.DATA if group is None else groups.get(group.group_name, run_log.DATA)):
                result = function(*args, **kwargs)
                return result.wait() if waits and isinstance(result, funcol.AsyncCollectiveTensor) else result

        return call

    with ExitStack() as undo:
        for name in filter(partial(hasattr, home), names):
            function = getattr(home, name)
            undo.callback(setattr, home, name, function)
            setattr(home, name, timed(function))
        yield


class _Memory:
    """Peak memory since :meth:`reset`: of CUDA's allocator, or resident memory of this process in excess of that at its start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.kind = "allocator" if device.type == "cuda" else "resident"
        self._before = None if device.type == "cuda" else _pages("VmRSS")

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # of VmHWM
        except OSError:
            self._before = None

    def peak_bytes(self) -> int | None:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        now = _pages("VmHWM")
        return None if now is None or self._before is None else max(now - self._before, 0)

    def reserved_bytes(self) -> int | None:
        """Return the most that CUDA's allocator has reserved; None on CPUs."""
        return int(torch.cuda.max_memory_reserved(self._device)) if self._device.type == "cuda" else None


def _pages(key: str) -> int | None:
    """Bytes in a line of /proc/self/status; None if the system has no such file."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    entry = next((line for line in lines if line.startswith(f"{key}:")), None)
    return None if entry is None else int(entry.split()[1]) * 1024
