"""The module that is exported: a copy of the user's model on fake tensors, which returns its loss first.

:func:`fake_copy` makes the copy, and :class:`ModelWithLoss` calls it and its ``loss_fn`` on a batch whose entries come by name.
:func:`pick_loss` says which of the values that a model returns is its loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from autopar.errors import TraceError
from autopar.ops.opaque import trained_copy
from autopar.tracing.batch import arguments
from autopar.tracing.failures import FAILURES, not_copied
from autopar.tracing.forms.experts import swap_experts
from autopar.tracing.forms.layers import swap_norms
from autopar.tracing.modes import for_products
from autopar.tracing.program_ends import Kept, written_back

LossFunction = Callable[[Any, dict[str, Any]], torch.Tensor]
"""``loss_fn(output, batch)`` gives the scalar loss from what a model returns and from the batch by name."""


class ModelWithLoss(torch.nn.Module):
    """Calls a model and its ``loss_fn`` on a batch by name, and returns the loss, then the other tensors that the model returns.

    Attributes:
        kept: the structure of what the model returned last.
        positional: names of the entries of the batch that the model takes by position, in order.
        passed: names of the entries that it takes by keyword. ``loss_fn`` gets all entries.
    """

    def __init__(self, model: torch.nn.Module, batch: dict[str, Any], loss_fn: LossFunction | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn.__call__ if isinstance(loss_fn, torch.nn.Module) else loss_fn  # no submodule
        self.kept = Kept()
        self.positional, self.passed = arguments(model.forward, batch)
        unused = [k for k in batch if k not in self.passed and k not in self.positional]
        if unused and loss_fn is None:
            raise TraceError(
                f"Forward does not take the example input {', '.join(map(str, unused))}",
                where=type(model).__name__,
                fix="Remove it, or give loss_fn=... that reads it",
            )

    def forward(self, **batch: Any) -> tuple[torch.Tensor, ...]:
        """Return the loss and the other tensors that the model returns, each once."""
        with written_back(self.model), for_products(self.model):
            output = self.model(*(batch[k] for k in self.positional), **{k: batch[k] for k in self.passed})
            returned = output if self.loss_fn is None else self._call_loss_fn(output, batch)
        loss = pick_loss(returned, type(self.model).__name__)
        return (loss, *self.kept.take(output, loss))

    def _call_loss_fn(self, output: Any, batch: dict[str, Any]) -> Any:
        """Return what ``loss_fn`` returns. :func:`autopar.tracing.failures.explained` knows its errors by the name of this function."""
        assert self.loss_fn is not None
        return self.loss_fn(output, batch)


def check_loss_function(loss_fn: LossFunction | None) -> None:
    """Check that ``loss_fn`` can be called with an output and a batch, and that it has no parameters to train.

    Raises:
        TraceError: ``loss_fn`` fails a check.
    """
    if loss_fn is None:
        return
    if isinstance(loss_fn, torch.nn.Module):
        trained = [name for name, parameter in loss_fn.named_parameters() if parameter.requires_grad]
        if trained:
            raise TraceError(
                f"The loss_fn has parameters ({', '.join(trained[:3])}), which no plan trains",
                where=type(loss_fn).__name__,
                fix="Make it a part of the model, whose forward returns the loss, or freeze it: loss_fn.requires_grad_(False)",
            )
    try:
        inspect.signature(loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn).bind(None, None)
    except TypeError as error:
        raise TraceError(
            "The loss_fn does not take (output, batch)", got=str(error), fix="Give loss_fn=lambda output, batch: ..."
        ) from None
    except ValueError:  # the signature of a builtin is not known
        return


def pick_loss(output: Any, place: str) -> torch.Tensor:
    """Return the loss in what a model returns: its entry or attribute ``loss``, or else the first floating-point scalar in it.

    Args:
        output: is what the model, or its ``loss_fn``, returns.
        place: is named in errors.

    Raises:
        TraceError: there is no such scalar, or ``output`` is a mapping with several that have a gradient and none is called ``loss``.
    """
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    leaves = [named] if isinstance(named, torch.Tensor) else pytree.tree_leaves(output)
    scalars = [v for v in leaves if isinstance(v, torch.Tensor) and v.dim() == 0 and v.is_floating_point()]
    if isinstance(output, Mapping) and not isinstance(named, torch.Tensor):
        learned = {
            key: v for key, v in output.items() if any(v is scalar and scalar.requires_grad for scalar in scalars)
        }
        if len(learned) > 1:
            raise TraceError(
                f"The model returns several losses ({', '.join(map(str, learned))}), and none is called loss",
                where=place,
                fix="Say how they make one: return their sum as loss, or give "
                f"loss_fn=lambda output, batch: {' + '.join(f'output[{key!r}]' for key in learned)}",
            )
    if scalars:
        return scalars[0]
    shapes = [
        str(tuple(leaf.shape)) + ("" if leaf.is_floating_point() else f" in {str(leaf.dtype).removeprefix('torch.')}")
        for leaf in leaves
        if isinstance(leaf, torch.Tensor)
    ]
    raise TraceError(
        "The model returns no scalar loss",
        where=place,
        got=f"outputs of shape {', '.join(shapes)}" if shapes else f"a {type(output).__name__} without tensors",
        fix="Add labels to the example inputs, return the loss, or give loss_fn=lambda output, batch: ...",
    )


def fake_copy(model: torch.nn.Module, mode: FakeTensorMode) -> torch.nn.Module:
    """Return a copy of ``model``, in training mode as a step has it, whose parameters and buffers are fake tensors of ``mode``.

    Fake tensors take no memory. Tied parameters stay tied. Tensors that are neither parameters nor buffers keep their values, unless
    they are on meta.

    Raises:
        TraceError: the model cannot be copied.
    """

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        with mode:
            return torch.empty(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")

    def constant(tensor: torch.Tensor) -> torch.Tensor:
        return fake(tensor) if tensor.is_meta else tensor.detach().cpu()

    try:
        copied = trained_copy(model, model, fake, constant)
    except FAILURES as error:
        raise not_copied(error, model) from error
    swap_experts(copied)
    swap_norms(copied)
    return copied
