"""Calls that all ranks of a job make together, in the same order, and how ranks that wait in collectives learn that another has failed."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from zlib import crc32

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from autopar.errors import AutoparError, RankFailedError, UsageError, first_line
from autopar.runtime.checks import MemoryReport, is_out_of_memory
from autopar.runtime.job import FAKE, own_store
from autopar.runtime.step.runner import StepGradients
from autopar.runtime.world import World

_LOGGER = logging.getLogger("autopar")

POLL_S = 1.0
"""Seconds between two polls of a rank: each sends two or three small requests to the job's store."""

GRACE_S = 5.0
"""Seconds in which a call may end by itself after another rank has failed, before the process is ended."""

_NUM_LOOKS = 10
"""Polls within :data:`GRACE_S` of a rank whose collective has failed."""

_RECENT = 8
"""Number of last calls whose names are compared with those of other ranks: so far ahead may a host be that only launches work."""

_CLOSED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")
_FAILED, _LEFT, _SEEN = "failed", "left", "seen"

Launched = Callable[[], Callable[[], bool]]
"""Is called at the end of a call; returns a function that says whether the device has done all work launched until then."""


class Alarm:
    """Watches the calls that all ranks make together; each rank makes one, and makes the same calls in the same order.

    A rank whose call fails writes this into the job's store, which reaches the other ranks whatever they wait for, with gloo and NCCL. A
    thread of each rank polls the store. While its rank waits, it also checks whether another rank is in a different call (such as an
    evaluation on one rank alone), for which it would wait forever.

    A rank waits inside a call. If calls return when their work is launched (NCCL), it may also wait after a call, until the device has done
    the work. If collectives fail by themselves (gloo, when the other process ends) the call raises what the store says. Otherwise (NCCL;
    gloo, when the error was caught) nothing can interrupt the main thread, and the process is ended with the same message. A rank that does
    not wait is not interrupted: its next call raises the error.

    Args:
        rank, num_ranks: of the job; a single rank has no others to inform.
        recovers: whether a single rank can continue after a step that failed.
        launched: of this rank's device; None if calls have done their work when they return.
        poll_s, grace_s: see :data:`POLL_S`, :data:`GRACE_S`.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        *,
        recovers: bool = False,
        launched: Launched | None = None,
        poll_s: float = POLL_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._rank, self._num_ranks, self._recovers = rank, num_ranks, recovers and num_ranks == 1
        self._poll_s, self._grace_s = poll_s, grace_s
        has_others = num_ranks > 1 and dist.get_backend() != FAKE
        self._store = own_store("alarm", rank) if has_others else None
        self._num_calls, self._compared = 0, 0
        self._recent: deque[tuple[int, str]] = deque(maxlen=_RECENT)
        self._inside: tuple[int, str] | None = None
        self._launched = launched
        self._is_done: Callable[[], bool] = lambda: True
        self._is_running = False
        self._failure = ""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """Enter the context of a call of all ranks, named ``what``.

        Raises:
            RankFailedError: another rank failed in this call, or an earlier call failed after it had begun to communicate. Otherwise errors
                from inside are raised unchanged.
        """
        if self._failure:
            raise _error(self._failure)
        self.begin(what)
        try:
            yield
        except Exception as error:
            self._inside = None
            message = self._report(error, what)
            if self._is_running and not self._recovers:
                self._fail(message)
            if not self._is_running or isinstance(error, AutoparError) or _is_of_rank(message, self._rank):
                raise  # before communication a failure is local, and ranks may continue if all refused the same
            raise _error(message) from error
        finally:
            self.end()

    def begin(self, what: str) -> None:
        """Begin a call of all ranks that cannot be a context (a backward that the user calls); :meth:`end` ends it."""
        if self._is_done():
            self._recent.clear()
        self._num_calls += 1
        self._inside, self._is_running = (self._num_calls, what), False
        self._recent.append(self._inside)
        if self._thread is None and self._store is not None:
            self._store.set(f"{_SEEN}/{self._rank}", str(self._num_calls))
            self._thread = threading.Thread(target=self._watch, args=(self._store,), name="autopar-alarm", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """End the call."""
        if self._launched is not None and self._inside is not None:
            self._is_done = self._launched()
        else:  # the call is finished, or was refused
            self._recent.clear()
        self._inside = None

    def runs(self) -> None:
        """Note that the call communicates from here on: if a rank fails now, ranks are no longer in the same state."""
        self._is_running = True

    def met(self) -> None:
        """Note that all ranks have the same information again: until one communicates, an error is raised by all of them."""
        self._is_running = False

    def spoil(self, message: str) -> None:
        """Note that the current call did not finish here; inform the other ranks, and refuse later calls.

        Ranks, or FSDP's state of the step, are not in the state of a step's beginning.
        """
        self._inside = None
        first = self._first_message(f"rank {self._rank}: {message}")
        if not self._recovers:
            self._fail(first)

    def close(self) -> None:
        """End the thread, and informs the other ranks that this one makes no more calls."""
        if self._store is not None and not self._closed.is_set():
            with suppress(Exception):  # the store has ended with its process: no rank is left to inform
                self._first(_LEFT, f"rank {self._rank} ended after {self._num_calls} calls")
        self._closed.set()
        if self._thread is not None:
            self._thread.join(2 * self._poll_s)

    def _report(self, error: Exception, what: str) -> str:
        """Return the store's message for the call ``what``, which is made from ``error`` if no rank has written one."""
        where = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        local = f"rank {self._rank}{where}: {type(error).__name__}: {first_line(error)}"
        if self._is_running and not isinstance(error, AutoparError):
            with suppress(Exception):  # see _first_message
                local = self._ended_before(self._num_calls) or (self._silent(what) if _is_lost(error) else "") or local
        return self._first_message(local)

    def _first_message(self, local: str) -> str:
        """Return the store's message for this call, which is ``local`` if no rank has written one, or the store has ended."""
        try:
            return self._first(str(self._num_calls), local)
        except Exception:  # noqa: BLE001  the store has ended with its process: no rank is left to inform
            return local

    def _first(self, key: str, text: str) -> str:
        """Return the store's value of a key, which is ``text`` if no rank has written one."""
        return text if self._store is None else str(self._store.compare_set(key, "", text).decode())

    def _fail(self, message: str) -> None:
        """Refuse further calls of this rank, and informs the ranks that wait in this or in a later call."""
        self._failure = message
        with suppress(Exception):  # see _first_message
            self._first(_FAILED, f"{self._num_calls} {message}")

    def _watch(self, store: Store) -> None:
        """Run as the thread until another rank has failed in the call in which this one waits, or the process ends."""
        while not self._closed.wait(self._poll_s):
            waits = self._waits()
            try:
                store.set(f"{_SEEN}/{self._rank}", f"{self._num_calls} {time.monotonic()}")
                message = self._failure_of_others(waits) or (self._different_call() if waits else "")
            except Exception:  # noqa: BLE001  the store has ended with its process: the launcher ends the others
                return
            if not message:
                continue
            if waits is None:
                self._failure = self._failure or message
                continue
            for _ in range(round(self._grace_s / self._poll_s)):
                if self._closed.wait(self._poll_s) or self._waits() != waits:
                    break
            else:
                self._end(message)

    def _waits(self) -> int | None:
        """Return the number of the call that this rank is in, or whose work its device has not done; None if there is neither."""
        inside = self._inside
        if inside is not None:
            return inside[0]
        return None if self._is_done() else self._num_calls

    def _failure_of_others(self, waits: int | None) -> str:
        """Return the failure of another rank in the call ``waits``, or one after which the job cannot continue; empty if there is none."""
        number, _, message = self._read(_FAILED).partition(" ")
        if message and int(number) <= self._num_calls and not _is_of_rank(message, self._rank):
            return message
        if waits is None:
            return ""
        message = self._read(str(waits))
        return message if message and not _is_of_rank(message, self._rank) else self._ended_before(waits)

    def _read(self, key: str) -> str:
        """Return the store's value of a key; empty if there is none."""
        if self._store is None or not self._store.check([key]):
            return ""
        return str(self._store.get(key).decode())

    def _ended_before(self, call: int) -> str:
        """Return a message that a rank has ended before this call; empty if none has."""
        message = self._read(_LEFT)
        return f"{message}, this one is in its call {call}" if message and int(message.split()[-2]) < call else ""

    def _silent(self, what: str) -> str:
        """Return a message on ranks that have ended, stand still, or have not come to this call; empty if there are none.

        A rank writes that it ends, at which time its connections may be closed already. While it lives, its thread writes at each poll.
        """
        here = f"its call {self._num_calls}, {what}"
        is_first = self._first(f"{self._num_calls}/asks", str(self._rank)) == str(self._rank)
        before = self._seen() if is_first else {}  # every rank asking for all others would be too much for the store
        for _ in range(_NUM_LOOKS if is_first else 2 * _NUM_LOOKS):
            if left := self._read(_LEFT):
                return f"{left}, and this one waits for it in {here}: different calls"
            if failed := self._read(str(self._num_calls)):
                return failed
            self._closed.wait(self._grace_s / _NUM_LOOKS)
        now = self._seen() if is_first else {}
        if still := [rank for rank in now if now[rank] == before[rank] != ""]:
            return f"rank {still[0]} was killed or stopped, and rank {self._rank} waits for it in {here}"
        if behind := [rank for rank in now if int(now[rank].partition(" ")[0] or 0) < self._num_calls]:
            return f"rank {behind[0]} hangs, or is slower than collective_timeout_s, and rank {self._rank} waits for it in {here}"
        return ""

    def _seen(self) -> dict[int, str]:
        """Return what the threads of the other ranks have written last; empty if nothing yet."""
        return {rank: self._read(f"{_SEEN}/{rank}") for rank in range(self._num_ranks) if rank != self._rank}

    def _different_call(self) -> str:
        """Return a message that a rank makes another call in place of one of this rank's last ones; empty if none does.

        A rank that waits longer than a poll compares the name of each call once, with the first rank that has done so.
        """
        for number, what in [call for call in self._recent if call[0] > self._compared]:
            self._compared = number
            local = f"{what} on rank {self._rank}"
            first = self._first(f"{number}/what", local)
            if first.partition(" ")[0] != what:
                return self._first(str(number), f"{first}, {local}: different calls at the same time")
        return ""

    def _end(self, message: str) -> None:
        """End the process, whose main thread waits in a collective that will never finish."""
        _LOGGER.critical("%s: %s", RankFailedError.__name__, _error(message))
        try:
            self._first(_FAILED, f"{self._num_calls} {message}")
        finally:
            sys.stderr.flush()
            os._exit(RankFailedError.exit_code)


