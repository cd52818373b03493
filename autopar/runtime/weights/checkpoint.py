"""Checkpoints by ``torch.distributed.checkpoint``: written under one plan, read under any other.

Keys are ``model.KEY`` and ``optimizer.KEY.STATE`` with ``Parameter.key``, which is the same in all
plans; values are DTensors, so every rank writes and reads its own elements alone. Buffers that
training changes are ``buffer.FQN``, whole. Hyperparameters are ``optimizer.KEY.group``, those of the
parameter's group: ranks of a pipeline number the groups of their own parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from types import MappingProxyType
from typing import Any, TypeGuard
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from autopar.errors import PlanError, UsageError, first_line, reason
from autopar.graph.graph import Padding
from autopar.lower.program import Program
from autopar.runtime.step.gradients import Held, lengthened
from autopar.runtime.weights.checkpoint_reader import Planner, Reader
from autopar.runtime.weights.checkpoint_writer import Writer
from autopar.runtime.world import World

Values = Mapping[str, Tensor]

_OTHER = "The checkpoint is of another model or optimizer"
_TAKE_SAME = "Load it with the model and the kind of optimizer that were saved"

SCALER = "scaler"
"""The entry of ``progress`` that jobs in float16 alone have."""

_OPTIONAL = frozenset({f"progress.{SCALER}"})

_WAYS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Hyperparameters that say how an optimizer steps on its devices, not where to: each job has its own."""


def save(
    path: str | Path,
    held: Sequence[Held],
    progress: dict[str, Tensor],
    optimizer: Optimizer | None,
    buffers: Values = MappingProxyType({}),
) -> None:
    """Writes a folder, in place of the checkpoint that is there; all ranks call it.

    ``buffers``: those that training changes, by name.

    Raises:
        UsageError: it cannot be written; on all ranks alike.
    """
    writer = Writer(path)
    try:
        save_state(_state(held, progress, optimizer, buffers), storage_writer=writer)
    except CheckpointException as error:
        writer.remove_own()
        raise UsageError(
            f"Cannot write the checkpoint {path}",
            got=_reasons(error),
            fix="Name the same folder on all ranks, on a file system that all nodes share. A checkpoint that was there is unchanged",
        ) from error


def load(
    path: str | Path,
    held: Sequence[Held],
    progress: dict[str, Tensor],
    optimizer: Optimizer | None,
    buffers: Values = MappingProxyType({}),
) -> None:
    """Reads a folder in place; all ranks call it. An entry of ``progress`` that not every job saves is taken out where it is not there.

    Raises:
        PlanError: the folder is none that :func:`save` wrote, is another one on some rank, lacks a parameter, state or file, has one
            in another shape, or hyperparameters that differ within a group; on all ranks alike. Parameters and optimizer are as they were, but for that of shapes.
    """
    is_new = optimizer is not None and _make_state(optimizer)
    try:
        _read(Path(path), held, progress, optimizer, buffers)
    except PlanError:
        if optimizer is not None and is_new:
            optimizer.state.clear()  # for who goes on without: what was made here has counted a step
        raise


def _read(
    path: Path, held: Sequence[Held], progress: dict[str, Tensor], optimizer: Optimizer | None, buffers: Values
) -> None:
    """See :func:`load`; the optimizer has its states."""
    state = _state(held, progress, optimizer, buffers)
    padded = _padded(held, optimizer)
    _check_holds(path, state)
    if optimizer is not None:  # before anything is changed
        settings = {key: value for key, value in state.items() if key.endswith(".group")}
        _load(path, settings)
        _check_groups(path, held, optimizer, settings)
    _load(path, state)
    for name in tuple(progress):
        if f"progress.{name}" in state:
            progress[name] = state[f"progress.{name}"]
        else:
            del progress[name]
    for name, (target, padding) in padded.items():
        _put_whole(target, padding, state[name])
    for name, value in buffers.items():
        value.copy_(state[f"buffer.{name}"])
    if optimizer is not None:
        _put_groups(held, optimizer, state)


def _load(path: Path, state: dict[str, Any]) -> None:
    """Reads ``state``, tensors in place; all ranks call it."""
    try:
        load_state(state, storage_reader=Reader(path), planner=Planner())
    except CheckpointException as error:
        raise PlanError(_OTHER, where=str(path), got=_reasons(error), fix=_TAKE_SAME) from error
    except (RuntimeError, ValueError, KeyError) as error:
        raise PlanError(_OTHER, where=str(path), got=first_line(error), fix=_TAKE_SAME) from error


def _reasons(error: CheckpointException) -> str:
    return "; ".join(sorted({reason(cause) for cause, _ in error.failures.values()})[:2])


