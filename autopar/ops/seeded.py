"""Random operators with streams of their own: ranks with the same data draw the same numbers, and a recomputation repeats them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.ops.collectives import group
from autopar.ops.kernels import resolve

Salt = int | tuple[int, ...]
"""A number, or several, that differs between the random operators of a program."""


_MASK64 = (1 << 64) - 1


def dropout(x: Tensor, p: float, salt: Salt = 0, seed: int = 0, axes: Sequence[str] = ()) -> Tensor:
    """Set elements to zero with probability ``p`` and scales the others by 1 / (1 - p).

    The random stream is a function of ``seed`` (of a step and micro-batch), ``salt`` (of the operator) and the coordinate of this rank on
    ``axes`` (those that split ``x``). Ranks with the same data therefore drop the same elements, ranks with different parts draw
    different numbers, and a recomputation repeats them.
    """
    if p == 0.0:
        return x
    x = x.contiguous()  # numbers are drawn in memory order
    with drawing(x.device, salt, seed, axes):
        return torch.native_dropout(x, p, True)[0]


def attention(  # noqa: PLR0913  the signature of scaled_dot_product_attention
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    salt: Salt = 0,
    seed: int = 0,
    axes: Sequence[str] = (),
) -> Tensor:
    """``scaled_dot_product_attention`` with dropout from the stream that :func:`dropout` describes."""
    with drawing(query.device, salt, seed, axes) if dropout_p else nullcontext():
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def draw(
    target: str,
    *args: object,
    salt: Salt = 0,
    seed: int = 0,
    axes: Sequence[str] = (),
    device: torch.device | None = None,
    **kwargs: object,
) -> Any:
    """Call a random operator of torch by name, with the stream that :func:`dropout` describes.

    Args:
        target: the name of the operator.
        args, kwargs: its arguments.
        salt, seed, axes: as in :func:`dropout`.
        device: the device of the result of an operator without tensors; None for an operator that has tensors.
    """
    where = device or next(x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    args = tuple(x.contiguous() if isinstance(x, Tensor) else x for x in args)  # numbers are drawn in memory order
    named = kwargs if device is None else {**kwargs, "device": device}
    with drawing(where, salt, seed, axes):
        return resolve(target)(*args, **named)


_DEFAULT_GENERATOR = Lock()
"""Held while torch's default generators are seeded, as all threads share them."""


@contextmanager
def drawing(device: torch.device, salt: Salt, seed: int, axes: Sequence[str]) -> Iterator[None]:
    """Enter a context for one operator that draws from torch's default generator of ``device``; see :func:`seeded`. Other threads wait."""
    with _DEFAULT_GENERATOR, seeded((device,), salt, seed, axes):
        yield


@contextmanager
def seeded(devices: Sequence[torch.device], salt: Salt, seed: int, axes: Sequence[str]) -> Iterator[None]:
    """Enter a context that sets torch's default generators of ``devices`` to the stream that :func:`dropout` describes, and restores them.

    Generators of other devices are not touched. States are in host memory, so that nothing waits for a device.
    """
    states = []
    for device in devices:
        if device.type == "meta":
            continue
        generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
        states.append((generator, generator.get_state()))
        generator.manual_seed(stream_seed(salt, seed, axes))
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def stream_seed(salt: Salt, seed: int, axes: Sequence[str]) -> int:
    """Return a seed in [0, 2**63) that differs, except by improbable collisions, for different arguments and coordinates."""
    words = (seed, *((salt,) if isinstance(salt, int) else salt), *(dist.get_rank(group(a)) for a in axes))
    state = 0x9E3779B97F4A7C15
    for word in words:  # splitmix64's finaliser, once for each word
        state = (state + (word & _MASK64) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state >> 1
