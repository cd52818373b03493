"""The interface of ``torch.nn.Module`` on a parallel model, and checks of the model that it was made from.

Parameters and buffers that steps change are registered as usual, so that whatever walks modules (optimizers, a module that contains this
one, ``state_dict``) finds them. The stages are no submodules, as hooks and replaced layers would not see what emitted code does. Calls that
would move, wrap or replace parameters are refused here.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import UsageError
from autopar.plan.plan import Plan
from autopar.runtime.checks import absent
from autopar.runtime.step.gradients import RankParameter
from autopar.runtime.world import World
from autopar.tracing import side_effects as memory
from autopar.util.formatting import some

_LOGGER = logging.getLogger("autopar")

_Tensor = TypeVar("_Tensor", bound=Tensor)

_OFTEN, _SELDOM = 8, 32
"""The first 8 steps are all checked, later ones one in 32: comparing the attributes of a large model takes milliseconds."""


class Given:
    """Checks the original model for optimizers of its parameters, and for weights and attributes set later.

    Attributes:
        model: returns the original model, while it exists.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self._parameters = WeakIdKeyDictionary(dict.fromkeys(model.parameters()))
        self._state = memory.state_of(model)
        self._weights: dict[str, tuple[int, int]] | None = _written(model)

    def check(self, step: int) -> None:
        """Warn before a step, once, if numbers or texts in the model have changed since it was planned.

        Before the first step it also warns of written parameters, and of hooks.
        """
        model = self.model()
        before, self._weights = self._weights, None
        if model is not None and before is not None:
            _warn(
                "parameters of the model have been written since autopar.parallelize (%s): what trains are copies, made there; load "
                "weights into the model before it, or give files by weights=DIR",
                [name for name, now in _written(model).items() if before.get(name) != now],
            )
            _warn(
                "layers of the model have hooks (%s), which no step calls: what a forward hook returned when the plan was made is part "
                "of it, all else that hooks do is not done; return what you look for from the model's forward",
                _hooked(model),
            )
        if model is None or not self._state or (step >= _OFTEN and step % _SELDOM):
            return
        changed = memory.changed(self._state, memory.state_of(model))
        self._state = {} if changed else self._state
        _warn(
            "attributes of the model have changed since autopar.parallelize (%s): the plan has them as they were; pass what "
            "changes as a tensor in the batch, or keep it in a buffer",
            changed,
        )

    def knows_weights(self) -> None:
        """Note that the weights of the parallel model were read: they may be copied into the model, which is no mistake."""
        self._weights = None

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse a step of an optimizer that would do nothing.

        Raises:
            UsageError: its parameters are those of the original model, and have no gradients.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if parameters and all(p in self._parameters and p.grad is None for p in parameters):
            raise UsageError(
                f"{type(optimizer).__name__} has the parameters of the model before autopar.parallelize, which do not train",
                fix="Make the optimizer of par.parameters(), after autopar.parallelize",
            )


