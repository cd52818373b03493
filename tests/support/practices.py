"""What software does, for tests of published runs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autopar.validate.foreign_kernels import ForeignKernels
from autopar.validate.practice import PLAIN, ForeignRuntime, Site

if TYPE_CHECKING:
    from collections.abc import Iterable


def named(**practices: bool) -> frozenset[str]:
    """Those that are true."""
    return frozenset(name for name, is_done in practices.items() if is_done)


def doing(site: Site = PLAIN, **practices: bool) -> Site:
    """The site with these practices added, or taken away where they are false."""
    kept: Iterable[str] = (name for name in site.practices if name not in practices)
    return replace(site, source=site.source or "x", practices=named(**practices).union(kept))


def kernels(**practices: bool) -> ForeignKernels:
    """The kernels of a program with these practices."""
    return ForeignKernels(practices=named(**practices))


def runtime(**practices: bool) -> ForeignRuntime:
    """A program with these practices."""
    return ForeignRuntime(practices=named(**practices))
