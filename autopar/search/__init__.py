"""The search: exact inside (layouts of a block, stage cut), branch and bound outside.

``autopar.search`` is this package and a function at once: calling it is :func:`autopar.api.search`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package that can be called; a function of its name in ``autopar`` would hide it, and it the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See :func:`autopar.api.search`."""
        return import_module("autopar.api").search(*args, **kwargs)  # by name: the planning wing knows no verbs


sys.modules[__name__].__class__ = _Callable