def _written(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the identity of each parameter, and its version counter."""
    return {name: (id(p), -1 if p.is_inference() else p._version) for name, p in model.named_parameters()}


def _hooked(model: nn.Module) -> list[str]:
    """Name of the modules with hooks."""
    kinds = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [name or "the model" for name, m in model.named_modules() if any(getattr(m, kind) for kind in kinds)]


def _warn(text: str, names: Sequence[str]) -> None:
    if names:
        _LOGGER.warning(text, some(names))


NOTHING_HERE = "no_parameter_on_this_rank"
"""Name of the empty parameter of a rank whose stage has none, as torch's optimizers refuse an empty list."""

_ASKED_BY = {
    "_is_accelerate_prepared": ("accelerate's Accelerator", "autopar.integrations.accelerate.Accelerator in its place"),
    "is_distributed_loading_by_transformers": ("transformers.Trainer", "autopar.integrations.hf.Trainer in its place"),
}
"""Attributes that libraries check before they move and wrap a module, with the library and its replacement for parallel models."""

_MANAGED = frozenset({"_is_fsdp_managed_module", "__class__"})
"""Attributes that both versions of FSDP write to the modules that they wrap."""


class PlannedModule(nn.Module):
    """A module whose parameters are distributed by a plan.

    Attributes:
        plan: the plan that it executes.
        device: the device of this rank's parameters and steps.
        rank, world_size: the rank of this process in the job, and the number of ranks.
        is_main_process: whether this is the rank of the job that should print and log.
    """

    def __init__(self, plan: Plan, world: World) -> None:
        super().__init__()
        self.plan: Plan = plan
        self._world = world
        self.device, self.rank, self.world_size = world.device, world.rank, plan.mesh.world_size
        self.is_main_process = world.rank == 0
        self.__dict__[REGISTRY_KEY] = _NoWrappers()

    def _show(self, held: Iterable[RankParameter]) -> None:
        """Register parameters by their keys; further copies of a tied one, on other stages of this rank, have a number appended."""
        for h in held:
            name, number = h.key, 1
            while name in self._parameters:
                number += 1
                name = f"{h.key}@{number}"
            self._parameters[name] = h.parameter
        if not self._parameters:
            empty = torch.empty(0, device=self._world.device)
            self._parameters[NOTHING_HERE] = nn.Parameter(empty, requires_grad=False)

    def _show_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Register buffers that steps change, by the model's names; new values replace old ones."""
        self._buffers.update(values)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Lead ``torch.distributed.checkpoint.state_dict``, which walks the dots of names by attributes, to :class:`_Named`."""
        return {name.partition(".")[0]: "_named" for name in (*self._parameters, *self._buffers)}

    @property
    def _named(self) -> _Named:
        return _Named({**self._parameters, **self._buffers})

    def get_parameter(self, target: str) -> nn.Parameter:
        """Return this rank's parameter of a name of ``named_parameters()``.

        Raises:
            AttributeError: the rank has none of that name.
        """
        return _registered(target, self._parameters)

    def get_buffer(self, target: str) -> Tensor:
        """Return a buffer that steps change, by its name in ``named_buffers()``.

        Raises:
            AttributeError: the rank has none of that name.
        """
        return _registered(target, self._buffers)

    def __repr__(self) -> str:
        """Return the part of the plan that this rank has.

        ``ParallelModel('gpt2', mesh=pp=2 x tp=2, rank=3 of 4, stage=1 of 2, precision='fp32')``
        """
        stages = [stage.index for stage in self.plan.stages if stage.pp_rank == self._world.coordinate["pp"]]
        name, indices = self.plan.model.name, ", ".join(map(str, stages))
        return (
            f"{type(self).__name__}({name!r}, mesh={self.plan.mesh}, rank={self.rank} of {self.world_size}, "
            f"stage={indices} of {len(self.plan.stages)}, precision={self.plan.precision.name!r})"
        )

    # --- what a plan has settled

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Implement ``to``, ``cuda``, ``half`` and other changes of parameters, on this module or one that contains it.

        Nothing is done if the parameters have the requested dtype and device already.

        Raises:
            UsageError: they do not.
        """
        storage: torch.dtype = getattr(torch, self.plan.precision.storage)
        like = torch.empty(0, dtype=storage, device=self._world.device)
        try:
            is_unchanged = fn(like) is like
        except (AssertionError, RuntimeError):  # torch has no such device
            is_unchanged = False
        if is_unchanged:
            return self
        raise UsageError(
            f"The parameters of a parallel model cannot be moved, cast or replaced: its plan has them in {self.plan.precision.storage} "
            f"on {self._world.device}",
            fix="Leave the call out. Devices and dtypes are chosen with the plan: autopar.parallelize(model, cluster=..., precision=...)",
        )

    def apply(self, fn: Callable[..., Any]) -> NoReturn:
        """Would call a function for every layer, but a parallel model has no layers.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "A parallel model has no layers that apply(...) could reach: its stages are programs made from the model",
            fix="Call model.apply(...) before autopar.parallelize, or go through par.named_parameters()",
        )

    def _no_hooks(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError.unsupported(
            "A backward hook on a parallel model",
            instead="Look at the gradients of par.parameters() after the step, or hook the loss: loss.register_hook(...)",
        )

    register_backward_hook = register_full_backward_hook = register_full_backward_pre_hook = _no_hooks

    def _replicate_for_data_parallel(self) -> NoReturn:
        """Refuse DataParallel, which calls it.

        Raises:
            UsageError: always.
        """
        raise _wrapped("DataParallel")

    # --- what cannot be

    if not TYPE_CHECKING:  # a type checker should report unknown attributes

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name in _ASKED_BY:
                    asker, instead = _ASKED_BY[name]
                    raise UsageError(f"A parallel model was given to {asker}", fix=f"Use {instead}") from None
                original = self.__dict__.get("_original")
                raise absent(name, None if original is None else original.model()) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; modules and parameters do not become parts of this module.

        Raises:
            UsageError: a module or parameter is set, which no step would run or train; or FSDP wraps the model.
        """
        if name in _MANAGED:
            raise _wrapped("FullyShardedDataParallel")
        if isinstance(value, nn.Module | nn.Parameter):
            self._no_parts(name, value)
        object.__setattr__(self, name, value)

    def _no_parts(self, *given: Any, **named: Any) -> NoReturn:
        name, value = *given, *named.values()
        raise UsageError(
            f"A {type(value).__name__} cannot be put into a parallel model as par.{name}: no step would run or train it",
            fix="Make it a part of the model before autopar.parallelize",
        )

    add_module = register_module = register_parameter = _no_parts

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Refuses DistributedDataParallel, which reads it first.

        Raises:
            UsageError: always.
        """
        raise _wrapped("DistributedDataParallel")

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse ``copy`` and ``pickle``.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "A parallel model cannot be copied, pickled or passed to torch.save",
            fix="Write a checkpoint with par.save(DIR, optimizer), or copy its weights with par.full_state_dict(). "
            "Means of weights (EMA, SWA) are kept as copies of par.parameters(), without a copy of the model",
        )


def _registered(name: str, tensors: Mapping[str, _Tensor | None]) -> _Tensor:
    value = tensors.get(name)
    if value is None:
        raise AttributeError(f"This rank has no {name!r}. It has {some(list(tensors)) or 'none'}")
    return value


class _Named:
    """Registered tensors by their dotted names as attributes: each part of a name leads to what follows it."""

    def __init__(self, tensors: Mapping[str, Tensor | None]) -> None:
        self._tensors = tensors

    def __getattr__(self, part: str) -> Any:
        if part in self._tensors:
            return self._tensors[part]
        below = {name.removeprefix(f"{part}."): t for name, t in self._tensors.items() if name.startswith(f"{part}.")}
        if not below:
            raise AttributeError(f"No name goes on with {part!r}")
        return _Named(below)


class _NoWrappers(dict[str, Any]):
    """The registry of a module that torch's composable wrappers (``fully_shard``, ``replicate``, ``checkpoint``) read; it refuses.

    FSDP reads it too when ``torch.distributed.checkpoint.state_dict`` asks which modules of a model it has wrapped, and wraps none then.
    """

    def __contains__(self, name: object) -> bool:
        if sys._getframe(2).f_code.co_name == "_get_fsdp_states_with_modules":
            return False
        raise _wrapped("fully_shard, FullyShardedDataParallel or replicate")


def _wrapped(wrapper: str) -> UsageError:
    return UsageError(
        f"A parallel model cannot be wrapped in {wrapper}: its plan has distributed parameters and gradients already",
        fix="Leave the wrapper out, and call par itself. Pins of the plan say how it is distributed: zero=3, dp=4, ...",
    )
