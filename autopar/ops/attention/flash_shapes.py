"""For which shapes there is a fused kernel of attention."""

from __future__ import annotations

import torch

_ON_CUDA = (torch.float16, torch.bfloat16)


_WIDEST, _MULTIPLE = 256, 8
"""Of heads: what the flash kernel in torch takes."""


def takes_shapes(kind: str, dtype: torch.dtype, width: int, value_width: int) -> bool:
    """Whether there is a fused kernel for an ``autopar.hardware.device.KernelKind``, whatever the make of the device."""
    if width != value_width or not dtype.is_floating_point:
        return False
    if kind != "cuda":
        return kind == "cpu"
    return dtype in _ON_CUDA and width <= _WIDEST and width % _MULTIPLE == 0
