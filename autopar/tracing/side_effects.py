"""What a forward pass leaves behind or hides outside of its result: attributes it sets, hooks on gradients.

A graph has neither. Where a model's numbers depend on them, that is said instead of lost.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from autopar.errors import TraceError

_PLAIN = (bool, int, float, str, bytes, complex)
_CONTAINERS = (list, dict, set, tuple)
_DEPTH, _LONG = 3, 64
"""Of containers in containers, and of items, up to which contents are looked at."""
_PRIVATE = frozenset(vars(torch.nn.Module()))

State = Mapping[str, object]


def state_of(model: torch.nn.Module) -> State:
    """Numbers and texts among the attributes of all modules, by path; of containers what they hold of such."""
    found: dict[str, object] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in _PRIVATE:
                continue
            place = f"{path}.{name}" if path else name
            if isinstance(value, (*_CONTAINERS, types.SimpleNamespace)):
                found[place] = _plain(value, _DEPTH)
            elif isinstance(value, _PLAIN):
                found[place] = value
    return found


def _plain(value: object, depth: int) -> object:
    """A copy of the numbers and texts in a container, and the lengths of long ones."""
    if isinstance(value, types.SimpleNamespace):
        value = vars(value)
    if isinstance(value, _CONTAINERS) and (len(value) > _LONG or not depth):
        return len(value)
    if isinstance(value, dict):
        return {str(key): _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, _CONTAINERS):
        return [_plain(item, depth - 1) for item in value]
    return value if isinstance(value, _PLAIN) else None


def changed(before: State, after: State) -> tuple[str, ...]:
    """Attributes that differ."""
    return tuple(name for name in after if name not in before or before[name] != after[name])


def check_model(model: torch.nn.Module) -> None:
    """Refuses what no trace can hold.

    Raises:
        TraceError: parameters without a shape, quantized or scripted modules, hooks on the gradients of parameters.
    """
    for path, module in model.named_modules():
        kind = f"{path or 'the model'} ({type(module).__name__})"
        if any(is_lazy(p) for p in (*module._parameters.values(), *module._buffers.values()) if p is not None):
            raise TraceError(
                "A lazy parameter has no shape yet",
                where=kind,
                fix="Run the model on one batch first, or give the sizes to its layers",
            )
        held = any(isinstance(value, torch.ScriptObject) for value in vars(module).values())
        if held or isinstance(module, torch.jit.ScriptModule):
            raise TraceError.unsupported(
                "A quantized or scripted module",
                where=kind,
                instead="Plan for the float model in Python, and quantize or script what was trained",
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TraceError.unsupported(
                "A hook on a parameter",
                where=name,
                instead="Remove it, and change gradients between train_step and optimizer.step",
            )


def with_backward_hooks(model: torch.nn.Module) -> tuple[str, ...]:
    """Modules whose hooks on gradients a trace would lose."""
    return tuple(
        path
        for path, module in model.named_modules()
        if path and (module._backward_hooks or module._backward_pre_hooks)
    )


@contextmanager
def own_gradients_refused() -> Iterator[None]:
    """While tracing, a hook on a tensor's gradient is an error of the line that sets it, a gradient taken in forward likewise."""
    usual, owner = torch.Tensor.register_hook, threading.get_ident()
    grad, backward = torch.autograd.grad, torch.autograd.backward

    def register_hook(self: torch.Tensor, hook: Any) -> Any:
        if threading.get_ident() == owner:
            raise RuntimeError("a trace would lose a hook on a tensor's gradient")
        return usual(self, hook)  # type: ignore[no-untyped-call]

    def refused(call: Callable[..., Any]) -> Callable[..., Any]:
        def taken(*args: Any, **options: Any) -> Any:
            if threading.get_ident() == owner:
                raise RuntimeError("a trace would lose how a gradient that forward takes itself depends on parameters")
            return call(*args, **options)

        return taken

    with (
        mock.patch.object(torch.Tensor, "register_hook", register_hook),
        mock.patch.object(torch.autograd, "grad", refused(grad)),
        mock.patch.object(torch.autograd, "backward", refused(backward)),
    ):
        yield


@contextmanager
def casts_that_change_nothing() -> Iterator[None]:
    """Lets a forward pass call ``module.to(dtype)`` where the module has that dtype: fake parameters cannot be swapped."""
    usual = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        tensors = (*self.parameters(), *self.buffers())
        fits = all(
            (dtype is None or not t.is_floating_point() or t.dtype == dtype) and (device is None or t.device == device)
            for t in tensors
        )
        return self if fits and memory_format is None else usual(self, *args, **kwargs)

    torch.nn.Module.to = to  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.to = usual  # type: ignore[method-assign]


@contextmanager
def inference_as_no_grad() -> Iterator[None]:
    """While tracing, ``torch.inference_mode`` is ``torch.no_grad``: export records where gradients are off, and nothing of that."""

    def enter(self: Any) -> None:
        self._autopar_before = torch.is_grad_enabled()
        torch.set_grad_enabled(not self.mode)

    def leave(self: Any, *_: object) -> None:
        torch.set_grad_enabled(self._autopar_before)

    with (
        mock.patch.object(torch.inference_mode, "__enter__", enter),
        mock.patch.object(torch.inference_mode, "__exit__", leave),
    ):
        yield


class ParametersKept(TorchFunctionMode):
    """While tracing, a parameter that a forward pass changes through ``.data`` is an error: torch's export dies of it.

    What is read through ``.data`` is detached: export would take it for a constant.
    """

    def __init__(self) -> None:
        super().__init__()
        self._data: list[torch.Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and any(args[0] is x for x in self._data if args):
            raise TraceError(
                f"Forward changes a parameter by .data.{name}",
                fix="Use what the call returns where the parameter is read, or call it after optimizer.step()",
            )
        if getattr(func, "__self__", None) is not torch.Tensor.data or name != "__get__":
            return func(*args, **dict(kwargs or {}))
        found = args[0].detach()
        if isinstance(args[0], torch.nn.Parameter):
            self._data.append(found)
        return found
