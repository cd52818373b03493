"""Torch's clipping of gradients, where a rank has only some of them.

``torch.nn.utils.clip_grad_norm_`` asks the ranks of a parameter's mesh for their parts. Of the parameters of other pipeline stages, and of
other ranks' experts, it knows nothing, so that each rank would scale by a norm of its own, without a word.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad

from autopar.errors import UsageError

_MARK = "is_of_some_ranks"
_NAME = "_clip_grads_with_norm_"
_scale = getattr(clip_grad, _NAME)


def refuse_clipping(parameters: Iterable[Tensor]) -> None:
    """Torch's function raises an error from now on where it is given one of these, whatever name it was imported by."""
    for parameter in parameters:
        setattr(parameter, _MARK, True)
    setattr(clip_grad, _NAME, _checked)


def _checked(parameters: Any, *args: Any, **kwargs: Any) -> None:
    """In place of torch's, which scales gradients once their norm is known."""
    if not isinstance(parameters, Tensor) and any(hasattr(p, _MARK) for p in parameters):
        raise UsageError(
            "A norm by torch.nn.utils.clip_grad_norm_ would be that of this rank's pipeline stages or experts alone",
            fix="Call par.clip_grad_norm_(max_norm), which returns the norm of all parameters",
        )
    _scale(parameters, *args, **kwargs)
