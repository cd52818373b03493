"""What optimizers keep and move, by torch's implementations."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """An optimizer of ``torch.optim`` that walks over all parameters, operator by operator (not fused).

    Attributes:
        states: tensors of a parameter's shape that it keeps.
        passes: times that a step reads or writes an element of a parameter, its gradient or a state.
        kernels: operators for one parameter (one for all of them on a GPU, where torch groups them).
        temporaries: tensors of a parameter's shape in passing.
    """

    states: int
    passes: int
    kernels: int
    temporaries: int


_ADAM = OptimizerCost(states=2, passes=19, kernels=8, temporaries=1)
"""lerp (3), mul (2), addcmul (3), sqrt (2), div (2), add (2), addcdiv (4) and the step count (1)."""

OPTIMIZERS = {
    "adamw": OptimizerCost(states=2, passes=21, kernels=9, temporaries=1),
    "adam": _ADAM,
    "momentum": OptimizerCost(states=1, passes=8, kernels=3, temporaries=0),
    "sgd": OptimizerCost(states=0, passes=3, kernels=1, temporaries=0),
}
"""adamw is adam and the decay of weights (2); momentum is mul (2), add (3), add (3); sgd is add (3)."""


def optimizer_cost(name: str) -> OptimizerCost:
    """The costs of an optimizer.

    Raises:
        UsageError: it is not known.
    """
    found = OPTIMIZERS.get(name.lower())
    if found is None:
        raise UsageError("the optimizer is known", value=name, remedy=f"known: {', '.join(OPTIMIZERS)}")
    return found
