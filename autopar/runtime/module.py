"""What users and libraries ask of any ``torch.nn.Module``, answered by a parallel model; and the model that it was made from.

Its parameters and changed buffers are registered as a module's own, so that whatever walks modules (an optimizer's groups, a
module that has this one inside, ``state_dict``) finds them. Its stages are no submodules: hooks and swaps would miss what
emitted code does. What would move, wrap or replace parameters is refused here, in one sentence.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import UsageError
from autopar.plan.plan import Plan
from autopar.runtime.checks import absent
from autopar.runtime.step.gradients import Held
from autopar.runtime.world import World
from autopar.tracing import side_effects as memory
from autopar.util.formatting import some

_LOGGER = logging.getLogger("autopar")

_OFTEN, _SELDOM = 8, 32
"""Steps that are all looked at, and of which later one is: going through the attributes of a large model takes milliseconds."""


class Given:
    """Tells of an optimizer that steps its parameters in place of those that train, of weights loaded and attributes set later.

    Until :meth:`remove`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._parameters = WeakIdKeyDictionary(dict.fromkeys(model.parameters()))
        self._state = memory.state_of(model)
        self._weights: dict[str, tuple[int, int]] | None = _written(model)
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    @property
    def model(self) -> nn.Module | None:
        """It, as long as somebody has it."""
        return self._model()

    def remove(self) -> None:
        """Steps are not looked at any more."""
        self._hook.remove()

    def check(self, step: int) -> None:
        """Before a step: a warning, once, of numbers and texts in the model that are others than when it was planned.

        Before the first one: of parameters and hooks, too.
        """
        model = self._model()
        before, self._weights = self._weights, None
        if model is not None and before is not None:
            _tell(
                "parameters of the model have been written since autopar.parallelize (%s): what trains are copies, made there; load "
                "weights into the model before it, or give files by weights=DIR",
                [name for name, now in _written(model).items() if before.get(name) != now],
            )
            _tell(
                "layers of the model have hooks (%s), which no step calls: what a forward hook returned when the plan was made is part "
                "of it, all else that hooks do is not done; return what you look for from the model's forward",
                _hooked(model),
            )
        if model is None or not self._state or (step >= _OFTEN and step % _SELDOM):
            return
        changed = memory.changed(self._state, memory.state_of(model))
        self._state = {} if changed else self._state
        _tell(
            "attributes of the model have changed since autopar.parallelize (%s): the plan has them as they were; pass what "
            "changes as a tensor in the batch, or keep it in a buffer",
            changed,
        )

    def knows_weights(self) -> None:
        """The parallel model's weights have been asked for: they may be put into the model, which is no mistake."""
        self._weights = None

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuses a step that would do nothing.

        Raises:
            UsageError: the parameters are the model's, and have no gradients.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if parameters and all(p in self._parameters and p.grad is None for p in parameters):
            raise UsageError(
                f"{type(optimizer).__name__} has the parameters of the model before autopar.parallelize, which do not train",
                fix="Make the optimizer of par.parameters(), after autopar.parallelize",
            )


