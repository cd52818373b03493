"""Modes of this process that change how fast, and how exactly, its devices compute."""

from __future__ import annotations

from typing import Any

import torch


def multiplies_in_tf32() -> bool:
    """Whether GPUs make products of float32 in TF32, however that was said: torch has an old and a new way since 2.9."""
    matmul: Any = torch.backends.cuda.matmul
    mode = getattr(matmul, "fp32_precision", None)
    return bool(matmul.allow_tf32) if mode is None else mode == "tf32"


def convolves_in_tf32() -> bool:
    """Whether cuDNN makes convolutions of float32 in TF32: a mode of its own, and on unless somebody says otherwise."""
    cudnn: Any = torch.backends.cudnn
    mode = getattr(getattr(cudnn, "conv", None), "fp32_precision", None)
    return bool(cudnn.allow_tf32) if mode is None else mode == "tf32"
