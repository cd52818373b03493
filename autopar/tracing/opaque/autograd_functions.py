"""Whether an autograd function's own backward is what autograd makes of its forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.tracing.failures import FAILURES
from autopar.tracing.opaque.trials import Subject, Unclear, are_same, draw, outcomes


class _Context:
    """Stands for the context of an autograd function whose forward is run by itself."""

    def __init__(self, count: int) -> None:
        self.needs_input_grad = (True,) * count
        self.saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Tensor) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise Unclear("it changes its inputs in place")

    def set_materialize_grads(self, value: bool) -> None:
        pass


def is_plain(function: type[torch.autograd.Function], subject: Subject) -> bool:
    """Whether a function's own backward is what autograd makes of its forward: then it is traced like any code."""

    def forward(state: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function.setup_context is not torch.autograd.Function.setup_context:
            return function.forward(*args, **kwargs)
        return function.forward(_Context(len(args)), *args, **kwargs)

    wide = subject.wide()
    for number in range(4):
        inputs = draw(wide.inputs, (None,) * len(wide.inputs), number)
        try:
            own = outcomes(wide, inputs, seed=number)
            plain = outcomes(replace(wide, call=forward), inputs, seed=number)
        except (Unclear, *FAILURES):
            return False
        if not (are_same(own[0], plain[0]) and are_same(own[1], plain[1])):
            return False
    return True
