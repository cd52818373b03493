"""What users and libraries ask of any ``torch.nn.Module``, answered by a parallel model.

Its parameters and changed buffers are registered as a module's own, so that whatever walks modules (an optimizer's groups, a
module that has this one inside, ``state_dict``) finds them. Its stages are no submodules: hooks and swaps would miss what
emitted code does. What would move, wrap or replace parameters is refused here, in one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY

from autopar.errors import UsageError
from autopar.plan.plan import Plan
from autopar.runtime.guard.checks import absent
from autopar.runtime.step.gradients import Held
from autopar.runtime.world import World

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
