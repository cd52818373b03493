"""Example inputs and batches: by name, as fake tensors, and as the inputs of a graph."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autopar.errors import TraceError, UsageError
from autopar.graph.graph import Input, TensorSpec

_LEAVES = (
    torch.Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format
)  # fmt: skip
"""What export takes, in containers that torch's pytree knows."""


def named_batch(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Example inputs by the names of ``forward``'s parameters; entries that are None are dropped.

    Raises:
        TraceError: there are more than parameters, a dict of them all stands in a list, or one is neither tensor, number nor text.
    """
    names = positional(model)
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping) and args[0] and args[0].keys() <= set(names):
        raise TraceError(
            f"The example inputs are a list of one dict, whose keys are parameters of forward ({', '.join(args[0])})",
            where=type(model).__name__,
            fix="Give the dict itself, not in a list: example_inputs={...}",
        )
    unnamed = next((str(p) for p in _parameters(model) if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    if len(args) > len(names) and unnamed:
        raise TraceError(
            f"Forward takes {unnamed}, and no plan has inputs without a name",
            where=type(model).__name__,
            fix="Write its parameters by name, as in def forward(self, x, y), or wrap the model in a module that has them",
        )
    if len(args) > len(names):
        raise TraceError(
            f"Too many positional example inputs: {len(args)} for the {len(names)} parameters of forward ({', '.join(names)})",
            where=type(model).__name__,
            fix="Give the example inputs by name, as a dict",
        )
    batch = dict(zip(names, args, strict=False)) | dict(kwargs)
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, _LEAVES):
            raise TraceError(
                f"The example input {_path_name(path)} is a {type(leaf).__module__}.{type(leaf).__qualname__}",
                where=type(model).__name__,
                fix="Give tensors (torch.as_tensor(...)), numbers and texts, alone or in lists and dicts",
            )
    return {key: value for key, value in batch.items() if value is not None}


def positional(model: torch.nn.Module) -> tuple[str, ...]:
    """Names of the inputs that ``forward`` takes by position, in order; of a compiled model those of the model in it."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in _parameters(model) if p.kind in kinds)


def _parameters(model: torch.nn.Module) -> tuple[inspect.Parameter, ...]:
    plain = getattr(model, "_orig_mod", model)
    return tuple(inspect.signature(plain.forward).parameters.values())


def with_names(given: tuple[Any, ...], batch: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """A batch of which some inputs were given by position.

    Raises:
        UsageError: there are more of them than names, one is named as well, or the whole batch is given so.
    """
    if not given:
        return batch
    if isinstance(given[0], Mapping) and len(given) == 1 and not batch:
        raise UsageError(
            f"The batch was given as a {type(given[0]).__name__} without a name",
            fix="Write par(**batch), or par.train_step(batch), which takes a dict",
        )
    taken = dict(zip(names, given, strict=False))
    if len(given) > len(names) or not taken.keys().isdisjoint(batch):
        raise UsageError(
            f"{len(given)} inputs were given by position",
            expected=f"at most those of the model's forward: {', '.join(names) or 'none'}",
            got=f"{len(given)}, and {', '.join(batch) or 'none'} by name",
            fix="Write par(**batch), with each input by name once",
        )
    return {name: value for name, value in {**taken, **batch}.items() if value is not None}


def arguments(forward: Callable[..., Any], batch: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Entries of a batch that ``forward`` takes: those by position alone, in order, and those by name."""
    parameters = inspect.signature(forward).parameters.values()
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    known = {p.name for p in parameters}
    positional = [p.name for p in parameters if p.kind == p.POSITIONAL_ONLY and p.name in batch]
    return positional, [k for k in batch if (k in known or takes_any) and k not in positional]


def size_of(batch: Any) -> int | None:
    """Samples in example inputs: the size of dim 0 that most tensors share, those in lists and dicts among them; None where none has one."""
    leaves = pytree.tree_leaves(batch)
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    return max(sizes, key=sizes.count) if sizes else None


def fake_batch(batch: dict[str, Any], mode: FakeTensorMode, times: int) -> tuple[dict[str, Any], int]:
    """The batch as fake tensors, and its size; a batch of one doubled."""
    size = size_of(batch)
    if size == 0:
        raise TraceError("The example inputs hold no sample", fix="Give two or more")
    if size is None:
        raise TraceError(
            "No example input is a tensor with a batch dim",
            got=", ".join(sorted(batch)) or None,
            fix="Give example inputs for the model's forward, such as {'x': torch.zeros(2, 8)}",
        )
    doubled = times * (2 if size == 1 else 1)

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = list(leaf.shape)
        if shape and shape[0] == size:
            shape[0] *= doubled
        with mode:
            return torch.empty(shape, dtype=leaf.dtype, device="cpu")

    return pytree.tree_map(fake, batch), size * doubled


def inputs_of(batch: dict[str, Any], batch_size: int) -> tuple[Input, ...]:
    """The inputs of a graph for a fake batch.

    Raises:
        TraceError: two of them have one name.
    """
    leaves, _ = pytree.tree_flatten_with_path(batch)
    names = Counter(_path_name(path) for path, leaf in leaves if isinstance(leaf, torch.Tensor))
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise TraceError(
            f"Two inputs are called {twice!r} (names of inputs in dicts and lists are joined with '_')",
            fix="Give one of the keys, or of forward's parameters, another name",
        )
    return tuple(
        Input(
            name=name,
            spec=TensorSpec(shape=tuple(leaf.shape), dtype=leaf.dtype),
            batch_dim=0 if leaf.dim() and leaf.shape[0] == batch_size else None,
        )
        for name, leaf in tensors_of(batch).items()
    )


def named_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What is in a batch by the names of a graph's inputs: lists and dicts of tensors taken apart, None dropped."""
    leaves, _ = pytree.tree_flatten_with_path(dict(batch))
    return {_path_name(path): leaf for path, leaf in leaves if leaf is not None}


def tensors_of(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs of a graph in a batch: what is no tensor is a constant of the graph."""
    return {name: value for name, value in named_inputs(batch).items() if isinstance(value, torch.Tensor)}


def _path_name(path: tuple[Any, ...]) -> str:
    return "_".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
