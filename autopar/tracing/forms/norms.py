"""Batch norms as operators, and those of torch's modules whose forward no trace can follow."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm

from autopar.graph.graph import Ref
from autopar.tracing.builder import Builder, Call, Value
from autopar.tracing.forms.basic import Handler, generic


def swap_norms(model: torch.nn.Module) -> None:
    """Gives batch norms of ``model``, a copy made for tracing, a forward that says what theirs does.

    ``momentum=None`` divides by a number of batches that lies in a tensor. ``SyncBatchNorm`` asks for a GPU, and takes the statistics
    that every batch norm of a plan takes.
    """
    for module in model.modules():
        if not isinstance(module, _BatchNorm):
            continue
        changed: Any = module
        if type(module).forward is SyncBatchNorm.forward:
            changed.forward = partial(_BatchNorm.forward, module)
        is_usual = type(module).forward in (_BatchNorm.forward, SyncBatchNorm.forward)
        counts = module.training and module.track_running_stats and module.num_batches_tracked is not None
        if is_usual and module.momentum is None and counts:
            changed.forward = partial(_cumulative, module)


def _cumulative(norm: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Running statistics that are the mean of those of all batches: the operator gives the batch's own."""
    norm._check_input_dim(x)  # type: ignore[no-untyped-call]
    running = norm.running_mean, norm.running_var
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    before = [value.clone() for value in running if value is not None]
    y = F.batch_norm(x, *running, norm.weight, norm.bias, training=True, momentum=1.0, eps=norm.eps)
    for value, old in zip(running, before, strict=True):
        if value is not None:
            value.copy_(old + (value - old) / norm.num_batches_tracked)
    return y


def _batch_norm(builder: Builder, call: Call) -> Value:
    """Batch norm in training: the statistics are of the whole batch, whoever holds its samples.

    Nobody may read the statistics that torch hands out for its backward. The running ones are results of the operator.
    """
    given = call.bound()
    if given.get("training") is not True:
        return generic(builder, call)
    args = (given["input"], given["weight"], given["bias"], given["eps"])
    running = (given.get("running_mean"), given.get("running_var"))
    if all(isinstance(ref, Ref) for ref in running):
        kept = (call.outputs[0], *call.outputs[3:])
        assert all(spec is not None for spec in kept) and len(kept) == 3
        made = builder.emit(
            call,
            "autopar.batch_norm_running",
            (given["input"], *running, given["weight"], given["bias"], given["momentum"], given["eps"]),
            *(spec for spec in kept if spec is not None),
        )
        builder.stop_gradient(made, 1, 2)
        return (made, None, None, Ref(made.name, 1), Ref(made.name, 2))
    return (builder.emit(call, "autopar.batch_norm", args, call.spec), *(None,) * (len(call.outputs) - 1))


def _batch_norm_at_rest(builder: Builder, call: Call) -> Value:
    """Batch norm in ``eval()``, which only reads its running statistics: no sample knows of another."""
    given = call.bound()
    names = ("input", "weight", "bias", "running_mean", "running_var")
    args = (*(given[name] for name in names), False, given["momentum"], given["eps"], False)
    made = builder.emit(call, "aten.batch_norm.default", args, call.spec)
    return (made, *(None,) * (len(call.outputs) - 1))


NORMS: dict[str, Handler] = {
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten._native_batch_norm_legit.no_stats": _batch_norm,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm_at_rest,
}