def _is_of_rank(message: str, rank: int) -> bool:
    return message.startswith((f"rank {rank}:", f"rank {rank},"))


def _is_lost(error: Exception) -> bool:
    """Return whether a collective failed because another process has closed its connection, or did not come in time."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CLOSED)


def _error(what: str) -> RankFailedError:
    return RankFailedError(
        "A rank of the job has failed, or made another call",
        got=what,
        fix="Correct what that rank reports, and start the job again from its last checkpoint",
    )


_MISSING_KERNEL = re.compile(r"\"(?P<kernel>\w+)\" not implemented for '(?P<dtype>BFloat16|Half)'")


@contextmanager
def ordinary() -> Iterator[None]:
    """Leaves ``torch.inference_mode()``, with gradients off.

    Tensors that are made in that mode and kept (the memory that FSDP gathers into, parameters) could never be written or trained on later,
    and such parameters have no ``detach()``.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def launched_on(device: torch.device) -> Launched | None:
    """Mark the work launched on the device, for the alarm; None if calls have done their work when they return."""
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
        group: all ranks on their hosts, for calls outside of steps; None if there is one rank.
        gradients: those of the step, which are restored if it fails.

    Attributes:
        memory: makes the error of a call that ran out of memory.
    """

    def __init__(self, world: World, alarm: Alarm, group: dist.ProcessGroup | None, gradients: StepGradients) -> None:
        self._world, self._alarm, self._group, self._gradients = world, alarm, group, gradients
        self.memory: MemoryReport | None = None

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """Enter the context of a step of all ranks: if it fails on one, all are informed, and gradients are restored."""
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
                    raise self.memory.error() from error
                if found := _MISSING_KERNEL.match(str(error)):
                    raise UsageError(
                        f"No kernel {found['kernel']} for {found['dtype']} on this device",
                        fix='Cast what it takes in the model, x.float(), or make the plan with precision="fp32"',
                    ) from error
                raise

    @contextmanager
    def at_once(self, what: str, *, meets: bool = True) -> Iterator[None]:
        """Enter the context of a call that communicates outside of steps. Errors of autopar are raised on all ranks, which may go on."""
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

    def meet(self, what: str) -> None:
        """Wait for all ranks, before calls that are rare.

        A rank that is in a step meanwhile would mix up the sums of both. So this one waits, and the alarm names the calls.

        Raises:
            UsageError: another rank makes a different call of this kind.
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
