"""Known mixtures of experts become one operator before the export.

transformers gives every model's experts one interface: a module that holds ``gate_up_proj`` [E, 2f, h] (or
``up_proj`` [E, f, h]) and ``down_proj`` [E, h, f] and whose forward takes hidden states, the experts of each
token and their weights. The router before it and shared experts beside it stay ordinary operators.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch

from autopar import nn
from autopar.tracing.builder import Builder, Call, Value

_MARKS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated", "down_proj", "act_fn")
_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]
_ACTIVATIONS = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUActivation": "gelu",
    "GELU": "gelu",
    "GELUTanh": "gelu_tanh",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
}


def swap_experts(model: torch.nn.Module) -> None:
    """Gives the known experts of ``model``, a copy made for tracing, a forward of one operator."""
    for module in model.modules():
        activation = _activation(module)
        if activation is not None:
            module.forward = partial(_forward, module, activation)


def _activation(module: torch.nn.Module) -> str | None:
    """The activation of experts that :func:`autopar.nn.experts` can say; None for any other module."""
    if not all(hasattr(module, mark) for mark in _MARKS):
        return None
    held: Any = module
    plain = not (held.has_bias or held.has_post_expert_norm or held.is_transposed) and held.is_concatenated
    gate = getattr(type(module), "_apply_gate", None)
    usual = not held.has_gate or getattr(gate, "__name__", "") == "_default_apply_gate"
    if not plain or not usual or list(inspect.signature(type(module).forward).parameters)[1:] != _ARGUMENTS:
        return None
    act = held.act_fn
    name = getattr(act, "__name__", type(act).__name__)
    if isinstance(act, torch.nn.GELU) and act.approximate == "tanh":
        name = "GELUTanh"
    return name if name in ("silu", "relu") else _ACTIVATIONS.get(name)


def _forward(
    module: Any,
    activation: str,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    gate, up = module.gate_up_proj.chunk(2, dim=1) if module.has_gate else (None, module.up_proj)
    return nn.experts(hidden_states, top_k_weights, top_k_index, gate, up, module.down_proj, activation)


def experts_of(builder: Builder, call: Call) -> Value:
    """``autopar.experts`` with all arguments in place."""
    a = call.bound()
    names = ("hidden", "weights", "indices", "gate", "up", "down", "activation")
    return builder.emit(call, "autopar.experts", tuple(a[name] for name in names))
