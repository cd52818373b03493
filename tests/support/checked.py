"""Code that looks at values, in a module whose assertions pytest leaves as they are."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Checked(nn.Module):
    """Doubles what a linear layer gives; ``check`` looks at the values."""

    def __init__(self, check: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.check = check

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return 2.0 * self.inner(x).sum()


def asserted(x: Tensor) -> None:
    assert torch.all(x >= 0).item(), "no negative values"


def asserted_tensors(x: Tensor) -> None:
    assert (x >= 0).all() and not (x > 9).any(), f"values from 0 to 9 of {x.shape}"


def raised(x: Tensor) -> None:
    if x.max() > 9 or x.min().item() < 0:
        message = "values from 0 to 9"
        raise ValueError(message)


def raised_otherwise(x: Tensor) -> None:
    with torch.no_grad():
        if (x >= 0).all():
            return
        raise ValueError("no negative values")


def cleaned_up(x: Tensor) -> None:
    try:
        asserted(x)
    finally:
        x.shape  # noqa: B018


def caught(x: Tensor) -> None:
    try:
        asserted(x)
    except AssertionError:
        x.mul_(2.0)


def caught_here(x: Tensor) -> None:
    try:
        assert x.sum() > 3
    except Exception:  # noqa: BLE001
        x.mul_(2.0)


def branched(x: Tensor) -> None:
    if x.sum() > 3:
        x.mul_(2.0)


def numbered(x: Tensor) -> Tensor:
    return x[: int(x.sum() > 3)]


def either(x: Tensor) -> None:
    if x.sum() > 3:
        raise ValueError("large")
    raise ValueError("small")


def numbered_or_not(x: Tensor) -> Tensor:
    try:
        return x[: int(x.sum() > 3)]
    except Exception:  # noqa: BLE001
        return x
