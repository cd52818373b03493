"""Python's collector of cycles kept from going through all objects of the process again and again while a search runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 400_000
"""New objects after which cycles are looked for. A search makes few of them and keeps most of what it makes, beside the
objects of torch and of the traced model, all of which a full collection visits."""

YOUNG = 50
"""Collections of the newest objects after which those that were left are visited again: in the tenth that of a search of a few
seconds goes through most of what it has made, a tenth of a second for nothing."""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Cycles are collected after every :data:`OBJECTS` new objects; as before at the end.

    What is collected more seldom already, or not at all, stays so; so it does where a search runs inside of another.
    """
    before = gc.get_threshold()
    during = (OBJECTS, max(before[1], YOUNG), before[2])
    if before[0] == 0 or before[0] >= OBJECTS:
        yield
        return
    gc.set_threshold(*during)
    try:
        yield
    finally:
        if gc.get_threshold() == during:  # nobody has set another in the meantime
            gc.set_threshold(*before)
