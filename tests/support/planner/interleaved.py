"""Searches that take turns: each in a thread of its own, which goes on only when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Died(BaseException):
    """A search that is killed where it stands: nothing that it does on an error is done."""


class Turns:
    """Work that stops at each call of :meth:`pause` until its next turn.

    Args:
        work: in its thread; it calls :meth:`pause`.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self.is_over = False
        self._dies = False
        self._error: Exception | None = None
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            self._wait()
            work()
        except Died:
            pass
        except Exception as error:  # noqa: BLE001  raised again in the thread that asks
            self._error = error
        self.is_over = True
        self._stands.release()

    def pause(self) -> None:
        """In the work: wait for the next turn."""
        self._stands.release()
        self._wait()

    def _wait(self) -> None:
        self._go.acquire()
        if self._dies:
            raise Died

    def go_on(self) -> bool:
        """Let the work go on to its next pause; whether there was one."""
        if not self.is_over:
            self._go.release()
            self._stands.acquire()
        if self._error is not None:
            raise self._error
        return not self.is_over

    def kill(self) -> None:
        """End the work where it stands."""
        self._dies = True
        self.go_on()
        self._thread.join()

    def finish(self) -> None:
        """Let the work go on to its end."""
        while self.go_on():
            pass
        self._thread.join()
