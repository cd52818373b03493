"""The parameters of a parallel model as users see them: what is without effect on a step is refused where it is written.

Emitted code and FSDP read the memory of a parameter. Whatever writes that memory (``copy_``, ``p.data.mul_``, ``torch.nn.init``)
takes effect; ``p.data = tensor`` has none on any DTensor: torch puts the new memory behind the wrapper, which nobody reads.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _foreach_supported_types

from autopar.errors import UsageError


class OwnParameter(DTensor):
    """A DTensor that keeps its memory; what is computed or copied from it is a DTensor as any other."""

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        """The parameter without its history, on the same memory."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        """Nothing, for what is there already, as ``p.data *= 2`` hands it on.

        Raises:
            UsageError: it is another tensor.
        """
        if isinstance(value, DTensor) and value._local_tensor.is_set_to(self._local_tensor):
            return
        raise UsageError(
            "a parameter of a parallel model keeps its memory, which the steps read: it is written in place",
            value=f"`p.data = ...` of a parameter of shape {tuple(self.shape)}",
            remedy="write p.data.copy_(value), with a DTensor of the same mesh; "
            "torch.distributed.tensor.distribute_tensor(whole, p.device_mesh, p.placements) makes one of a whole tensor",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A parameter of its own, which no step reads."""
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As any DTensor."""
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _plain(self) -> nn.Parameter:
        """On the same memory."""
        plain = nn.Parameter(self.detach(), self.requires_grad)
        plain.grad = self.grad
        return plain


_foreach_supported_types.append(OwnParameter)  # as torch does for DTensors: types are compared there, not classes


def make_own(parameter: Tensor) -> None:
    """Makes it an :class:`OwnParameter`, the same object on the same memory: FSDP and hooks know it by its identity."""
    if isinstance(parameter, DTensor):
        parameter.__class__ = OwnParameter


def is_own(parameter: Tensor) -> bool:
    """Whether it is still what :func:`make_own` made: ``torch.utils.swap_tensors`` exchanges classes with the memory."""
    return type(parameter) is OwnParameter or not isinstance(parameter, DTensor)