def _check_holds(path: Path, state: dict[str, Any]) -> None:
    """Refuses a folder without a checkpoint, or one that lacks entries of some rank's ``state``; all ranks call it.

    Takes those out of ``state`` that not every job saves, where this one has not.
    """
    missing: list[str] = []
    which = 0
    try:
        metadata = Reader(path).read_metadata()
        sizes = _sizes(metadata)
        which = crc32("\n".join(sorted(sizes)).encode())  # each save has names of its own
        for key in _OPTIONAL - metadata.state_dict_metadata.keys():
            state.pop(key, None)
        missing = sorted(key for key in state if key not in metadata.state_dict_metadata)
        error = _cut_off(path, sizes) if dist.get_rank() == 0 else ""
    except (OSError, EOFError, UnpicklingError, AttributeError) as failure:
        error = reason(failure)
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, (error, missing, which))
    other = next((rank for rank, (_, _, files) in enumerate(said) if files != said[0][2]), 0)
    if other and not any(error for error, _, _ in said):
        raise PlanError(
            f"Rank {other} loads another checkpoint than rank 0",
            where=str(path),
            fix="Choose the folder on one rank, and send its name to the others",
        )
    if errors := [error for error, _, _ in said if error]:
        raise PlanError(
            f"Cannot read the checkpoint {path}",
            got=errors[0],
            fix="Name a folder that par.save(...) wrote, on a file system that all nodes share",
        )
    if lacking := sorted({key for _, keys, _ in said for key in keys}):
        is_optimizers = all(key.startswith("optimizer.") for key in lacking)
        raise PlanError(
            _OTHER,
            where=str(path),
            got=f"it lacks {lacking[0]}" + (f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""),
            fix="Give the kind of optimizer that was saved, or load without one" if is_optimizers else _TAKE_SAME,
        )


def _sizes(metadata: Metadata) -> dict[str, int]:
    """Names of a checkpoint's files, and how long each is at least."""
    sizes: dict[str, int] = {}
    for stored in metadata.storage_data.values():
        sizes[stored.relative_path] = max(sizes.get(stored.relative_path, 0), stored.offset + stored.length)
    return sizes


def _cut_off(path: Path, sizes: Mapping[str, int]) -> str:
    """Which file of a checkpoint is shorter than it was written; empty when none is.

    Raises:
        OSError: one is not there.
    """
    for name, size in sizes.items():
        if (path / name).stat().st_size < size:
            return f"{name}, which is cut off"
    return ""


def _state(
    held: Sequence[Held], progress: dict[str, Tensor], optimizer: Optimizer | None, buffers: Values
) -> dict[str, Any]:
    state: dict[str, Any] = {f"model.{h.key}": h.parameter.detach() for h in held}
    state |= {f"buffer.{name}": value for name, value in buffers.items()}
    state |= {name: _unpadded(value, padding) for name, (value, padding) in _padded(held, optimizer).items()}
    state |= {f"progress.{name}": value for name, value in progress.items()}
    if optimizer is None:
        return state
    for h in held:
        for name, value in optimizer.state.get(h.parameter, {}).items():
            if isinstance(value, Tensor) and f"optimizer.{h.key}.{name}" not in state:
                state[f"optimizer.{h.key}.{name}"] = value
    return state | {f"optimizer.{h.key}.group": _settings(group) for h, group in _groups(held, optimizer)}


def _groups(held: Sequence[Held], optimizer: Optimizer) -> list[tuple[Held, dict[str, Any]]]:
    """Each parameter that the optimizer steps, with its group."""
    of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return [(h, of[id(h.parameter)]) for h in held if id(h.parameter) in of]


