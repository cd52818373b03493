"""SIGTERM before a preemption: noted, so that training ends between two steps and not inside of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Termination:
    """Whether this process was asked to end.

    Attributes:
        is_asked: a signal has come.
    """

    def __init__(self) -> None:
        self.is_asked = False

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, SIGTERM sets :attr:`is_asked` and nothing else; Python delivers signals to its main thread alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _note(self, _: int, __: FrameType | None) -> None:
        self.is_asked = True
