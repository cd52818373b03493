"""Makes optimizers on DTensors step on the plain tensors inside them, on the device or on copies on the host.

An operator on DTensors costs the host ten times as much as one on plain tensors, and ``torch.optim`` by default combines only plain tensors
into one kernel. An elementwise step gives the same result on the parts that a rank holds. So during ``step`` the parameters, gradients and
states of such an optimizer are plain tensors on the same memory; before and after it they are DTensors. If states are on the host the plain
tensors are copies there, which one fused kernel of torch steps if it has one for CPUs.

**States on the host.** After ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840). The device keeps the parameter that forward and backward
read and that FSDP gathers from. Gradients are copied to the host before a step, parameters to the device after it. A parameter is copied to
the host only if it was written elsewhere since. No version counter notices all writes (``.data``), so a checksum on the device finds them.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from autopar.errors import UsageError
from autopar.runtime.same_values import checksums


class HostCopy:
    """A parameter on the host, page-locked if its device is a GPU, and its gradient.

    Attributes:
        parameter: the tensor that the optimizer steps.
        came_up: checksum of the value last copied to the device; None before the first step.
    """

    def __init__(self, local: Tensor) -> None:
        self.parameter = nn.Parameter(_on_host(local), requires_grad=True)
        self.came_up: int | None = None
        self._gradient: Tensor | None = None

    def lend(self, gradient: Tensor | None) -> None:
        """Start the copy of the gradient; without a gradient the parameter is not stepped."""
        if gradient is None:
            self.parameter.grad = None
            return
        if self._gradient is None:  # with the parameter's strides, which fused kernels require
            self._gradient = _on_host(self.parameter.detach(), is_pinned=gradient.is_cuda)
        self._gradient.copy_(gradient, non_blocking=True)
        self.parameter.grad = self._gradient


_Stepped = Sequence[tuple[HostCopy, Tensor]]
"""Host copies with a gradient, each with its parameter on the device."""


def _down(stepped: _Stepped) -> None:
    """Wait for the gradients, and copy the parameters that were written since they were last copied to the device."""
    for (host, local), now in zip(stepped, _checksums(stepped), strict=True):
        if host.came_up != now:
            with torch.no_grad():
                host.parameter.copy_(local)


def _up(stepped: _Stepped) -> None:
    """Copy the parameters to the device, and wait for that: the next step writes to the memory that is copied."""
    with torch.no_grad():
        for host, local in stepped:
            local.copy_(host.parameter, non_blocking=True)
    for (host, _), now in zip(stepped, _checksums(stepped), strict=True):
        host.came_up = now


def _checksums(stepped: _Stepped) -> list[int]:
    """Return the checksums of the parameters on the device, after all copies that were begun on its current stream."""
    return _read(checksums([local for _, local in stepped])) if stepped else []


def _read(numbers: Tensor) -> list[int]:
    values: list[int] = numbers.tolist()
    return values


def _on_host(like: Tensor, *, is_pinned: bool = False) -> Tensor:
    return torch.empty_like(like, device="cpu", requires_grad=False, pin_memory=like.is_cuda or is_pinned)


ELEMENTWISE = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adamax,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    }
)
"""Optimizers whose steps have no sum over elements; subclasses may have one."""

_FUSED = frozenset({torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad})
"""Optimizers for which torch has a CPU kernel that reads the elements once instead of once for each operation."""

_LOGGER = logging.getLogger("autopar")

_COUNTERS = frozenset({"step", "mu_product", "mu", "eta"})
"""States of a parameter as a whole: plain tensors, even for a parameter of one element."""


class LocalSteps:
    """Changes the steps of all optimizers that hold only the given parameters, until :meth:`remove`.

    It uses torch's hooks for the steps of all optimizers of a process, so that no optimizer needs to be registered and none escapes the
    checks.

    These are left unchanged: optimizers that are not :data:`ELEMENTWISE`, that have hooks around their steps (which may look at
    parameters), or whose step is differentiable, compiled or called with a closure.

    Args:
        on_host: whether states are in host memory and optimizers step there; optimizers that would be left unchanged then fail.
        is_staged: whether pipeline stages on other ranks hold parameters of the model; an optimizer that needs all at once then fails.
        parts: parameters that are parts of one of the model's, or longer than it, with their names and whether they are longer. For an
            optimizer that may look at complete parameters the logger ``autopar`` gets a warning. Those of torch that take means over
            matrices, or read their shapes, fail for longer ones.
        check, check_other: are called before a step of an optimizer with and without a parameter of this model; they may raise.
        timed: gives the context of the time of a step.
        threads: threads of the host for steps there; None leaves torch's number.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        *,
        on_host: bool = False,
        is_staged: bool = False,
        parts: Iterable[tuple[Tensor, str, bool]] = (),
        check: Callable[[Optimizer], None] = lambda _: None,
        check_other: Callable[[Optimizer], None] = lambda _: None,
        timed: Callable[[], AbstractContextManager[None]] = nullcontext,
        threads: int | None = None,
    ) -> None:
        self._check, self._check_other, self._timed = check, check_other, timed
        self._timing = ExitStack()
        self._parts = {id(p): (name, is_longer) for p, name, is_longer in parts}
        self._told: set[type[Optimizer]] = set()
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._parameters = {id(p): p for p in parameters}
        self._on_host, self._is_staged = on_host, is_staged
        self._hosts: dict[int, HostCopy] = {}
        self._threads = threads
        self._undo = ExitStack()
        self._open: tuple[Optimizer, list[list[Tensor]], Any] | None = None
        self._hooks = register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)

    def remove(self) -> None:
        """Remove the hooks from torch."""
        for hook in self._hooks:
            hook.remove()

    def plain(self, parameter: Tensor) -> nn.Parameter:
        """Return the plain parameter that optimizers see in place of a DTensor: on the same memory, or on the host."""
        local = _inside(parameter)
        if not (self._on_host and parameter.requires_grad):
            return nn.Parameter(local.detach(), parameter.requires_grad)
        if id(parameter) not in self._hosts:
            self._hosts[id(parameter)] = HostCopy(local)
        return self._hosts[id(parameter)].parameter

    def states(self) -> Iterator[Tensor]:
        """Yield the states of this model's parameters, of all optimizers that have stepped."""
        for optimizer in tuple(self._seen):
            for parameter in self._parameters.values():
                values = optimizer.state.get(parameter, {}).values()
                yield from (value for value in values if isinstance(value, Tensor))

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        of_model = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._parameters]
        if not of_model:  # not an optimizer of this model
            self._check_other(optimizer)
            return
        self._check(optimizer)
        if torch.compiler.is_compiling() or not self._changes(optimizer, args, kwargs):
            self._refuse(optimizer, of_model)
            self._tell_of_parts(optimizer)
        else:
            self._replace(optimizer)
        self._timing.close()  # that of a step that failed
        self._timing.enter_context(self._timed())

    def _replace(self, optimizer: Optimizer) -> None:
        """Give an optimizer plain tensors for the length of its step."""
        self._seen.add(optimizer)
        self.restore()
        lists = [group["params"] for group in optimizer.param_groups]
        states: defaultdict[Tensor, Any] = defaultdict(dict)
        kept = optimizer.state
        lent = [[self._lent_with(parameter, kept, states) for parameter in parameters] for parameters in lists]
        for group, parameters in zip(optimizer.param_groups, lent, strict=True):
            group["params"] = parameters
        optimizer.state = states
        self._open = optimizer, lists, kept
        if self._on_host:
            _down(self._stepped(lists))
            self._use_host(optimizer)

    def _use_host(self, optimizer: Optimizer) -> None:
        """Use one kernel for a parameter's step, if torch has one for CPUs and the user has chosen none, and more threads, until the step ends.

        torchrun gives a process one thread, and its share of the cores is idle during a step.
        """
        for group in optimizer.param_groups:
            is_free = group.get("fused") is None and not group.get("foreach")
            if type(optimizer) in _FUSED and is_free and all(p.is_floating_point() for p in group["params"]):
                group["fused"] = True
                self._undo.callback(group.update, fused=None)
        before = torch.get_num_threads()
        if self._threads is not None and self._threads > before:
            torch.set_num_threads(self._threads)
            self._undo.callback(torch.set_num_threads, before)

    def _lent_with(
        self, parameter: Tensor, own: Mapping[Tensor, Any], states: defaultdict[Tensor, Any]
    ) -> nn.Parameter:
        """Return the plain parameter with its gradient; its states are put into ``states``."""
        local, grad = self.plain(parameter), _inside(parameter.grad)
        if id(parameter) in self._hosts:
            self._hosts[id(parameter)].lend(grad)
        else:
            local.grad = grad
        if given := own.get(parameter):
            states[local] = {name: self._lent(name, value, local) for name, value in given.items()}
        return local

    def _lent(self, name: str, value: Any, local: Tensor) -> Any:
        plain = _inside(value)
        if plain is value and isinstance(value, Tensor) and name not in _COUNTERS:
            raise UsageError(
                f"The optimizer has a state '{name}' that was loaded from another job's file",
                fix="Leave out optimizer.load_state_dict: its parameters have another order and other parts. "
                "par.save and par.load carry optimizer states from plan to plan",
            )
        is_of_elements = isinstance(plain, Tensor) and plain.shape == local.shape
        is_moved = self._on_host and is_of_elements and plain.device.type != "cpu"  # loaded from elsewhere
        return _on_host(plain).copy_(plain) if is_moved else plain

    def _stepped(self, lists: Iterable[Iterable[Tensor]]) -> list[tuple[HostCopy, Tensor]]:
        """Return the host copies that a step changes, each with its parameter on the device."""
        pairs = ((self._hosts.get(id(p)), _inside(p)) for parameters in lists for p in parameters)
        return [(host, local) for host, local in pairs if host is not None and host.parameter.grad is not None]

    def _refuse(self, optimizer: Optimizer, of_model: Sequence[Tensor]) -> None:
        """Check an optimizer whose step is left unchanged.

        Args:
            of_model: the optimizer's parameters that belong to this model.

        Raises:
            UsageError: its states would be made on the device instead of the host, or its step needs elements that other ranks hold.
        """
        if self._on_host:
            raise UsageError(
                f"{type(optimizer).__name__} cannot step parameters whose optimizer states live on the host",
                fix="Step with an elementwise optimizer of torch.optim, on this model's parameters alone, without a closure, hooks, "
                "differentiable or compiled. Or pin offload=none",
            )

        if self._is_staged and isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                f"{type(optimizer).__name__} needs all parameters at once, but each rank of a pipeline has those of its stages",
                fix="Pin pp=1, or use an optimizer that takes each parameter by itself",
            )
        if type(optimizer).__name__ == "Adafactor" and not isinstance(optimizer, torch.optim.Adafactor):
            raise UsageError.unsupported(
                f"The Adafactor of {type(optimizer).__module__.split('.')[0]}",
                instead="Use torch.optim.Adafactor, which needs zero=0 and tp=1, or an optimizer that steps element by element",
            )
        split = next((p for p in of_model if p.ndim > 1 and _inside(p).shape != p.shape), None)
        if split is not None and isinstance(optimizer, torch.optim.Adafactor):
            raise UsageError(
                f"Torch's Adafactor needs each matrix complete, but this rank has {tuple(_inside(split).shape)} "
                f"of one of shape {tuple(split.shape)}",
                fix="Pin zero=0 and tp=1, or use an optimizer that steps element by element",
            )
        longer = next((p for p in of_model if self._parts.get(id(p), ("", False))[1]), None)
        if longer is not None and isinstance(optimizer, torch.optim.Adafactor | torch.optim.Muon):
            raise UsageError(
                f"Torch's {type(optimizer).__name__} needs each matrix as it is in the model, but the plan has lengthened one to shape "
                f"{tuple(longer.shape)}",
                fix="Pin tp=1 and vocab_multiple=1, or use an optimizer that steps element by element",
            )

    def _tell_of_parts(self, optimizer: Optimizer) -> None:
        kind = type(optimizer)
        if kind in ELEMENTWISE or kind in self._told:
            return
        self._told.add(kind)
        part = next((p for group in optimizer.param_groups for p in group["params"] if id(p) in self._parts), None)
        if part is not None:
            _LOGGER.warning(
                "%s is not known to step element by element, and gets parts of parameters, or longer ones, as parameters of their own, "
                "such as %s: if it looks at whole matrices, its steps are not those of one device",
                kind.__name__,
                self._parts[id(part)][0],
            )

    def _changes(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = [*args[1:], kwargs.get("closure")]  # args[0] is the optimizer
        return (
            type(optimizer) in ELEMENTWISE
            and all(value is None for value in given)
            and not optimizer._optimizer_step_pre_hooks
            and not optimizer._optimizer_step_post_hooks
            and not any(group.get("differentiable") for group in optimizer.param_groups)
            and all(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"])
        )

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        if self._open is not None and self._open[0] is optimizer:
            self.restore()
        if any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            self._timing.close()

    def restore(self) -> None:
        """Give an optimizer its own tensors back, after its step or after one that failed."""
        if self._open is None:
            return
        optimizer, lists, kept = self._open
        self._open = None
        self._undo.close()
        _up(self._stepped(lists))
        plain_states, optimizer.state = optimizer.state, kept
        for group, parameters in zip(optimizer.param_groups, lists, strict=True):
            for parameter, local in zip(parameters, group["params"], strict=True):
                local.grad = None
                if local in plain_states:
                    states = kept[parameter]
                    for name, value in plain_states[local].items():
                        if name not in states or _inside(states[name]) is not value:
                            states[name] = _around(name, value, local, parameter)
            group["params"] = parameters


def _inside(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _around(name: str, value: Any, local: Tensor, parameter: Any) -> Any:
    """Return a new state as the optimizer would have made it from the DTensor."""
    if name in _COUNTERS or not isinstance(value, Tensor) or value.shape != local.shape:
        return value
    return DTensor(value, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
