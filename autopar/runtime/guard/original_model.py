"""The model that was given to ``autopar.parallelize``, which trains no more by itself: what is done to it later has no effect."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import UsageError
from autopar.tracing import side_effects as memory

_LOGGER = logging.getLogger("autopar")

_OFTEN, _SELDOM = 8, 32
"""Steps that are all looked at, and of which later one is: going through the attributes of a large model takes milliseconds."""


class Given:
    """Tells of an optimizer that steps its parameters in place of those that train, of weights loaded and attributes set later.

    Until :meth:`remove`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._ids = {id(p): weakref.ref(p) for p in model.parameters()}
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
            _tell_of_weights([name for name, now in _written(model).items() if before.get(name) != now])
            _tell_of_hooks(model)
        if model is None or not self._state or (step >= _OFTEN and step % _SELDOM):
            return
        changed = memory.changed(self._state, memory.state_of(model))
        if changed:
            self._state = {}
            _LOGGER.warning(
                "attributes of the model have changed since autopar.parallelize (%s): the plan has them as they were; pass what "
                "changes as a tensor in the batch, or keep it in a buffer",
                ", ".join(changed[:3]) + (f" and {len(changed) - 3} more" if len(changed) > 3 else ""),
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
        if parameters and all(self._is_models(p) and p.grad is None for p in parameters):
            raise UsageError(
                f"{type(optimizer).__name__} has the parameters of the model before autopar.parallelize, which do not train",
                fix="Make the optimizer of par.parameters(), after autopar.parallelize",
            )

    def _is_models(self, parameter: Tensor) -> bool:
        known = self._ids.get(id(parameter))
        return known is not None and known() is parameter


def _written(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Of each parameter which one it is, and how often it has been written."""
    return {name: (id(p), -1 if p.is_inference() else p._version) for name, p in model.named_parameters()}


def _tell_of_weights(names: list[str]) -> None:
    if names:
        _LOGGER.warning(
            "parameters of the model have been written since autopar.parallelize (%s): what trains are copies, made there; load "
            "weights into the model before it, or give files by weights=DIR",
            ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else ""),
        )


def _tell_of_hooks(model: nn.Module) -> None:
    kinds = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = [name or "the model" for name, one in model.named_modules() if any(getattr(one, kind) for kind in kinds)]
    if hooked:
        _LOGGER.warning(
            "layers of the model have hooks (%s), which no step calls: what a forward hook returned when the plan was made is part "
            "of it, all else that hooks do is not done; return what you look for from the model's forward",
            ", ".join(hooked[:3]) + (f" and {len(hooked) - 3} more" if len(hooked) > 3 else ""),
        )
