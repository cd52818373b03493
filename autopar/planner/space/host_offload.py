"""What of a plan may live on the host: candidates beside those that keep all on the device, where profiles have the link.

At equal choices a plan with its optimizer on the host is never quicker: its first bound is the work of all ranks and the
step on the host with its copies, from what is known of its twin on the device, so that it is looked at more closely only
where the memory that it frees may pay for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.cluster import Cluster
from autopar.cost.step.optimizer import OPTIMIZERS, optimizer_cost
from autopar.errors import UsageError
from autopar.plan import Offload
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.pins import ActivationPin, ChoicePin, Pins
from autopar.planner.space.space import Hosted

KEY = "offload"
OPTIMIZER: tuple[Offload, ...] = ("optimizer",)


def offloaded(
    pool: Sequence[Candidate], cluster: Cluster, pins: Pins, tried: Sequence[Hosted], optimizer: str
) -> list[Candidate]:
    """The candidates, each with its optimizer on the host, and of all of these each whose blocks may keep there what they save.

    As far as pins and the space say.

    Args:
        tried: what the space may have on the host; pins widen it.

    Raises:
        UsageError: pins want it where it cannot be, or allow nothing.
    """
    stays, goes = pins.allows(KEY, "none"), pins.allows(KEY, "optimizer")
    texts = [pin.text for pin in pins.pins if isinstance(pin, ChoicePin) and pin.key == KEY]
    if not stays and not goes:
        raise UsageError("pins of offload allow something", value=", ".join(texts), remedy="drop one of them")
    moved = [pin.text for pin in pins.pins if isinstance(pin, ActivationPin)]
    if moved and (none := [text for text in texts if text.replace("==", "=") == f"{KEY}=none"]):
        raise UsageError("pins of offload agree", value=", ".join((*moved, *none)), remedy="drop one of them")
    if moved and (against := _without_link(cluster)):
        raise UsageError(against[0], value=against[1], place=f"pin '{moved[0]}'", remedy=against[2])
    reason = _reason_against(cluster, optimizer)
    if not stays and reason:
        raise UsageError(reason[0], value=reason[1], place=f"pin '{texts[0]}'", remedy=reason[2])
    found = list(pool) if stays else []
    if goes and not reason and (texts or "optimizer" in tried):
        found += [replace(candidate, offload=OPTIMIZER) for candidate in pool]
    if "activations" in tried and pins.allows(KEY, "activations") and not moved and not _without_link(cluster):
        found += [replace(candidate, moves=True) for candidate in found]
    return found


def _reason_against(cluster: Cluster, optimizer: str) -> tuple[str, str, str] | None:
    """The law that keeps the optimizer on the device, what was found, and the remedy."""
    if against := _without_link(cluster):
        return against
    if optimizer_cost(optimizer).is_factored:
        known = ", ".join(name for name, cost in OPTIMIZERS.items() if not cost.is_factored)
        return "an optimizer on the host steps element by element", optimizer, f"take one of {known}, or drop the pin"
    return None


def _without_link(cluster: Cluster) -> tuple[str, str, str] | None:
    missing = [device.name for device in cluster.devices if device.host is None]
    if missing:
        law = "something is offloaded to the host where the device's profile has the link to it"
        return law, f"none of {missing[0]}", "add [device.host] to the profile (profiles/README.md), or drop the pin"
    if not cluster.is_homogeneous:
        law = "something is offloaded to the host where all nodes are equal"
        return law, cluster.name, "drop the pin, or take equal nodes"
    return None
