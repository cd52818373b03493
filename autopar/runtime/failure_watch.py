"""What all ranks of a job call together, in one order, and one rank's failure told to all: the others wait for it in collectives."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from zlib import crc32

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, RankFailedError, UsageError, first_line
from autopar.runtime.checks import MemoryReport, is_out_of_memory
from autopar.runtime.job import FAKE, own_store
from autopar.runtime.step.runner import StepGradients
from autopar.runtime.world import World

_LOGGER = logging.getLogger("autopar")

POLL_S = 1.0
"""Between two looks of a rank: one or two small requests to the job's store each."""

GRACE_S = 5.0
"""For the call to end by itself once another rank has failed, before the process is ended."""

_LOOKS = 5
"""Within one poll, of a rank that has lost a connection."""

_RECENT = 8
"""Calls whose names are compared with those of other ranks: so far ahead a host is that has only launched them."""

_CLOSED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_FAILED, _LEFT = "failed", "left"

Launched = Callable[[], Callable[[], bool]]
"""Called at the end of a call; what it gives says whether the device has done all that was launched until then."""


class Alarm:
    """Watches the calls that all ranks make together; each rank makes one, and enters the same calls in the same order.

    A rank whose call fails writes so into the job's store, the one place that reaches the others whatever they wait for, on gloo
    as on NCCL. A thread of each rank looks there, and while the rank waits also whether others are in another call (an evaluation
    that one rank alone makes), for which they wait as well. A rank waits inside of a call, or, where calls return when their work is
    launched (NCCL), outside of it in whatever asks for a number: as long as the device has not done that work. Where the
    collectives fail by themselves (gloo, when the other process ends) the call raises what the store says; where they do not (NCCL;
    gloo, when the error was caught) nothing can call the main thread back, and the process is ended with the same words. A rank
    that does not wait, but works by itself, is left at that: its next call raises them.

    Args:
        rank, num_ranks: of the job; one rank alone has nobody to tell.
        recovers: whether one rank alone can go on after a step that failed.
        launched: of this rank's device; None where a call has done its work when it returns.
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
        self._rank, self._recovers = rank, recovers and num_ranks == 1
        self._poll_s, self._grace_s = poll_s, grace_s
        has_others = num_ranks > 1 and dist.get_backend() != FAKE
        self._store = own_store("alarm", rank) if has_others else None
        self._num_calls, self._compared = 0, 0
        self._recent: deque[tuple[int, str]] = deque(maxlen=_RECENT)
        self._inside: tuple[int, str] | None = None
        self._launched, self._is_done = launched, _always
        self._is_running = False
        self._failure = ""
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """Around a call that all ranks make, of the name ``what``.

        Raises:
            RankFailedError: another rank failed in this call, or an earlier call that communicated came to no end; else what is
                raised inside.
        """
        if self._failure:
            raise _error(self._failure)
        self.begin(what)
        try:
            yield
        except Exception as error:
            self._inside = None
            said = self._tell(error, what)
            if self._is_running and not self._recovers:
                self._fail(said)
            if not self._is_running or isinstance(error, AutoparError) or _is_own(said, self._rank):
                raise  # before it communicates a rank fails by itself, and may go on where all refused the same
            raise _error(said) from error
        finally:
            self.end()

    def begin(self, what: str) -> None:
        """Begins a call that all ranks make and that nothing can be put around (a backward that the user calls), until :meth:`end`."""
        if self._is_done():
            self._recent.clear()
        self._num_calls += 1
        self._inside, self._is_running = (self._num_calls, what), False
        self._recent.append(self._inside)
        if self._thread is None and self._store is not None:
            self._thread = threading.Thread(target=self._watch, name="autopar-alarm", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Ends it."""
        if self._launched is not None and self._inside is not None:
            self._is_done = self._launched()
        else:  # it has come to its end, or was refused, maybe beside another call that was
            self._recent.clear()
        self._inside = None

    def runs(self) -> None:
        """From here on the call communicates: a rank that fails now is in another place than the others for good."""
        self._is_running = True

    def met(self) -> None:
        """All ranks know the same again: what one refuses now all do, until one communicates anew."""
        self._is_running = False

    def spoil(self, said: str) -> None:
        """The call that has begun came to no end here: tells the others, and refuses later ones.

        Ranks, or what FSDP keeps of a step, are in another place than at a step's begin.
        """
        self._inside = None
        told = self._told(f"rank {self._rank}: {said}")
        if not self._recovers:
            self._fail(told)

    def close(self) -> None:
        """Ends the thread, and tells the others that this rank makes no more calls."""
        if self._store is not None and not self._closed.is_set():
            with suppress(Exception):  # the store is gone with its process: there is nobody left to tell
                self._store.compare_set(_LEFT, "", f"rank {self._rank} ended after {self._num_calls} calls")
        self._closed.set()
        if self._thread is not None:
            self._thread.join(2 * self._poll_s)

    def _tell(self, error: Exception, what: str) -> str:
        """What the store says of the call ``what``, which is ``error`` if nobody has been before."""
        where = "".join(f", {note}" for note in getattr(error, "__notes__", ()))
        own = f"rank {self._rank}{where}: {type(error).__name__}: {first_line(error)}"
        if self._is_running and not isinstance(error, AutoparError):
            with suppress(Exception):  # see _told
                own = self._gone(self._num_calls) or (self._left(what) if _is_lost(error) else "") or own
        return self._told(own)

    def _told(self, own: str) -> str:
        """What the store says of this call, which is ``own`` if nobody has been before."""
        if self._store is None:
            return own
        try:
            return str(self._store.compare_set(str(self._num_calls), "", own).decode())
        except Exception:  # noqa: BLE001  the store is gone with its process: there is nobody left to tell
            return own

    def _fail(self, said: str) -> None:
        """This rank makes no more calls, and those that are in this one or in a later one hear of it wherever they wait."""
        self._failure = said
        if self._store is not None:
            with suppress(Exception):  # see _told
                self._store.compare_set(_FAILED, "", f"{self._num_calls} {said}")

    def _watch(self) -> None:
        """The thread: until another rank has failed in the call for which this one waits, or the process ends."""
        while not self._closed.wait(self._poll_s):
            waits = self._waits()
            try:
                said = self._heard(waits) or (self._elsewhere() if waits else "")
            except Exception:  # noqa: BLE001  the store is gone with its process: the launcher ends the others
                return
            if not said:
                continue
            if waits is None:
                self._failure = self._failure or said
                continue
            for _ in range(round(self._grace_s / self._poll_s)):
                if self._closed.wait(self._poll_s) or self._waits() != waits:
                    break
            else:
                self._end(said)

    def _waits(self) -> int | None:
        """The call in which this rank is, or whose work its device has not done; None: neither."""
        inside = self._inside
        if inside is not None:
            return inside[0]
        return None if self._is_done() else self._num_calls

    def _heard(self, waits: int | None) -> str:
        """The failure of another rank in the call ``waits``, or one after which no job goes on; empty when there is none."""
        number, _, said = self._read(_FAILED).partition(" ")
        if said and int(number) <= self._num_calls and not _is_own(said, self._rank):
            return said
        if waits is None:
            return ""
        said = self._read(str(waits))
        return said if said and not _is_own(said, self._rank) else self._gone(waits)

    def _read(self, key: str) -> str:
        """What the store has under a key; empty when there is nothing."""
        if self._store is None or not self._store.check([key]):
            return ""
        return str(self._store.get(key).decode())

    def _gone(self, call: int) -> str:
        """That a rank has ended before this call; empty when none is known."""
        said = self._read(_LEFT)
        return f"{said}, this one is in its call {call}" if said and int(said.split()[-2]) < call else ""

    def _left(self, what: str) -> str:
        """That a rank has ended which was no more in need of this one; empty when none is known.

        It says so after its end, and its connections may be closed before.
        """
        for _ in range(_LOOKS):
            if said := self._read(_LEFT):
                return f"{said}, and this one waits for it in its call {self._num_calls}, {what}: different calls"
            self._closed.wait(self._poll_s / _LOOKS)
        return ""

    def _elsewhere(self) -> str:
        """Which other call a rank makes in place of one of this rank's last, for which this one waits; empty when none is known.

        Who waits for longer than a poll compares each call with the first such rank, once.
        """
        assert self._store is not None
        for number, what in tuple(self._recent):
            if number <= self._compared:
                continue
            self._compared = number
            own = f"{what} on rank {self._rank}"
            first = self._store.compare_set(f"{number}/what", "", own).decode()
            if first.partition(" ")[0] != what:
                said = f"{first}, {own}: different calls at the same time"
                return str(self._store.compare_set(str(number), "", said).decode())
        return ""

    def _end(self, said: str) -> None:
        """Ends the process, whose main thread waits in a collective that has no end."""
        assert self._store is not None
        _LOGGER.critical("%s: %s", RankFailedError.__name__, _error(said))
        try:
            self._store.compare_set(_FAILED, "", f"{self._num_calls} {said}")
        finally:
            sys.stderr.flush()
            os._exit(RankFailedError.exit_code)


def _always() -> bool:
    return True


def _is_own(said: str, rank: int) -> bool:
    return said.startswith((f"rank {rank}:", f"rank {rank},"))


def _is_lost(error: Exception) -> bool:
    """Whether a collective failed because another process has closed its connection."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CLOSED)


def _error(what: str) -> RankFailedError:
    return RankFailedError(
        "A rank of the job has failed, or made another call",
        got=what,
        fix="Correct what that rank reports, and start the job again from its last checkpoint",
    )


_LACKING = re.compile(r"\"(?P<kernel>\w+)\" not implemented for '(?P<dtype>BFloat16|Half)'")


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
                    raise self.memory.error() from error
                if found := _LACKING.match(str(error)):
                    raise UsageError(
                        f"No kernel {found['kernel']} for {found['dtype']} on this device",
                        fix='Cast what it takes in the model, x.float(), or make the plan with precision="fp32"',
                    ) from error
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
