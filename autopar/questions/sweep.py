"""Plans while one number of the cluster changes: what if the network were half as fast?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import UsageError
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import scaled
from autopar.plan.plan import Plan
from autopar.planner.task import Limits
from autopar.questions.ask import Ask


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """One factor of a sweep; ``plan`` None: nothing fits."""

    factor: float
    plan: Plan | None


def sweep(ask: Ask, name: str, factors: Sequence[float]) -> tuple[Swept, ...]:
    """The best plan with the number ``name`` of the cluster (``autopar.hardware.describe``) times each factor.

    Raises:
        UsageError: unknown name, a factor that is not above zero.
    """
    whole = Cluster.parse(ask.cluster, cache_dir=ask.cache_dir)
    found = []
    for factor in factors:
        ask.say(f"{name} x {factor:g}")
        planner = ask.planner(scaled(whole, {name: factor}))
        found.append(
            Swept(
                factor=factor,
                plan=planner.fastest(Limits(max_step_time_s=ask.max_step_time_s), processes=ask.processes),
            )
        )
    return tuple(found)


def parse_sweep(text: str) -> tuple[str, tuple[float, ...]]:
    """``link.bandwidth=0.5,1,2`` as a name and factors.

    Raises:
        UsageError: it is written otherwise.

    >>> parse_sweep("link.bandwidth=0.5,1,2")
    ('link.bandwidth', (0.5, 1.0, 2.0))
    """
    name, equals, values = text.partition("=")
    try:
        factors = tuple(float(value) for value in values.split(","))
    except ValueError:
        factors = ()
    if not equals or not factors:
        raise UsageError(
            f"'{text}' is not of the form NAME=FACTOR,FACTOR,...",
            where="--scale",
            fix="Write for example link.bandwidth=0.5,1,2",
        )
    return name.strip(), factors
