"""A model of one's own as it is compared: with batches whose samples are drawn from its example inputs."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autopar.errors import UsageError, reason
from autopar.models.graph_for_plan import samples_of
from autopar.models.resolve import random_example_for, without_dropout
from autopar.plan.plan import Plan
from autopar.tracing.batch import named_batch
from autopar.verification.verified_model import with_noise

EXAMPLES = 8
"""Samples that are made for a model whose config says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel:
    """A module, or a function that makes it; picklable where the class or the function can be imported.

    Attributes:
        source: stays as it is, and is copied.
        examples: inputs by name, on the CPU.
    """

    source: nn.Module | Callable[[], nn.Module]
    examples: Mapping[str, Any]

    def build(self) -> nn.Module:
        """The model on CPU in float32 without dropout; no parameter is left at zero or one."""
        model = self.as_traced()
        without_dropout(model)
        return with_noise(model)

    def as_traced(self) -> nn.Module:
        """The model on CPU in float32, with what it drops."""
        return copy.deepcopy(made(self.source)).float().cpu().train()

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = False) -> dict[str, Any]:
        """Samples of the examples: each as often as any other, in an order that depends on the seed alone."""
        size = samples_of(self.examples) or 1
        generator = torch.Generator().manual_seed(seed)
        rounds = [torch.randperm(size, generator=generator) for _ in range(-(-batch_size // size))]
        order = torch.cat(rounds)[:batch_size]

        def drawn(value: Tensor) -> Tensor:
            value = value.float() if value.is_floating_point() else value
            return value[order] if value.dim() > 0 and value.shape[0] == size else value

        batch: dict[str, Any] = pytree.tree_map_only(Tensor, drawn, dict(self.examples))
        return batch


def made(source: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """The module itself, or what the function makes, which is the same each time.

    Raises:
        UsageError: neither.
    """
    if isinstance(source, nn.Module):
        return source
    if not callable(source):
        raise UsageError(
            f"A {type(source).__name__} is no model",
            expected="a torch.nn.Module, or a function without arguments that returns one",
            fix="Give the model that trains on one device",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = source()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"The function {getattr(source, '__name__', source)} returns a {type(model).__name__}",
            expected="a torch.nn.Module",
            fix="Return the model that trains on one device",
        )
    return model


def own_model(
    source: nn.Module | Callable[[], nn.Module], model: nn.Module, plan: Plan, example_inputs: Any
) -> OwnModel:
    """A model that can be compared under a plan.

    Args:
        source: a module, or a function that makes it.
        model: what :func:`made` gives of it.
        example_inputs: a batch, by name or in order; made from its config for a Hugging Face model.

    Raises:
        UsageError: the model is on meta; one sample is to stand for those of several ranks; the class of the model cannot
            be imported by other processes.
    """
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise UsageError(
            "A model on the meta device has no weights to train with",
            fix="Build it on the CPU, or give a function that builds it there",
        )
    given = random_example_for(model, batch_size=EXAMPLES) if example_inputs is None else example_inputs
    if isinstance(given, Tensor):
        given = (given,)
    named = named_batch(model, (), given) if isinstance(given, Mapping) else named_batch(model, tuple(given), {})
    examples = pytree.tree_map_only(Tensor, lambda value: value.detach().cpu(), named)
    if plan.mesh.data > 1 and samples_of(examples) == 1:
        raise UsageError(
            f"One example is too few for {plan.mesh.data} data ranks, which would all train on it",
            fix="Give example inputs with several different samples",
        )
    found = OwnModel(source=source, examples=examples)
    _check_sent(found)
    return found


def _is_typed_in(source: nn.Module | Callable[[], nn.Module]) -> bool:
    """Whether other processes would look in vain for the class of a module, or for a function, of this session."""
    homes = {type(m).__module__ for m in source.modules()} if isinstance(source, nn.Module) else {source.__module__}
    return "__main__" in homes and not hasattr(sys.modules["__main__"], "__file__")


def _check_sent(model: OwnModel) -> None:
    """Refuse what the processes that play the ranks could not receive.

    Raises:
        UsageError: says what cannot be pickled.
    """
    try:
        if _is_typed_in(model.source):
            raise pickle.PicklingError(f"{type(model.source).__name__} was typed in, and stands in no file")
        pickle.dumps(model)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            "The model cannot be sent to the processes that play the ranks",
            got=reason(error),
            fix="Define its class in a module, or give a function of a module that builds it",
        ) from error
