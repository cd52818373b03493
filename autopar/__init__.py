"""Finds and runs the parallelization plan of a PyTorch model.

This module holds the public names. Each but the errors is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError as AutoparError
from autopar.errors import CheckpointError as CheckpointError
from autopar.errors import InfeasibleError as InfeasibleError
from autopar.errors import InternalError as InternalError
from autopar.errors import NonFiniteError as NonFiniteError
from autopar.errors import OutOfMemoryError as OutOfMemoryError
from autopar.errors import PlanError as PlanError
from autopar.errors import PlanFileError as PlanFileError
from autopar.errors import RankFailedError as RankFailedError
from autopar.errors import RuleError as RuleError
from autopar.errors import RuntimeMismatchError as RuntimeMismatchError
from autopar.errors import TraceError as TraceError
from autopar.errors import UsageError as UsageError
from autopar.errors import VerificationError as VerificationError

if TYPE_CHECKING:
    from autopar.api import estimate as estimate
    from autopar.api import parallelize as parallelize
    from autopar.api import search as search
    from autopar.api import trace as trace
    from autopar.api import verify as verify
    from autopar.graph.graph import Graph as Graph
    from autopar.hardware.cluster import Cluster as Cluster
    from autopar.pins.on_modules import pin as pin
    from autopar.plan.mesh import Mesh as Mesh
    from autopar.plan.plan import Plan as Plan
    from autopar.request import Request as Request
    from autopar.rules.table import register_rule as register_rule
    from autopar.runtime.checkpoint.series import Checkpoints as Checkpoints
    from autopar.runtime.fit import fit as fit
    from autopar.runtime.parallel_model import ParallelModel as ParallelModel

__version__ = "0.1.0"

_MODULE_OF = {
    "Checkpoints": "autopar.runtime.checkpoint.series",
    "Cluster": "autopar.hardware.cluster",
    "Graph": "autopar.graph.graph",
    "Mesh": "autopar.plan.mesh",
    "ParallelModel": "autopar.runtime.parallel_model",
    "Plan": "autopar.plan.plan",
    "Request": "autopar.request",
    "estimate": "autopar.api",
    "fit": "autopar.runtime.fit",
    "parallelize": "autopar.api",
    "pin": "autopar.pins.on_modules",
    "register_rule": "autopar.rules.table",
    "search": "autopar.api",
    "trace": "autopar.api",
    "verify": "autopar.api",
}

_NAMES = sorted([*_MODULE_OF, *(name for name in globals() if name.endswith("Error"))])
__all__ = list(_NAMES)


def __getattr__(name: str) -> Any:
    """Import a public name from its module, so that ``import autopar`` alone loads neither torch nor the solvers."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'autopar' has no attribute '{name}'; public names: {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
