"""Rules whose kernels communicate, on ranks that are threads of one process."""

from functools import partial
from typing import Any

from autopar.plan.mesh import Mesh
from autopar.rules import by_execution
from tests.support.lower.ranks import axis_group, run_ranks


def in_threads(rank: Any, size: int) -> None:
    """Run ``rank(index, group)`` on threads that form a group."""
    run_ranks(Mesh(tp=size), lambda index: rank(index, axis_group("tp")))


verify_rule = partial(by_execution.verify_rule, together=in_threads)
"""Also of strategies whose kernels communicate."""
