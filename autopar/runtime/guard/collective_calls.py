"""What all ranks of a job call together: watched, so that one's failure is told to the others, and in the same order everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from zlib import crc32

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, UsageError
from autopar.runtime.guard.failure_watch import Alarm, Launched
from autopar.runtime.guard.out_of_memory import MemoryReport, is_out_of_memory
from autopar.runtime.step.step_gradients import StepGradients
from autopar.runtime.world import World

_LACKING = re.compile(r"\"(?P<kernel>\w+)\" not implemented for '(?P<dtype>BFloat16|Half)'")


def _no_kernel(kernel: str, dtype: str) -> UsageError:
    return UsageError(
        f"No kernel {kernel} for {dtype} on this device",
        fix='Cast what it takes in the model, x.float(), or make the plan with precision="fp32"',
    )


@contextmanager
def ordinary() -> Iterator[None]:
    """Without ``torch.inference_mode()`` around it; gradients stay off.

    What is made there and kept (the memory that FSDP gathers into, parameters) could never be written or trained on later,
    and of parameters there is no ``detach()``.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def launched_on(device: torch.device) -> Launched | None:
    """For the alarm: marks the device's work so far; None where calls do theirs before they return."""
    if device.type != "cuda":
        return None

    def mark() -> Callable[[], bool]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event.query

    return mark


class Calls:
    """The calls of a parallel model.

    Args:
        group: of all ranks on their hosts, for calls besides steps; None where there is one rank.
        gradients: of the step that may fail.

    Attributes:
        memory: makes the error of a call for which there is no memory left.
    """

    def __init__(self, world: World, alarm: Alarm, group: dist.ProcessGroup | None, gradients: StepGradients) -> None:
        self._world, self._alarm, self._group, self._gradients = world, alarm, group, gradients
        self.memory: MemoryReport | None = None

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Around what all ranks do together: if it fails on one, all know, and gradients are those of before."""
        self._world.check_job()
        if self._gradients.is_open:  # a backward that the user called, and that has failed
            self._gradients.abandon()
            self._alarm.spoil("a backward came to no end")
        with self._alarm.watched(what):
            try:
                yield
            except Exception as error:
                self._gradients.abandon()
                if self.memory is not None and is_out_of_memory(error):
                    raise self.memory.error(error) from error
                if found := _LACKING.match(str(error)):
                    raise _no_kernel(*found.groups()) from error
                raise

    @contextmanager
    def at_once(self, what: str, *, meets: bool = True) -> Iterator[None]:
        """Around what communicates besides steps; errors that name themselves are the same on all ranks, which may go on after them."""
        self._world.check_job()
        with ordinary(), self._alarm.watched(what):
            if meets:
                self.meet(what)
            self._alarm.runs()
            try:
                yield
            except AutoparError:
                self._alarm.met()
                raise

    def largest(self, values: Sequence[float]) -> list[float]:
        """Of each the largest that any rank has; inside of a call that all make."""
        found = torch.tensor(values, dtype=torch.float64)
        if self._group is not None:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
            self._alarm.met()
        largest: list[float] = found.tolist()
        return largest

    def meet(self, what: str) -> None:
        """Before what is called seldom: waits for all ranks.

        A rank that is in a step meanwhile would take this one's sums for its own; so it waits, and the alarm says for what.

        Raises:
            UsageError: another rank makes another such call.
        """
        if self._group is None:
            return
        self._alarm.runs()
        code = crc32(what.encode())
        codes = torch.tensor([code, -code])
        dist.all_reduce(codes, op=dist.ReduceOp.MAX, group=self._group)
        self._alarm.met()
        if codes.tolist() != [code, -code]:
            raise UsageError(
                f"Rank {self._world.rank} called {what} while another rank made a different call",
                fix="Make the same calls on every rank, and let one of them print or write what they return",
            )
