"""Finds and runs the parallelization plan of a PyTorch model. The public names, each loaded when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.api import estimate, parallelize, search, verify
    from autopar.cluster import Cluster
    from autopar.errors import AutoparError
    from autopar.graph.ir import Graph
    from autopar.graph.trace import trace
    from autopar.marks import pin
    from autopar.mesh import Mesh
    from autopar.plan import Plan
    from autopar.plan_io import load_plan, save_plan
    from autopar.rules import register_rule

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
    "Cluster": "autopar.cluster",
    "Graph": "autopar.graph.ir",
    "Mesh": "autopar.mesh",
    "Plan": "autopar.plan",
    "estimate": "autopar.api",
    "load_plan": "autopar.plan_io",
    "parallelize": "autopar.api",
    "pin": "autopar.marks",
    "register_rule": "autopar.rules",
    "save_plan": "autopar.plan_io",
    "search": "autopar.api",
    "trace": "autopar.graph.trace",
    "verify": "autopar.api",
}


def __getattr__(name: str) -> Any:
    """Import the module that defines a public name: ``import autopar`` alone loads neither torch nor the solvers."""
    if name not in _HOME:
        raise AttributeError(f"module 'autopar' has no attribute '{name}'; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
