"""The module that is exported: a copy of the user's model on fake tensors, which returns its loss first. Experts in it are one operator.

:func:`fake_copy` makes the copy, and :class:`ModelWithLoss` calls it and its ``loss_fn`` on a batch whose entries come by name.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from autopar import nn
from autopar.errors import TraceError
from autopar.ops.kernels import Form
from autopar.ops.opaque import pick_loss, trained_copy
from autopar.tracing.batch import arguments
from autopar.tracing.failures import FAILURES, not_copied
from autopar.tracing.modes import for_products
from autopar.tracing.program_ends import Kept
from autopar.tracing.side_effects import written_back

LossFunction = Callable[[Any, dict[str, Any]], torch.Tensor]
"""``loss_fn(output, batch)`` gives the scalar loss from what a model returns and from the batch by name."""


class ModelWithLoss(torch.nn.Module):
    """Calls a model and its ``loss_fn`` on a batch by name, and return the loss, then the other tensors that the model returns.

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


def check_model(model: torch.nn.Module) -> None:
    """Check that a graph can represent ``model``.

    Raises:
        TraceError: it has parameters without a shape or in shared memory, quantized or scripted modules, or hooks on parameters.
    """
    for path, module in model.named_modules():
        kind = f"{path or 'the model'} ({type(module).__name__})"
        if any(is_lazy(p) for p in (*module._parameters.values(), *module._buffers.values()) if p is not None):
            raise TraceError(
                "A lazy parameter has no shape yet",
                where=kind,
                fix="Run the model on one batch first, or give the sizes to its layers",
            )
        has_script_object = any(isinstance(value, torch.ScriptObject) for value in vars(module).values())
        if has_script_object or isinstance(module, torch.jit.ScriptModule):
            raise TraceError.unsupported(
                "A quantized or scripted module",
                where=kind,
                instead="Plan for the float model in Python, and quantize or script what was trained",
            )
    check_memory(model)
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TraceError.unsupported(
                "A hook on a parameter",
                where=name,
                instead="Remove it, and change gradients between train_step and optimizer.step",
            )


def check_memory(model: torch.nn.Module) -> None:
    """Check that no two tensors of ``model`` share memory of which one is trained: one device would train both through either name.

    Raises:
        TraceError: a parameter that is trained begins at the address of another parameter or buffer.
    """
    seen: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        is_plain = type(tensor) in (torch.nn.Parameter, torch.Tensor) and tensor.layout is torch.strided
        if not is_plain or tensor.is_meta or not tensor.data_ptr():
            continue
        first, other = seen.setdefault(tensor.data_ptr(), (name, tensor))
        if other is not tensor and (other.requires_grad or tensor.requires_grad):
            raise TraceError(
                f"{first} and {name} lie in the same memory, and are two tensors",
                where=type(model).__name__,
                fix="Tie them by b.weight = a.weight, without .data, or take a clone()",
            )


