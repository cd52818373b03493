"""The model that was given to ``autopar.parallelize``, which trains no more by itself: what is done to it later has no effect."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import UsageError
from autopar.graph import memory

_LOGGER = logging.getLogger("autopar")

_OFTEN, _SELDOM = 8, 32
"""Steps that are all looked at, and of which later one is: going through the attributes of a large model takes milliseconds."""


class Given:
    """Tells of an optimizer that steps its parameters in place of those that train, and of attributes set later.

    Until :meth:`remove`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._ids = {id(p): weakref.ref(p) for p in model.parameters()}
        self._state = memory.state_of(model)
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def remove(self) -> None:
        """Steps are not looked at any more."""
        self._hook.remove()

    def check(self, step: int) -> None:
        """Before a step: a warning, once, of numbers and texts in the model that are others than when it was planned."""
        model = self._model()
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

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuses a step that would do nothing.

        Raises:
            UsageError: the parameters are the model's, and have no gradients.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if parameters and all(self._is_models(p) and p.grad is None for p in parameters):
            raise UsageError(
                "an optimizer steps the parameters that train: par.parameters()",
                value=f"{type(optimizer).__name__} of those of the model that was given to autopar.parallelize, without gradients",
                remedy="make the optimizer of par.parameters(), after autopar.parallelize",
            )

    def _is_models(self, parameter: Tensor) -> bool:
        known = self._ids.get(id(parameter))
        return known is not None and known() is parameter
