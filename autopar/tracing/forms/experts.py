"""One operator for a mixture of experts.

transformers gives every model's experts one interface: a module that holds ``gate_up_proj`` [E, 2f, h] (or
``up_proj`` [E, f, h]) and ``down_proj`` [E, h, f], some transposed, with gate and up in turn, or with biases, and whose forward takes
hidden states, the experts of each token and their weights. The router before it and shared experts beside it stay ordinary operators.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from autopar import nn
from autopar.ops.kernels import Form
from autopar.tracing.failures import FAILURES

_MARKS = (
    "has_gate",
    "has_bias",
    "has_post_expert_norm",
    "is_transposed",
    "is_concatenated",
    "down_proj",
    "_apply_gate",
)
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
        form = _form(module)
        if form is not None:
            module.forward = partial(_forward, module, form)
        elif type(module).__name__ == "Llama4TextMoe" and _activation_of(getattr(module.experts, "act_fn", None)):
            module.forward = partial(_of_scaled_inputs, module)


def _form(module: torch.nn.Module) -> Form | None:
    """What experts compute, as far as :func:`autopar.nn.experts` can say it; None for any other module."""
    if not all(hasattr(module, mark) for mark in _MARKS):
        return None
    held: Any = module
    if held.has_post_expert_norm or len(inspect.signature(type(module).forward).parameters) != 4:
        return None
    name = _activation_of(getattr(held, "act_fn", None))
    if not held.has_gate:
        return None if name is None else Form(activation=name, is_transposed=held.is_transposed)
    found = _gate_form(held, name)
    return found and replace(found, is_transposed=held.is_transposed)


def _activation_of(act: Any) -> str | None:
    name = getattr(act, "__name__", type(act).__name__)
    if isinstance(act, torch.nn.GELU) and act.approximate == "tanh":
        name = "GELUTanh"
    return name if name in ("silu", "relu") else _ACTIVATIONS.get(name)


def _gate_form(experts: Any, activation: str | None) -> Form | None:
    """The form whose gate gives in float64 what that of these experts gives, with numbers that they hold; None: no form does.

    Models differ in names of limits and slopes, so that what a gate computes tells more than how it is written.
    """
    if isinstance(getattr(experts, "act_fn", None), torch.nn.Module) and any(experts.act_fn.parameters()):
        return None
    held = {float(value) for value in vars(experts).values() if type(value) in (int, float)}
    f, generator = experts.down_proj.shape[1 if experts.is_transposed else 2], torch.Generator().manual_seed(0)
    near = 3 * torch.randn(1 + _PROBES // f, 2 * f, generator=generator, dtype=torch.float64, device="cpu")
    x = torch.cat((near, near * max(map(abs, held), default=1.0)))  # where activations differ, and beyond limits
    try:
        given = experts._apply_gate(x.clone())
    except FAILURES:
        return None
    smooth = "silu" if activation is None else activation
    forms = [
        Form(activation=smooth, alpha=alpha, limit=limit, shift=shift, is_interleaved=not experts.is_concatenated)
        for limit in (math.inf, *sorted(v for v in held if v > 0))
        for alpha in (1.0, *sorted(held - {1.0}))
        for shift in (0.0, 1.0)
        if alpha == 1.0 or smooth == "silu"
    ]
    return next(
        (form for form in forms if torch.allclose(form.between(*_halves(form, x)), given, rtol=1e-12, atol=1e-12)), None
    )


def _halves(form: Form, both: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """What gate and up give, as :meth:`Form.between` takes them, of experts that hold both in one tensor."""
    if form.is_interleaved:
        return None, both
    gate, up = both.chunk(2, dim=-1)
    return gate, up


_PROBES = 512
"""Pairs of what gate and up give by which gates are compared, at least."""


def _forward(module: Any, form: Form, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
    """Hidden states, the experts of each token and their weights, which models name as they like, through one operator."""
    hidden, indices, weights = inspect.signature(type(module).forward).bind(module, *args, **kwargs).args[1:]
    name, gate, gate_bias = "gate_up_proj" if module.has_gate else "up_proj", None, None
    up, up_bias = getattr(module, name), getattr(module, f"{name}_bias") if module.has_bias else None
    if module.has_gate and not form.is_interleaved:
        gate, up = up.chunk(2, dim=2 if form.is_transposed else 1)
        gate_bias, up_bias = (None, None) if up_bias is None else up_bias.chunk(2, dim=1)
    down_bias = module.down_proj_bias if module.has_bias else None
    return nn.experts(
        hidden, weights, indices, gate, up, module.down_proj, str(form), gate_bias=gate_bias, up_bias=up_bias, down_bias=down_bias
    )  # fmt: skip


def _of_scaled_inputs(module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Llama 4, whose scores multiply what goes into experts, and not what comes out; those that are not chosen get zeros, and give zeros.

    Written, all experts compute all tokens, as rows [E * tokens, h], of which no rank can have its samples.
    """
    x = hidden_states.reshape(-1, module.hidden_dim)
    scores, logits = module.router(x)
    chosen, indices = scores.topk(module.top_k)
    rows, one = x.unsqueeze(1) * chosen.unsqueeze(2), torch.ones_like(chosen).unsqueeze(2)
    gate, up = module.experts.gate_up_proj.chunk(2, dim=2)
    form = str(Form(activation=str(_activation_of(module.experts.act_fn)), is_transposed=True))
    found = nn.experts(rows, one, indices.unsqueeze(2), gate, up, module.experts.down_proj, form)
    return module.shared_expert(x) + found.sum(1), logits
