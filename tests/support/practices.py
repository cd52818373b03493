"""What software does, for tests of published runs."""

from dataclasses import replace

from autopar.validate.foreign_kernels import ForeignKernels
from autopar.validate.practice import PLAIN, ForeignRuntime, Site


def named(**practices: bool) -> frozenset[str]:
    return frozenset(name for name, is_done in practices.items() if is_done)


def doing(site: Site = PLAIN, **practices: bool) -> Site:
    """The site with these practices added, or taken away where they are false."""
    kept = site.practices - practices.keys()
    return replace(site, source=site.source or "x", practices=kept | named(**practices))


def kernels(**practices: bool) -> ForeignKernels:
    return ForeignKernels(practices=named(**practices))


def runtime(**practices: bool) -> ForeignRuntime:
    return ForeignRuntime(practices=named(**practices))
