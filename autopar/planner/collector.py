"""Python's collector of cycles beside a search."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def objects_set_aside() -> Iterator[None]:
    """What there is already is not looked through for cycles while a search makes its own objects.

    A search keeps most of what it makes, for which the collector goes through all objects of the process again and again: those of
    torch and of the traced model are many more. Without this, searches take 1.0 to 2.7 times as long
    (``docs/adr/0023-planner.md``). Where a caller has set objects aside by itself, that stays as it is.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
