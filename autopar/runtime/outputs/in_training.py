"""What stands in the outputs of a training call beside the loss: values to look at, from which no gradient comes.

On one device any output may become a part of a loss. Here the gradients of the plan's loss alone are summed over ranks, so what asks
another output for a gradient is refused, where it would be left out without a word.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from autopar.errors import UsageError


def without_gradient(value: Tensor, name: str) -> Tensor:
    """The value, which says that it needs a gradient as on one device does; ``backward()`` through it is an error that names it."""
    start = torch.zeros((), device=value.device, requires_grad=True)
    found: Tensor = _WithoutGradient.apply(start, value, name)  # type: ignore[no-untyped-call]
    return found


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, value: Tensor, name: str) -> Tensor:
        ctx.name = name
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise UsageError(
            f"The output {ctx.name} of par(**batch) was made a part of a loss, but only the plan's loss has a gradient",
            fix="Add it up in the model's forward, as its entry loss, or give autopar.parallelize(model, loss_fn=lambda output, batch: ...)",
        )


class NotComputed:
    """Stands for an output that takes complete values of others, which a training call leaves on their ranks.

    Whoever reads it gets an error that says where it is computed; it may be passed on and printed.
    """

    def __init__(self, name: str) -> None:
        self.__dict__["_name"] = name

    def __repr__(self) -> str:
        return f"<{self._name}: not computed in training, par.predict(batch) has it>"

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UsageError(
            f"The output {self.__dict__['_name']} is computed from complete values, which a training call of several ranks leaves apart",
            fix="Read it from par.predict(batch), or from par(**batch) after par.eval()",
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies and other protocols of Python ask for
            raise AttributeError(name)
        return self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Of torch's functions that are given one, also inside of lists."""
        found = next((value for value in _flat((args, kwargs or {})) if isinstance(value, cls)), None)
        return NotImplemented if found is None else found._refuse()

    __array__ = __bool__ = __contains__ = __float__ = __format__ = __getitem__ = __index__ = __int__ = __iter__ = (
        __len__
    ) = _refuse
    __setattr__ = __setitem__ = _refuse
    __abs__ = __invert__ = __neg__ = __pos__ = __round__ = _refuse
    __add__ = __and__ = __floordiv__ = __matmul__ = __mod__ = __mul__ = __or__ = __pow__ = __sub__ = __truediv__ = (
        __xor__
    ) = _refuse
    __radd__ = __rand__ = __rfloordiv__ = __rmatmul__ = __rmod__ = __rmul__ = __ror__ = __rpow__ = __rsub__ = (
        __rtruediv__
    ) = _refuse
    __ge__ = __gt__ = __le__ = __lt__ = _refuse
    __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [one for item in value for one in _flat(item)] if isinstance(value, list | tuple) else [value]
