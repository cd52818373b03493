"""Example inputs and batches: their names, their fake tensors and the inputs of a graph that they become."""

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
"""Types that ``torch.export`` accepts as inputs, in any container that torch's pytree knows."""


def named_batch(model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return example inputs by the names of the parameters of ``forward``, without those that are None.

    Args:
        model: The model whose ``forward`` takes them.
        args: The inputs that are given by position.
        kwargs: The inputs that are given by name.

    Raises:
        TraceError: There are more positional inputs than parameters, the only positional input is a dict of all inputs, or an input
            is of a type that ``torch.export`` does not accept.
    """
    names = positional(model)
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping) and args[0] and args[0].keys() <= set(names):
        raise TraceError(
            f"The example inputs are a list of one dict, whose keys are parameters of forward ({', '.join(args[0])})",
            where=type(model).__name__,
            fix="Give the dict itself, not in a list: example_inputs={...}",
        )
    variadic = next((str(p) for p in _parameters(model) if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    if len(args) > len(names) and variadic:
        raise TraceError(
            f"Forward takes {variadic}, and no plan has inputs without a name",
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
    """Return the names of the inputs that ``forward`` takes by position, in order.

    For a model that ``torch.compile`` returned, they are those of the original model.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in _parameters(model) if p.kind in kinds)


def _parameters(model: torch.nn.Module) -> tuple[inspect.Parameter, ...]:
    """Return the parameters of ``forward``, that of the original model if ``torch.compile`` returned ``model``."""
    original = getattr(model, "_orig_mod", model)
    return tuple(inspect.signature(original.forward).parameters.values())


def with_names(given: tuple[Any, ...], batch: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return a batch by name, without inputs that are None.

    Args:
        given: The inputs that were given by position.
        batch: The inputs that were given by name.
        names: The names of the positional parameters of ``forward``.

    Raises:
        UsageError: There are more positional inputs than names, an input is given by position and by name, or a dict with the
            complete batch is given by position.
    """
    if not given:
        return batch
    if isinstance(given[0], Mapping) and len(given) == 1 and not batch:
        raise UsageError(
            f"The batch was given as a {type(given[0]).__name__} without a name",
            fix="Write par(**batch), or par.train_step(batch), which takes a dict",
        )
    named = dict(zip(names, given, strict=False))
    if len(given) > len(names) or not named.keys().isdisjoint(batch):
        raise UsageError(
            f"{len(given)} inputs were given by position",
            expected=f"at most those of the model's forward: {', '.join(names) or 'none'}",
            got=f"{len(given)}, and {', '.join(batch) or 'none'} by name",
            fix="Write par(**batch), with each input by name once",
        )
    return {name: value for name, value in {**named, **batch}.items() if value is not None}


def arguments(forward: Callable[..., Any], batch: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of the entries of a batch that ``forward`` takes: positional-only ones in order, and all others."""
    parameters = inspect.signature(forward).parameters.values()
    takes_any = any(p.kind == p.VAR_KEYWORD for p in parameters)
    names = {p.name for p in parameters}
    positional = [p.name for p in parameters if p.kind == p.POSITIONAL_ONLY and p.name in batch]
    return positional, [key for key in batch if (key in names or takes_any) and key not in positional]


def size_of(batch: Any) -> int | None:
    """Return the number of samples in a batch: the most frequent size of dim 0 among its tensors, including those in containers.

    None if no tensor has a dim.
    """
    leaves = pytree.tree_leaves(batch)
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    return max(sizes, key=sizes.count) if sizes else None


def fake_batch(batch: dict[str, Any], mode: FakeTensorMode, times: int) -> tuple[dict[str, Any], int]:
    """Return a batch of fake tensors, and its number of samples.

    Args:
        batch: The example inputs by name.
        mode: The mode of the fake tensors.
        times: The number of samples is this multiple of that of the example. A batch of one sample is doubled as well, because
            operators would treat its batch dim as one to broadcast.

    Raises:
        TraceError: There is no sample, or no tensor with a batch dim.
    """
    size = size_of(batch)
    if size == 0:
        raise TraceError("The example inputs hold no sample", fix="Give two or more")
    if size is None:
        raise TraceError(
            "No example input is a tensor with a batch dim",
            got=", ".join(sorted(batch)) or None,
            fix="Give example inputs for the model's forward, such as {'x': torch.zeros(2, 8)}",
        )
    factor = times * (2 if size == 1 else 1)

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = list(leaf.shape)
        if shape and shape[0] == size:
            shape[0] *= factor
        with mode:
            return torch.empty(shape, dtype=leaf.dtype, device="cpu")

    return pytree.tree_map(fake, batch), size * factor


def inputs_of(batch: dict[str, Any], batch_size: int) -> tuple[Input, ...]:
    """Return the inputs of a graph for a fake batch.

    Args:
        batch: The fake batch by name.
        batch_size: Its number of samples. A tensor whose dim 0 has this size has its samples along dim 0.

    Raises:
        TraceError: Two inputs have the same name.
    """
    leaves, _ = pytree.tree_flatten_with_path(batch)
    names = Counter(_path_name(path) for path, leaf in leaves if isinstance(leaf, torch.Tensor))
    duplicate = next((name for name, count in names.items() if count > 1), None)
    if duplicate is not None:
        raise TraceError(
            f"Two inputs are called {duplicate!r} (names of inputs in dicts and lists are joined with '_')",
            fix="Give one of the keys, or of forward's parameters, another name",
        )
    return tuple(
        Input(
            name=name,
            spec=TensorSpec.of(leaf),
            batch_dim=0 if leaf.dim() and leaf.shape[0] == batch_size else None,
        )
        for name, leaf in tensors_of(batch).items()
    )


def named_inputs(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves of a batch that are not None, under the names that the inputs of a graph have.

    The name of a leaf in a list or dict joins its keys and indices with ``_``.
    """
    leaves, _ = pytree.tree_flatten_with_path(dict(batch))
    return {_path_name(path): leaf for path, leaf in leaves if leaf is not None}


def tensors_of(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch under the names of the graph's inputs; a graph has all other leaves as constants."""
    return {name: value for name, value in named_inputs(batch).items() if isinstance(value, torch.Tensor)}


def _path_name(path: tuple[Any, ...]) -> str:
    """Return the keys, indices or attribute names of a pytree path, joined with ``_``."""
    return "_".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
