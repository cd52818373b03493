"""What a training step returns: a number whose backward has been done."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.amp import GradScaler

from autopar.errors import UsageError


class StepLoss(Tensor):
    """A scalar without gradient that knows why, as it does divided by a number, which loops that accumulate do.

    What else is computed from it, saved or copied is an ordinary tensor.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def backward(self, *_: object, **__: object) -> NoReturn:
        """For loops that call it by habit.

        Raises:
            UsageError: always: the gradients are there.
        """
        raise UsageError(
            "par.train_step(batch) runs forward and backward: the gradients are there when it returns",
            value="loss.backward() after it",
            remedy="leave backward() out (with one pipeline stage, `par(**batch).backward()` does the same)",
        )

    def __truediv__(self, other: Any) -> Tensor:
        quotient: Tensor = super().__truediv__(other)
        return quotient.as_subclass(StepLoss) if isinstance(other, int | float) else quotient

    def __mul__(self, other: Any) -> Tensor:
        """As a tensor's.

        Raises:
            UsageError: it is ``torch.amp.GradScaler`` that asks, whose ``step`` would divide gradients by what has not scaled them.
                (The scaler of a plan in float16 says so itself: :mod:`autopar.runtime.step.loss_scale`.)
        """
        if sys._getframe(1).f_globals.get("__name__") == GradScaler.__module__:
            raise UsageError(
                "gradients of par.train_step(batch) are there when it returns, and no scaler of torch's has scaled its loss",
                value="GradScaler.scale of it",
                remedy="leave the scaler out (GradScaler(enabled=False)): of the dtypes that plans compute in float16 alone needs "
                "one, which is par.grad_scaler()",
            )
        return super().__mul__(other)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).__deepcopy__(memo)  # type: ignore[no-untyped-call, no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))
