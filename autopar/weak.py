"""What a part asks of the object that it belongs to, without keeping that object: no circle that only a collection of cycles ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakMethod

P = ParamSpec("P")
T = TypeVar("T")


def weakly(method: Callable[P, T]) -> Callable[P, T]:
    """A bound method that does not keep its object, for parts that are never used after it.

    Raises:
        ReferenceError: when called after the object is gone.

    >>> class Owner:
    ...     def name(self) -> str:
    ...         return "owner"
    >>> owner = Owner()
    >>> name = weakly(owner.name)
    >>> name()
    'owner'
    >>> del owner
    >>> name()
    Traceback (most recent call last):
    ReferenceError: the owner of Owner.name is gone
    """
    reference, told = WeakMethod(method), method.__qualname__

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        alive = reference()
        if alive is None:
            raise ReferenceError(f"the owner of {told} is gone")
        return alive(*args, **kwargs)

    return call
