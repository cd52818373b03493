"""Finds and runs the parallelization plan of a PyTorch model. The public names, each loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api import estimate, parallelize, search, trace, verify
    from autopar.errors import (
        AutoparError,
        CheckpointError,
        InfeasibleError,
        InternalError,
        NonFiniteError,
        OutOfMemoryError,
        PlanError,
        PlanFileError,
        RankFailedError,
        RuleError,
        RuntimeMismatchError,
        TraceError,
        UsageError,
        VerificationError,
    )
    from autopar.graph.graph import Graph
    from autopar.hardware.cluster import Cluster
    from autopar.pins.on_modules import pin
    from autopar.plan.mesh import Mesh
    from autopar.plan.plan import Plan
    from autopar.request import Request
    from autopar.rules.table import register_rule
    from autopar.runtime.checkpoint.series import Checkpoints
    from autopar.runtime.fit import fit
    from autopar.runtime.parallel_model import ParallelModel

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "CheckpointError",
    "Checkpoints",
    "Cluster",
    "Graph",
    "InfeasibleError",
    "InternalError",
    "Mesh",
    "NonFiniteError",
    "OutOfMemoryError",
    "ParallelModel",
    "Plan",
    "PlanError",
    "PlanFileError",
    "RankFailedError",
    "Request",
    "RuleError",
    "RuntimeMismatchError",
    "TraceError",
    "UsageError",
    "VerificationError",
    "estimate",
    "fit",
    "parallelize",
    "pin",
    "register_rule",
    "search",
    "trace",
    "verify",
]

_HOME = {
    "AutoparError": "autopar.errors",
    "CheckpointError": "autopar.errors",
    "Checkpoints": "autopar.runtime.checkpoint.series",
    "Cluster": "autopar.hardware.cluster",
    "Graph": "autopar.graph.graph",
    "InfeasibleError": "autopar.errors",
    "InternalError": "autopar.errors",
    "Mesh": "autopar.plan.mesh",
    "NonFiniteError": "autopar.errors",
    "OutOfMemoryError": "autopar.errors",
    "ParallelModel": "autopar.runtime.parallel_model",
    "Plan": "autopar.plan.plan",
    "PlanError": "autopar.errors",
    "PlanFileError": "autopar.errors",
    "RankFailedError": "autopar.errors",
    "Request": "autopar.request",
    "RuleError": "autopar.errors",
    "RuntimeMismatchError": "autopar.errors",
    "TraceError": "autopar.errors",
    "UsageError": "autopar.errors",
    "VerificationError": "autopar.errors",
    "estimate": "autopar.api",
    "fit": "autopar.runtime.fit",
    "parallelize": "autopar.api",
    "pin": "autopar.pins.on_modules",
    "register_rule": "autopar.rules.table",
    "search": "autopar.api",
    "trace": "autopar.api",
    "verify": "autopar.api",
}


def __getattr__(name: str) -> Any:
    """Import the module that defines a public name: ``import autopar`` alone loads neither torch nor the solvers."""
    if name not in _HOME:
        raise AttributeError(f"module 'autopar' has no attribute '{name}'; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