def _written(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Of each parameter which one it is, and how often it has been written."""
    return {name: (id(p), -1 if p.is_inference() else p._version) for name, p in model.named_parameters()}


def _hooked(model: nn.Module) -> list[str]:
    """Names of the modules with hooks."""
    kinds = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [name or "the model" for name, one in model.named_modules() if any(getattr(one, kind) for kind in kinds)]


def _tell(text: str, names: Sequence[str]) -> None:
    if names:
        _LOGGER.warning(text, some(names))


NOTHING_HERE = "no_parameter_on_this_rank"
"""The name of the one without elements that a rank has whose stage has none: torch's optimizers refuse an empty list."""

_ASKED_BY = {
    "_is_accelerate_prepared": ("accelerate's Accelerator", "autopar.integrations.accelerate.Accelerator in its place"),
    "is_distributed_loading_by_transformers": ("transformers.Trainer", "autopar.integrations.hf.Trainer in its place"),
}
"""What libraries ask first of all of a module that they would go on to move and wrap, and what is made for parallel models."""

_MANAGED = frozenset({"_is_fsdp_managed_module", "__class__"})
"""What both versions of FSDP write to the modules that they take."""


class PlannedModule(nn.Module):
    """A module whose parameters lie where a plan puts them.

    Attributes:
        plan: what is executed.
    """

    def __init__(self, plan: Plan, world: World) -> None:
        super().__init__()
        self.plan: Plan = plan
        self._world = world
        self.__dict__[REGISTRY_KEY] = _NoWrappers()

    def _show(self, held: Iterable[Held]) -> None:
        """Registers parameters by their keys; a further copy of a tied one, on another stage of this rank, has a number behind it."""
        for one in held:
            name, number = one.key, 1
            while name in self._parameters:
                number += 1
                name = f"{one.key}@{number}"
            self._parameters[name] = one.parameter
        if not self._parameters:
            none = torch.empty(0, device=self._world.device)
            self._parameters[NOTHING_HERE] = nn.Parameter(none, requires_grad=False)

    def _show_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Registers buffers that steps change by the model's names; new values take the place of old ones."""
        self._buffers.update(values)

    # --- where it is

    @property
    def device(self) -> torch.device:
        """Of this rank's parameters and steps."""
        return self._world.device

    @property
    def rank(self) -> int:
        """Of this process in the job."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.plan.mesh.world_size

    @property
    def is_main_process(self) -> bool:
        """True on the one rank of the job that should print and log."""
        return self._world.rank == 0

    def __repr__(self) -> str:
        """Which part of which plan this rank has.

        ``ParallelModel('gpt2', mesh=pp=2 x tp=2, rank=3 of 4, stage=1 of 2, precision='fp32')``
        """
        stages = [stage.index for stage in self.plan.stages if stage.pp_rank == self._world.coordinate["pp"]]
        name, own = self.plan.model.name, ", ".join(map(str, stages))
        return (
            f"{type(self).__name__}({name!r}, mesh={self.plan.mesh}, rank={self.rank} of {self.world_size}, "
            f"stage={own} of {len(self.plan.stages)}, precision={self.plan.precision.name!r})"
        )

    # --- what a plan has settled

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What ``to``, ``cuda``, ``half`` and all others that change parameters do, of this module or of one around it.

        Nothing, where the parameters are so already.

        Raises:
            UsageError: they are not.
        """
        storage: torch.dtype = getattr(torch, self.plan.precision.storage)
        like = torch.empty(0, dtype=storage, device=self._world.device)
        try:
            is_so = fn(like) is like
        except (AssertionError, RuntimeError):  # torch has no such device
            is_so = False
        if is_so:
            return self
        raise UsageError(
            f"The parameters of a parallel model cannot be moved, cast or replaced: its plan has them in {self.plan.precision.storage} "
            f"on {self._world.device}",
            fix="Leave the call out. Devices and dtypes are chosen with the plan: autopar.parallelize(model, cluster=..., precision=...)",
        )

    def apply(self, fn: Callable[..., Any]) -> NoReturn:
        """Of a module: calls a function for every layer, of which a parallel model has none.

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
        """What DataParallel asks of a module.

        Raises:
            UsageError: always.
        """
        raise _wrapped("DataParallel")

    # --- what cannot be

    if not TYPE_CHECKING:  # which knows better what there is

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name in _ASKED_BY:
                    asker, instead = _ASKED_BY[name]
                    raise UsageError(f"A parallel model was given to {asker}", fix=f"Use {instead}") from None
                given = self.__dict__.get("_given")
                raise absent(name, None if given is None else given.model) from None

    def __setattr__(self, name: str, value: Any) -> None:
        """As Python's: modules and parameters that are set do not become parts of this one.

        Raises:
            UsageError: a module or parameter is set, which no step would run or train; FSDP takes the model for one to shard.
        """
        if name in _MANAGED:
            raise _wrapped("FullyShardedDataParallel")
        if isinstance(value, nn.Module | nn.Parameter):
            raise UsageError(
                f"A {type(value).__name__} cannot be put into a parallel model as par.{name}: no step would run or train it",
                fix="Make it a part of the model before autopar.parallelize",
            )
        object.__setattr__(self, name, value)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """What DistributedDataParallel asks first of all of a module.

        Raises:
            UsageError: always.
        """
        raise _wrapped("DistributedDataParallel")

    def __reduce_ex__(self, protocol: object) -> Any:
        """For ``copy`` and ``pickle``.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "A parallel model cannot be copied, pickled or passed to torch.save",
            fix="Write a checkpoint with par.save(DIR, optimizer), or copy its weights with par.full_state_dict(). "
            "Means of weights (EMA, SWA) are kept as copies of par.parameters(), without a copy of the model",
        )


class _NoWrappers(dict[str, Any]):
    """Where torch's composable wrappers (``fully_shard``, ``replicate``, ``checkpoint``) look whether a module has them already."""

    def __contains__(self, name: object) -> bool:
        raise _wrapped("fully_shard, FullyShardedDataParallel or replicate")


def _wrapped(wrapper: str) -> UsageError:
    return UsageError(
        f"A parallel model cannot be wrapped in {wrapper}: its plan has distributed parameters and gradients already",
        fix="Leave the wrapper out, and call par itself. Pins of the plan say how it is distributed: zero=3, dp=4, ...",
    )