def _settings(group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The hyperparameters of a group: numbers, switches and tuples of them, by name."""
    plain = {name: _plain(value) for name, value in group.items()}
    return tuple((name, value) for name, value in plain.items() if isinstance(value, float | int | bool | tuple))


def _plain(value: object) -> object:
    """A number as Python's own, also of numpy's kinds, which a file could name only as classes."""
    if _is_number(value):
        return value.item()
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    return float(value) if isinstance(value, float) else value


def _is_number(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.numel() == 1


def _padded(held: Sequence[Held], optimizer: Optimizer | None) -> dict[str, tuple[Tensor, Padding]]:
    """Entries of a checkpoint that are longer here than in the model, and so than in the file."""
    found: dict[str, tuple[Tensor, Padding]] = {}
    for h in held:
        if h.padding is None:
            continue
        found[f"model.{h.key}"] = h.parameter.detach(), h.padding
        for name, value in optimizer.state.get(h.parameter, {}).items() if optimizer is not None else ():
            if isinstance(value, Tensor) and value.shape == h.parameter.shape:
                found[f"optimizer.{h.key}.{name}"] = value, h.padding
    return found


def _unpadded(value: Tensor, padding: Padding) -> Tensor:
    """The whole tensor as the model has it, on every rank's CPU; ranks that hold parts of it call together."""
    if isinstance(value, DTensor) and value._local_tensor.device.type != value.device_mesh.device_type:
        # a state that lives on the host: its parts meet where the mesh's groups communicate
        local = value._local_tensor.to(value.device_mesh.device_type)
        value = DTensor(local, value._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.narrow(padding.dim, 0, padding.length).to("cpu", copy=True).contiguous()


def _put_whole(target: Tensor, padding: Padding, whole: Tensor) -> None:
    """Writes this rank's part of ``whole``, zeros behind it, into ``target``."""
    long = lengthened(whole, padding.dim, target.shape[padding.dim])
    if not isinstance(target, DTensor):
        target.copy_(long)
        return
    shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
    local = long[tuple(slice(first, first + count) for first, count in zip(offset, shape, strict=True))]
    target._local_tensor.copy_(local)


def _check_groups(path: Path, held: Sequence[Held], optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Refuses groups of parameters that were saved with different hyperparameters; all ranks call it.

    Raises:
        PlanError: names two of them; on all ranks alike, before a group is changed.
    """
    mixed = ""
    firsts: dict[int, tuple[str, dict[str, Any]]] = {}
    for h, group in _groups(held, optimizer):
        settings = {name: value for name, value in state[f"optimizer.{h.key}.group"] if name not in _WAYS}
        key, first = firsts.setdefault(id(group), (h.key, settings))
        name = next((name for name in sorted(first.keys() | settings) if first.get(name) != settings.get(name)), "")
        if name and not mixed:
            mixed = f"{name} {first.get(name)} of {key} and {settings.get(name)} of {h.key} in one group"
    said: list[Any] = [""] * dist.get_world_size()
    dist.all_gather_object(said, mixed)
    if found := [text for text in said if text]:
        raise PlanError(
            "The parameters of a group of the optimizer were saved with different hyperparameters",
            where=str(path),
            got=found[0],
            fix="Make the groups of the optimizer that was saved, or load without one",
        )


def _put_groups(held: Sequence[Held], optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Hyperparameters are Python values: read beside, then put in; a learning rate in a tensor stays in it.

    Those that the group has not yet, too: what a scheduler that is made later goes on from (``initial_lr``). A group without a
    parameter of this rank's, as pipeline ranks may have, takes what another rank has in the group at its place. All ranks call it.
    """
    known: dict[int, Any] = {}
    for h, group in _groups(held, optimizer):
        known[id(group)] = state[f"optimizer.{h.key}.group"]
        _put_group(group, known[id(group)])
    own = [known.get(id(group)) for group in optimizer.param_groups]
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, own)
    if len({len(one) for one in said}) > 1:
        return  # ranks have groups of their own: none is the other's at the same place
    for place, group in enumerate(optimizer.param_groups):
        if own[place] is None:
            _put_group(group, next((one[place] for one in said if one[place] is not None), ()))


def _put_group(group: dict[str, Any], settings: Iterable[tuple[str, Any]]) -> None:
    for name, value in settings:
        old = group.get(name)
        if name in _WAYS:
            continue
        if _is_number(old):
            old.fill_(value)
        else:
            group[name] = value


def _make_state(optimizer: Optimizer) -> bool:
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


def full_state_dict(
    program: Program,
    world: World,
    held: Sequence[Held],
    buffers: Values = MappingProxyType({}),
    *,
    gradients: bool = False,
) -> dict[str, Tensor]:
    """All parameters (or gradients) of the model whole, parts merged, on every rank. All ranks call it.

    ``buffers``: those that this rank's stages make, by name; they are added as they are.
    """
    parts: dict[str, Tensor] = {}
    for h in held:
        value = h.parameter.grad if gradients else h.parameter.detach()
        if value is None:
            continue
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        whole = whole if h.padding is None else whole.narrow(h.padding.dim, 0, h.padding.length)
        parts[h.name] = whole.detach().to("cpu", copy=True)
    whole_buffers = {name: value.to("cpu", copy=True) for name, value in buffers.items()}
    group = world.axis_group(("pp",))
    if group is not None:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (parts, whole_buffers), group=group)
        parts = {name: value for part, _ in gathered for name, value in part.items()}
        whole_buffers = {name: value for _, part in gathered for name, value in part.items()}
    return _merge(program, parts) | whole_buffers


def _merge(program: Program, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parts of one model parameter side by side, under all of its names."""
    by_fqn: dict[str, list[Any]] = {}
    for parameter in program.graph.parameters:
        if parameter.name in parts:
            by_fqn.setdefault(parameter.fqn, []).append(parameter)
    merged: dict[str, Tensor] = {}
    for fqn, parameters in by_fqn.items():
        first = parameters[0]
        if first.part is None:
            value = parts[first.name]
        else:
            ordered = sorted(parameters, key=lambda p: p.part.start)
            value = torch.cat([parts[p.name] for p in ordered], dim=first.part.dim)
        for name in (fqn, *first.aliases):
            merged[name] = value
    return merged
