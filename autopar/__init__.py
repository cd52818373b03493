"""Finds and runs the parallelization plan of a PyTorch model. The public names, each loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api import estimate, parallelize, search, verify
    from autopar.errors import AutoparError
    from autopar.graph.graph import Graph
    from autopar.hardware.cluster import Cluster
    from autopar.pins.on_modules import pin
    from autopar.plan.file import load_plan, save_plan
    from autopar.plan.mesh import Mesh
    from autopar.plan.plan import Plan
    from autopar.rules.registry import register_rule
    from autopar.tracing.trace import trace

__version__ = "0.1.0"

__all__ = [
    "AutoparError",
    "Cluster",
    "Graph",
    "Mesh",
    "Plan",
    "estimate",
    "load_plan",
    "parallelize",
    "pin",
    "register_rule",
    "save_plan",
    "search",
    "trace",
    "verify",
]

_HOME = {
    "AutoparError": "autopar.errors",
    "Cluster": "autopar.hardware.cluster",
    "Graph": "autopar.graph.graph",
    "Mesh": "autopar.plan.mesh",
    "Plan": "autopar.plan.plan",
    "estimate": "autopar.api",
    "load_plan": "autopar.plan.file",
    "parallelize": "autopar.api",
    "pin": "autopar.pins.on_modules",
    "register_rule": "autopar.rules.registry",
    "save_plan": "autopar.plan.file",
    "search": "autopar.api",
    "trace": "autopar.tracing.trace",
    "verify": "autopar.api",
}


def __getattr__(name: str) -> Any:
    """Import the module that defines a public name: ``import autopar`` alone loads neither torch nor the solvers."""
    if name not in _HOME:
        raise AttributeError(f"module 'autopar' has no attribute '{name}'; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
