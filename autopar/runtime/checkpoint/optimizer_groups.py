"""What a checkpoint has of an optimizer: states by parameter, and hyperparameters by parameter, as pipeline ranks number groups of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import PlanError
from autopar.runtime.checkpoint.meeting import Meeting
from autopar.runtime.step.gradients import Held

Settings = dict[str, Any]

WAYS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Hyperparameters that say how an optimizer steps on its devices, not where to: each job has its own."""


def groups(held: Sequence[Held], optimizer: Optimizer) -> list[tuple[Held, dict[str, Any]]]:
    """Each parameter that the optimizer steps, with its group."""
    of = {p: group for group in optimizer.param_groups for p in group["params"]}
    return [(h, of[h.parameter]) for h in held if h.parameter in of]


def settings(group: Mapping[str, Any]) -> Settings:
    """The hyperparameters of a group: numbers, switches and tuples of them, by name."""
    plain = {name: _plain(value) for name, value in group.items()}
    return {name: value for name, value in plain.items() if isinstance(value, float | int | bool | tuple)}


def _plain(value: object) -> object:
    """A number as Python's own, also of numpy's kinds."""
    if _is_number(value):
        return value.item()
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    return float(value) if isinstance(value, float) else value


def _is_number(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.numel() == 1


def check_groups(
    place: str, held: Sequence[Held], optimizer: Optimizer, saved: Mapping[str, Settings], meeting: Meeting
) -> None:
    """Refuses groups of parameters that were saved with different hyperparameters; all ranks call it.

    Raises:
        PlanError: names two of them; on all ranks alike, before a group is changed.
    """
    mixed = ""
    firsts: list[tuple[dict[str, Any], str, Settings]] = []
    for h, group in groups(held, optimizer):
        own = {name: value for name, value in saved[h.key].items() if name not in WAYS}
        known = next(((key, first) for one, key, first in firsts if one is group), None)
        if known is None:
            firsts.append((group, h.key, own))
            continue
        key, first = known
        name = next((name for name in sorted(first.keys() | own) if first.get(name) != own.get(name)), "")
        if name and not mixed:
            mixed = f"{name} {first.get(name)} of {key} and {own.get(name)} of {h.key} in one group"
    if found := [text for text in meeting.all(mixed) if text]:
        raise PlanError(
            "The parameters of a group of the optimizer were saved with different hyperparameters",
            where=place,
            got=found[0],
            fix="Make the groups of the optimizer that was saved, or load without one",
        )


def put_groups(held: Sequence[Held], optimizer: Optimizer, saved: Mapping[str, Settings], meeting: Meeting) -> None:
    """Hyperparameters are Python values: read beside, then put in; a learning rate in a tensor stays in it.

    Those that the group has not yet, too: what a scheduler that is made later goes on from (``initial_lr``). A group without a
    parameter of this rank's, as pipeline ranks may have, takes what another rank has in the group at its place. All ranks call it.
    """
    own: list[Settings | None] = [None] * len(optimizer.param_groups)
    for h, group in groups(held, optimizer):
        place = next(i for i, one in enumerate(optimizer.param_groups) if one is group)
        own[place] = saved[h.key]
        _put(group, saved[h.key].items())
    said = meeting.all(own)
    if len({len(one) for one in said}) > 1:
        return  # ranks have groups of their own: none is the other's at the same place
    for place, group in enumerate(optimizer.param_groups):
        if own[place] is None:
            found = next((one[place] for one in said if one[place] is not None), {})
            _put(group, (found or {}).items())


def _put(group: dict[str, Any], values: Iterable[tuple[str, Any]]) -> None:
    for name, value in values:
        old = group.get(name)
        if name in WAYS:
            continue
        if _is_number(old):
            old.fill_(value)
        else:
            group[name] = value


def make_state(optimizer: Optimizer) -> bool:
    """Lets an optimizer make its state tensors, by a step that changes nothing; whether it had none at all."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if all(p in optimizer.state for p in parameters):
        return False
    is_new = not optimizer.state
    kept = [(group.get("lr"), p.grad) for group in optimizer.param_groups for p in group["params"]]
    rates = [group.get("lr") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if "lr" in group:
            group["lr"] = rate
    for (_, grad), p in zip(kept, (p for group in optimizer.param_groups for p in group["params"]), strict=True):
        p.grad = grad
    return is_new