def with_backward_hooks(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the paths of the modules that have hooks on gradients, which a trace would lose."""
    return tuple(
        path
        for path, module in model.named_modules()
        if path and (module._backward_hooks or module._backward_pre_hooks)
    )


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


# --- norms ----------------------------------------------------------------------------------------


def swap_norms(model: torch.nn.Module) -> None:
    """Replace the forward of norms that cannot be traced as they are; ``model`` is a copy made for tracing.

    - Instance norms write running statistics, which the schema of their operator does not declare.
    - Batch norms with ``momentum=None`` divide by a number of batches, which is stored in a tensor.
    - ``SyncBatchNorm`` requires a GPU. It becomes a batch norm, because in a plan each batch norm has the statistics of the whole batch.
    """
    for module in model.modules():
        changed: Any = module
        if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
            changed.forward = partial(_instance_norm, module)
        if not isinstance(module, _BatchNorm):
            continue
        if type(module).forward is SyncBatchNorm.forward:
            changed.forward = partial(_BatchNorm.forward, module)
        is_usual = type(module).forward in (_BatchNorm.forward, SyncBatchNorm.forward)
        counts = module.training and module.track_running_stats and module.num_batches_tracked is not None
        if is_usual and module.momentum is None and counts:
            changed.forward = partial(_cumulative, module)


def _cumulative(norm: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    """Return the forward of a batch norm with ``momentum=None``, whose running statistics are the mean of those of all batches."""
    norm._check_input_dim(x)  # type: ignore[no-untyped-call]
    running = norm.running_mean, norm.running_var
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    before = [value.clone() for value in running if value is not None]
    # A momentum of 1 replaces the running statistics by those of this batch.
    y = F.batch_norm(x, *running, norm.weight, norm.bias, training=True, momentum=1.0, eps=norm.eps)
    for value, old in zip(running, before, strict=True):
        if value is not None:
            value.copy_(old + (value - old) / norm.num_batches_tracked)
    return y


def _instance_norm(norm: _InstanceNorm, x: torch.Tensor) -> torch.Tensor:
    """Return the forward of an instance norm in training.

    Each sample is normalised by its statistics. The running statistics are moving averages of the mean of these over the samples.
    """
    norm._check_input_dim(x)  # type: ignore[no-untyped-call]
    dims, momentum = tuple(range(2, x.dim())), norm.momentum or 0.0
    with torch.no_grad():
        for running, statistic in ((norm.running_mean, x.mean(dims)), (norm.running_var, x.var(dims))):
            if running is not None:
                running.copy_((1.0 - momentum) * running + momentum * statistic.mean(0))
    return F.instance_norm(x, None, None, norm.weight, norm.bias, use_input_stats=True, momentum=momentum, eps=norm.eps)


# --- experts of transformers ----------------------------------------------------------------------
# The operator ``autopar.experts`` replaces the experts of transformers' models, which all have one interface. The module holds
# ``gate_up_proj`` [E, 2f, h] (or ``up_proj`` [E, f, h]) and ``down_proj`` [E, h, f], where E is the number of experts, h the hidden size and
# f the intermediate size. The matrices may be transposed, gate and up may be interleaved, and there may be biases. The forward takes hidden
# states, the experts of each token and their weights. Routers and shared experts are traced as ordinary operators.

_MARKS = (
    "has_gate",
    "has_bias",
    "has_post_expert_norm",
    "is_transposed",
    "is_concatenated",
    "down_proj",
    "_apply_gate",
)
"""Attributes by which a module of experts is recognised."""

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
"""Names of activations in :class:`~autopar.ops.kernels.Form` by the class that computes them."""


def swap_experts(model: torch.nn.Module) -> None:
    """Replace the forward of the known experts of ``model`` by a single operator; ``model`` is a copy made for tracing."""
    for module in model.modules():
        form = _form(module)
        if form is not None:
            module.forward = partial(_forward, module, form)
        elif type(module).__name__ == "Llama4TextMoe" and _activation_of(getattr(module.experts, "act_fn", None)):
            module.forward = partial(_of_scaled_inputs, module)


def _form(module: torch.nn.Module) -> Form | None:
    """Return the form of a module of experts; None if it is no such module or :func:`autopar.nn.experts` cannot compute it."""
    if not all(hasattr(module, mark) for mark in _MARKS):
        return None
    experts: Any = module
    if experts.has_post_expert_norm or len(inspect.signature(type(module).forward).parameters) != 4:
        return None
    activation = _activation_of(getattr(experts, "act_fn", None))
    if not experts.has_gate:
        return None if activation is None else Form(activation=activation, is_transposed=experts.is_transposed)
    form = _gate_form(experts, activation)
    return form and replace(form, is_transposed=experts.is_transposed)


def _activation_of(act: Any) -> str | None:
    """Return the name of an activation, a module or a function; None if it is not known."""
    name = getattr(act, "__name__", type(act).__name__)
    if isinstance(act, torch.nn.GELU) and act.approximate == "tanh":
        name = "GELUTanh"
    return name if name in ("silu", "relu") else _ACTIVATIONS.get(name)


def _gate_form(experts: Any, activation: str | None) -> Form | None:
    """Return the form whose gate computes the same function as the gate of these experts; None if no form does.

    The two are compared on random values in float64. The candidates take their limit and slope from the numbers among the
    attributes of the module, whose names differ from model to model.
    """
    if isinstance(getattr(experts, "act_fn", None), torch.nn.Module) and any(experts.act_fn.parameters()):
        return None
    numbers = {float(value) for value in vars(experts).values() if type(value) in (int, float)}
    f, generator = experts.down_proj.shape[1 if experts.is_transposed else 2], torch.Generator().manual_seed(0)
    small = 3 * torch.randn(1 + _MIN_PROBES // f, 2 * f, generator=generator, dtype=torch.float64, device="cpu")
    # Activations differ near 0, limits act far from it.
    x = torch.cat((small, small * max(map(abs, numbers), default=1.0)))
    try:
        expected = experts._apply_gate(x.clone())
    except FAILURES:
        return None
    activation = "silu" if activation is None else activation
    forms = [
        Form(activation=activation, alpha=alpha, limit=limit, shift=shift, is_interleaved=not experts.is_concatenated)
        for limit in (math.inf, *sorted(number for number in numbers if number > 0))
        for alpha in (1.0, *sorted(numbers - {1.0}))
        for shift in (0.0, 1.0)
        if alpha == 1.0 or activation == "silu"
    ]
    return next(
        (form for form in forms if torch.allclose(form.between(*_halves(form, x)), expected, rtol=1e-12, atol=1e-12)),
        None,
    )


def _halves(form: Form, gate_up: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the outputs of the gate and up projections as :meth:`Form.between` takes them, from the tensor that has both."""
    if form.is_interleaved:
        return None, gate_up
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


_MIN_PROBES = 512
"""Minimum number of pairs of values of gate and up on which gates are compared."""


def _forward(module: Any, form: Form, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
    """Return the new forward of a module of experts, whose arguments are bound by position because their names differ between models."""
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
    """Return the new forward of the experts of Llama 4, whose scores multiply the inputs of experts and not their outputs.

    The original computes all experts for all tokens, as rows [E * tokens, h], which no rank can split by samples. Experts that
    are not selected get zeros there and return zeros, so that they can be left out.
    """
    x = hidden_states.reshape(-1, module.hidden_dim)
    scores, logits = module.router(x)
    top_scores, indices = scores.topk(module.top_k)
    rows, weights = x.unsqueeze(1) * top_scores.unsqueeze(2), torch.ones_like(top_scores).unsqueeze(2)
    gate, up = module.experts.gate_up_proj.chunk(2, dim=2)
    form = str(Form(activation=str(_activation_of(module.experts.act_fn)), is_transposed=True))
    outputs = nn.experts(rows, weights, indices.unsqueeze(2), gate, up, module.experts.down_proj, form)
    return module.shared_expert(x) + outputs.sum(1), logits
